"""Waiting requests, in the order a strategy chooses.

An engine takes one request after the other, the simulator a batch; a strategy chooses several requests at once. The
link between them is a selection, made over a window of the oldest waiting requests and the running load.
:meth:`WaitingList.take_batch` hands out a whole selection at once. :meth:`WaitingList.pop` hands out its requests one
by one until none is left. The selection is recomputed earlier if a request arrives that belongs in its window, or if
more requests have left the server since than the selection holds. If a server with all places free pops as many
requests as a batch holds, both give the same requests in the same order.

The oldest request of a window is first in every selection; requests that were passed over `max_skips` times follow. In
a shallow queue, where every arrival makes a new selection, the order is therefore that of arrival, or close to it. When
a selection ends, requests that still wait while a younger one was taken count as passed over.

Requests have a class (a priority): all of one class are handed out before the next. Urgent requests, which a server had
to stop and put back, go first within their class and are not reordered. Requests that cannot start yet are blocked:
they take no part in selections and are handed out last. If no load is known, or the strategy fails, the order is that
of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from coterie.batching.base import passed_over
from coterie.batching.waiting.choosing import Chooser
from coterie.errors import ConfigError

T = TypeVar("T", bound=Hashable)
Key = tuple[Any, int, Any, int]
"""Sort key of a waiting request: class, lane (urgent or normal), age and serial number."""

URGENT, NORMAL = 0, 1
ARRIVAL = "in order of arrival"
"""Reason given for a batch that no strategy chose."""


class ChosenBatch(NamedTuple, Generic[T]):
    """Requests that start together."""

    items: list[T]
    skipped: list[int]
    """[item] number of times the request was passed over before."""
    reason: str
    """Reason for the choice, as text."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    """A waiting request with its sort key and skips."""

    key: Key
    request: T
    skips: int = 0


_key = attrgetter("key")


@dataclass(slots=True, eq=False)
class _Plan(Generic[T]):
    """A selection whose requests are handed out, all at once or one by one."""

    rank: Any
    window: list[_Entry[T]]
    """Window as the strategy saw it, oldest first."""
    rest: deque[int]
    """Indices into the window still to be handed out, in that order."""
    size: int
    """Number of requests selected."""
    last: Key | None
    """Key of the youngest request of a full window: later keys are beyond the window. None if it was not full."""
    reason: str | None
    """The strategy's reason; None if the strategy did not choose."""
    running: frozenset[T]
    """Requests that ran when the selection was made."""
    taken: set[int] = field(default_factory=set)
    """Indices handed out; the window's length stands for a request younger than all in the window."""
    gone: set[int] = field(default_factory=set)
    """Indices of requests that no longer wait."""

    def sees(self, key: Key) -> bool:
        """Return whether a new request with this key belongs in the window, or goes before all requests in it."""
        rank, lane = key[:2]
        inside = lane == NORMAL and (self.last is None or key < self.last)
        return inside if rank == self.rank else bool(rank < self.rank)

    def has_outlived(self, running: Callable[[], Iterable[T]]) -> bool:
        """Return whether more requests left the server since the selection than it holds."""
        return len(self.running) > self.size and len(self.running.difference(running())) > self.size

    def take(self, entry: _Entry[T]) -> bool:
        """Mark a request as taken; return whether an older request of the window still waits."""
        index = self.drop(entry)
        self.taken.add(index)
        return any(older not in self.gone for older in range(index))

    def drop(self, entry: _Entry[T]) -> int:
        """Mark a request as no longer waiting; return its index, or the window's length if it is not in the window."""
        index = self.window.index(entry) if entry in self.window else len(self.window)
        self.gone.add(index)
        if index in self.rest:
            self.rest.remove(index)
        return index


