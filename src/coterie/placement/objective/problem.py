"""Prices of the objective, one planning problem as plain arrays, and the score of a placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.costs.exchange import BYTES_PER_VALUE, ArrivalLine, row_trips_s
from coterie.costs.lines import ExpertLine, slot_s
from coterie.costs.movement import Movement, load_s, staged_exposed
from coterie.costs.replicas import equal_shares
from coterie.costs.step import StepModel
from coterie.errors import check_not_negative, check_one_of, check_positive_share, check_share
from coterie.placement.base import Load, Moves, Plan
from coterie.placement.moves import living_shares, moves_between, settle
from coterie.placement.objective._arrays import Array, assess, even_share, fill, fill_sources
from coterie.placement.objective.steps import Steps
from coterie.types import Placement, Topology, layer_balance

PRICES_HINT = "the prices to plan by; make them with Objective.of(step_model, tokens)"


@dataclass(frozen=True, slots=True)
class Objective:
    """Prices of the cost that planners minimise; :meth:`of` takes them from a calibrated model."""

    row_s: float
    """Seconds that one token of one expert takes on a rank of speed 1."""
    expert_bytes: float
    """Bytes of the weights of one expert of one layer."""
    touch_s: float = 0.0
    """Seconds to read an expert's weights in a step that uses the expert; every replica pays it. 0: compute-bound."""
    row_bytes: float = 0.0
    """Bytes of a token's hidden state, sent to its expert's rank and back. 0 leaves the exchange out."""
    horizon: float = 1000.0
    """Steps that the new placement will serve."""
    exposed: float = 1.0
    """Share of the movement time that delays serving: 1 if the engine stops for every move, less if it stages moves
    behind its steps."""
    planning_s: float = 0.0
    """Seconds by which planning delays serving."""
    target_balance: float = 1.0
    """Balance (balanced time ÷ time of the slowest rank) at which a layer is left alone; 1: improve as far as
    possible."""
    move_price: float = 0.0
    """Cost of each move as a share of its link time, in addition to the movement time of the slowest rank."""
    arrival: ArrivalLine | None = None
    """The step model's exchange of a layer, for tokens spread over all ranks. None: rows take what their links take."""

    def __post_init__(self) -> None:
        check_not_negative(
            row_s=self.row_s,
            touch_s=self.touch_s,
            row_bytes=self.row_bytes,
            expert_bytes=self.expert_bytes,
            horizon=self.horizon,
            planning_s=self.planning_s,
            move_price=self.move_price,
        )
        check_share(exposed=self.exposed)
        check_positive_share(target_balance=self.target_balance)

    @classmethod
    def of(cls, model: StepModel, tokens: int, movement: Movement = "stops", **settings: float) -> Objective:
        """Take the prices from a calibrated model, for steps of about `tokens` tokens over all ranks.

        `movement` is how the engine moves weights: it `stops` for every move, or moves are `staged` behind its steps,
        at the contention measured for the device. `exposed` in `settings` overrides both.

        An expert's time is a straight line in its tokens, :class:`~coterie.costs.lines.ExpertLine`; the part of a step
        that does not depend on the experts' loads is left out.
        """
        spec, line, ranks = model.spec, ExpertLine.of(model, tokens), model.topology.num_ranks
        physics: dict[str, Any] = {
            "row_s": line.row_s,
            "touch_s": line.touch_s,
            "row_bytes": BYTES_PER_VALUE * spec.hidden_size if ranks > 1 else 0.0,
            "expert_bytes": spec.expert_bytes(model.dtype),
        }
        if ranks > 1:
            physics["arrival"] = ArrivalLine.of(spec, model.topology, max(1.0, tokens * spec.top_k / ranks))
        check_one_of(get_args(Movement), movement=movement)
        if movement == "staged" and "exposed" not in settings:
            physics["exposed"] = staged_exposed(model.contention, model.topology)
        return cls(**(physics | settings))

    def problem(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Problem:
        """Make the arrays of a planning problem. `shares` [layer, slot] are the shares in force; None: equal shares."""
        load.check_fits(topology, current)
        layers, experts, ranks = *load.tokens.shape, topology.num_ranks
        speeds = topology.rank_speeds
        alive = speeds > 0
        living = int(alive.sum())
        per_step = load.tokens / load.steps  # [layer, expert]
        spare = living * current.slots_per_rank - experts
        shape = layers, min(living, spare + 1), experts
        share = np.empty(shape) if self.touch_s else even_share(*shape)
        # One allocation: above 4 MB NumPy requests huge pages; page faults on small ones would dominate this function.
        unit, load_in = np.empty((2, layers, ranks, experts))
        source = np.empty((layers, ranks, experts), np.int16)
        even, reach = np.empty(layers), np.empty(layers)
        exchange, per_token = self._exchange_s(load, topology)
        side_by_side(
            fill,
            layers,
            per_step,
            np.asarray(slot_s(self.row_s, self.touch_s, per_step)),
            self.touch_s,
            self.row_s,
            exchange,
            per_token,
            speeds,
            current.slot_experts,
            load_s(topology, self.expert_bytes),
            unit,
            share,
            load_in,
            source,
            even,
            reach,
        )
        steps = Steps.of(load, topology, self.row_s, self.touch_s, exchange, per_token, shape[1])
        if steps is not None:
            even, reach = steps.even @ steps.weights, steps.reach @ steps.weights
        return Problem(
            objective=self,
            topology=topology,
            current=current,
            alive=alive,
            unit=unit,
            share=share,
            load_in=load_in,
            source=source,
            even=even,
            reach=reach,
            shares=None if shares is None else living_shares(shares, current, alive),
            steps=steps,
        )

    @property
    def fixed_s(self) -> float:
        """Seconds of a layer that no placement changes: the part of the exchange that does not grow with rows."""
        return self.arrival.fixed_s if self.arrival is not None and self.row_bytes else 0.0

    def link_s(self, topology: Topology) -> float:
        """Return the seconds to load an expert over the fastest link."""
        return float(load_s(topology, self.expert_bytes).min())

    def _exchange_s(self, load: Load, topology: Topology) -> tuple[Array, Array]:
        """Return the seconds to send an expert's tokens to a rank and back.

        If sources are known: seconds for all tokens of an expert [rank, layer, expert], and zeros. Otherwise: an empty
        array, and seconds [rank] for one token from a random rank. Rows that come from all ranks alike take what
        `arrival` says, and others that multiple of it which their links give; a matrix of links is taken as it is.
        """
        per_row = row_trips_s(topology, self.row_bytes)  # [source, rank]
        alive = topology.rank_speeds > 0
        if self.arrival is not None and per_row.any() and not topology.bytes_per_s:
            per_row *= self.arrival.row_s / per_row[np.ix_(alive, alive)].mean()
        if load.sources is None or not self.row_bytes:
            return np.empty((0, 1, 0)), per_row[alive].sum(axis=0) / alive.sum()
        known = np.tensordot(per_row.T, load.sources / load.steps, (1, 0))
        return np.ascontiguousarray(known), np.zeros(topology.num_ranks)


DEEPSEEK_V3_PREFILL = Objective(row_s=1.5e-7, expert_bytes=44e6)
"""Approximate prices of DeepSeek-V3 in prefill: 88 Mflop per row at 590 Tflop/s, 44 MB per expert."""


class Score(NamedTuple):
    """Objective of one placement per layer, in seconds."""

    processing_s: Array
    """[layer] time of the slowest rank in one step."""
    movement_s: Array
    """[layer] exposed movement, without `move_price`."""
    total_s: Array
    """[layer] cost over the horizon that planners minimise, including `target_balance` and `move_price`, excluding
    planning time."""
    moves: NDArray[np.int64]
    """[layer] number of moves."""


class _Assessment(NamedTuple):
    """Times of a placement; arrays are [layer, rank]."""

    busy_s: Array
    """Seconds of the mean step."""
    arrivals_s: Array
    loads: NDArray[np.int64]
    steps_s: Array | None
    """[layer, scenario, rank] seconds of each scenario; None without scenarios."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One planning problem as plain arrays. Make one with :meth:`Objective.problem`."""

    objective: Objective
    topology: Topology
    current: Placement
    alive: NDArray[np.bool_]
    """[rank] whether the rank is alive (its speed is above 0)."""
    unit: Array
    """[layer, rank, expert] seconds per step if the rank got all of the expert's tokens."""
    share: Array
    """[layer, replicas - 1, expert] part of `unit` that each replica takes if the expert has this many equal replicas.
    Exact if all ranks are equal; otherwise the time to read weights is a mean over ranks."""
    load_in: Array
    """[layer, rank, expert] seconds to load the expert; 0 if the rank holds it."""
    source: NDArray[np.int16]
    """[layer, rank, expert] rank of the cheapest copy, or HOST."""
    even: Array
    """[layer] seconds if every expert took its time on its cheapest rank and all ranks were equally busy: a lower
    bound."""
    reach: Array
    """[layer] lower bound on the seconds of any placement: the larger of `even` and the longest expert in as many
    replicas as possible. Without spare slots, the shortest experts that must fill its rank are added. If replicas read
    weights, the least cost of replicas in the spare slots is added; shares that leave replicas idle can be below it."""
    shares: Array | None = None
    """[layer, slot] shares in force, on living ranks only; None: equal shares."""
    steps: Steps | None = None
    """Scenarios whose expected time is minimised; None: the time of the mean step is minimised. All other arrays are of
    the mean step, except `even` and `reach`, which are combined over the scenarios."""

    @property
    def floor(self) -> Array:
        """[layer] seconds below which a faster placement counts as no gain."""
        return self.reach / self.objective.target_balance

    @property
    def sound(self) -> bool:
        """Whether the current placement is valid: every expert on a living rank, none twice on a rank."""
        return not self.current.duplicates and not self.lost

    @property
    def lost(self) -> bool:
        """Whether an expert is on no living rank, so that the current placement cannot stay."""
        return not self.current.held[self.alive].any(axis=0).all()

    @property
    def uniform_ranks(self) -> bool:
        """Whether every expert takes the same time on all living ranks."""
        if not self.objective.row_bytes:
            return len(np.unique(self.topology.rank_speeds[self.alive])) == 1
        living = self.unit[:, self.alive]
        return bool((living == living[:, :1]).all())

    def equal_shares(self, slot_experts: NDArray[np.integer]) -> Array:
        """Return equal shares [layer, slot] of an expert's living slots; slots of dead ranks get 0."""
        return equal_shares(slot_experts, self.current.num_experts, np.repeat(self.alive, self.current.slots_per_rank))

    def rank_s(self, slot_experts: NDArray[np.integer], shares: Array | None = None) -> Array:
        """Return the seconds [layer, rank] of the mean step with these `shares` [layer, slot].

        None means equal shares here, not the shares in force (:attr:`shares`).
        """
        return self._assess(slot_experts, shares).busy_s

    def slowest_s(
        self, slot_experts: NDArray[np.integer], shares: Array | None = None, *, per_step: bool = False
    ) -> Array:
        """Return the seconds [layer] of the slowest rank, expected over the scenarios.

        The exchange's latency is included. `per_step` chooses the optimal shares in every scenario; `shares` then apply
        to the mean step only. It has no effect without scenarios. `balanced` and `score` use it in the same way.
        """
        return self._slowest_s(self._assess(slot_experts, shares, per_step)) + self.objective.fixed_s

    def balanced(
        self, slot_experts: NDArray[np.integer], shares: Array | None = None, *, per_step: bool = False
    ) -> float:
        """Return the balancedness of a placement, over the scenarios if there are any."""
        return self._balance(self._assess(slot_experts, shares, per_step))

    def score(self, slot_experts: NDArray[np.integer], shares: Array | None = None, *, per_step: bool = False) -> Score:
        return self._score(self._assess(slot_experts, shares, per_step))

    def _assess(self, slot_experts: NDArray[np.integer], shares: Array | None, per_step: bool = False) -> _Assessment:
        shape = len(slot_experts), self.current.num_ranks
        busy, arrivals, loads = np.empty(shape), np.empty(shape), np.empty(shape, np.int64)
        slots = np.ascontiguousarray(slot_experts, np.int32)
        given = np.empty((0, 0)) if shares is None else np.ascontiguousarray(shares, np.float64)
        arguments = slots, self.unit, self.share, given, self.load_in, self.source, self.alive, busy, arrivals, loads
        side_by_side(assess, len(slots), *arguments)
        if self.steps is None:
            return _Assessment(busy, arrivals, loads, None)
        if per_step:
            return _Assessment(busy, arrivals, loads, self.steps.split_rank_s(slots, self.topology.rank_speeds))
        return _Assessment(busy, arrivals, loads, self.steps.rank_s(slots, given, self.alive))

    def _slowest_s(self, assessment: _Assessment) -> Array:
        if self.steps is None or assessment.steps_s is None:
            return np.asarray(assessment.busy_s.max(axis=1))
        return np.asarray(assessment.steps_s.max(axis=2) @ self.steps.weights)

    def _balance(self, assessment: _Assessment) -> float:
        if self.steps is None or assessment.steps_s is None:
            return self.balance(assessment.busy_s)
        return float((layer_balance(assessment.steps_s[..., self.alive]) @ self.steps.weights).mean())

    def _score(self, assessment: _Assessment) -> Score:
        objective = self.objective
        processing = self._slowest_s(assessment)
        movement = objective.exposed * assessment.arrivals_s.max(axis=1)
        priced = movement + objective.exposed * objective.move_price * assessment.arrivals_s.sum(axis=1)
        total = objective.horizon * np.maximum(processing, self.floor) + priced
        return Score(processing, movement, total, assessment.loads.sum(axis=1))

    def plan(
        self,
        slot_experts: NDArray[np.integer],
        shares: Array | None = None,
        *,
        split: str = "equal",
        planning_s: float = 0.0,
        skip_reason: str | None = None,
        layer_reasons: tuple[str, ...] = (),
    ) -> Plan:
        """Make the plan that leads to `slot_experts`; experts that stay on a rank keep their slot, shares follow them.

        With scenarios and `split` optimal, the time after the plan uses the optimal shares of every scenario. So does
        the time before the plan if there are shares in force, which then come from an earlier optimal plan.
        """
        current = self.current
        settled, order = settle(current.slot_experts, np.asarray(slot_experts, np.int32), current.num_ranks)
        given = None if shares is None else np.take_along_axis(shares, order, axis=1)
        placement = Placement(settled, current.num_ranks, current.num_experts)
        per_step = split == "optimal"
        was = self._assess(current.slot_experts, self.shares, per_step and self.shares is not None)
        will = self._assess(settled, given, per_step)
        before, after = self._score(was), self._score(will)
        return Plan(
            placement=placement,
            shares=self.equal_shares(settled) if given is None else given,
            split=split,
            before_s=float((before.processing_s + self.objective.fixed_s).sum()),
            after_s=float((after.processing_s + self.objective.fixed_s).sum()),
            moves=self.moves(settled),
            movement_s=float(after.movement_s.sum()),
            planning_s=planning_s,
            balance_before=self._balance(was),
            balance_after=self._balance(will),
            skip_reason=skip_reason,
            layer_reasons=layer_reasons,
        )

    def keep(
        self, reason: str, planning_s: float = 0.0, layer_reasons: tuple[str, ...] = (), split: str | None = None
    ) -> Plan:
        """Make the plan that changes nothing; shares in force stay, as weights fitted on an earlier window."""
        return self.plan(
            self.current.slot_experts,
            self.shares,
            split=split or ("equal" if self.shares is None else "weighted"),
            planning_s=planning_s,
            skip_reason=reason,
            layer_reasons=layer_reasons,
        )

    def onward(self, layers: NDArray[np.integer], slot_experts: NDArray[np.integer], shares: Array | None) -> Problem:
        """Make the problem of some layers from another current placement [layer, slot]; only move costs differ."""
        current = Placement(np.asarray(slot_experts, np.int32), self.current.num_ranks, self.current.num_experts)
        unit = self.unit[layers]
        load_in, source = np.empty(unit.shape), np.empty(unit.shape, np.int16)
        links = load_s(self.topology, self.objective.expert_bytes)
        speeds = self.topology.rank_speeds
        for index, row in enumerate(current.slot_experts):
            fill_sources(row, speeds, links, load_in[index], source[index])
        return replace(
            self,
            current=current,
            unit=unit,
            share=self.share[layers],
            load_in=load_in,
            source=source,
            even=self.even[layers],
            reach=self.reach[layers],
            shares=shares,
            steps=None if self.steps is None else self.steps.of_layers(layers),
        )

    def balance(self, rank_s: Array) -> float:
        """Return the mean over layers of :meth:`layer_balance`."""
        return float(self.layer_balance(rank_s).mean())

    def layer_balance(self, rank_s: Array) -> Array:
        """Return mean ÷ max over living ranks [layer] of seconds [layer, rank]; 1 for a layer without work."""
        return layer_balance(rank_s[:, self.alive])

    def moves(self, slot_experts: NDArray[np.integer]) -> Moves:
        """Return the moves that lead to `slot_experts`; slots on dead ranks are ignored."""
        return moves_between(self.current, slot_experts, self.topology, self.objective.expert_bytes)
