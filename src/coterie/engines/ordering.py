"""The waiting requests of an engine, in the order a strategy chooses.

An engine asks for one request after the other; a strategy chooses several at once. In between stands a selection: it is
made over a window of the oldest waiting requests, beside the load that runs, and handed out one by one until it is used
up. It is made anew before that if a request arrives that it should have seen, or if more requests have left the engine
since than it has members. The oldest request of a window is in every selection and comes first in it; so does one that
was passed over `max_skips` times. In a shallow queue, where every arrival makes a new selection, the order is therefore
that of arrival, or close to it.

Requests go by classes (a priority): a lower one is never handed out before a higher. Urgent ones, those an engine had
to stop and put back, go first within their class and are not reordered. Requests that the engine cannot run yet take no
part and are handed out last. Where no load is known, or the strategy fails, the order is that of arrival.

Nothing here knows an engine: what it has to say is an :class:`EngineView`.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.batching import Window
from coterie.batching.base import Loads
from coterie.costs.lines import StepCost
from coterie.engines.ordering_inputs import OrderingSettings
from coterie.errors import ConfigError, CoterieError, InputError

T = TypeVar("T", bound=Hashable)
Key = tuple[Any, int, Any, int]
"""Class, lane, age and a number of its own: sorts as requests wait."""

URGENT, NORMAL = 0, 1
SPARE_SHARES = 64
"""Loads kept beyond those that a selection looks at."""
UNKNOWN = "no waiting request has a known load (no footprint, no table in 'loads'): they go in order of arrival"


class EngineView(Protocol[T]):
    """What an engine tells of itself and of its requests."""

    def share(self, request: T) -> Loads | None:
        """[layer, expert] activations a token; None if nothing is known. May raise."""
        ...

    def tokens(self, request: T) -> float:
        """Tokens it brings to a step, waiting or running."""
        ...

    def running(self) -> Sequence[T]: ...

    def free_places(self) -> int:
        """Requests that could start now."""
        ...

    def urgent(self, request: T) -> bool:
        """It ran already and was put back."""
        ...

    def blocked(self, request: T) -> bool:
        """It could not start now, whatever is free."""
        ...

    def name(self, request: T) -> str: ...


@dataclass
class Counters:
    """Since the start."""

    selections: int = 0
    """Made by the strategy."""
    handed_out: int = 0
    moved: int = 0
    """Handed out while an older one of its class waited."""
    unknown: int = 0
    """Windows without a known load: in order of arrival."""
    failures: int = 0
    """Of strategies and predictors: in order of arrival, or without that request's load."""
    worst_skips: int = 0
    """Most times any request was passed over."""


