"""What a waiting list asks of the server that takes its requests, and two ways to answer.

:class:`RowView` is for a simulator that has all loads in one array: a window is then one index. :class:`RequestView` is
for an engine that is asked for one request's load after the other, and may know nothing of some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from coterie.batching.base import Loads
from coterie.batching.waiting.report import Report
from coterie.errors import InputError

T = TypeVar("T", bound=Hashable)

SPARE_SHARES = 64
"""Loads kept beyond those of the window and of what runs."""


class ServerView(Protocol[T]):
    """A server as its waiting list sees it."""

    def loads(self, requests: Sequence[T]) -> Loads | None:
        """[request, layer, expert] tokens each would bring to a step, contiguous; None if no load is known."""
        ...

    def running_load(self) -> Loads:
        """[layer, expert] tokens of a step of what runs. Asked after :meth:`loads`, where that gave some."""
        ...

    def running(self) -> Sequence[T]: ...

    def free_places(self) -> int:
        """Requests that could start now."""
        ...

    def name(self, request: T) -> str:
        """In a decision."""
        ...


class RowView:
    """Requests are row numbers of one array of loads."""

    def __init__(self, loads: Loads) -> None:
        """`loads` is [request, layer, expert]."""
        self._loads = np.ascontiguousarray(loads, np.float64)
        self.load = np.zeros(loads.shape[1:])
        """[layer, expert] that runs; whoever owns the view sets it before a selection."""

    def loads(self, requests: Sequence[int]) -> Loads:
        return self._loads.take(requests, axis=0)

    def running_load(self) -> Loads:
        return self.load

    def running(self) -> Sequence[int]:
        return ()

    def free_places(self) -> int:
        return 0

    def name(self, request: int) -> str:
        return str(request)


class RequestView(ABC, Generic[T]):
    """Loads by request: a share a token, times the tokens that the request brings to a step.

    A share is asked for once while its request waits or runs. A request whose share is not known, or cannot be had,
    counts as the mean of the window's others.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self._shares: dict[T, Loads | None] = {}
        self._shape: tuple[int, ...] | None = None
        self._running = np.zeros((0, 0))
        self._counted: dict[T, tuple[Loads, float]] = {}
        """Who is in the running load, and with what."""

    @abstractmethod
    def share(self, request: T) -> Loads | None:
        """[layer, expert] activations a token; None if nothing is known. May raise."""

    @abstractmethod
    def tokens(self, request: T) -> float:
        """Tokens it brings to a step, waiting or running."""

    @abstractmethod
    def running(self) -> Sequence[T]: ...

    @abstractmethod
    def free_places(self) -> int: ...

    @abstractmethod
    def name(self, request: T) -> str: ...

    def loads(self, requests: Sequence[T]) -> Loads | None:
        self._trim(requests)
        known = {at: load for at, request in enumerate(requests) if (load := self._share(request)) is not None}
        if not known or self._shape is None:
            return None
        loads = np.empty((len(requests), *self._shape))
        for at, share in known.items():
            np.multiply(share, self.tokens(requests[at]), out=loads[at])
        if len(known) < len(requests):
            mean = loads[list(known)].mean(axis=0)
            for at in range(len(requests)):
                if at not in known:
                    loads[at] = mean
        return loads

    def running_load(self) -> Loads:
        """Kept from one selection to the next, and changed by who came and went: hundreds may run."""
        shares = ((request, self._share(request)) for request in self.running())
        now = {request: (share, self.tokens(request)) for request, share in shares if share is not None}
        if self._running.shape != self._shape or not now:
            self._running, self._counted = np.zeros(self._shape or (0, 0)), {}
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
            share = self.share(request)
            if share is not None:
                if self._shape is None:
                    self._shape = share.shape
                if share.shape != self._shape:
                    raise InputError(f"a load of shape {share.shape}; those before have {self._shape}")
        except Exception as error:
            self.report.failed("the load of a request", error)
            share = None
        self._shares[request] = share
        return share

    def _trim(self, requests: Sequence[T]) -> None:
        """Forget the shares of those that left."""
        if len(self._shares) > len(requests) + len(self.running()) + SPARE_SHARES:
            self._shares = {r: self._shares[r] for r in (*requests, *self.running()) if r in self._shares}
