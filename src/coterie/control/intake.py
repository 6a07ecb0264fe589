"""What comes in: checked, counted, and left out with its reason where it is wrong, late, doubled or too much."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from coterie.control.base import ControlEvent, ControlSettings, LoadSeen, LoopShape, RequestSeen
from coterie.control.checks import MOST_NAME, is_number, wrong_load, wrong_request

REMEMBERED_IDS = 1 << 15
"""Newest request ids that are recognised when they come again."""
AGAIN_S = 60.0
"""Time after which values that are left out for one reason give an event again."""
MOST_WORKERS = 4096
"""Most workers that are told apart."""


def worker_of(seen: Any) -> str:
    """The worker that a value names, cut to a length; nothing where it names none."""
    worker = seen.worker if isinstance(seen, RequestSeen | LoadSeen) else ""
    return worker[:MOST_NAME] if isinstance(worker, str) else ""


class Intake:
    """Decides what the loop uses. Never raises on data."""

    def __init__(
        self, shape: LoopShape, settings: ControlSettings, now_s: float, names: Collection[str] | None
    ) -> None:
        self.shape, self.settings, self.now_s = shape, settings, now_s
        self.names: frozenset[str] | None = None if names is None else frozenset(names)
        self.counters: dict[str, int] = {"requests": 0, "loads": 0}
        self.newest_s = now_s
        """Newest time that was believed."""
        self.untold: list[ControlEvent] = []
        """Events of first ignored values, for the next tick."""
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._since_tick: dict[str, int] = {}
        self._told_s: dict[str, float] = {}

    def refused(self, seen: RequestSeen | LoadSeen | Any) -> str | None:
        """Why a value is not to be used, counted by that reason; None for one that is."""
        try:
            reason = self._reason(seen)
        except Exception:  # a value made to break the checks is one more wrong value
            reason = "error"
        if reason is None:
            self.counters["requests" if isinstance(seen, RequestSeen) else "loads"] += 1
        else:
            self.ignore(reason, worker_of(seen))
        return reason

    def ignore(self, reason: str, worker: str = "") -> None:
        """Count a value that is not used; the first of a run with one reason gives an event.

        A run ends after `AGAIN_S`, so that a worker that reports nonsense does not fill the events.
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
        """Take the driver's time; False where it is no time, or goes back."""
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
