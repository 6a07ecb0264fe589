"""The planner contract: choose a placement of the experts, given their load and the current placement.

A planner is a pure function: the same load, topology, current placement and shares in force give the same plan on
every rank, bit for bit. Every rank can therefore run the planner, and no plan has to be sent. A planner decides from
its :class:`~coterie.placement.objective.Objective`, never from a clock; the measured planning time is only reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_given, check_positive
from coterie.registry import PolicyRegistry
from coterie.types import Placement, Topology

HOST = -1
"""Source of a move if no living rank holds the expert: the host's copy of the weights."""

HELD_OUT = 4
"""Every HELD_OUT-th scenario is held out by planners that test their plans on unseen steps. Functions that draw
scenarios build the held-out ones from separate requests, if there are enough requests."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens per expert in a window of steps, and, if known, a sample of single steps (scenarios).

    A single step differs from the mean load: it holds a few requests, and all ranks wait for the slowest rank of that
    step. With `scenarios`, planners minimise the expected time of a step; without, the time of the mean step.
    """

    tokens: NDArray[np.float64]
    """[layer, expert] tokens in the window."""
    steps: float = 1.0
    """Steps in the window."""
    sources: NDArray[np.float64] | None = None
    """[source rank, layer, expert] the same tokens, split by the rank that holds the token. None: spread evenly over
    all ranks."""
    scenarios: NDArray[np.float64] | None = None
    """[scenario, layer, expert] tokens of one step per scenario. Their weighted mean should equal the window's mean
    step, as in a load made with :meth:`of_scenarios`. None: the mean step is the only scenario."""
    weights: NDArray[np.float64] | None = None
    """[scenario] probability of each scenario; None: all are equally likely."""
    whole_steps: bool = False
    """Whether a scenario is one recorded step (its tokens are counts) rather than the mean of similar steps. In a
    recorded step, the weights of every expert with a token are certainly read."""

    def __post_init__(self) -> None:
        tokens = np.ascontiguousarray(self.tokens, np.float64)
        object.__setattr__(self, "tokens", tokens)
        check(
            tokens.ndim == 2 and 0 not in tokens.shape,
            f"load has shape {tokens.shape}; it must be [layer, expert], neither 0",
        )
        _check_tokens("load", tokens)
        check_positive(steps=self.steps)
        for name, axis in (("sources", "source rank"), ("scenarios", "scenario")):
            if getattr(self, name) is not None:
                parts = np.ascontiguousarray(getattr(self, name), np.float64)
                object.__setattr__(self, name, parts)
                check(
                    parts.ndim == 3 and parts.shape[1:] == tokens.shape and len(parts),
                    f"{name} has shape {parts.shape}; expected [{axis}, *{tokens.shape}]",
                )
                _check_tokens(name, parts)
        check(
            self.sources is None or np.allclose(self.sources.sum(axis=0), tokens, rtol=1e-6, atol=1e-6),
            "sources must add up to the load over their ranks",
        )
        if self.scenarios is not None:
            self._set_weights(len(self.scenarios))
        elif self.weights is not None:
            raise ConfigError("weights are those of scenarios, and the load has none")

    def _set_weights(self, scenarios: int) -> None:
        weights = np.ones(scenarios) if self.weights is None else np.asarray(self.weights, np.float64)
        check(weights.shape == (scenarios,), f"weights has shape {weights.shape}; there are {scenarios} scenarios")
        check(
            ((weights >= 0) & (weights < np.inf)).all() and weights.any(),
            "weights must be finite, not negative, and not all 0",
        )
        object.__setattr__(self, "weights", weights / weights.sum())

    @classmethod
    def of_scenarios(
        cls,
        scenarios: NDArray[np.floating] | NDArray[np.integer],
        weights: NDArray[np.floating] | None = None,
        *,
        whole_steps: bool = False,
    ) -> Load:
        """Make a load from a sample of steps [scenario, layer, expert]; its window is their mean step."""
        given = np.ascontiguousarray(scenarios, np.float64)
        check(
            given.ndim == 3 and len(given),
            f"scenarios has shape {given.shape}; it must be [scenario, layer, expert], none 0",
        )
        mean = np.average(given, axis=0, weights=weights)
        if len(given) == 1 and not whole_steps:
            return cls(mean)
        kept = None if weights is None else np.asarray(weights, np.float64)
        return cls(mean, scenarios=given, weights=kept, whole_steps=whole_steps)

    @property
    def num_scenarios(self) -> int:
        """Number of scenarios that planners see; 1 if there is only the mean step."""
        return 1 if self.scenarios is None else len(self.scenarios)

    @property
    def mean(self) -> Load:
        """The same window without scenarios."""
        return self if self.scenarios is None else replace(self, scenarios=None, weights=None, whole_steps=False)

    @property
    def num_layers(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_experts(self) -> int:
        return int(self.tokens.shape[1])

    def check_fits(self, topology: Topology, current: Placement) -> None:
        """Raise ConfigError if the shapes of load, topology and placement do not match, or living slots are too few."""
        check(
            (current.num_layers, current.num_experts) == self.tokens.shape,
            f"the placement is for {current.num_layers} layers of {current.num_experts} experts; "
            f"the load has {self.num_layers} of {self.num_experts}",
        )
        check(
            current.num_ranks == topology.num_ranks,
            f"placement.num_ranks={current.num_ranks} must equal topology.num_ranks={topology.num_ranks}",
        )
        if self.sources is not None and len(self.sources) != topology.num_ranks:
            raise ConfigError(f"sources has {len(self.sources)} ranks; topology.num_ranks={topology.num_ranks}")
        alive = int((topology.rank_speeds > 0).sum())
        check(
            alive * current.slots_per_rank >= self.num_experts,
            f"{alive} living ranks of {current.slots_per_rank} slots must hold num_experts={self.num_experts}",
        )


def _check_tokens(name: str, tokens: NDArray[np.float64]) -> None:
    bad = np.argwhere(~((tokens >= 0) & (tokens < np.inf)))  # ~ catches NaN as well
    if bad.size:
        at = tuple(int(index) for index in bad[0])
        raise ConfigError(f"{name}{list(at)} is {tokens[at]}; tokens must be finite and not negative")


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Experts to load, one entry per move, sorted by layer and slot."""

    layer: NDArray[np.int64]
    slot: NDArray[np.int64]
    expert: NDArray[np.int64]
    source: NDArray[np.int64]
    """Rank to fetch the expert from, or HOST."""
    seconds: NDArray[np.float64]
    """Transfer time on the link of the move, in seconds, without other traffic."""

    def __len__(self) -> int:
        return len(self.layer)


class SearchProgress(NamedTuple):
    """Progress of a search that plans one layer after another."""

    layer: int
    layers: int
    objective_s: float
    """Best objective so far in this layer, in seconds."""
    bound_s: float


Progress = Callable[[SearchProgress], bool | None]
"""Callback that receives the progress of a search; returning False ends the search with the best plan so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """Proven quality of a plan per layer, in seconds over the horizon, movement included."""

    objective_s: NDArray[np.float64]
    """[layer] objective of the plan."""
    bound_s: NDArray[np.float64]
    """[layer] lower bound over all placements of the layer."""
    closed: NDArray[np.bool_]
    """[layer] whether objective and bound are within the requested gap."""

    @property
    def gap(self) -> NDArray[np.float64]:
        """[layer] gap between objective and bound, as a share of the objective."""
        return np.asarray((self.objective_s - self.bound_s) / np.maximum(self.objective_s, 1e-300))

    @property
    def total_gap(self) -> float:
        total = float(self.objective_s.sum())
        return (total - float(self.bound_s.sum())) / total if total else 0.0


class Unseen(NamedTuple):
    """Balancedness, on held-out scenarios, of plans made from the remaining scenarios, over some of the layers."""

    before: float
    """Balancedness of the placement in force on the held-out scenarios."""
    mean: float
    """Balancedness of a plan for the mean step of the remaining scenarios."""
    after: float
    """Balancedness of a plan for the remaining scenarios, with the chosen `shrinkage`."""
    fitted: float
    """Balancedness of the same plan on the scenarios it was made for; its excess over `after` is overfitting."""
    shrinkage: float
    """Share of the mean step mixed into every scenario; the share with the best `after` is chosen."""
    scenarios: int
    """Number of held-out scenarios."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A planner's decision and its predicted effect."""

    placement: Placement
    """Placement to serve with; the current placement if nothing moves."""
    shares: NDArray[np.float64]
    """[layer, slot] share of its expert's tokens that each slot computes; the shares of an expert add up to 1."""
    split: str
    """How `shares` were chosen: equal, weighted or optimal."""
    before_s: float
    """Predicted seconds of one step's MoE layers in the current placement, with the shares in force."""
    after_s: float
    moves: Moves
    movement_s: float
    """Exposed seconds of all moves: the sum over layers of the slowest rank's seconds."""
    planning_s: float
    """Measured planning time in seconds; planners decide by Objective.planning_s, which is the same on every rank."""
    balance_before: float
    """Balancedness of the current placement, over the load's scenarios if it has any."""
    balance_after: float
    skip_reason: str | None = None
    """Reason for keeping the current placement; None if the plan changes it."""
    layer_reasons: tuple[str, ...] = field(default=(), repr=False)
    """[layer] what was changed or why not, in words; empty if the planner gives no reasons."""
    proof: Proof | None = field(default=None, repr=False, compare=False)
    """Objective and lower bound of the plan; None if the planner computes no bound."""
    unseen: Unseen | None = None
    """Balancedness of plans made in the same way on held-out scenarios; None if no scenarios were held out."""

    @property
    def proven(self) -> Proof:
        """Return the proof; raise ConfigError if the plan has none."""
        return check_given(self.proof, "the plan has no proof; its planner proves nothing")

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved per step."""
        return self.before_s - self.after_s

    @property
    def break_even_steps(self) -> float:
        """Steps until the saving pays for the movement; infinite if the plan saves nothing, 0 if nothing moves."""
        if not self.movement_s:
            return 0.0
        return self.movement_s / self.saving_s if self.saving_s > 0 else np.inf


@runtime_checkable
class Planner(Protocol):
    """A planner; its settings are the fields of a frozen dataclass."""

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        """Plan for a load; `shares` [layer, slot] are the shares in force, from an earlier plan (None: equal)."""


planners: PolicyRegistry[Planner] = PolicyRegistry("planner", group="coterie.planners")
"""Registry of planners; holds the built-in planners once :mod:`coterie.placement` is imported. Its context offers
`objective` (an :class:`~coterie.placement.objective.Objective`) and `progress`."""
