"""What every planner minimises, and the arrays its loops work on.

    total = horizon x sum over layers of max over ranks of processing(rank)
          +           sum over layers of exposed x max over ranks of movement(rank)
          + planning

A rank's processing in a layer is the sum over its slots of ``unit[rank, expert] x share[expert, replicas]``: what the
expert would take if all its tokens came to this rank (compute at the rank's speed, streaming where that shows, the
exchange of rows from where they are), times what is left of it when replicas share the tokens. Movement is a weighted
Hamming distance: only an expert that is loaded where it was not costs, by the link from its cheapest source. Layers
are moved one after the other, each rank receiving one expert at a time.

Two settings are the dial between balance and moves: a layer within `enough` of even gains nothing from being evener,
and `move_price` charges each move a share of its link time on top of the slowest rank's. Wrong where rows of one
window are not like those of the next: score plans on the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.placement.base import HOST, Load, Moves, Plan
from coterie.types import Link, Placement, Topology

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objective:
    """The prices. The defaults are about DeepSeek-V3's in prefill: 88 Mflop a row, 44 MB an expert."""

    row_s: float = 1.5e-7
    """Seconds one token of one expert takes on a rank of speed 1."""
    touch_s: float = 0.0
    """Seconds to stream an expert's weights in a step that touches it, at every replica. 0: compute decides."""
    row_bytes: float = 0.0
    """Bytes of a token's hidden state, sent to its expert's rank and back. 0 leaves the exchange out."""
    expert_bytes: float = 44e6
    """Weights of one expert of one layer."""
    horizon: float = 1000.0
    """Steps that the new placement will serve."""
    exposed: float = 1.0
    """Share of the movement that is not hidden behind steps."""
    planning_s: float = 0.0
    """Seconds that planning holds up serving."""
    enough: float = 1.0
    """Balance (even ÷ slowest) at which a layer is good enough; 1 asks for all there is."""
    move_price: float = 0.0
    """Share of its link time that each move costs besides what the slowest rank waits."""

    def __post_init__(self) -> None:
        for name in ("row_s", "touch_s", "row_bytes", "expert_bytes", "horizon", "planning_s", "move_price"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a finite number of at least 0")
        if not 0 <= self.exposed <= 1:
            raise ConfigError(f"exposed={self.exposed} must be in 0 … 1")
        if not 0 < self.enough <= 1:
            raise ConfigError(f"enough={self.enough} must be above 0 and at most 1")

    @classmethod
    def of(cls, model: StepModel, tokens: int, **settings: float) -> Objective:
        """Prices of a calibrated model for steps of about `tokens` tokens over all ranks.

        The time of an expert's tokens is taken as a straight line through what the model says at this many tokens and
        at twice as many: its slope is `row_s`, what is left at none is `touch_s`.
        """
        spec = model.spec
        ranks = model.topology.num_ranks
        held = max(1, spec.num_experts // ranks)
        rows = max(1.0, tokens * spec.top_k / spec.num_experts)
        once, twice = (model.experts_us(np.full(held, rows * n), tokens * n) * 1e-6 / held for n in (1, 2))
        fixed = (model.moe.overhead_us + model.moe.token_us * tokens) * 1e-6 / held
        row = max((twice - once) / rows, 1e-12)
        physics: dict[str, float] = {
            "row_s": row, "touch_s": max(0.0, once - fixed - row * rows),
            "row_bytes": 2.0 * spec.hidden_size if ranks > 1 else 0.0, "expert_bytes": spec.expert_bytes(model.dtype),
        }  # fmt: skip
        return cls(**(physics | settings))

    def problem(self, load: Load, topology: Topology, current: Placement) -> Problem:
        """The arrays that planning works on."""
        load.check_fits(topology, current)
        per_step = load.tokens / load.steps  # [layer, expert]
        speeds = topology.rank_speeds
        alive = speeds > 0
        # A rank that is gone takes no time; nothing may be planned on it.
        pace = np.where(alive, 1.0 / np.where(alive, speeds, 1.0), 0.0)  # [rank]
        alone = self._slot_s(per_step)
        unit = alone[:, None, :] * pace[None, :, None]
        if self.row_bytes:
            unit = unit + self._exchange_s(load, topology) * alive[None, :, None]
        replicas = np.arange(1, min(int(alive.sum()), current.num_slots - current.num_experts + 1) + 1)
        share = np.empty((*per_step.shape, len(replicas)))
        if self.touch_s:
            whole = np.where(alone > 0, alone, 1.0)[..., None]
            split = self._slot_s(per_step[..., None] / replicas) / whole
            share[:] = np.where(alone[..., None] > 0, split, 1.0 / replicas)
        else:
            share[:] = 1.0 / replicas
        hosts = _hosts(current.slot_experts, current.num_ranks, current.num_experts, alive)
        source = _cheapest_source(hosts, topology.rank_nodes)
        links = topology.intra, topology.inter, topology.host
        seconds = np.array([_seconds(link, self.expert_bytes) for link in links])
        load_in = _load_in(hosts, source, topology.rank_nodes, seconds)
        cheapest = np.where(alive[None, :, None], unit * speeds[None, :, None], np.inf).min(axis=1)  # [layer, expert]
        even = cheapest.sum(axis=1) / speeds.sum()
        return Problem(self, topology, current, alive, unit, share, load_in, source, even)

    def _slot_s(self, tokens: Array) -> Array:
        """Seconds of a slot that gets this many tokens a step on average; by chance some steps do not touch it."""
        return self.touch_s * -np.expm1(-tokens) + self.row_s * tokens

    def _exchange_s(self, load: Load, topology: Topology) -> Array:
        """[layer, rank, expert] seconds to bring all of an expert's tokens to a rank, and back."""
        nodes = topology.rank_nodes
        near = nodes[:, None] == nodes[None, :]
        per_row = 2.0 * self.row_bytes * np.where(near, 1 / topology.intra.bytes_per_s, 1 / topology.inter.bytes_per_s)
        np.fill_diagonal(per_row, 0.0)  # [source, rank] seconds
        if load.sources is None:
            alive = topology.rank_speeds > 0
            each = per_row[alive].sum(axis=0) / alive.sum()
            return np.asarray(load.tokens[:, None, :] / load.steps * each[None, :, None])
        by_rank = np.tensordot(per_row.T, load.sources / load.steps, (1, 0))  # [rank, layer, expert]
        return np.ascontiguousarray(by_rank.transpose(1, 0, 2))


class Score(NamedTuple):
    """The objective of one placement, by layer, in seconds."""

    processing_s: Array
    """[layer] slowest rank's, of one step."""
    movement_s: Array
    """[layer] exposed, `move_price` left out."""
    total_s: Array
    """[layer] of the whole horizon, as planners minimise it: `enough` and `move_price` counted, planning left out."""
    moves: NDArray[np.int64]
    """[layer]"""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One planning round as plain arrays. Make one with :meth:`Objective.problem`."""

    objective: Objective
    topology: Topology
    current: Placement
    alive: NDArray[np.bool_]
    """[rank]"""
    unit: Array
    """[layer, rank, expert] seconds a step if the rank got all of the expert's tokens."""
    share: Array
    """[layer, expert, replicas - 1] of `unit` that each of so many equal replicas takes."""
    load_in: Array
    """[layer, rank, expert] seconds to load the expert; 0 where the rank has it."""
    source: NDArray[np.int64]
    """[layer, rank, expert] where the cheapest copy is."""
    even: Array
    """[layer] seconds if all ranks were equally busy with what the experts take where they are cheapest: a bound."""

    @property
    def floor(self) -> Array:
        """[layer] seconds below which nothing is gained."""
        return self.even / self.objective.enough

    def equal_shares(self, slot_experts: NDArray[np.integer]) -> Array:
        """[layer, slot] of equal replicas; slots of ranks that are gone get nothing."""
        return _equal_shares(slot_experts, self.current.num_experts, self._slot_alive())

    def rank_s(self, slot_experts: NDArray[np.integer], shares: Array | None = None) -> Array:
        """[layer, rank] seconds of a step; equal replicas unless `shares` [layer, slot] says otherwise."""
        ranks = self.current.num_ranks
        if shares is None:
            return _equal_rank_s(slot_experts, ranks, self.unit, self.share, self.alive)
        return _shared_rank_s(slot_experts, ranks, self.unit, shares)

    def arrivals_s(self, slot_experts: NDArray[np.integer]) -> Array:
        """[layer, rank] seconds of loading what is new there."""
        return _arrivals(slot_experts, self.current.num_ranks, self.load_in, self.alive)[0]

    def score(self, slot_experts: NDArray[np.integer], shares: Array | None = None) -> Score:
        objective = self.objective
        processing = self.rank_s(slot_experts, shares).max(axis=1)
        arrivals, moves = _arrivals(slot_experts, self.current.num_ranks, self.load_in, self.alive)
        movement = objective.exposed * arrivals.max(axis=1)
        priced = movement + objective.exposed * objective.move_price * arrivals.sum(axis=1)
        total = objective.horizon * np.maximum(processing, self.floor) + priced
        return Score(processing, movement, total, moves.sum(axis=1))

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
        """The plan that leads to `slot_experts`: what stays on a rank stays in its slot, and shares go along."""
        current = self.current
        settled, order = settle(current.slot_experts, np.asarray(slot_experts, np.int32), current.num_ranks)
        shares = self.equal_shares(settled) if shares is None else np.take_along_axis(shares, order, axis=1)
        placement = Placement(settled, current.num_ranks, current.num_experts)
        before = self.score(current.slot_experts)
        after = self.score(settled, None if split == "equal" else shares)
        busy_before = self.rank_s(current.slot_experts)
        busy_after = self.rank_s(settled, None if split == "equal" else shares)
        moves = self.moves(settled)
        return Plan(
            placement, shares, split, float(before.processing_s.sum()), float(after.processing_s.sum()), moves,
            float(after.movement_s.sum()), planning_s, self.balance(busy_before), self.balance(busy_after),
            skip_reason, layer_reasons,
        )  # fmt: skip

    def keep(self, reason: str, planning_s: float = 0.0, layer_reasons: tuple[str, ...] = ()) -> Plan:
        """The plan that moves nothing."""
        return self.plan(
            self.current.slot_experts, planning_s=planning_s, skip_reason=reason, layer_reasons=layer_reasons
        )

    def balance(self, rank_s: Array) -> float:
        """Mean over layers of mean ÷ max over living ranks."""
        living = rank_s[:, self.alive]
        peak = living.max(axis=1)
        return float(np.where(peak > 0, living.mean(axis=1) / np.where(peak > 0, peak, 1.0), 1.0).mean())

    def moves(self, slot_experts: NDArray[np.integer]) -> Moves:
        """What must be loaded to get there; slots on ranks that are gone count for nothing."""
        per_rank = self.current.slots_per_rank
        changed = (slot_experts != self.current.slot_experts) & self._slot_alive()[None, :]
        layer, slot = np.nonzero(changed)
        expert = np.asarray(slot_experts, np.int64)[layer, slot]
        rank = slot // per_rank
        seconds = self.load_in[layer, rank, expert]
        source = self.source[layer, rank, expert]
        new = source != rank  # an expert that only changed its slot is copied inside the device
        return Moves(layer[new], slot[new], expert[new], source[new], seconds[new])

    def _slot_alive(self) -> NDArray[np.bool_]:
        return np.repeat(self.alive, self.current.slots_per_rank)


def _seconds(link: Link, nbytes: float) -> float:
    return link.latency_s + nbytes / link.bytes_per_s


def _hosts(
    slot_experts: NDArray[np.integer], ranks: int, experts: int, alive: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[layer, rank, expert] whether a living rank holds the expert."""
    layers, slots = slot_experts.shape
    hosts = np.zeros((layers, ranks, experts), np.bool_)
    rank = np.arange(slots) // (slots // ranks)
    hosts[np.arange(layers)[:, None], rank[None, :], slot_experts] = True
    hosts[:, ~alive] = False
    return hosts


@njit()
def _cheapest_source(hosts: NDArray[np.bool_], nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """[layer, rank, expert] the rank itself, else the first of its node, else the first of all, else the host."""
    layers, ranks, experts = hosts.shape
    source = np.full((layers, ranks, experts), HOST, np.int64)
    for layer in range(layers):
        for expert in range(experts):
            first = HOST
            for rank in range(ranks - 1, -1, -1):
                if hosts[layer, rank, expert]:
                    first = rank
            if first == HOST:
                continue
            near, node = HOST, -1
            for rank in range(ranks):
                if nodes[rank] != node:
                    node, near = nodes[rank], HOST
                    peer = rank
                    while peer < ranks and nodes[peer] == node:
                        if near == HOST and hosts[layer, peer, expert]:
                            near = peer
                        peer += 1
                if hosts[layer, rank, expert]:
                    source[layer, rank, expert] = rank
                elif near != HOST:
                    source[layer, rank, expert] = near
                else:
                    source[layer, rank, expert] = first
    return source


def _load_in(
    hosts: NDArray[np.bool_], source: NDArray[np.int64], nodes: NDArray[np.int64], seconds: Array
) -> Array:
    near = nodes[source] == nodes[None, :, None]
    cost = np.where(source == HOST, seconds[2], np.where(near, seconds[0], seconds[1]))
    return np.where(hosts, 0.0, cost)


@njit()
def _equal_shares(slot_experts: NDArray[np.integer], experts: int, slot_alive: NDArray[np.bool_]) -> Array:
    layers, slots = slot_experts.shape
    shares = np.zeros((layers, slots))
    replicas = np.zeros(experts)
    for layer in range(layers):
        replicas[:] = 0.0
        for slot in range(slots):
            if slot_alive[slot]:
                replicas[slot_experts[layer, slot]] += 1.0
        for slot in range(slots):
            if slot_alive[slot]:
                shares[layer, slot] = 1.0 / replicas[slot_experts[layer, slot]]
    return shares


@njit()
def _equal_rank_s(
    slot_experts: NDArray[np.integer], ranks: int, unit: Array, share: Array, alive: NDArray[np.bool_]
) -> Array:
    layers, slots = slot_experts.shape
    per_rank = slots // ranks
    replicas = np.zeros(unit.shape[2], np.int64)
    seconds = np.zeros((layers, ranks))
    for layer in range(layers):
        replicas[:] = 0
        for slot in range(slots):
            if alive[slot // per_rank]:
                replicas[slot_experts[layer, slot]] += 1
        for slot in range(slots):
            rank, expert = slot // per_rank, slot_experts[layer, slot]
            if alive[rank]:
                # Duplicates on one rank may bring an expert past the replicas the table has.
                count = replicas[expert]
                known = min(count, share.shape[2])
                part = share[layer, expert, known - 1] * known / count
                seconds[layer, rank] += unit[layer, rank, expert] * part
    return seconds


@njit()
def _shared_rank_s(slot_experts: NDArray[np.integer], ranks: int, unit: Array, shares: Array) -> Array:
    layers, slots = slot_experts.shape
    per_rank = slots // ranks
    seconds = np.zeros((layers, ranks))
    for layer in range(layers):
        for slot in range(slots):
            rank = slot // per_rank
            seconds[layer, rank] += unit[layer, rank, slot_experts[layer, slot]] * shares[layer, slot]
    return seconds


def _arrivals(
    slot_experts: NDArray[np.integer], ranks: int, load_in: Array, alive: NDArray[np.bool_]
) -> tuple[Array, NDArray[np.int64]]:
    """[layer, rank] seconds and number of loads; an expert in two slots of a rank is loaded once."""
    held = _hosts(slot_experts, ranks, load_in.shape[2], alive)
    return np.asarray((held * load_in).sum(axis=2)), np.asarray((held & (load_in > 0)).sum(axis=2))


def settle(
    old: NDArray[np.int32], new: NDArray[np.int32], ranks: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """`new` with the slots of each rank reordered so that what stays keeps its slot, and where each came from.

    Both [layer, slot]; the second holds, for each slot of the result, the slot of `new` it was.
    """
    order = np.empty(new.shape, np.int64)
    _settle(old, new, ranks, order)
    return np.take_along_axis(new, order, axis=1), order


@njit()
def _settle(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int, order: NDArray[np.int64]) -> None:
    layers, slots = new.shape
    per_rank = slots // ranks
    used = np.zeros(per_rank, np.bool_)
    for layer in range(layers):
        for rank in range(ranks):
            start = rank * per_rank
            used[:] = False
            for slot in range(start, start + per_rank):
                order[layer, slot] = -1
            for slot in range(start, start + per_rank):
                for other in range(per_rank):
                    if not used[other] and new[layer, start + other] == old[layer, slot]:
                        used[other] = True
                        order[layer, slot] = start + other
                        break
            other = 0
            for slot in range(start, start + per_rank):
                if order[layer, slot] < 0:
                    while used[other]:
                        other += 1
                    used[other] = True
                    order[layer, slot] = start + other
