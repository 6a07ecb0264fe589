"""Confidence intervals of the differences between runs: compute, print and plot them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from coterie.types import Interval

WORTH_PCT = 1.0
"""Saving in percent below which a change hardly pays: the step model is no more exact than this."""


def interval(samples: NDArray[np.float64] | Sequence[float], overlap: float = 0.0) -> Interval:
    """Return the mean and its 95% interval by Student's t; a single sample has no interval.

    Samples from random subsets of one population share members, and their mean varies by more than their deviation ÷
    √samples. `overlap` is members in a subset ÷ members left out, 1 for halves: the deviation between subsets times
    √overlap is then the error of the whole population (delete-d jackknife), and that of the mean over subsets is added
    (the corrected resampled t of Nadeau and Bengio). Infinite if nothing is left out: no interval.
    """
    values = np.asarray(samples, np.float64)
    mean = float(values.mean())
    if len(values) < 2 or np.isinf(overlap):
        return Interval(mean, None, None)
    half = float(stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) * np.sqrt(1 / len(values) + overlap))
    return Interval(mean, mean - half, mean + half)


def interval_of(row: Mapping[str, Any], key: str) -> Interval:
    """Return the interval of a row's fields KEY_pct (the mean), KEY_low and KEY_high."""
    return Interval(row[f"{key}_pct"], row[f"{key}_low"], row[f"{key}_high"])


def with_ends(value: Interval, digits: int = 1, sign: str = "+", unit: str = "") -> str:
    """Format the mean and [low, high]; the mean alone if there is no interval."""
    mean, *ends = (format(round(end, digits) + 0.0, f"{sign}.{digits}f") for end in value if end is not None)  # no -0.0
    return f"{mean}{unit} [{', '.join(ends)}]" if ends else f"{mean}{unit}"


def told_apart(gain: Interval) -> str:
    """Say in words whether the interval of a gain excludes 0."""
    if gain.low is None or gain.high is None:
        return "one run: no interval"
    return "surely" if gain.low > 0 else "not told apart" if gain.high > 0 else "surely not"


def error_bars(values: Sequence[Interval]) -> NDArray[np.float64] | None:
    """Return error bars [2, value], lengths below and above the means; None if any value has no interval."""
    ends = [(one.mean - one.low, one.high - one.mean) for one in values if one.low is not None and one.high is not None]
    return np.array(ends).T if ends and len(ends) == len(values) else None
