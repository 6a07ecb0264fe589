"""The waiting line in front of a fleet: a bounded number of requests run, a bounded number waits, none for ever.

    waited_s = 0.0 if line.take_at_once() else await line.take(deadline_s=5.0)
    try:
        ...
    finally:
        line.give_back()

First come, first served: a request that needs several places is not passed by later, smaller ones, which would starve
it. A full line refuses at once (429), a deadline that passes refuses then (503), and both say when to try again, by the
rate at which places became free lately. A task that is cancelled while it waits, or just as it is given a place, gives
both back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

from coterie.errors import ConfigError, CoterieError, check_at_least

OBSERVED = 64
"""Places that became free last, whose rate is the service rate."""
LONGEST_RETRY_S = 60
SPARE = 64
"""Waiters that left, beyond which the line is made anew without them."""


class Refused(CoterieError):
    """A request that gets no place: HTTP 429 if the line is full, 503 if its deadline passed or the line is closed."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """One of a few words, to count by: full, late, closed."""
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class LineCounters:
    admitted: int = 0
    """Requests that got a place."""
    waited: int = 0
    """Those of them that had to wait."""
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
        """Result: None where it got a place, else why it was refused."""
        self.weight = weight
        self.queued = True


class WaitingLine:
    """Places of one event loop's requests."""

    def __init__(self, places: int, waiting: int) -> None:
        """`places` run at once, `waiting` more may wait."""
        self.counters = LineCounters()
        self.closed = False
        self._line: deque[_Waiter] = deque()
        """Waiters in order; those that left are still there until they come to the front."""
        self._waiting = 0
        self._used = 0
        self._freed: deque[float] = deque(maxlen=OBSERVED)
        self.set_limits(places, waiting)

    @property
    def in_use(self) -> int:
        """Places taken."""
        return self._used

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._waiting

    def set_limits(self, places: int, waiting: int) -> None:
        """Change both bounds; requests that run or wait stay."""
        check_at_least(1, places=places)
        check_at_least(0, waiting=waiting)
        self.places, self.most_waiting = places, waiting
        self._wake()

    def close(self, refuse_waiting: bool = False) -> None:
        """Refuse requests that come from now on, and if asked those that wait."""
        self.closed = True
        if refuse_waiting:
            for waiter in list(self._line):
                self._drop(waiter, "closed")

    def take_at_once(self) -> bool:
        """Take a place if one is free and nobody waits; returns whether it was. Give it back, once."""
        if self.closed or self._waiting or self._used >= self.places:
            return False
        self._used += 1
        self.counters.admitted += 1
        return True

    async def take(self, deadline_s: float, weight: int = 1) -> float:
        """Wait at most `deadline_s` for a place; returns the seconds that took. Give it back, once.

        `weight` is the number of places that the request needs; one that needs more than there are runs alone.
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
        except BaseException:  # cancelled, or closed with its loop
            self.counters.cancelled += 1
            if waiter.queued:
                self._drop(waiter, "cancelled")
                self._wake()  # the next may need less
            elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.result() is None:
                self.counters.admitted -= 1
                self._free(weight)  # it was given a place in this very turn of the loop
            raise
        finally:
            timer.cancel()
        if problem is not None:
            raise self._refused(problem)
        self.counters.waited += 1
        return loop.time() - started

    def give_back(self, weight: int = 1) -> None:
        """Free what :meth:`take` took."""
        self._freed.append(asyncio.get_running_loop().time())
        self._free(weight)

    def retry_after_s(self) -> int:
        """Whole seconds until those who wait now will have got places, by the rate of late; at least 1."""
        if len(self._freed) < 2:
            return 1
        passed = asyncio.get_running_loop().time() - self._freed[0]
        return max(1, min(math.ceil((self._waiting + 1) * passed / len(self._freed)), LONGEST_RETRY_S))

    def check_integrity(self) -> None:
        """Raise AssertionError if a waiter is lost: counted wrongly, or left waiting beside a free place."""
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
            self._freed.clear()  # the rate of an idle service says nothing of a busy one

    def _wake(self) -> None:
        """Give free places to those in front."""
        while self._line:
            first = self._line[0]
            if not first.future.done():
                if not self._fits(first.weight):
                    return
                self._used += first.weight
                self.counters.admitted += 1
            self._line.popleft()
            self._drop(first, None)  # of one that was refused or cancelled, nothing changes

    def _expire(self, waiter: _Waiter) -> None:
        if waiter.queued:
            self._drop(waiter, "late")
            self._wake()

    def _drop(self, waiter: _Waiter, result: str | None) -> None:
        """Take a waiter out of the line, and tell it why; it stays in the queue until it is in front."""
        if waiter.queued:
            waiter.queued = False
            self._waiting -= 1
        if not waiter.future.done():
            waiter.future.set_result(result)
        if len(self._line) > 2 * self._waiting + SPARE:  # a client that comes and goes must not fill the memory
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
