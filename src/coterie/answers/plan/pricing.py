"""Price a load on a device: seconds per step of any placement, at any batch size.

A plan is also scored on a part of the load that it was not made on: gain, balancedness, and results per domain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.plan.loads import Array, Parts
from coterie.answers.plan.samples import Sample
from coterie.costs.movement import Movement
from coterie.costs.step import StepModel
from coterie.placement import Load, Objective, Plan, Problem
from coterie.placement.maps.targets import Target
from coterie.types import Placement, Topology


class Placed(NamedTuple):
    """Placement, and the shares of tokens of its replicas."""

    placement: Placement
    shares: NDArray[np.floating] | None = None
    """[layer, slot] share of the expert's tokens; None for equal shares."""
    resplit: bool = False
    """Whether shares are computed anew for every load (split "optimal")."""

    @classmethod
    def of(cls, plan: Plan, target: Target | None = None, topology: Topology | None = None) -> Placed:
        """Return the plan as `target` executes it on the ranks of `topology`; None: with the plan's own shares."""
        shares = plan.shares
        if target is not None and topology is not None:
            shares = target.executed(plan.placement, topology, shares)
        if shares is plan.shares and plan.split == "equal":
            return cls(plan.placement)
        return cls(plan.placement, shares, plan.split == "optimal")


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """Load on a device; prices any placement at any batch size."""

    model: StepModel
    topology: Topology
    tokens: Array
    """[layer, expert] tokens."""
    settings: dict[str, float]
    """Settings of the objective other than prices: horizon and target_balance, if given."""
    movement: Movement = "stops"
    """How the engine moves weights: whether it stops for moves or stages them."""
    steps: Sample | None = None
    """Single steps, over which times and balancedness are averaged; None prices the mean step."""
    learned: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions that return what planners may learn from the requests of the load, by the parameter's name."""
    target: Target | None = None
    """Engine that executes plans; None for one that takes any shares."""

    def placed(self, plan: Plan) -> Placed:
        """Return a plan as the engine executes it."""
        return Placed.of(plan, self.target, self.topology)

    def load(self, batch: int) -> Load:
        if self.steps is not None:
            return self.steps.at(batch * self.model.spec.top_k)
        seen = self.tokens.sum(axis=1).mean() / self.model.spec.top_k
        return Load(self.tokens, max(float(seen) / batch, 1e-9))

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
        return gain_pct(self.step_s(batch, now), self.step_s(batch, then))


def gain_pct(before_s: float, after_s: float) -> float:
    return 100 * (1 - after_s / before_s) if before_s else 0.0


def _shares(problem: Problem, placed: Placed) -> Array | None:
    """Return the shares to price with; if they are computed for every load, those of the mean step."""
    if not placed.resplit:
        return problem.shares
    from coterie.placement.splits.shares import optimal_shares  # its solver takes seconds to compile

    return optimal_shares(problem, placed.placement.slot_experts)


class HeldOutReport(NamedTuple):
    """Scores of plans on load that they were not made on."""

    what: str
    gain_pct: float
    no_spare_gain_pct: float | None
    balancedness_before: float
    """Balancedness of the current placement."""
    balancedness_mean: float | None
    """Balancedness of a plan for the mean step; None if the plan itself is for the mean step."""
    balancedness_after: float
    """Balancedness of the plan that was made on the other part."""


class DomainRow(NamedTuple):
    """Balancedness of a placement on load of each domain that it was not planned on."""

    placement: str
    """Name of the placement, in words."""
    mix: float
    """Balancedness on the recorded mix of domains."""
    worst: float
    """Lowest balancedness on a single domain, `worst_domain`."""
    worst_domain: str


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """The two parts of a load, and the function that makes plans."""

    parts: Parts
    pricing: Pricing
    """Pricing of the whole load."""
    batch: int
    now: Placed
    """Current placement."""
    plan: Callable[[Pricing, Placed], Plan]
    """Function that plans for a load, starting from a placement."""

    def of_part(self, whole: Plan, begin: Placed) -> Placed:
        """Plan on the part to plan on; `whole` itself if it is scored on windows outside of its load."""
        if self.parts.planned is None:
            return self.pricing.placed(whole)
        return self.pricing.placed(self.plan(replace(self._part(), steps=self.parts.planned_steps), begin))

    def for_the_mean(self, begin: Placed) -> Placed | None:
        """Plan for the mean step of the part to plan on; None if plans are not for single steps."""
        if self.parts.planned is None or self.parts.planned_steps is None:
            return None
        return self.pricing.placed(self.plan(replace(self._part(), steps=None), begin))

    def _part(self) -> Pricing:
        """Return the pricing of the part to plan on."""
        assert self.parts.planned is not None
        learned = {} if self.parts.learned is None else self.parts.learned[0].offers()
        return replace(self.pricing, tokens=self.parts.planned, learned=learned)

    def held_out(self, made: Placed, mean: Placed | None, no_spare: Placed | None) -> HeldOutReport:
        unseen = replace(self.pricing, tokens=self.parts.scored, steps=self.parts.scored_steps)
        return HeldOutReport(
            what=self.parts.what,
            gain_pct=unseen.gain_pct(self.batch, self.now, made),
            no_spare_gain_pct=None if no_spare is None else unseen.gain_pct(self.batch, self.now, no_spare),
            balancedness_before=unseen.balance(self.batch, self.now),
            balancedness_mean=None if mean is None else unseen.balance(self.batch, mean),
            balancedness_after=unseen.balance(self.batch, made),
        )

    def domains(self, made: Placed, mean: Placed | None) -> list[DomainRow]:
        """Score the placements on the mix and on every domain; empty unless the plan is over domains or mixtures."""
        domains = self.parts.domains
        if domains is None or mean is None:
            return []
        pricing = replace(self.pricing, tokens=domains.load.tokens, steps=domains)
        today = replace(pricing, steps=None)
        rows = []
        for name, placed in (("now", self.now), ("a plan for the mean", mean), ("this plan", made)):
            each = pricing.step_balance(self.batch, placed)
            least = int(each.argmin())
            rows.append(DomainRow(name, today.balance(self.batch, placed), float(each[least]), domains.names[least]))
        return rows
