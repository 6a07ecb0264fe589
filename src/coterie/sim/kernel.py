"""The event kernel: a clock that jumps from one event to the next.

An event is a time and an action. Actions run in order of time, and at equal times in the order in which they were
scheduled, so that a run has exactly one order. An action may schedule further events, but not in the past.

    >>> sim, seen = Simulation(), []
    >>> sim.at(2.0, lambda: seen.append("b"))
    >>> sim.at(1.0, lambda: sim.after(1.0, lambda: seen.append("c")))
    >>> sim.run()
    >>> seen, sim.now_s
    (['b', 'c'], 2.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from coterie.errors import ConfigError, check

Action = Callable[[], None]


class Simulation:
    """The clock and the scheduled events."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """Number of events that have run."""
        self._heap: list[tuple[float, int, Action]] = []
        self._asked = 0

    def at(self, time_s: float, action: Action) -> None:
        """Schedule `action` at `time_s`."""
        if not self.now_s <= time_s < math.inf:
            raise ConfigError(f"time_s={time_s} must be a finite number not before now_s={self.now_s}")
        self._asked += 1
        heappush(self._heap, (time_s, self._asked, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Schedule `action` at `delay_s` from now."""
        if not 0.0 <= delay_s < math.inf:  # `at` accepts a negative delay that rounds to 0 on a late clock
            raise ConfigError(f"delay_s={delay_s} must be a finite number of at least 0")
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float = math.inf) -> None:
        """Run events until none is left, or up to and including `until_s`; the clock stays at the last event run."""
        check(until_s >= self.now_s, f"until_s={until_s} must be a number not before now_s={self.now_s}")
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action = heappop(heap)
            self.events += 1
            action()
