"""A waiting list's view of its server, and two implementations.

:class:`RowView` is for a simulator that has all loads in one array: a window is then one index. :class:`RequestView` is
for an engine that gives loads request by request, and may not know some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from coterie.batching.base import Loads
from coterie.batching.waiting.report import WaitingReport
from coterie.errors import InputError

T = TypeVar("T", bound=Hashable)

SPARE_SHARES = 64
"""Loads kept beyond those of waiting (in the window) and running requests."""


class ServerView(Protocol[T]):
    """A server as its waiting list sees it."""

    def loads(self, requests: Sequence[T]) -> Loads | None:
        """[request, layer, expert] tokens per step of each request, contiguous; None if no load is known."""
        ...

    def running_load(self) -> Loads:
        """[layer, expert] tokens of a step of the running requests. Called after :meth:`loads` returned loads."""
        ...

    def running(self) -> Sequence[T]: ...

    def free_places(self) -> int:
        """Requests that could start now."""
        ...

    def name(self, request: T) -> str:
        """Name of a request in decisions."""
        ...


class RowView:
    """Requests are row numbers of one array of loads."""

    def __init__(self, loads: Loads) -> None:
        """`loads` is [request, layer, expert]."""
        self._loads = np.ascontiguousarray(loads, np.float64)
        self.load = np.zeros(loads.shape[1:])
        """[layer, expert] running load; the owner sets it before a selection."""

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
    """Loads by request: activations per token, times the request's tokens in a step.

    A share is computed once while its request waits or runs. A request whose share is unknown, or fails, counts as the
    mean of the window's others.
    """

    def __init__(self, report: WaitingReport) -> None:
        self.report = report
        self._shares: dict[T, Loads | None] = {}
        self._shape: tuple[int, ...] | None = None
        self._running = np.zeros((0, 0))
        self._counted: dict[T, tuple[Loads, float]] = {}
        """Requests in the running load, with their share and tokens."""

    @abstractmethod
    def share(self, request: T) -> Loads | None:
        """[layer, expert] activations per token; None if unknown. May raise."""

    @abstractmethod
    def tokens(self, request: T) -> float:
        """Tokens of the request in a step, waiting or running."""

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
        """Updated between selections by requests that joined or left: hundreds may run."""
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
        return np.maximum(self._running, 0.0)  # subtraction may leave rounding errors below 0

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
        """Forget the shares of requests that left."""
        if len(self._shares) > len(requests) + len(self.running()) + SPARE_SHARES:
            self._shares = {r: self._shares[r] for r in (*requests, *self.running()) if r in self._shares}
