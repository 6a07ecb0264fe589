"""The contract of a batch selection strategy: which waiting requests join the running batch.

A strategy is a pure function of a snapshot: a window of the oldest waiting requests with the expected load of each, and
the running load (0 if batches run one after the other, that of a step if batching is continuous). It selects the
requests to add. Two rules hold for every strategy: the oldest request is always selected, and so is a request that was
passed over `max_skips` times, so that no request starves.
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
    """Cost ``1 + sensitivity x CV`` of a batch, where CV is the coefficient of variation of the load over experts.

    Each request counts as one unit of work. Right across ranks, which wait for the busiest rank; inside one GPU
    imbalance is nearly free.
    """

    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative(sensitivity=self.sensitivity)


BatchCost = SpreadCost | StepCost
"""Cost model of a batch before it runs: CAPS's model of a straggler, or the calibrated, linear step time."""


class Window(NamedTuple):
    """The oldest of the waiting requests, oldest first."""

    loads: Loads
    """[request, layer, expert] expected tokens of each request, contiguous. In decode, those of one step: at most 1."""
    skipped: NDArray[np.int64]
    """[request] number of times the request was passed over: a younger one was taken instead."""
    queued: int
    """Number of all waiting requests, including those beyond the window."""

    def no_load(self) -> Loads:
        """Return zeros [layer, expert]: the load if no request runs."""
        return np.zeros(self.loads.shape[1:])


class Selection(NamedTuple):
    """A strategy's decision."""

    order: NDArray[np.int64]
    """Indices into the window, in the order they were chosen."""
    reason: str
    """Reason for the selection, as text."""


@runtime_checkable
class Strategy(Protocol):
    """Policy that selects requests; its settings are the fields of a frozen dataclass."""

    @property
    def max_skips(self) -> int | None:
        """Times a request may be passed over before it must be taken; None for no limit."""

    def select(self, window: Window, running: Loads, size: int, rng: Generator) -> Selection:
        """Select min(size, window) different requests to add to `running` [layer, expert], the oldest among them."""


strategies: PolicyRegistry[Strategy] = PolicyRegistry("strategy", group="coterie.strategies")
"""Registry of strategies; importing :mod:`coterie.batching` registers those of the package. Callers offer
`cost` (a :data:`BatchCost`), `trust` and `max_skips`."""


def passed_over(window: Sequence[T], taken: Set[int]) -> list[T]:
    """Return the requests of a window, oldest first, that still wait although a younger one was taken.

    `taken` are indices into the window; the window's length stands for a request younger than all in the window.
    """
    return [request for index, request in enumerate(window[: max(taken, default=0)]) if index not in taken]
