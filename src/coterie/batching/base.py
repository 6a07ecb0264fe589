"""The contract of a batch selection strategy: which waiting requests join the running batch.

A strategy is a pure function of a snapshot. It sees a window of the oldest waiting requests with the expected load of
each, and the running load (none where batches run one after the other, a step's where batching is continuous), and
selects the requests to add. Two rules hold for every strategy: the oldest request is always selected, and so is one
that was passed over `max_skips` times, so that none starves.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.lines import StepCost
from coterie.errors import check_not_negative
from coterie.registry import PolicyRegistry

T = TypeVar("T")
Loads = NDArray[np.float64]

DEFAULT_MAX_SKIPS = 64


@dataclass(frozen=True, slots=True)
class SpreadCost:
    """``1 + sensitivity x CV`` of the load over its columns; each request is one unit of work.

    Right across ranks, where the busiest one is waited for; inside one GPU imbalance is nearly free.
    """

    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(sensitivity=self.sensitivity)


BatchCost = SpreadCost | StepCost
"""How a strategy prices a batch before it runs: CAPS's model of a straggler, or the calibrated step time as a line."""


class Window(NamedTuple):
    """The oldest of the waiting requests, oldest first."""

    loads: Loads
    """[request, layer, expert] expected tokens of each request, contiguous. In decode: of one step, so at most 1."""
    skipped: NDArray[np.int64]
    """[request] times it was passed over: a younger request was taken instead."""
    queued: int
    """All waiting requests, those beyond the window included."""

    def no_load(self) -> Loads:
        """[layer, expert] zeros: the load where nothing runs."""
        return np.zeros(self.loads.shape[1:])


class Selection(NamedTuple):
    """A strategy's decision."""

    order: NDArray[np.int64]
    """Indices into the window, in the order they were chosen."""
    reason: str
    """Explanation in words."""


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
:data:`BatchCost`), `trust` and `max_skips`."""


def passed_over(window: Sequence[T], taken: Set[int]) -> list[T]:
    """Requests of a window, oldest first, that still wait although a younger one was taken. `taken` are indices into
    the window; its length stands for a request younger than all of it."""
    return [request for index, request in enumerate(window[: max(taken, default=0)]) if index not in taken]
