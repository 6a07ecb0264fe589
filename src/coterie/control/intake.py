"""Checks on the loop's inputs: values that are wrong, late, duplicated or too many are counted and ignored.

A check returns None, or the reason to ignore the value.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coterie.control.base import ControlEvent, ControlSettings, LoadSeen, LoopShape, RequestSeen

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
REMEMBERED_IDS = 1 << 15
"""Number of newest request ids that are remembered to detect duplicates."""
AGAIN_S = 60.0
"""Least time between two events about values ignored for the same reason."""
MOST_WORKERS = 4096
"""Largest number of worker names accepted between two ticks."""


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number; a bool is not."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def worker_of(seen: Any) -> str:
    """Return the worker name of a value, cut to MOST_NAME characters; empty if it has none."""
    worker = seen.worker if isinstance(seen, RequestSeen | LoadSeen) else ""
    return worker[:MOST_NAME] if isinstance(worker, str) else ""


def _first(problems: Mapping[str, Callable[[], object]]) -> str | None:
    """Return the first reason whose condition is true; later conditions may rely on earlier ones being false."""
    return next((reason for reason, is_wrong in problems.items() if is_wrong()), None)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_NAME


def _wrong_counts(counts: Any, shape: LoopShape, kinds: str) -> str | None:
    """Check counts [layer, expert], whose dtype must be of one of these `kinds`."""
    return _first(
        {
            "dtype": lambda: not isinstance(counts, np.ndarray) or counts.dtype.kind not in kinds,
            "shape": lambda: counts.shape != (shape.num_layers, shape.num_experts),
            "magnitude": lambda: not ((counts >= 0) & (counts <= MOST_COUNT)).all(),  # false for NaN as well
            "empty": lambda: not counts.any(),
            "uneven_layers": lambda: (totals := counts.sum(axis=1, dtype=np.float64)).max() > UNEVEN * totals.min(),
        }
    )


def _wrong_request(seen: RequestSeen, shape: LoopShape) -> str | None:
    if not _is_name(seen.request_id) or not _is_name(seen.worker):
        return "name"
    return _wrong_counts(seen.prefill, shape, "iu") or _wrong_counts(seen.decode, shape, "iu")


def _wrong_load(seen: LoadSeen, shape: LoopShape) -> str | None:
    steps = seen.steps
    whole = isinstance(steps, int | np.integer) and not isinstance(steps, bool)
    wrong = _first(
        {
            "name": lambda: not _is_name(seen.worker),
            "steps": lambda: not whole or not 1 <= steps <= MOST_STEPS,
            "seconds": lambda: not is_number(seen.seconds) or not 0 < seen.seconds <= MOST_SECONDS,
        }
    )
    return (
        wrong
        or _wrong_counts(seen.tokens, shape, "iuf")
        or _first({"magnitude": lambda: float(seen.tokens.sum(axis=1).max()) > float(steps) * MOST_ROWS})
    )


class Intake:
    """Decides which values the loop uses. Never raises, whatever the values."""

    def __init__(self, shape: LoopShape, settings: ControlSettings, now_s: float) -> None:
        self.shape, self.settings, self.now_s = shape, settings, now_s
        self.counters: Counter[str] = Counter(requests=0, loads=0)
        self.newest_s = now_s
        """Newest time of an accepted value."""
        self.untold: list[ControlEvent] = []
        """Events about ignored values, to be reported at the next tick."""
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._since_tick: Counter[str] = Counter()
        self._told_s: dict[str, float] = {}

    def refused(self, seen: RequestSeen | LoadSeen | Any) -> str | None:
        """Check and count a value; return the reason to ignore it, or None if it is accepted."""
        try:
            reason = self._reason(seen)
        except Exception:  # a value crafted to break the checks counts as one more wrong value
            reason = "error"
        if reason is not None:
            self.ignore(reason, worker_of(seen))
            return reason
        self._since_tick[seen.worker] += 1
        self.newest_s = max(self.newest_s, float(seen.at_s))
        if isinstance(seen, RequestSeen):
            self._ids[seen.request_id] = None
            if len(self._ids) > REMEMBERED_IDS:
                self._ids.popitem(last=False)
        self.counters["requests" if isinstance(seen, RequestSeen) else "loads"] += 1
        return None

    def ignore(self, reason: str, worker: str = "") -> None:
        """Count an ignored value, and make an event unless one of the same reason is younger than `AGAIN_S`.

        The limit keeps a worker that reports nonsense from filling the events.
        """
        self.counters[f"ignored_{reason}"] += 1
        if self.now_s < self._told_s.get(reason, -math.inf) + AGAIN_S:
            return
        self._told_s[reason] = self.now_s
        words, values = f"a value was left out: {reason}", {"reason": reason, "worker": worker}
        self.untold.append(ControlEvent(self.now_s, "ignored", words, values))
        del self.untold[: -self.settings.events]

    def tick(self, now_s: float) -> bool:
        """Set the current time; return False if it is not a number or goes back."""
        if not is_number(now_s) or now_s < self.now_s:
            self.ignore("clock")
            return False
        self.now_s = float(now_s)
        self._since_tick.clear()
        return True

    def _reason(self, seen: Any) -> str | None:
        if not isinstance(seen, RequestSeen | LoadSeen):
            return "type"
        wrong = _wrong_request(seen, self.shape) if isinstance(seen, RequestSeen) else _wrong_load(seen, self.shape)
        at_s, worker, counted, settings = seen.at_s, seen.worker, self._since_tick, self.settings
        return wrong or _first(
            {
                "time": lambda: not is_number(at_s),
                "future": lambda: at_s > self.now_s + settings.ahead_s,
                "late": lambda: at_s < max(self.now_s, self.newest_s) - settings.late_s,
                "doubled": lambda: isinstance(seen, RequestSeen) and seen.request_id in self._ids,
                "too_many_workers": lambda: worker not in counted and len(counted) >= MOST_WORKERS,
                "flood": lambda: counted[worker] >= settings.per_tick,
            }
        )
