"""Checks on the loop's inputs: values that are wrong, late, duplicated or too many are counted and ignored."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from coterie.control.base import ControlEvent, ControlSettings, LoadSeen, LoopShape, RequestSeen
from coterie.control.checks import MOST_NAME, is_number, wrong_load, wrong_request

REMEMBERED_IDS = 1 << 15
"""Number of newest request ids that are remembered to detect duplicates."""
AGAIN_S = 60.0
"""Least time between two events about values ignored for the same reason."""
MOST_WORKERS = 4096
"""Largest number of worker names accepted between two ticks."""


def worker_of(seen: Any) -> str:
    """Return the worker name of a value, cut to MOST_NAME characters; empty if it has none."""
    worker = seen.worker if isinstance(seen, RequestSeen | LoadSeen) else ""
    return worker[:MOST_NAME] if isinstance(worker, str) else ""


class Intake:
    """Decides which values the loop uses. Never raises, whatever the values."""

    def __init__(
        self, shape: LoopShape, settings: ControlSettings, now_s: float, names: Collection[str] | None
    ) -> None:
        self.shape, self.settings, self.now_s = shape, settings, now_s
        self.names: frozenset[str] | None = None if names is None else frozenset(names)
        self.counters: dict[str, int] = {"requests": 0, "loads": 0}
        self.newest_s = now_s
        """Newest time of an accepted value."""
        self.untold: list[ControlEvent] = []
        """Events about ignored values, to be reported at the next tick."""
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._since_tick: dict[str, int] = {}
        self._told_s: dict[str, float] = {}

    def refused(self, seen: RequestSeen | LoadSeen | Any) -> str | None:
        """Check and count a value; return the reason to ignore it, or None if it is accepted."""
        try:
            reason = self._reason(seen)
        except Exception:  # a value crafted to break the checks counts as one more wrong value
            reason = "error"
        if reason is None:
            self.counters["requests" if isinstance(seen, RequestSeen) else "loads"] += 1
        else:
            self.ignore(reason, worker_of(seen))
        return reason

    def ignore(self, reason: str, worker: str = "") -> None:
        """Count an ignored value, and make an event unless one of the same reason is younger than `AGAIN_S`.

        The limit keeps a worker that reports nonsense from filling the events.
        """
        key = f"ignored_{reason}"
        self.counters[key] = self.counters.get(key, 0) + 1
        if self.now_s < self._told_s.get(reason, -math.inf) + AGAIN_S:
            return
        self._told_s[reason] = self.now_s
        values: dict[str, float | str] = {"reason": reason, "worker": worker}
        self.untold.append(ControlEvent(self.now_s, "ignored", f"a value was left out: {reason}", values))
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
        wrong = wrong_request(seen, self.shape) if isinstance(seen, RequestSeen) else wrong_load(seen, self.shape)
        if wrong is not None:
            return wrong
        if not is_number(seen.at_s):
            return "time"
        latest = max(self.now_s, self.newest_s)
        if seen.at_s > self.now_s + self.settings.ahead_s:
            return "future"
        if seen.at_s < latest - self.settings.late_s:
            return "late"
        if self.names is not None and seen.worker not in self.names:
            return "unknown_worker"
        if isinstance(seen, RequestSeen) and seen.request_id in self._ids:
            return "doubled"
        flood = self._flood(seen.worker)
        if flood is not None:
            return flood
        self.newest_s = max(self.newest_s, float(seen.at_s))
        if isinstance(seen, RequestSeen):
            self._ids[seen.request_id] = None
            if len(self._ids) > REMEMBERED_IDS:
                self._ids.popitem(last=False)
        return None

    def _flood(self, worker: str) -> str | None:
        count = self._since_tick.get(worker)
        if count is None and len(self._since_tick) >= MOST_WORKERS:
            return "too_many_workers"
        self._since_tick[worker] = (count or 0) + 1
        return "flood" if self._since_tick[worker] > self.settings.per_tick else None
