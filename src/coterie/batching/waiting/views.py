"""A waiting list's view of its server, two implementations of it, and the counters and decisions it reports.

:class:`RowView` is for a simulator that has all loads in one array, so that a window is one indexing operation.
:class:`RequestView` is for an engine that gives loads request by request, and may not know some.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from coterie.batching.base import Loads
from coterie.errors import ConfigError, CoterieError, InputError, check

T = TypeVar("T", bound=Hashable)

SPARE_SHARES = 64
"""Number of loads kept beyond those of running requests and of waiting requests in the window."""


@dataclass
class WaitingCounters:
    """Counts since the start."""

    selections: int = 0
    """Number of selections made by the strategy."""
    handed_out: int = 0
    moved: int = 0
    """Number of requests handed out while an older request of their class waited."""
    unknown: int = 0
    """Number of windows without a known load, served in order of arrival."""
    failures: int = 0
    """Failures of strategies (served in order of arrival) and predictors (served without that request's load)."""
    worst_skips: int = 0
    """Largest number of times that a request was passed over."""


@dataclass
class WaitingReport:
    """Counters, and messages about problems, one per kind of problem."""

    tell: Callable[[str], None] = lambda _: None
    counters: WaitingCounters = field(default_factory=WaitingCounters)
    _told: set[str] = field(default_factory=set)

    def failed(self, what: str, error: Exception) -> None:
        """Count a failure after which serving continues, and report it once."""
        self.counters.failures += 1
        text = str(error) if isinstance(error, CoterieError) else repr(error)
        self.once(what, f"{what} failed, serving goes on: {text}")

    def once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self.tell(message)


class BatchDecision(NamedTuple):
    """One selection, with requests by name."""

    queue: str
    window: list[str]
    """Window as the strategy saw it, oldest first."""
    skipped: list[int]
    """[request of the window] number of times it was passed over before."""
    queued: int
    """Number of waiting requests of the class, including those beyond the window."""
    size: int
    """Number of requests to select."""
    running: list[str]
    order: list[str]
    """Selected requests, in the order in which they are handed out."""
    reason: str


class DecisionFile:
    """File to which every decision is appended as a line of JSON."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.open("a").close()
        except OSError as error:
            raise ConfigError(f"decisions={str(path)!r}: cannot be written: {error.strerror}") from None

    def __call__(self, decision: BatchDecision) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(decision._asdict()) + "\n")


class ServerView(Protocol[T]):
    """A server as its waiting list sees it."""

    def loads(self, requests: Sequence[T]) -> Loads | None:
        """Return [request, layer, expert] the tokens per step of each request, contiguous; None if no load is known."""

    def running_load(self) -> Loads:
        """Return [layer, expert] tokens of a step of the running requests. Called after :meth:`loads` gave loads."""

    @abstractmethod
    def running(self) -> Sequence[T]: ...

    @abstractmethod
    def free_places(self) -> int:
        """Return the number of requests that could start now."""

    @abstractmethod
    def name(self, request: T) -> str:
        """Return the name of a request in decisions."""


class RowView:
    """View in which requests are row numbers of one array of loads."""

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


class RequestView(ServerView[T]):
    """View with a load per request: its share (activations per token) times its tokens in a step.

    A share is computed once while its request waits or runs. A request whose share is unknown, or whose computation
    fails, gets the mean load of the window's other requests.
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
        """Return [layer, expert] activations per token; None if unknown. May raise."""

    @abstractmethod
    def tokens(self, request: T) -> float:
        """Return the request's number of tokens in a step, whether it waits or runs."""

    def loads(self, requests: Sequence[T]) -> Loads | None:
        self._trim(requests)
        known = {at: load for at, request in enumerate(requests) if (load := self._share(request)) is not None}
        if not known or self._shape is None:
            return None
        loads = np.empty((len(requests), *self._shape))
        for at, share in known.items():
            np.multiply(share, self.tokens(requests[at]), out=loads[at])
        unknown = [at for at in range(len(requests)) if at not in known]
        if unknown:
            loads[unknown] = loads[list(known)].mean(axis=0)
        return loads

    def running_load(self) -> Loads:
        """Return the running load, updated by the requests that joined or left: hundreds may run."""
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
                self._shape = self._shape or share.shape
                check(
                    share.shape == self._shape,
                    f"a load of shape {share.shape}; those before have {self._shape}",
                    InputError,
                )
        except Exception as error:
            self.report.failed("the load of a request", error)
            share = None
        self._shares[request] = share
        return share

    def _trim(self, requests: Sequence[T]) -> None:
        """Forget the shares of requests that left."""
        if len(self._shares) > len(requests) + len(self.running()) + SPARE_SHARES:
            self._shares = {r: self._shares[r] for r in (*requests, *self.running()) if r in self._shares}
