"""Controllers of a simulated group's placement; planning takes no simulated time: engines plan beside their steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.answers.plan.changes import change_to
from coterie.control import LoadSeen, PlacementAdvisor
from coterie.control.advice import MOST_REQUESTS, with_steps
from coterie.control.traffic import Kept
from coterie.placement import Load, Planner
from coterie.sim.fleet.requests import FinishedRequest
from coterie.sim.group.serving import GroupLoads, Rebalance
from coterie.types import Placement, Topology


class NewestRequests:
    """The newest requests that ended, as the live loop keeps them."""

    def __init__(self, top_k: int) -> None:
        self.kept: deque[Kept] = deque(maxlen=2 * MOST_REQUESTS)
        self._top_k, self._serial = top_k, 0

    def add(self, ended: Sequence[FinishedRequest]) -> None:
        for one in ended:
            tokens = float(one.decode[0].sum()) / self._top_k
            self.kept.append(Kept(self._serial, one.at_s, str(one.worker), one.prefill, one.decode, tokens))
            self._serial += 1


@dataclass(slots=True)
class Periodic:
    """Plans every interval for the last interval's load and makes every change, as engines' EPLB does."""

    planner: Planner
    placement: Placement
    topology: Topology
    expert_bytes: float
    every_s: float
    late_s: float = 0.0
    contention: Mapping[str, Any] | None = None
    by_source: bool = False
    """Whether to plan for the ranks that tokens came from in the last interval, by chance or not."""
    requests: NewestRequests | None = None
    """Plan for single steps drawn from these; None plans for the mean step."""
    moving: bool = False

    def tick(self, _now_s: float, loads: GroupLoads) -> Rebalance | None:
        if self.requests is not None:
            self.requests.add(loads.ended)
        if self.moving or not loads.steps or not loads.sources.any():
            return None
        load = Load(loads.sources.sum(axis=0), loads.steps, loads.sources if self.by_source else None)
        if self.requests is not None:
            load = with_steps(load, tuple(self.requests.kept), np.random.default_rng(0))
        plan = self.planner.plan(load, self.topology, self.placement)
        words = f"{len(plan.moves)} moves every {self.every_s:g} s"
        change = change_to(self.placement, plan.placement, self.topology, self.expert_bytes, self.contention, words)
        self.moving = bool(change.layers)
        return change if self.moving else None

    def landed(self, _now_s: float, placement: Placement) -> None:
        self.placement, self.moving = placement, False


class AsItPays:
    """Passes loads and requests to the live loop's advisor, none while weights move, and makes the changes it advises.

    Ticks end the advisor's windows.
    """

    def __init__(
        self, advisor: PlacementAdvisor, contention: Mapping[str, Any] | None = None, late_s: float = 0.0
    ) -> None:
        self.advisor, self.contention = advisor, contention
        self.every_s, self.late_s = advisor.settings.window_s, late_s
        advisor.bind({str(rank): rank for rank in range(advisor.topology.num_ranks)})
        advisor.tick(0.0)
        self._requests = NewestRequests(advisor.shape.top_k)
        self._moving: int | None = None

    def tick(self, now_s: float, loads: GroupLoads) -> Rebalance | None:
        advisor = self.advisor
        self._requests.add(loads.ended)
        if self._moving is not None:
            return None
        if loads.steps:
            for rank, counted in enumerate(loads.sources):
                advisor.observe(LoadSeen(now_s, str(rank), counted, loads.steps, self.every_s))
        advisor.tick(now_s, tuple(self._requests.kept))
        if (advice := advisor.advice) is None or advice.plan is None:
            return None
        self._moving = advice.id
        current, bytes_each = advisor.placement, advisor.objective.expert_bytes
        return change_to(current, advice.plan.placement, advisor.topology, bytes_each, self.contention, advice.reason)

    def landed(self, _now_s: float, _placement: Placement) -> None:
        if self._moving is not None:
            self.advisor.applied(self._moving)
        self._moving = None
