"""Conversions to plain numbers for results: JSON has no NaN, so a value that cannot be computed is None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray


def number(value: SupportsFloat) -> float | None:
    """Return a Python float, or None if the value is not finite."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


def numbers(values: Iterable[SupportsFloat]) -> list[float | None]:
    return [number(v) for v in values]


def mean_or_none(values: NDArray[np.float64] | Sequence[float | None]) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    present = [float(v) for v in values if v is not None and math.isfinite(v)]
    return math.fsum(present) / len(present) if present else None
