"""Intervals of a suite's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.types import Interval


def interval_of(row: Mapping[str, Any], key: str) -> Interval:
    """Return the interval of a row's fields KEY_pct (the mean), KEY_low and KEY_high."""
    return Interval(row[f"{key}_pct"], row[f"{key}_low"], row[f"{key}_high"])


def told_apart(gain: Interval) -> str:
    """Say in words whether the interval of a gain excludes 0."""
    if gain.low is None or gain.high is None:
        return "one run: no interval"
    return "surely" if gain.low > 0 else "not told apart" if gain.high > 0 else "surely not"