class WaitingList(Generic[T]):
    """A queue whose next request is the strategy's choice. :meth:`peek` and :meth:`pop` agree while it is unchanged."""

    def __init__(
        self,
        chooser: Chooser[T],
        name: str = "waiting",
        *,
        rank: Callable[[T], tuple[Any, Any]] | None = None,
        urgent: Callable[[T], bool] | None = None,
        blocked: Callable[[T], bool] | None = None,
    ) -> None:
        """`rank` returns a request's class and age, lowest first; by default there is one class, in order of arrival.
        `urgent` returns whether a request ran already and was put back, `blocked` whether it cannot start now even if
        places are free; by default no request is either."""
        self.name = name
        self._chooser = chooser
        self._rank = rank
        self._is_urgent = urgent or (lambda _: False)
        self._blocked = blocked
        self._entries: list[_Entry[T]] = []
        """Entries in waiting order."""
        self._entry_of: dict[T, _Entry[T]] = {}
        self._plan: _Plan[T] | None = None
        self._head: T | None = None
        self._handed_out: dict[T, _Entry[T]] = {}
        """Requests handed out in this step, with their former entries: a server puts back those it cannot start."""
        self._number = 0

    # The queue.

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: object) -> bool:
        return request in self._entry_of

    def __iter__(self) -> Iterator[T]:
        """Iterate in waiting order: by class, urgent first, oldest first. They may be handed out in another order."""
        return iter([entry.request for entry in self._entries])

    def at(self, place: int) -> T:
        """Return the request at this position of the waiting order."""
        return self._entries[place].request

    def push(self, request: T) -> None:
        self._insert(request, self._number)

    def prepend(self, request: T) -> None:
        """Put a request back: at its old position if it was handed out in this step, else as the oldest."""
        before = self._handed_out.pop(request, None)
        if before is None or self._is_urgent(request):
            self._insert(request, -self._number)
            return
        self._insert(request, before.key[2])
        self._entry_of[request].skips = before.skips

    def remove(self, requests: Iterable[T]) -> None:
        """Remove requests; those that do not wait are ignored."""
        for request in requests:
            entry = self._entry_of.get(request)
            if entry is not None:
                if self._plan is not None:
                    self._plan.drop(entry)
                self._drop(entry)

    def peek(self) -> T:
        """Return the next request; raise IndexError if there is none."""
        if not self._entries:
            raise IndexError(f"nothing is {self.name}")
        if self._head is None:
            self._head = self._next()
        return self._head

    def pop(self) -> T:
        request = self.peek()
        self.take(request)
        return request

    def take(self, request: T) -> None:
        """Hand out this request, even if another was next."""
        entry, plan, counters = self._entry_of[request], self._plan, self._chooser.counters
        counters.handed_out += 1
        if plan is not None and entry.key[1] == NORMAL:
            counters.moved += plan.take(entry)
        self._handed_out[request] = entry
        self._drop(entry)
        if plan is not None and not plan.rest:
            self._retire()

    def take_batch(self, size: int) -> ChosenBatch[T]:
        """Hand out a selection of up to `size` requests at once, as one step. No request may be urgent."""
        self._retire()
        if not self._entries or size < 1:
            return ChosenBatch([], [], "nobody waits" if size else "no place is free")
        rank, lane, _, _ = self._entries[0].key
        if lane == URGENT:
            raise ConfigError(f"{self._entries[0].request!r} is urgent: such requests go one by one")
        plan = self._select(rank, size)
        order = list(plan.rest)[:size]  # if all are blocked, the selection holds all of them
        entries, taken = [plan.window[index] for index in order], set(order)
        stayed = passed_over(plan.window, taken)
        if self._blocked is None:  # the window is the head of the list
            self._entries[: len(order) + len(stayed)] = stayed
            for entry in entries:
                del self._entry_of[entry.request]
        else:
            for entry in entries:
                self._drop(entry)
        requests, skips = [entry.request for entry in entries], [entry.skips for entry in entries]
        self._handed_out = dict(zip(requests, entries, strict=True))
        self._pass_over(stayed)
        self._chooser.counters.handed_out += len(order)
        # All but those older than any request that stays.
        self._chooser.counters.moved += len(order) - next(index for index in count() if index not in taken)
        return ChosenBatch(requests, skips, plan.reason or ARRIVAL)

    def upcoming(self) -> list[T]:
        """Return all requests: urgent ones, then the selection (made if needed), then the others in waiting order."""
        urgent = [entry.request for entry in self._entries if entry.key[1] == URGENT]
        if len(urgent) == len(self._entries):
            return urgent
        wanted = min(len(self._entries) - len(urgent), max(1, self._chooser.view.free_places()))
        plan = self._plan
        if plan is None or len(plan.rest) < wanted:
            plan = self._make_plan(next(entry.key[0] for entry in self._entries if entry.key[1] == NORMAL))
        first = dict.fromkeys([*urgent, *(plan.window[index].request for index in plan.rest)])
        return [*first, *(request for request in self if request not in first)]

    def refresh(self) -> None:
        """Call before a step of the server: ends a selection that no strategy chose, or since which more requests left
        the server than it holds."""
        plan, self._head = self._plan, None
        self._handed_out.clear()
        if plan is not None and (plan.reason is None or plan.has_outlived(self._chooser.view.running)):
            self._retire()

    def skips(self, request: T) -> int:
        """Return how often a waiting request was passed over."""
        return self._entry_of[request].skips

    # Internal.

    def _insert(self, request: T, age: Any) -> None:
        if request in self._entry_of:
            self.remove([request])
        rank, age = (0, age) if self._rank is None else self._rank(request)
        key = (rank, URGENT if self._is_urgent(request) else NORMAL, age, self._number)
        self._number += 1
        entry = self._entry_of[request] = _Entry(key, request)
        if not self._entries or self._entries[-1].key < key:
            self._entries.append(entry)
        else:
            insort(self._entries, entry, key=_key)
        self._head = None
        if self._plan is not None and self._plan.sees(key):
            self._retire()

    def _drop(self, entry: _Entry[T]) -> None:
        del self._entry_of[entry.request]
        del self._entries[bisect_left(self._entries, entry.key, key=_key)]
        self._head = None

    def _next(self) -> T:
        rank, lane, _, _ = self._entries[0].key
        if lane == URGENT:
            return self._entries[0].request
        plan = self._plan
        if plan is None or not plan.rest or plan.rank != rank:
            plan = self._make_plan(rank)
        return plan.window[plan.rest[0]].request

    def _make_plan(self, rank: Any) -> _Plan[T]:
        """Make a selection to be handed out one by one."""
        self._retire()
        plan = self._plan = self._select(rank, max(1, self._chooser.batch_size, self._chooser.view.free_places()))
        return plan

    def _select(self, rank: Any, size: int) -> _Plan[T]:
        """Make a selection of a class, which must have waiting requests that are not urgent."""
        limit, entries = self._chooser.window_size, self._entries
        start, end = self._bounds(rank)
        window, running = entries[start : min(end, start + limit)], frozenset(self._chooser.view.running())
        if (blocked := self._blocked) is not None:
            free = (entry for entry in islice(entries, start, end) if not blocked(entry.request))
            window = list(islice(free, limit))
        last = window[-1].key if len(window) == limit else None
        if window:
            requests, skips = [entry.request for entry in window], [entry.skips for entry in window]
            choice = self._chooser.choose(self.name, requests, skips, end - start, size)
            if choice is not None:
                return _Plan(rank, window, deque(choice.order), len(choice.order), last, choice.reason, running)
            end = min(end, start + size)
        window = entries[start:end]  # in waiting order, blocked requests included
        return _Plan(rank, window, deque(range(len(window))), len(window), last, None, running)

    def _bounds(self, rank: Any) -> tuple[int, int]:
        """Return the start and end of a class's requests that are not urgent."""
        entries, first, behind = self._entries, (rank, NORMAL), (rank, NORMAL + 1)
        start = 0 if entries[0].key > first else bisect_left(entries, first, key=_key)
        return start, len(entries) if entries[-1].key < behind else bisect_left(entries, behind, start, key=_key)

    def _retire(self) -> None:
        """End the selection and count the requests it passed over."""
        plan, self._plan, self._head = self._plan, None, None
        if plan is not None:
            stayed = passed_over(plan.window, plan.taken)
            self._pass_over([entry for entry in stayed if self._entry_of.get(entry.request) is entry])

    def _pass_over(self, entries: list[_Entry[T]]) -> None:
        """Count one skip for each entry: a younger request was taken instead."""
        for entry in entries:
            entry.skips += 1
        counters = self._chooser.counters
        counters.worst_skips = max([counters.worst_skips, *(entry.skips for entry in entries)])
