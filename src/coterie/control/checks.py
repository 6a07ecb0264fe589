"""Validity checks of reported values. A check returns None, or the reason to ignore the value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from coterie.control.base import LoadSeen, LoopShape, RequestSeen

MOST_COUNT = 1 << 31
"""Largest number of activations of one expert by one request, and of tokens of one expert in one load report."""
MOST_NAME = 512
"""Greatest length of a request id or a worker name, in characters."""
MOST_STEPS = 1 << 31
MOST_ROWS = 1 << 24
"""Largest number of activations in one layer of a step: a batch of a million tokens with 16 experts each."""
MOST_SECONDS = 86_400.0
UNEVEN = 2.0
"""Largest ratio between the totals of two layers. Every token passes every layer, so a larger ratio is a miscount."""


def wrong_request(seen: RequestSeen, shape: LoopShape) -> str | None:
    """Return the reason to ignore a finished request, or None."""
    for field in (seen.request_id, seen.worker):
        if not _is_name(field):
            return "name"
    for counts in (seen.prefill, seen.decode):
        reason = _wrong_counts(counts, shape, whole=True)
        if reason is not None:
            return reason
    return None


def wrong_load(seen: LoadSeen, shape: LoopShape) -> str | None:
    """Return the reason to ignore a worker's load, or None."""
    if not _is_name(seen.worker):
        return "name"
    if not _is_whole(seen.steps) or not 1 <= seen.steps <= MOST_STEPS:
        return "steps"
    if not is_number(seen.seconds) or not 0 < seen.seconds <= MOST_SECONDS:
        return "seconds"
    wrong = _wrong_counts(seen.tokens, shape, whole=False)
    if wrong is None and float(seen.tokens.sum(axis=1).max()) > float(seen.steps) * MOST_ROWS:
        return "magnitude"
    return wrong


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number; a bool is not."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_NAME


def _wrong_counts(counts: Any, shape: LoopShape, *, whole: bool) -> str | None:
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in ("iu" if whole else "iuf"):
        return "dtype"
    if counts.shape != (shape.num_layers, shape.num_experts):
        return "shape"
    if not ((counts >= 0) & (counts <= MOST_COUNT)).all():  # false for NaN as well
        return "magnitude"
    totals = counts.sum(axis=1, dtype=np.float64)
    if not totals.any():
        return "empty"
    if totals.max() > UNEVEN * totals.min():
        return "uneven_layers"
    return None
