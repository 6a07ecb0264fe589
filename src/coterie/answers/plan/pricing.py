"""Price a load on a device: seconds per step of any placement, at any batch size."""

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
    """Placement, and the shares of tokens of its replicas."""

    placement: Placement
    shares: NDArray[np.floating] | None = None
    """[layer, slot] share of the expert's tokens; None for equal shares."""
    resplit: bool = False
    """Whether shares are computed anew for every load (split "optimal")."""

    @classmethod
    def of(cls, plan: Plan) -> Placed:
        return cls(plan.placement, None if plan.split == "equal" else plan.shares, plan.split == "optimal")


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """Load on a device; prices any placement at any batch size."""

    model: StepModel
    topology: Topology
    tokens: Array
    """[layer, expert] tokens."""
    settings: dict[str, float]
    """Settings of the objective other than prices: horizon and target_balance, if given."""
    sources: Array | None = None
    movement: Movement = "stops"
    """How the engine moves weights: whether it stops for moves or stages them."""
    steps: Sample | None = None
    """Single steps, over which times and balancedness are averaged; None prices the mean step."""

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
        """Return seconds [layer, rank] of the mean step."""
        problem = self.problem(batch, placed)
        return problem.rank_s(placed.placement.slot_experts, _shares(problem, placed))

    def step_s(self, batch: int, placed: Placed) -> float:
        """Return the seconds of a step's MoE layers; each layer takes as long as its slowest rank."""
        problem = self.problem(batch, placed)
        return float(problem.slowest_s(placed.placement.slot_experts, _shares(problem, placed)).sum())

    def balance(self, batch: int, placed: Placed) -> float:
        """Return the balancedness, mean over layers and steps."""
        problem = self.problem(batch, placed)
        return problem.balanced(placed.placement.slot_experts, _shares(problem, placed))

    def step_balance(self, batch: int, placed: Placed) -> Array:
        """Return the balancedness [scenario] of each step."""
        problem = self.problem(batch, placed)
        assert problem.steps is not None
        shares = _shares(problem, placed)
        busy = problem.steps.rank_s(placed.placement.slot_experts, shares, problem.alive)[..., problem.alive]
        peak = busy.max(axis=2)
        return np.asarray(np.divide(busy.mean(axis=2), peak, out=np.ones(peak.shape), where=peak > 0).mean(axis=0))

    def gain_pct(self, batch: int, now: Placed, then: Placed) -> float:
        """Return the share of the MoE layers' time that `then` saves relative to `now`, in percent."""
        before = self.step_s(batch, now)
        return 100 * (1 - self.step_s(batch, then) / before) if before else 0.0


def _shares(problem: Problem, placed: Placed) -> Array | None:
    """Return the shares to price with; if they are computed for every load, those of the mean step."""
    if not placed.resplit:
        return problem.shares
    from coterie.placement.splits.shares import optimal_shares  # its solver takes seconds to compile

    return optimal_shares(problem, placed.placement.slot_experts)
