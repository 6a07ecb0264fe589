"""An engine of a few places, for tests of the waiting list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.batching import strategies
from coterie.batching.base import SpreadCost
from coterie.batching.waiting import Chooser, RequestView, WaitingList, WaitingReport

LAYERS, EXPERTS = 2, 8


@dataclass(eq=False)
class Request:
    number: int
    priority: int = 0
    stopped: bool = False
    blocked: bool = False


class Engine(RequestView[Request]):
    """A request's load is drawn from its number."""

    def __init__(self, places: int = 4, runs: Sequence[Request] = (), known: bool = True) -> None:
        self.told: list[str] = []
        super().__init__(WaitingReport(self.told.append))
        self.places = places
        self.runs = list(runs)
        self.known = known
        self.broken = False
        self.failures = 0

    def share(self, request: Request) -> np.ndarray | None:
        if self.broken:
            self.failures += 1
            raise RuntimeError("the predictor broke")
        return load(request.number) if self.known else None

    def tokens(self, request: Request) -> float:  # noqa: ARG002
        return 1.0

    def running(self) -> Sequence[Request]:
        return self.runs

    def free_places(self) -> int:
        return self.places - len(self.runs)

    def name(self, request: Request) -> str:
        return str(request.number)


def load(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 4, (LAYERS, EXPERTS)).astype(np.float64)


def is_stopped(request: Request) -> bool:
    return request.stopped


def is_blocked(request: Request) -> bool:
    return request.blocked


def waiting_list(chooser: Chooser[Request], **how: Any) -> WaitingList[Request]:
    return WaitingList(chooser, urgent=is_stopped, blocked=is_blocked, **how)


def make(
    engine: Engine, strategy: Any = "greedy_variance", seed: int = 0, max_skips: int | None = 64, **how: Any
) -> tuple[Chooser[Request], WaitingList[Request]]:
    """`strategy` is a name, or one that is made already."""
    made = (
        strategies.make(strategy, {"cost": SpreadCost()}, max_skips=max_skips)
        if isinstance(strategy, str)
        else strategy
    )
    settings: dict[str, Any] = {"window_size": 32, "batch_size": 8, "report": engine.report, **how}
    chooser = Chooser(made, engine, np.random.default_rng(seed), **settings)
    return chooser, waiting_list(chooser)
