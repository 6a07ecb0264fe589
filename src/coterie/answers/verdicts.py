"""The sentence that an answer ends with: whether a change pays, where, by how much, against what, and how sure that is.

Every answer has the same form and the same four openings, so that answers about routing, batching and placement can be
read side by side. A saving is counted against what a deployment runs without Coterie: the shortest queue, first come
first served, or the placement that runs now.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from coterie.answers.runs import WORTH_PCT
from coterie.types import Interval

Opening = Literal["It pays", "It hardly pays", "It does not pay", "It cannot be told whether it pays"]


class Verdict(NamedTuple):
    """What an answer comes to."""

    sentence: str
    then: str
    """Next command to run."""


class Gain(NamedTuple):
    """Gain of a policy over a baseline, in percent; above 0 is better."""

    policy: str
    metric: str
    baseline: str
    percent: Interval
    unsure: str = "no interval: one run"
    """Words in place of the interval if there is none."""
    noise_pct: float = math.inf
    """Gain in percent up to which a result without an interval tells nothing."""
    more_is_better: bool = False
    """Whether a gain is more of the metric, as of throughput."""

    @property
    def opening(self) -> Opening:
        mean, low = self.percent.mean, self.percent.low
        if round(mean, 1) <= 0:
            return "It does not pay"
        if mean <= self.noise_pct if low is None else low <= 0:
            return "It cannot be told whether it pays"
        return "It pays" if mean >= WORTH_PCT else "It hardly pays"


def verdict_of(where: str, gain: Gain, *facts: str, opening: Opening | None = None) -> str:
    """Return the sentence; `opening` is that of the gain unless another reason decides. Empty facts are left out."""
    mean, low, high = gain.percent
    less, sure = -mean if gain.more_is_better else mean, gain.unsure
    if low is not None and high is not None:
        ends = (-high, -low) if (round(less, 1) >= 0) == gain.more_is_better else (low, high)
        sure = f"95% {ends[0]:.1f} to {ends[1]:.1f}"
    said = f"{gain.policy} {change(less, gain.metric)} against {gain.baseline}, {sure}"
    return f"{opening or gain.opening} {where}: {'; '.join(filter(None, (said, *facts)))}."


def change(percent: float, metric: str) -> str:
    """Say what becomes of a metric of which `percent` less is left."""
    does, of = ("takes", "off") if round(percent, 1) >= 0 else ("adds", "to")
    return f"{does} {abs(percent):.1f}% {of} {metric}"


def nothing_compared(where: str, baseline: str) -> str:
    return f"It cannot be told whether it pays {where}: only {baseline} ran, and nothing is compared with it."