class Chooser(Generic[T]):
    """Asks the strategy, and goes on without it where it fails. One for all queues of an engine."""

    def __init__(
        self,
        settings: OrderingSettings,
        engine: EngineView[T],
        tell: Callable[[str], None],
        shape: tuple[int, int] = (1, 1),
        cost: StepCost | None = None,
    ) -> None:
        """`tell` is given each kind of problem once; `shape` [layer, expert], if known, is what is warmed up for."""
        self.settings = settings
        self.engine = engine
        self.strategy = settings.make(cost)
        self.counters = Counters()
        self._rng = np.random.default_rng(settings.seed)
        self._tell = tell
        self._told: set[str] = set()
        self._shares: dict[T, Loads | None] = {}
        self._shape: tuple[int, ...] | None = None
        self._running: Loads | None = None
        self._counted: dict[T, tuple[Loads, float]] = {}
        """Who is in the running load, and with what."""
        self._decisions = None if settings.decisions is None else Path(settings.decisions)
        if self._decisions is not None:
            try:
                self._decisions.open("a").close()
            except OSError as error:
                raise ConfigError(f"decisions={settings.decisions!r}: cannot be written: {error.strerror}") from None
        self._warm_up(shape)

    def _warm_up(self, shape: tuple[int, int]) -> None:
        """Compiled loops are compiled now, not while requests wait."""
        layers, experts = shape
        window = Window(np.ones((2, max(1, layers), max(1, experts))), np.zeros(2, np.int64), 2)
        try:
            self.strategy.select(window, window.no_load(), 2, np.random.default_rng(0))
        except Exception as error:
            self.failed(f"strategy {self.settings.strategy!r}", error)

    def failed(self, what: str, error: Exception) -> None:
        self.counters.failures += 1
        text = str(error) if isinstance(error, CoterieError) else repr(error)
        self._once(what, f"{what} failed, serving goes on: {text}")

    def _once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(message)

    def choose(self, queue: str, window: list[T], skips: list[int], queued: int, size: int) -> list[T] | None:
        """Of a window, oldest first, those to hand out, in that order; None where the strategy has no say."""
        running = list(self.engine.running())
        try:
            loads = self._loads(window)
            if loads is None:
                self.counters.unknown += 1
                self._once("unknown", UNKNOWN)
                return None
            skipped = np.array(skips, np.int64)
            selection = self.strategy.select(
                Window(loads, skipped, queued), self._running_load(running, loads.shape[1:]), size, self._rng
            )
            order = self._in_turn(selection.order, skipped, size)
        except Exception as error:
            self.failed(f"strategy {self.settings.strategy!r}", error)
            return None
        finally:
            self._trim(window, running)
        self.counters.selections += 1
        chosen = [window[index] for index in order]
        self._write_down(queue, window, skips, queued, size, running, chosen, selection.reason)
        return chosen

    def _in_turn(self, order: NDArray[np.integer], skipped: NDArray[np.int64], size: int) -> list[int]:
        """The strategy's order, checked, with those it may not leave out in front, oldest first."""
        picked = [int(index) for index in order]
        if (
            len(set(picked)) != min(size, len(skipped))
            or len(picked) > size
            or not all(0 <= index < len(skipped) for index in picked)
        ):
            raise InputError(f"order {picked} must be {min(size, len(skipped))} different indices below {len(skipped)}")
        limit = self.strategy.max_skips
        due = [i for i, times in enumerate(skipped) if i == 0 or (limit is not None and times >= limit)]
        return [*due, *(index for index in picked if index not in due)][:size]

    def _loads(self, window: list[T]) -> Loads | None:
        """[request, layer, expert] tokens; one that is not known counts as the mean of the others."""
        known = {at: load for at, request in enumerate(window) if (load := self._share(request)) is not None}
        if not known or self._shape is None:
            return None
        loads = np.empty((len(window), *self._shape))
        for at, share in known.items():
            np.multiply(share, self.engine.tokens(window[at]), out=loads[at])
        if len(known) < len(window):
            mean = loads[list(known)].mean(axis=0)
            for at in range(len(window)):
                if at not in known:
                    loads[at] = mean
        return loads

    def _running_load(self, running: list[T], shape: tuple[int, ...]) -> Loads:
        """Kept from one selection to the next, and changed by who came and went: hundreds may run."""
        shares = ((request, self._share(request)) for request in running)
        now = {request: (share, self.engine.tokens(request)) for request, share in shares if share is not None}
        if self._running is None or self._running.shape != shape or not now:
            self._running, self._counted = np.zeros(shape), {}
        for request, (share, tokens) in list(self._counted.items()):
            if request not in now or now[request][1] != tokens:
                self._running -= share * tokens
                del self._counted[request]
        for request, (share, tokens) in now.items():
            if request not in self._counted:
                self._running += share * tokens
                self._counted[request] = share, tokens
        return np.maximum(self._running, 0.0)  # what was taken off may leave less than nothing, by rounding

    def _share(self, request: T) -> Loads | None:
        if request in self._shares:
            return self._shares[request]
        share = None
        try:
            share = self.engine.share(request)
            if share is not None:
                if self._shape is None:
                    self._shape = share.shape
                if share.shape != self._shape:
                    raise InputError(f"a load of shape {share.shape}; those before have {self._shape}")
        except Exception as error:
            self.failed("the load of a request", error)
            share = None
        self._shares[request] = share
        return share

    def _trim(self, window: list[T], running: list[T]) -> None:
        if len(self._shares) > len(window) + len(running) + SPARE_SHARES:
            self._shares = {r: self._shares[r] for r in (*window, *running) if r in self._shares}

    def _write_down(
        self,
        queue: str,
        window: list[T],
        skips: list[int],
        queued: int,
        size: int,
        running: list[T],
        chosen: list[T],
        reason: str,
    ) -> None:
        if self._decisions is None:
            return
        name = self.engine.name
        line = {
            "queue": queue,
            "window": [name(r) for r in window],
            "skipped": skips,
            "queued": queued,
            "size": size,
            "running": [name(r) for r in running],
            "order": [name(r) for r in chosen],
            "reason": reason,
        }
        try:
            with self._decisions.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            self._decisions = None
            self.failed("writing 'decisions'", error)


