"""The waiting line in front of a fleet: bounds the running requests, the waiting requests and the time of waiting.

    waited_s = 0.0 if line.take_at_once() else await line.take(deadline_s=5.0)
    try:
        ...
    finally:
        line.give_back()

First come, first served. A full line refuses at once (429), a passed deadline refuses then (503), and both say when to
retry, by the recent rate at which places became free. A task that is cancelled while it waits, or just as it gets a
place, gives its position or place back.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from dataclasses import dataclass

from coterie.errors import CoterieError, check_at_least, check_not_negative

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


@dataclass(slots=True, eq=False)
class _Waiter:
    future: asyncio.Future[str | None]
    """Future whose result is None if the request got a place, else the reason of its refusal."""
    queued: bool = True


class WaitingLine:
    """Places for the requests of one event loop, and the line of those that wait."""

    def __init__(self, places: int, waiting: int) -> None:
        """`places` is the number of running requests, `waiting` the most that may wait."""
        self.counters: Counter[str] = Counter()
        """Requests by what happened to them: admitted (they got a place), cancelled while they waited, or refused:
        full, late, closed."""
        self.closed = False
        self._line: deque[_Waiter] = deque()
        """Waiters in order of arrival; abandoned ones stay until they reach the front or the queue is rebuilt."""
        self.waiting = 0
        """Number of requests that wait."""
        self.in_use = 0
        """Number of places taken."""
        self._freed: deque[float] = deque(maxlen=OBSERVED)
        self.set_limits(places, waiting)

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
        if self.closed or self.waiting or self.in_use >= self.places:
            return False
        self.in_use += 1
        self.counters["admitted"] += 1
        return True

    async def take(self, deadline_s: float) -> float:
        """Wait at most `deadline_s` for a place and return the seconds waited. Give the place back once."""
        check_not_negative(deadline_s=deadline_s)
        if self.closed:
            raise self._refused("closed")
        if self.take_at_once():
            return 0.0
        if self.waiting >= self.most_waiting:
            raise self._refused("full")
        loop = asyncio.get_running_loop()
        started, waiter = loop.time(), _Waiter(loop.create_future())
        self._line.append(waiter)
        self.waiting += 1
        timer = loop.call_later(deadline_s, self._drop, waiter, "late")
        try:
            problem = await waiter.future
        except BaseException:  # cancelled, or the event loop was closed
            self.counters["cancelled"] += 1
            if waiter.queued:
                self._drop(waiter, "cancelled")
            elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.result() is None:
                self.counters["admitted"] -= 1
                self._free()  # it got a place in this same loop iteration
            raise
        finally:
            timer.cancel()
        if problem is not None:
            raise self._refused(problem)
        return loop.time() - started

    def give_back(self) -> None:
        """Free the place taken by :meth:`take` or :meth:`take_at_once`."""
        self._freed.append(asyncio.get_running_loop().time())
        self._free()

    def retry_after_s(self) -> int:
        """Return the whole seconds until all present waiters get places at the recent rate: 1 … `LONGEST_RETRY_S`."""
        if len(self._freed) < 2:
            return 1
        passed = asyncio.get_running_loop().time() - self._freed[0]
        return max(1, min(math.ceil((self.waiting + 1) * passed / len(self._freed)), LONGEST_RETRY_S))

    def _free(self) -> None:
        self.in_use -= 1
        if self._line:
            self._wake()
        if self.in_use == 0:
            self._freed.clear()  # the rate of an idle service says nothing about a busy one

    def _wake(self) -> None:
        """Give free places to the waiters at the front."""
        while self._line:
            first = self._line[0]
            if not first.future.done():
                if self.in_use >= self.places:
                    return
                self.in_use += 1
                self.counters["admitted"] += 1
            self._line.popleft()
            self._drop(first, None)  # no effect on a waiter that was refused or cancelled

    def _drop(self, waiter: _Waiter, result: str | None) -> None:
        """Resolve a waiter and stop counting it; its entry stays in the queue until it reaches the front."""
        if waiter.queued:
            waiter.queued = False
            self.waiting -= 1
        if not waiter.future.done():
            waiter.future.set_result(result)
        if len(self._line) > 2 * self.waiting + SPARE:  # clients that leave while waiting must not fill the memory
            self._line = deque(waiter for waiter in self._line if waiter.queued)

    def _refused(self, reason: str) -> Refused:
        self.counters[reason] += 1
        retry = self.retry_after_s()
        message = {
            "full": f"{self.waiting} requests wait already; try again in {retry} s",
            "late": f"no place became free in time; try again in {retry} s",
            "closed": "the service is shutting down",
        }[reason]
        return Refused(429 if reason == "full" else 503, reason, message, retry)
