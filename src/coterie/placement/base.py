"""The contract of a planner: where the experts should live, given their load and the current placement.

A planner is a pure function of a snapshot: the same load, topology, current placement and shares in force give the same
plan on every rank, bit for bit, so every rank may run it and no plan has to be sent. It decides from the settings of
its :class:`~coterie.placement.objective.Objective`, never from a clock; the time it took is reported, not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check_positive
from coterie.registry import PolicyRegistry
from coterie.types import Placement, Topology

HOST = -1
"""Source of a move that no living rank can serve: the host's copy of the weights."""

HELD_OUT = 4
"""Every so manieth scenario of a load is held out by planners that ask how their plans do on steps not planned on. What
draws scenarios makes those of requests that the others do not have, where there are enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens per expert in a window of steps, and, where known, a sample of single steps.

    No step has the mean load: a step holds a few requests, and the slowest rank of that step is what all wait for. With
    `scenarios` planners minimise the expected time of such steps; without, the time of the mean one.
    """

    tokens: NDArray[np.float64]
    """[layer, expert] tokens in the window."""
    steps: float = 1.0
    """Steps in the window."""
    sources: NDArray[np.float64] | None = None
    """[source rank, layer, expert] the same tokens by the rank they were on, where known. None: spread evenly over all
    ranks."""
    scenarios: NDArray[np.float64] | None = None
    """[scenario, layer, expert] tokens of one step each. Their weighted mean should be that of the window; make such a
    load with :meth:`of_scenarios`. None: the mean step is the only scenario."""
    weights: NDArray[np.float64] | None = None
    """[scenario] probability of each; None: all are alike."""
    whole_steps: bool = False
    """Whether a scenario is one step as it was, so that its tokens are counts, rather than the mean of steps like it:
    an expert with a token is then surely streamed."""

    def __post_init__(self) -> None:
        tokens = np.ascontiguousarray(self.tokens, np.float64)
        object.__setattr__(self, "tokens", tokens)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ConfigError(f"load has shape {tokens.shape}; it must be [layer, expert], neither 0")
        _check_tokens("load", tokens)
        check_positive(steps=self.steps)
        if self.sources is not None:
            sources = np.ascontiguousarray(self.sources, np.float64)
            object.__setattr__(self, "sources", sources)
            if sources.ndim != 3 or sources.shape[1:] != tokens.shape:
                raise ConfigError(f"sources has shape {sources.shape}; expected [source rank, *{tokens.shape}]")
            _check_tokens("sources", sources)
            if not np.allclose(sources.sum(axis=0), tokens, rtol=1e-6, atol=1e-6):
                raise ConfigError("sources must add up to the load over their ranks")
        self._check_scenarios()

    def _check_scenarios(self) -> None:
        if self.scenarios is None:
            if self.weights is not None:
                raise ConfigError("weights are those of scenarios, and the load has none")
            return
        scenarios = np.ascontiguousarray(self.scenarios, np.float64)
        object.__setattr__(self, "scenarios", scenarios)
        if scenarios.ndim != 3 or scenarios.shape[1:] != self.tokens.shape or not len(scenarios):
            raise ConfigError(f"scenarios has shape {scenarios.shape}; expected [scenario, *{self.tokens.shape}]")
        _check_tokens("scenarios", scenarios)
        weights = np.ones(len(scenarios)) if self.weights is None else np.asarray(self.weights, np.float64)
        if weights.shape != (len(scenarios),):
            raise ConfigError(f"weights has shape {weights.shape}; there are {len(scenarios)} scenarios")
        if not ((weights >= 0) & (weights < np.inf)).all() or not weights.any():
            raise ConfigError("weights must be finite, not negative, and not all 0")
        object.__setattr__(self, "weights", weights / weights.sum())

    @classmethod
    def of_scenarios(
        cls,
        scenarios: NDArray[np.floating] | NDArray[np.integer],
        weights: NDArray[np.floating] | None = None,
        *,
        whole_steps: bool = False,
    ) -> Load:
        """The load of a sample of steps [scenario, layer, expert]; its window is their mean step."""
        given = np.ascontiguousarray(scenarios, np.float64)
        if given.ndim != 3 or not len(given):
            raise ConfigError(f"scenarios has shape {given.shape}; it must be [scenario, layer, expert], none 0")
        mean = np.average(given, axis=0, weights=weights)
        if len(given) == 1 and not whole_steps:
            return cls(mean)
        kept = None if weights is None else np.asarray(weights, np.float64)
        return cls(mean, scenarios=given, weights=kept, whole_steps=whole_steps)

    @property
    def num_scenarios(self) -> int:
        """Scenarios that planners weigh: 1 where the mean step is the only one."""
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
        """Raise where load, topology and placement do not belong together."""
        if (current.num_layers, current.num_experts) != self.tokens.shape:
            raise ConfigError(
                f"the placement is for {current.num_layers} layers of {current.num_experts} experts; "
                f"the load has {self.num_layers} of {self.num_experts}"
            )
        if current.num_ranks != topology.num_ranks:
            raise ConfigError(
                f"placement.num_ranks={current.num_ranks} must equal topology.num_ranks={topology.num_ranks}"
            )
        if self.sources is not None and len(self.sources) != topology.num_ranks:
            raise ConfigError(f"sources has {len(self.sources)} ranks; topology.num_ranks={topology.num_ranks}")
        alive = int((topology.rank_speeds > 0).sum())
        if alive * current.slots_per_rank < self.num_experts:
            raise ConfigError(
                f"{alive} living ranks of {current.slots_per_rank} slots must hold num_experts={self.num_experts}"
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
    """Rank to fetch it from, or HOST."""
    seconds: NDArray[np.float64]
    """Time on its link without other traffic."""

    def __len__(self) -> int:
        return len(self.layer)


class SearchProgress(NamedTuple):
    """Progress of a search that goes layer by layer."""

    price: int
    """Index of the price per move being tried; always 0 without a budget."""
    layer: int
    layers: int
    objective_s: float
    """Best objective so far in this layer, price included."""
    bound_s: float


Progress = Callable[[SearchProgress], bool | None]
"""Callback: progress of a search; returning False ends it with the best plan so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """How good a plan is proven to be, by layer, in seconds over the horizon, movement included."""

    objective_s: NDArray[np.float64]
    """[layer]"""
    bound_s: NDArray[np.float64]
    """[layer] lower bound over all placements of the layer, without the budget of moves."""
    closed: NDArray[np.bool_]
    """[layer] whether objective and bound are within the requested gap."""
    seconds: NDArray[np.float64]
    """[layer] search time."""
    total_bound_s: float
    """Lower bound over all plans that keep to the budget of moves."""

    @property
    def gap(self) -> NDArray[np.float64]:
        """[layer] gap between objective and bound, as a share of the objective."""
        least = np.maximum(self.objective_s, 1e-300)
        return np.asarray((self.objective_s - self.bound_s) / least)

    @property
    def total_gap(self) -> float:
        total = float(self.objective_s.sum())
        return (total - self.total_bound_s) / total if total else 0.0


class Unseen(NamedTuple):
    """Balancedness on scenarios that were held out, of plans made from the others, over some layers."""

    before: float
    """With the placement in force."""
    mean: float
    """With a plan for the mean step of the other scenarios."""
    after: float
    """With the plan for the other scenarios, made in the way that was chosen."""
    fitted: float
    """With that plan on the scenarios it was made for: what is above `after` is chance."""
    shrinkage: float
    """Share of the mean that was mixed into every scenario; chosen by `after`."""
    scenarios: int
    """Held out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A planner's decision and its predicted effect."""

    placement: Placement
    """The current one where nothing moves."""
    shares: NDArray[np.float64]
    """[layer, slot] share of its expert's tokens each slot computes; an expert's add up to 1."""
    split: str
    """How those shares were chosen: equal, weighted or optimal."""
    before_s: float
    """Predicted seconds of one step's MoE layers in the current placement, with the shares in force."""
    after_s: float
    moves: Moves
    movement_s: float
    """Exposed seconds of all moves: layer by layer, the slowest rank of each."""
    planning_s: float
    """Measured planning time; planners decide by Objective.planning_s instead, which is the same on every rank."""
    balance_before: float
    """Balancedness; over the load's scenarios, where it has them."""
    balance_after: float
    skip_reason: str | None = None
    """Why the current placement is kept, in words; None where the plan moves something."""
    layer_reasons: tuple[str, ...] = field(default=(), repr=False)
    """[layer] what was changed or why not, in words; empty where the planner does not say."""
    proof: Proof | None = field(default=None, repr=False, compare=False)
    """How good the plan is, from a planner that proves something."""
    unseen: Unseen | None = None
    """How such a plan does on scenarios that it was not planned on; None without scenarios to hold out."""

    @property
    def proven(self) -> Proof:
        """The proof, of a plan that must have one."""
        if self.proof is None:
            raise ConfigError("the plan has no proof; its planner proves nothing")
        return self.proof

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved per step."""
        return self.before_s - self.after_s

    @property
    def break_even_steps(self) -> float:
        """Steps until the movement is paid for; infinite where nothing is saved, 0 where nothing moves."""
        if not self.movement_s:
            return 0.0
        return self.movement_s / self.saving_s if self.saving_s > 0 else np.inf


@runtime_checkable
class Planner(Protocol):
    """Anything that plans; settings are the fields of a frozen dataclass."""

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        """`shares` [layer, slot] are those in force, from an earlier plan; None: equal shares."""
        ...


planners: PolicyRegistry[Planner] = PolicyRegistry("planner", group="coterie.planners")
"""Holds the built-in ones once :mod:`coterie.placement` is imported. Callers offer `objective` (an
:class:`~coterie.placement.objective.Objective`) and `progress`."""
