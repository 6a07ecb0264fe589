"""The sentence that an answer ends with: whether a change pays, where, by how much, against what, and how sure that is.

Answers about routing, batching and placement have one form and the same four openings, so that they can be read side by
side. A gain is counted against what a deployment runs without Coterie: the shortest queue, first come first served, or
the placement that runs now.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from coterie.answers.runs import WORTH_PCT
from coterie.types import Interval

PAYS, HARDLY, NOT, UNTOLD = "It pays", "It hardly pays", "It does not pay", "It cannot be told whether it pays"
P99_SLACK_PCT = 1.0
"""Loss of a p99 in percent that still counts as no worse: the step model is no more exact than this."""


class Verdict(NamedTuple):
    """What an answer comes to."""

    sentence: str
    then: str
    """Next command to run."""


def opening_of(percent: Interval, noise_pct: float = math.inf) -> str:
    """Return the first words on a gain; without an interval, one of at most `noise_pct` tells nothing."""
    if round(percent.mean, 1) <= 0:
        return NOT
    if percent.mean <= noise_pct if percent.low is None else percent.low <= 0:
        return UNTOLD
    return PAYS if percent.mean >= WORTH_PCT else HARDLY


def is_recommended(gain: Interval, tail: Interval) -> bool:
    """Return whether a change is recommended, by the percent that it saves of a mean and of its p99 (`tail`).

    It must surely save: the interval is above 0. And p99 must not surely get worse by more than the mean gains.
    """
    return gain.low is not None and gain.low > 0.0 and not is_outweighed(gain, tail)


def is_outweighed(gain: Interval, tail: Interval | None) -> bool:
    """Return whether p99 surely gets worse by more than the mean gains; False if it is not looked at."""
    return tail is not None and is_worse(tail) and -tail.mean > gain.mean


def is_worse(tail: Interval | None) -> bool:
    """Return whether p99 surely gets worse: its interval is below 0, and the loss is more than the slack."""
    return tail is not None and tail.high is not None and tail.high < 0.0 and tail.mean < -P99_SLACK_PCT


def tail_said(gain: Interval, tail: Interval) -> str:
    """Say what becomes of p99; empty if there is no interval."""
    if tail.low is None or tail.high is None:
        return ""
    if is_worse(tail):
        return f"p99 {-tail.mean:.1f}% longer" + ", more than it saves" * is_outweighed(gain, tail)
    if tail.low >= -P99_SLACK_PCT:
        return "p99 no worse"
    return f"p99 cannot be told ({tail.low:+.1f} to {tail.high:+.1f}% saved)"


def verdict_of(
    where: str, percent: Interval, gain: str, baseline: str, sure: str, *facts: str, opening: str | None = None
) -> str:
    """Return the sentence on a gain, which is words of :func:`change` and whose percents are above 0 if it is good.

    `sure` says why there is no interval; unused if there is one. `opening` is that of the gain unless another reason
    decides. Empty facts are left out.
    """
    mean, low, high = percent
    if low is not None and high is not None:
        sure = "95% {:.1f} to {:.1f}".format(*((low, high) if round(mean, 1) >= 0 else (-high, -low)))
    first = f"{opening or opening_of(percent)} {where}: {gain} against {baseline}, {sure}"
    return "; ".join([first, *filter(None, facts)]) + "."


def change(percent: float, metric: str) -> str:
    """Say what becomes of a metric of which `percent` less is left."""
    return f"takes {abs(percent):.1f}% off {metric}" if round(percent, 1) >= 0 else f"adds {-percent:.1f}% to {metric}"


def nothing_compared(where: str, baseline: str) -> str:
    return f"{UNTOLD} {where}: only {baseline} ran, and nothing is compared with it."