@dataclass
class _Plan(Generic[T]):
    """A selection on its way out."""

    rank: Any
    window: list[T]
    """As the strategy saw it, oldest first."""
    rest: deque[T]
    """Still to be handed out, all of them waiting."""
    size: int
    chosen: bool
    """By the strategy."""
    running: frozenset[T]
    last: Key | None
    """Of the window's youngest, if the window is full: what arrives behind it would not have been seen."""
    taken: set[T] = field(default_factory=set)
    beyond: bool = False
    """One was taken that is younger than the window."""


class WaitingList(Generic[T]):
    """A queue whose next request is the strategy's choice. :meth:`peek` and :meth:`pop` agree until it changes."""

    def __init__(
        self, chooser: Chooser[T], name: str = "waiting", rank: Callable[[T], tuple[Any, Any]] | None = None
    ) -> None:
        """`rank` gives a request's class and age, lowest first; without it all are of one class and age is the order
        in which they came."""
        self.name = name
        self._chooser = chooser
        self._rank = rank
        self._keys: list[Key] = []
        self._at: dict[Key, T] = {}
        self._key_of: dict[T, Key] = {}
        self._skips: dict[T, int] = {}
        self._plan: _Plan[T] | None = None
        self._head: T | None = None
        self._handed_out: dict[T, tuple[Key, int]] = {}
        """In this step, with the place and the skips each had: an engine puts back what it cannot start."""
        self._number = 0

    # The queue.

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request: object) -> bool:
        return request in self._key_of

    def __iter__(self) -> Iterator[T]:
        """As they wait: by class, the urgent first, oldest first. Not the order they will be handed out in."""
        return iter([self._at[key] for key in self._keys])

    def push(self, request: T) -> None:
        self._insert(request, self._number)

    def prepend(self, request: T) -> None:
        """Back in: where it was, if it was handed out in this step; else it is older than all others."""
        before = self._handed_out.pop(request, None)
        if before is None or self._chooser.engine.urgent(request):
            self._insert(request, -self._number)
            return
        key, skips = before
        self._insert(request, key[2])
        if skips:
            self._skips[request] = skips

    def remove(self, requests: Iterable[T]) -> None:
        """Those that are here; others are ignored."""
        for request in requests:
            if request in self._key_of:
                if self._plan is not None and request in self._plan.rest:
                    self._plan.rest.remove(request)
                self._drop(request)

    def peek(self) -> T:
        """The next request; raises IndexError if there is none."""
        if not self._keys:
            raise IndexError(f"nothing is {self.name}")
        if self._head is None:
            self._head = self._next()
        return self._head

    def pop(self) -> T:
        request = self.peek()
        self.take(request)
        return request

    def take(self, request: T) -> None:
        """Hand this one out, whoever was next."""
        key, plan = self._key_of[request], self._plan
        self._chooser.counters.handed_out += 1
        if plan is not None and key[1] == NORMAL:
            if request in plan.rest:
                plan.rest.remove(request)
            older = next((r for r in plan.window if r in self._key_of), request)
            self._chooser.counters.moved += int(older != request)
            if request in plan.window:
                plan.taken.add(request)
            else:
                plan.beyond = True
        self._handed_out[request] = key, self._skips.get(request, 0)
        self._drop(request)
        if plan is not None and not plan.rest:
            self._retire()

    def upcoming(self) -> list[T]:
        """All of them: the urgent, then the selection, made if there is none, then the others as they wait."""
        if not self._keys:
            return []
        urgent = [self._at[key] for key in self._keys if key[1] == URGENT]
        if len(urgent) == len(self._keys):
            return urgent
        wanted = min(len(self._keys) - len(urgent), max(1, self._chooser.engine.free_places()))
        if self._plan is None or len(self._plan.rest) < wanted:
            self._select(next(key[0] for key in self._keys if key[1] == NORMAL))
        assert self._plan is not None
        first = dict.fromkeys([*urgent, *self._plan.rest])
        return [*first, *(request for request in self if request not in first)]

    def refresh(self) -> None:
        """Before a step of the engine: a selection for a batch that is gone is made anew, and so is one of default."""
        plan, self._head = self._plan, None
        self._handed_out.clear()
        if plan is None:
            return
        if not plan.chosen:
            self._retire()
        elif len(plan.running) > plan.size:
            left = plan.running.difference(self._chooser.engine.running())
            if len(left) > plan.size:
                self._retire()

    def skips(self, request: T) -> int:
        """Times a waiting request was passed over."""
        return self._skips.get(request, 0)

    # Inside.

    def _insert(self, request: T, age: Any) -> None:
        self.remove([request])
        rank: Any = 0
        if self._rank is not None:
            rank, age = self._rank(request)
        lane = URGENT if self._chooser.engine.urgent(request) else NORMAL
        key = (rank, lane, age, self._number)
        self._number += 1
        insort(self._keys, key)
        self._at[key] = request
        self._key_of[request] = key
        self._head = None
        plan = self._plan
        if plan is not None and (rank < plan.rank or (rank == plan.rank and lane == NORMAL and _seen(key, plan))):
            self._retire()

    def _drop(self, request: T) -> None:
        key = self._key_of.pop(request)
        del self._keys[bisect_left(self._keys, key)]
        del self._at[key]
        self._skips.pop(request, None)
        self._head = None

    def _next(self) -> T:
        rank, lane, _, _ = key = self._keys[0]
        if lane == URGENT:
            return self._at[key]
        if self._plan is None or not self._plan.rest or self._plan.rank != rank:
            self._select(rank)
        assert self._plan is not None
        return self._plan.rest[0]

    def _select(self, rank: Any) -> None:
        self._retire()
        chooser, limit = self._chooser, self._chooser.settings.window_size
        same: list[Key] = [key for key in self._keys[: 4 * limit] if key[0] == rank and key[1] == NORMAL]
        window = [self._at[key] for key in same if not chooser.engine.blocked(self._at[key])][:limit]
        if len(window) < limit:  # it is short, or many are blocked: look at all
            same = [key for key in self._keys if key[0] == rank and key[1] == NORMAL]
            window = [self._at[key] for key in same if not chooser.engine.blocked(self._at[key])][:limit]
        size = max(1, chooser.settings.batch_size, chooser.engine.free_places())
        last = self._key_of[window[-1]] if len(window) == limit else None
        chosen: list[T] | None = None
        if window:
            skips = [self._skips.get(request, 0) for request in window]
            queued = bisect_left(self._keys, (rank, NORMAL + 1)) - bisect_left(self._keys, (rank, NORMAL))
            chosen = chooser.choose(self.name, window, skips, queued, size)
        by_strategy = chosen is not None
        if chosen is None:  # as they wait, those that are blocked too
            window = chosen = [self._at[key] for key in (same[:size] if window else same)]
        running = frozenset(chooser.engine.running())
        self._plan = _Plan(rank, window, deque(chosen), len(chosen), by_strategy, running, last)

    def _retire(self) -> None:
        """The selection is over: whoever stayed while a younger one was taken was passed over."""
        plan, self._plan, self._head = self._plan, None, None
        if plan is None or not (plan.taken or plan.beyond):
            return
        reach = len(plan.window)
        while not plan.beyond and plan.window[reach - 1] not in plan.taken:
            reach -= 1
        for request in plan.window[:reach]:
            if request not in plan.taken and request in self._key_of:
                times = self._skips[request] = self._skips.get(request, 0) + 1
                self._chooser.counters.worst_skips = max(self._chooser.counters.worst_skips, times)


def _seen(key: Key, plan: _Plan[Any]) -> bool:
    return plan.last is None or key < plan.last
