"""The contract of a batch selection strategy: which of the waiting requests join what runs.

A strategy is a pure function of a snapshot. It sees a window of the oldest waiting requests with the load each is
expected to bring, and the load that runs already (none where batches run one after the other, all of a step's where
batching is continuous), and names the requests to add. Two rules hold for all of them: the oldest request is always
in, and so is one that was passed over `max_skips` times, so that nobody starves.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.registry import PolicyRegistry

T = TypeVar("T")
Loads = NDArray[np.float64]

DEFAULT_MAX_SKIPS = 64


class Window(NamedTuple):
    """The oldest of the waiting requests, oldest first."""

    loads: Loads
    """[request, layer, expert] tokens each is expected to bring, contiguous. In decode: a step's, so at most 1."""
    skipped: NDArray[np.int64]
    """[request] times it was passed over: it stayed while a younger one was taken."""
    queued: int
    """Requests that wait in all, those past the window too."""

    def no_load(self) -> Loads:
        """[layer, expert] of nothing running."""
        return np.zeros(self.loads.shape[1:])


class Selection(NamedTuple):
    """What a strategy decided."""

    order: NDArray[np.int64]
    """Indices into the window, in the order they were chosen."""
    reason: str
    """In words."""


@runtime_checkable
class Strategy(Protocol):
    """Anything that selects; settings are the fields of a frozen dataclass."""

    @property
    def max_skips(self) -> int | None:
        """Times a request may be passed over before it must be taken; None never forces one."""
        ...

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:
        """min(size, window) different requests to add to `running` [layer, expert]; the oldest is among them."""
        ...


strategies: PolicyRegistry[Strategy] = PolicyRegistry("strategy", group="coterie.strategies")
"""Holds the built-in ones once :mod:`coterie.batching` is imported. Callers offer `cost` (a
:data:`~coterie.batching.costs.BatchCost`), `trust` and `max_skips`."""


def passed_over(window: Sequence[T], taken: Set[int]) -> list[T]:
    """Those of a window, oldest first, that stay although a younger one was taken. `taken` are indices into it; one
    past its end stands for a request that is younger than the window."""
    return [request for index, request in enumerate(window[: max(taken, default=0)]) if index not in taken]
