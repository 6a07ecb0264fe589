"""The waiting line in front of a fleet: bounds the running requests, the waiting requests and the time of waiting.

    waited_s = 0.0 if line.take_at_once() else await line.take(deadline_s=5.0)
    try:
        ...
    finally:
        line.give_back()

First come, first served: a request that needs several places is not overtaken by later, smaller ones, which would
starve it. A full line refuses at once (429), a passed deadline refuses then (503), and both say when to retry, by the
recent rate at which places became free. A task that is cancelled while it waits, or just as it gets a place, gives its
position or place back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

from coterie.errors import ConfigError, CoterieError, check_at_least

OBSERVED = 64
"""Number of recently freed places over which the service rate is measured."""
LONGEST_RETRY_S = 60
SPARE = 64
"""Abandoned entries that the queue may hold before it is rebuilt without them."""


class Refused(CoterieError):
    """A request that gets no place: HTTP 429 if the line is full, 503 if its deadline passed or the line is closed."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """Label for counters: full, late or closed."""
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class LineCounters:
    admitted: int = 0
    """Requests that got a place."""
    waited: int = 0
    """Admitted requests that had to wait."""
    full: int = 0
    """Requests refused because the line was full."""
    late: int = 0
    """Requests refused because their deadline passed."""
    closed: int = 0
    """Requests refused because the line was closed."""
    cancelled: int = 0
    """Requests whose task was cancelled while they waited."""


class _Waiter:
    __slots__ = ("future", "queued", "weight")

    def __init__(self, future: asyncio.Future[str | None], weight: int) -> None:
        self.future = future
        """Future whose result is None if the request got a place, else the reason of its refusal."""
        self.weight = weight
        self.queued = True


class WaitingLine:
    """Places for the requests of one event loop, and the line of those that wait."""

    def __init__(self, places: int, waiting: int) -> None:
        """`places` is the number of running requests, `waiting` the most that may wait."""
        self.counters = LineCounters()
        self.closed = False
        self._line: deque[_Waiter] = deque()
        """Waiters in order of arrival; abandoned ones stay until they reach the front or the queue is rebuilt."""
        self._waiting = 0
        self._used = 0
        self._freed: deque[float] = deque(maxlen=OBSERVED)
        self.set_limits(places, waiting)

    @property
    def in_use(self) -> int:
        """Number of places taken."""
        return self._used

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._waiting

    def set_limits(self, places: int, waiting: int) -> None:
        """Change both bounds; running and waiting requests stay."""
        check_at_least(1, places=places)
        check_at_least(0, waiting=waiting)
        self.places, self.most_waiting = places, waiting
        self._wake()

    def close(self, refuse_waiting: bool = False) -> None:
        """Refuse new requests from now on; with `refuse_waiting` also those that wait."""
        self.closed = True
        if refuse_waiting:
            for waiter in list(self._line):
                self._drop(waiter, "closed")

    def take_at_once(self) -> bool:
        """Take a place if one is free and nobody waits; return whether it was taken. Give it back once."""
        if self.closed or self._waiting or self._used >= self.places:
            return False
        self._used += 1
        self.counters.admitted += 1
        return True

    async def take(self, deadline_s: float, weight: int = 1) -> float:
        """Wait at most `deadline_s` for a place and return the seconds waited. Give the place back once.

        `weight` is the number of places that the request needs; if that is more than exist, the request runs alone.
        """
        if weight < 1 or not 0 <= deadline_s < math.inf:
            raise ConfigError(f"weight={weight} must be at least 1, deadline_s={deadline_s} finite and not negative")
        if self.closed:
            raise self._refused("closed")
        if not self._waiting and self._fits(weight):
            self._used += weight
            self.counters.admitted += 1
            return 0.0
        if self._waiting >= self.most_waiting:
            raise self._refused("full")
        loop = asyncio.get_running_loop()
        started, waiter = loop.time(), _Waiter(loop.create_future(), weight)
        self._line.append(waiter)
        self._waiting += 1
        timer = loop.call_later(deadline_s, self._expire, waiter)
        try:
            problem = await waiter.future
        except BaseException:  # cancelled, or the event loop was closed
            self.counters.cancelled += 1
            if waiter.queued:
                self._drop(waiter, "cancelled")
                self._wake()  # the next waiter may need fewer places
            elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.result() is None:
                self.counters.admitted -= 1
                self._free(weight)  # it got a place in this same loop iteration
            raise
        finally:
            timer.cancel()
        if problem is not None:
            raise self._refused(problem)
        self.counters.waited += 1
        return loop.time() - started

    def give_back(self, weight: int = 1) -> None:
        """Free the places taken by :meth:`take` or :meth:`take_at_once`."""
        self._freed.append(asyncio.get_running_loop().time())
        self._free(weight)

    def retry_after_s(self) -> int:
        """Return the whole seconds until all present waiters get places at the recent rate: 1 … `LONGEST_RETRY_S`."""
        if len(self._freed) < 2:
            return 1
        passed = asyncio.get_running_loop().time() - self._freed[0]
        return max(1, min(math.ceil((self._waiting + 1) * passed / len(self._freed)), LONGEST_RETRY_S))

    def check_integrity(self) -> None:
        """Raise AssertionError if a waiter is miscounted, or waits although its place is free."""
        queued = [waiter for waiter in self._line if waiter.queued]
        if len(queued) != self._waiting or self._used < 0:
            raise AssertionError(f"{len(queued)} requests wait, {self._waiting} counted; {self._used} places in use")
        if queued and self._fits(queued[0].weight) and not queued[0].future.done():
            raise AssertionError("the first request waits though its place is free")

    def _fits(self, weight: int) -> bool:
        return self._used + weight <= self.places or self._used == 0

    def _free(self, weight: int) -> None:
        self._used -= weight
        if self._line:
            self._wake()
        if self._used == 0:
            self._freed.clear()  # the rate of an idle service says nothing about a busy one

    def _wake(self) -> None:
        """Give free places to the waiters at the front."""
        while self._line:
            first = self._line[0]
            if not first.future.done():
                if not self._fits(first.weight):
                    return
                self._used += first.weight
                self.counters.admitted += 1
            self._line.popleft()
            self._drop(first, None)  # no effect on a waiter that was refused or cancelled

    def _expire(self, waiter: _Waiter) -> None:
        if waiter.queued:
            self._drop(waiter, "late")
            self._wake()

    def _drop(self, waiter: _Waiter, result: str | None) -> None:
        """Resolve a waiter and stop counting it; its entry stays in the queue until it reaches the front."""
        if waiter.queued:
            waiter.queued = False
            self._waiting -= 1
        if not waiter.future.done():
            waiter.future.set_result(result)
        if len(self._line) > 2 * self._waiting + SPARE:  # clients that leave while waiting must not fill the memory
            self._line = deque(waiter for waiter in self._line if waiter.queued)

    def _refused(self, reason: str) -> Refused:
        retry = self.retry_after_s()
        if reason == "full":
            self.counters.full += 1
            return Refused(429, reason, f"{self._waiting} requests wait already; try again in {retry} s", retry)
        if reason == "late":
            self.counters.late += 1
            return Refused(503, reason, f"no place became free in time; try again in {retry} s", retry)
        self.counters.closed += 1
        return Refused(503, reason, "the service is shutting down", retry)
