"""A load on a device: what a step of any placement takes, at any batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.plan.samples import Sample
from coterie.costs.movement import Movement
from coterie.costs.step import StepModel
from coterie.placement import Load, Objective, Plan, Problem
from coterie.types import Placement, Topology

Array = NDArray[np.float64]


class Placed(NamedTuple):
    """A placement and how its replicas share tokens."""

    placement: Placement
    shares: NDArray[np.floating] | None = None
    """[layer, slot]; None: equal shares."""
    resplit: bool = False
    """Whether shares are solved again for every load (split optimal)."""

    @classmethod
    def of(cls, plan: Plan) -> Placed:
        return cls(plan.placement, None if plan.split == "equal" else plan.shares, plan.split == "optimal")


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """A load on a device: seconds of any placement, at any batch."""

    model: StepModel
    topology: Topology
    tokens: Array
    """[layer, expert]"""
    settings: dict[str, float]
    """Of the objective, besides its prices."""
    sources: Array | None = None
    movement: Movement = "stops"
    """How the engine moves weights."""
    steps: Sample | None = None
    """Single steps, over which times and balancedness are means; None: the mean step."""

    def load(self, batch: int) -> Load:
        if self.steps is not None:
            return self.steps.at(batch * self.model.spec.top_k)
        seen = self.tokens.sum(axis=1).mean() / self.model.spec.top_k
        return Load(self.tokens, max(float(seen) / batch, 1e-9), self.sources)

    def objective(self, batch: int) -> Objective:
        return Objective.of(self.model, batch, self.movement, **self.settings)

    def problem(self, batch: int, placed: Placed) -> Problem:
        return self.objective(batch).problem(self.load(batch), self.topology, placed.placement, placed.shares)

    def busy_s(self, batch: int, placed: Placed) -> Array:
        """[layer, rank] seconds of the mean step."""
        problem = self.problem(batch, placed)
        return problem.rank_s(placed.placement.slot_experts, _shares(problem, placed))

    def step_s(self, batch: int, placed: Placed) -> float:
        """Seconds of the MoE layers of a step: each waits for its slowest rank."""
        problem = self.problem(batch, placed)
        return float(problem.slowest_s(placed.placement.slot_experts, _shares(problem, placed)).sum())

    def balance(self, batch: int, placed: Placed) -> float:
        """Balancedness: mean over layers, and over the steps."""
        problem = self.problem(batch, placed)
        return problem.balanced(placed.placement.slot_experts, _shares(problem, placed))

    def step_balance(self, batch: int, placed: Placed) -> Array:
        """[scenario] balancedness of each step."""
        problem = self.problem(batch, placed)
        assert problem.steps is not None
        shares = _shares(problem, placed)
        busy = problem.steps.rank_s(placed.placement.slot_experts, shares, problem.alive)[..., problem.alive]
        peak = busy.max(axis=2)
        return np.asarray(np.divide(busy.mean(axis=2), peak, out=np.ones(peak.shape), where=peak > 0).mean(axis=0))

    def gain_pct(self, batch: int, now: Placed, then: Placed) -> float:
        """Share of the MoE layers' time that `then` saves, in percent."""
        before = self.step_s(batch, now)
        return 100 * (1 - self.step_s(batch, then) / before) if before else 0.0


def _shares(problem: Problem, placed: Placed) -> Array | None:
    """The shares in force; where they are solved for every load, those of the mean step."""
    if not placed.resplit:
        return problem.shares
    from coterie.placement.splits.shares import optimal_shares  # its solver takes seconds to compile

    return optimal_shares(problem, placed.placement.slot_experts)
