"""What every planner minimises, and the arrays its loops work on.

    total = horizon x sum over layers of max over ranks of processing(rank)
          +           sum over layers of exposed x max over ranks of movement(rank)
          + planning

A rank's processing in a layer is the sum over its slots of ``unit[rank, expert] x share[expert, replicas]``: what the
expert would take if all its tokens came to this rank (compute at the rank's speed, streaming where that shows, the
exchange of rows from where they are), times what is left of it when replicas share the tokens. Shares other than equal
ones are priced from the same table, on straight lines between whole numbers of replicas. Movement is a weighted
Hamming distance: only an expert that is loaded where it was not costs, by the link from its cheapest source. Layers
are moved one after the other, each rank receiving one expert at a time.

Two settings are the dial between balance and moves: a layer within `enough` of even gains nothing from being evener,
and `move_price` charges each move a share of its link time on top of the slowest rank's. Wrong where rows of one
window are not like those of the next: score plans on the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit, side_by_side
from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.placement.base import HOST, Load, Moves, Plan
from coterie.placement.moves import moves_between
from coterie.types import Link, Placement, Topology

Array = NDArray[np.float64]

CLOSE = 1e-6
"""Of a bound that is looked for by halving: nearer does not matter."""

TINY = 1e-12
"""Of a limit: seconds that are no seconds."""


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

        The time of an expert's tokens is taken as a straight line through what the model says of a rank whose experts
        get a quarter of the mean each up to four times it, since loads are that uneven: its slope is `row_s`, what is
        left at none is `touch_s`. What a step costs whatever the experts' loads are is left out.
        """
        spec = model.spec
        ranks = model.topology.num_ranks
        held = max(1, spec.num_experts // ranks)
        rows = max(1.0, tokens * spec.top_k / spec.num_experts) * np.array([0.25, 0.5, 1.0, 2.0, 4.0])
        rows = np.maximum(rows, 1.0)
        fixed = model.moe.overhead_us + model.moe.token_us * tokens
        times = np.array([model.experts_us(np.full(held, n), tokens) - fixed for n in rows]) * 1e-6 / held
        row, touch = (float(value) for value in np.polyfit(rows, times, 1, w=1 / times))
        if touch < 0 or row <= 0:  # all compute, or all streaming
            row, touch = (float((times / rows).mean()), 0.0) if touch < 0 else (1e-12, float(times.mean()))
        physics: dict[str, float] = {
            "row_s": row,
            "touch_s": touch,
            "row_bytes": 2.0 * spec.hidden_size if ranks > 1 else 0.0,
            "expert_bytes": spec.expert_bytes(model.dtype),
        }
        return cls(**(physics | settings))

    def problem(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Problem:
        """The arrays that planning works on. `shares` [layer, slot] are those in force; None is equal ones."""
        load.check_fits(topology, current)
        layers, experts, ranks = *load.tokens.shape, topology.num_ranks
        speeds = topology.rank_speeds
        alive = speeds > 0
        living = int(alive.sum())
        per_step = load.tokens / load.steps  # [layer, expert]
        spare = living * current.slots_per_rank - experts
        shape = layers, min(living, spare + 1), experts
        share = np.empty(shape) if self.touch_s else _even_share(*shape)
        # One block: past 4 MB NumPy asks for huge pages, and touching fresh small ones takes longer than all else here.
        unit, load_in = np.empty((2, layers, ranks, experts))
        source = np.empty((layers, ranks, experts), np.int16)
        even, reach = np.empty(layers), np.empty(layers)
        exchange, each = self._exchange_s(load, topology)
        links = self._links_s(topology)
        arguments = (
            per_step,
            self._slot_s(per_step),
            self.touch_s,
            self.row_s,
            exchange,
            each,
            speeds,
            current.slot_experts,
            topology.rank_nodes,
            links,
            unit,
            share,
            load_in,
            source,
            even,
            reach,
        )
        side_by_side(_fill, layers, *arguments)
        in_force = None if shares is None else _living_shares(shares, current, alive)
        return Problem(self, topology, current, alive, unit, share, load_in, source, even, reach, in_force)

    def link_s(self, topology: Topology) -> float:
        """Seconds to load an expert over the fastest link between devices."""
        return float(self._links_s(topology).min())

    def _links_s(self, topology: Topology) -> Array:
        """[link] seconds to load an expert inside a node, between nodes and from the host."""
        links = topology.intra, topology.inter, topology.host
        return np.array([_seconds(link, self.expert_bytes) for link in links])

    def _slot_s(self, tokens: Array) -> Array:
        """Seconds of a slot that gets this many tokens a step on average; by chance some steps do not touch it."""
        return self.touch_s * -np.expm1(-tokens) + self.row_s * tokens

    def _exchange_s(self, load: Load, topology: Topology) -> tuple[Array, Array]:
        """Seconds to bring all of an expert's tokens to a rank, and back.

        [rank, layer, expert] where their sources are known (else empty), and [rank] for one token from anywhere.
        """
        nodes = topology.rank_nodes
        near = nodes[:, None] == nodes[None, :]
        per_row = 2.0 * self.row_bytes * np.where(near, 1 / topology.intra.bytes_per_s, 1 / topology.inter.bytes_per_s)
        np.fill_diagonal(per_row, 0.0)  # [source, rank] seconds
        alive = topology.rank_speeds > 0
        if load.sources is None or not self.row_bytes:
            return np.empty((0, 1, 0)), per_row[alive].sum(axis=0) / alive.sum()
        known = np.tensordot(per_row.T, load.sources / load.steps, (1, 0))
        return np.ascontiguousarray(known), np.zeros(topology.num_ranks)


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


class _Assessment(NamedTuple):
    """[layer, rank] of a placement."""

    busy_s: Array
    arrivals_s: Array
    loads: NDArray[np.int64]


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
    """[layer, replicas - 1, expert] of `unit` that each of so many equal replicas takes. Exact where ranks are alike;
    where they differ, what share of it is streaming is their mean."""
    load_in: Array
    """[layer, rank, expert] seconds to load the expert; 0 where the rank has it."""
    source: NDArray[np.int16]
    """[layer, rank, expert] where the cheapest copy is."""
    even: Array
    """[layer] seconds if all ranks were equally busy with what the experts take where they are cheapest: a bound."""
    reach: Array
    """[layer] seconds that no placement gets below: `even`, or what the longest expert takes in as many replicas as
    there can be; without a slot to spare, beside the shortest ones that must fill its rank. Where replicas stream, what
    those in the spare slots add at least; shares that leave some of them idle may get below that."""
    shares: Array | None = None
    """[layer, slot] in force, of living ranks alone; None is equal ones."""

    @property
    def floor(self) -> Array:
        """[layer] seconds below which nothing is gained."""
        return self.reach / self.objective.enough

    @property
    def alike(self) -> bool:
        """Whether an expert takes as long on every living rank."""
        if not self.objective.row_bytes:
            return len(np.unique(self.topology.rank_speeds[self.alive])) == 1
        living = self.unit[:, self.alive]
        return bool((living == living[:, :1]).all())

    def equal_shares(self, slot_experts: NDArray[np.integer]) -> Array:
        """[layer, slot] of equal replicas; slots of ranks that are gone get nothing."""
        return _equal_shares(slot_experts, self.current.num_experts, self._slot_alive())

    def rank_s(self, slot_experts: NDArray[np.integer], shares: Array | None = None) -> Array:
        """[layer, rank] seconds of a step; equal replicas unless `shares` [layer, slot] says otherwise.

        The shares in force are those of :attr:`shares`, which is not what None means here.
        """
        return self._assess(slot_experts, shares).busy_s

    def arrivals_s(self, slot_experts: NDArray[np.integer]) -> Array:
        """[layer, rank] seconds of loading what is new there."""
        return self._assess(slot_experts, None).arrivals_s

    def score(self, slot_experts: NDArray[np.integer], shares: Array | None = None) -> Score:
        return self._score(self._assess(slot_experts, shares))

    def _assess(self, slot_experts: NDArray[np.integer], shares: Array | None) -> _Assessment:
        shape = len(slot_experts), self.current.num_ranks
        found = _Assessment(np.empty(shape), np.empty(shape), np.empty(shape, np.int64))
        slots = np.ascontiguousarray(slot_experts, np.int32)
        given = np.empty((0, 0)) if shares is None else np.ascontiguousarray(shares, np.float64)
        arguments = slots, self.unit, self.share, given, self.load_in, self.source, self.alive, *found
        side_by_side(_assess, len(slots), *arguments)
        return found

    def _score(self, found: _Assessment) -> Score:
        objective = self.objective
        processing = found.busy_s.max(axis=1)
        movement = objective.exposed * found.arrivals_s.max(axis=1)
        priced = movement + objective.exposed * objective.move_price * found.arrivals_s.sum(axis=1)
        total = objective.horizon * np.maximum(processing, self.floor) + priced
        return Score(processing, movement, total, found.loads.sum(axis=1))

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
        given = None if shares is None else np.take_along_axis(shares, order, axis=1)
        placement = Placement(settled, current.num_ranks, current.num_experts)
        was, will = self._assess(current.slot_experts, self.shares), self._assess(settled, given)
        before, after = self._score(was), self._score(will)
        return Plan(
            placement,
            self.equal_shares(settled) if given is None else given,
            split,
            float(before.processing_s.sum()),
            float(after.processing_s.sum()),
            self.moves(settled),
            float(after.movement_s.sum()),
            planning_s,
            self.balance(was.busy_s),
            self.balance(will.busy_s),
            skip_reason,
            layer_reasons,
        )

    def keep(self, reason: str, planning_s: float = 0.0, layer_reasons: tuple[str, ...] = ()) -> Plan:
        """The plan that changes nothing: shares in force stay, which from then on are weights of an earlier window."""
        return self.plan(
            self.current.slot_experts,
            self.shares,
            split="equal" if self.shares is None else "weighted",
            planning_s=planning_s,
            skip_reason=reason,
            layer_reasons=layer_reasons,
        )

    def onward(self, layers: NDArray[np.integer], slot_experts: NDArray[np.integer], shares: Array) -> Problem:
        """The problem of some layers once they are as given, [layer, slot]: only what has to be loaded is another."""
        current = Placement(np.asarray(slot_experts, np.int32), self.current.num_ranks, self.current.num_experts)
        unit = self.unit[layers]
        load_in, source = np.empty(unit.shape), np.empty(unit.shape, np.int16)
        links = self.objective._links_s(self.topology)
        for index, row in enumerate(current.slot_experts):
            _fill_sources(
                row, self.topology.rank_speeds, self.topology.rank_nodes, links, load_in[index], source[index]
            )
        return Problem(
            self.objective,
            self.topology,
            current,
            self.alive,
            unit,
            self.share[layers],
            load_in,
            source,
            self.even[layers],
            self.reach[layers],
            shares,
        )

    def balance(self, rank_s: Array) -> float:
        """Mean over layers of :meth:`layer_balance`."""
        return float(self.layer_balance(rank_s).mean())

    def layer_balance(self, rank_s: Array) -> Array:
        """[layer] mean ÷ max over living ranks, of [layer, rank] seconds; 1 where there is nothing to do."""
        living = rank_s[:, self.alive]
        peak = living.max(axis=1)
        return np.where(peak > 0, living.mean(axis=1) / np.where(peak > 0, peak, 1.0), 1.0)

    def moves(self, slot_experts: NDArray[np.integer]) -> Moves:
        """What must be loaded to get there; slots on ranks that are gone count for nothing."""
        return moves_between(self.current, slot_experts, self.topology, self.objective.expert_bytes)

    def _slot_alive(self) -> NDArray[np.bool_]:
        return np.repeat(self.alive, self.current.slots_per_rank)


@lru_cache(maxsize=4)
def _even_share(layers: int, replicas: int, experts: int) -> Array:
    """The share table where only tokens count: the same for all loads, so it is made once and only read."""
    parts = 1.0 / np.arange(1, replicas + 1)
    return np.array(np.broadcast_to(parts[:, None], (layers, replicas, experts)), order="C")


def _seconds(link: Link, nbytes: float) -> float:
    return link.latency_s + nbytes / link.bytes_per_s


def _living_shares(shares: NDArray[np.floating], current: Placement, alive: NDArray[np.bool_]) -> Array:
    """[layer, slot] with what ranks that are gone had spread over an expert's others: as they shared, else equally."""
    given, experts = np.ascontiguousarray(shares, np.float64), current.slot_experts
    if given.shape != experts.shape:
        raise ConfigError(f"shares has shape {given.shape}; the placement {experts.shape}")
    bad = np.argwhere(~((given >= 0) & (given < np.inf)))
    if bad.size:
        layer, slot = (int(index) for index in bad[0])
        raise ConfigError(f"shares[{layer}, {slot}] is {given[layer, slot]}; it must be finite and not negative")
    row = np.arange(current.num_layers)[:, None]
    total = np.zeros((current.num_layers, current.num_experts))
    np.add.at(total, (row, experts), given)
    bad = np.argwhere(~np.isclose(total, 1.0, rtol=0.0, atol=1e-6))
    if bad.size:
        layer, expert = (int(index) for index in bad[0])
        raise ConfigError(f"shares of layer {layer}, expert {expert} add up to {total[layer, expert]:g}; it must be 1")
    slot_alive = np.repeat(alive, current.slots_per_rank)
    if slot_alive.all():
        return given
    living = given * slot_alive
    total[:] = 0.0
    np.add.at(total, (row, experts), living)
    left = total[row, experts]
    equal = _equal_shares(experts, current.num_experts, slot_alive)
    return np.where(left > 0, living / np.where(left > 0, left, 1.0), equal)


@njit()
def _fill(
    chosen: NDArray[np.int64],
    tokens: Array,
    alone: Array,
    touch_s: float,
    row_s: float,
    exchange: Array,
    each: Array,
    speeds: Array,
    slot_experts: NDArray[np.int32],
    nodes: NDArray[np.int64],
    links: Array,
    unit: Array,
    share: Array,
    load_in: Array,
    source: NDArray[np.int16],
    even: Array,
    reach: Array,
) -> None:
    """The arrays of a :class:`Problem`, of the chosen layers."""
    for layer in chosen:
        known = exchange[:, layer] if len(exchange) else exchange[:, 0]
        per_rank = slot_experts.shape[1] // len(speeds)
        _fill_unit(tokens[layer], alone[layer], known, each, speeds, unit[layer])
        if touch_s > 0.0:
            _fill_share(tokens[layer], alone[layer], touch_s, row_s, known, each, speeds, share[layer])
        _fill_sources(slot_experts[layer], speeds, nodes, links, load_in[layer], source[layer])
        _fill_bounds(
            unit[layer],
            share[layer],
            each,
            speeds,
            len(known) > 0,
            touch_s > 0.0,
            per_rank,
            even[layer:],
            reach[layer:],
        )


@helper()
def _fill_unit(tokens: Array, alone: Array, known: Array, each: Array, speeds: Array, unit: Array) -> None:
    for rank in range(len(speeds)):
        # A rank that is gone takes no time; nothing may be planned on it.
        pace = 1.0 / speeds[rank] if speeds[rank] > 0.0 else 0.0
        row, token_s = unit[rank], each[rank] if speeds[rank] > 0.0 else 0.0
        for expert in range(len(row)):
            row[expert] = alone[expert] * pace + tokens[expert] * token_s
        if len(known) and speeds[rank] > 0.0:
            for expert in range(len(row)):  # as one statement it compiles for seconds
                row[expert] += known[rank, expert]


@helper()
def _fill_share(
    tokens: Array, alone: Array, touch_s: float, row_s: float, known: Array, each: Array, speeds: Array, share: Array
) -> None:
    """What replicas divide (rows, their exchange) and what each of them pays (streaming), over living ranks' mean."""
    living, pace, token_s = 0, 0.0, 0.0
    for rank in range(len(speeds)):
        if speeds[rank] > 0.0:
            living += 1
            pace += 1.0 / speeds[rank]
            token_s += each[rank]
    for expert in range(share.shape[1]):
        sent = tokens[expert] * token_s
        if len(known):
            for rank in range(len(speeds)):
                if speeds[rank] > 0.0:
                    sent += known[rank, expert]
        whole = (pace * alone[expert] + sent) / living
        for index in range(share.shape[0]):
            part = 1.0 / (index + 1.0)
            if whole > 0.0:
                few = tokens[expert] * part
                slot_s = touch_s * -np.expm1(-few) + row_s * few
                part = (pace * slot_s + sent * part) / living / whole
            share[index, expert] = part


@njit()
def _fill_sources(
    slot_experts: NDArray[np.int32],
    speeds: Array,
    nodes: NDArray[np.int64],
    links: Array,
    load_in: Array,
    source: NDArray[np.int16],
) -> None:
    """The rank itself, else the first of its node, else the first of all, else the host."""
    ranks, experts = source.shape
    per_rank = len(slot_experts) // ranks
    first, near = np.empty(experts, np.int16), np.empty((nodes[-1] + 1, experts), np.int16)
    for expert in range(experts):
        first[expert] = HOST
    for node in range(len(near)):
        _copy(near[node], first)
    for slot in range(len(slot_experts) - 1, -1, -1):
        rank = slot // per_rank
        if speeds[rank] > 0.0:
            first[slot_experts[slot]] = rank
            near[nodes[rank], slot_experts[slot]] = rank
    for rank in range(ranks):
        at, seconds = source[rank], load_in[rank]
        if rank > 0 and nodes[rank] == nodes[rank - 1]:
            _copy(at, near[nodes[rank]])
            _copy(seconds, load_in[rank - 1])
        else:
            here = near[nodes[rank]]
            for expert in range(experts):
                close, gone = here[expert] != HOST, first[expert] == HOST
                seconds[expert] = links[0] if close else (links[2] if gone else links[1])
                if not close:
                    here[expert] = first[expert]
            _copy(at, here)
    for slot in range(len(slot_experts)):
        if speeds[slot // per_rank] > 0.0:
            source[slot // per_rank, slot_experts[slot]] = slot // per_rank
            load_in[slot // per_rank, slot_experts[slot]] = 0.0


@helper()
def _copy(to: Array | NDArray[np.int16], row: Array | NDArray[np.int16]) -> None:
    """Not `to[:] = row`: where shapes might differ, the message of that takes seconds to compile."""
    for at in range(len(to)):
        to[at] = row[at]


@helper()
def _smallest(values: Array) -> int:
    """The first of the smallest."""
    smallest = 0
    for at in range(1, len(values)):
        if values[at] < values[smallest]:
            smallest = at
    return smallest


@helper()
def _fill_bounds(
    unit: Array,
    share: Array,
    each: Array,
    speeds: Array,
    by_source: bool,
    streams: bool,
    per_rank: int,
    even: Array,
    reach: Array,
) -> None:
    ranks, experts = unit.shape
    work, least = np.empty(experts), np.empty(experts)  # at speed 1, and where it is shortest
    for expert in range(experts):
        work[expert], least[expert] = np.inf, np.inf
    living, pace = 0, 0.0
    for rank in range(ranks):
        if speeds[rank] == 0.0:
            continue
        living += 1
        pace += speeds[rank]
        if rank > 0 and not by_source and speeds[rank] == speeds[rank - 1] and each[rank] == each[rank - 1]:
            continue  # the same as the one before
        row = unit[rank]
        for expert in range(experts):
            least[expert] = min(least[expert], row[expert])
            work[expert] = min(work[expert], row[expert] * speeds[rank])
    longest, total = 0.0, 0.0
    for expert in range(experts):
        lowest = share[0, expert]
        for index in range(1, share.shape[0]):
            lowest = min(lowest, share[index, expert])
        longest = max(longest, least[expert] * lowest)
        total += work[expert]
    spare = living * per_rank - experts
    if spare == 0:
        for _ in range(per_rank - 1):  # the shortest ones fill its rank
            shortest = _smallest(least)
            longest += least[shortest]
            least[shortest] = np.inf
    even[0] = total / pace
    reach[0] = max(even[0], longest)
    if streams and spare > 0:
        reach[0] = _streaming_reach(work, least, share, spare, pace, reach[0])


@helper()
def _streaming_reach(work: Array, least: Array, share: Array, spare: int, pace: float, low: float) -> float:
    """Seconds, at least `low`, below which no ranks of `pace` all together come, since every slot is filled."""
    chords, room = np.empty(len(work)), np.empty(len(work), np.int64)
    if _fits(low, work, least, share, spare, pace, chords, room):
        return low
    high = 2.0 * low
    while not _fits(high, work, least, share, spare, pace, chords, room):
        low, high = high, 2.0 * high
    while high > low * (1.0 + CLOSE):
        middle = (low + high) / 2.0
        if _fits(middle, work, least, share, spare, pace, chords, room):
            high = middle
        else:
            low = middle
    return low


@helper()
def _fits(
    limit: float,
    work: Array,
    least: Array,
    share: Array,
    spare: int,
    pace: float,
    chords: Array,
    room: NDArray[np.int64],
) -> bool:
    """Whether ranks might do within `limit`: each expert in replicas short enough, the slots left over filled cheaply.

    r replicas take r x share[r] x work in all, which is concave in r. So one more of them adds, up to the most there
    can be, at least the mean of all those: the cheapest such means, no more than there is room, are a bound.
    """
    most = share.shape[0]
    left, total = spare, 0.0
    for expert in range(len(work)):
        row, count = share[:, expert], 1
        while count < most and least[expert] * row[count - 1] > limit * (1.0 + TINY):
            count += 1
        left -= count - 1
        if left < 0:
            return False
        taken = count * row[count - 1] * work[expert]
        total += taken
        room[expert] = most - count
        chords[expert] = np.inf
        if count < most:
            chords[expert] = (most * row[most - 1] * work[expert] - taken) / (most - count)
    while left > 0:
        cheapest = _smallest(chords)
        if chords[cheapest] == np.inf:
            break  # more slots than ranks have use for
        more = min(left, room[cheapest])
        total += more * chords[cheapest]
        chords[cheapest] = np.inf
        left -= more
    return bool(total <= limit * pace * (1.0 + TINY))


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
def _assess(
    chosen: NDArray[np.int64],
    slot_experts: NDArray[np.int32],
    unit: Array,
    share: Array,
    given: Array,
    load_in: Array,
    source: NDArray[np.int16],
    alive: NDArray[np.bool_],
    busy: Array,
    arrivals: Array,
    loads: NDArray[np.int64],
) -> None:
    """Times of ranks, and of loads, of the chosen layers; an expert in two slots of a rank is loaded once."""
    for layer in chosen:
        parts = given[layer] if len(given) else np.empty(0)
        _assess_layer(
            slot_experts[layer],
            unit[layer],
            share[layer],
            parts,
            load_in[layer],
            source[layer],
            alive,
            busy[layer],
            arrivals[layer],
            loads[layer],
        )


@helper()
def _assess_layer(
    slot_experts: NDArray[np.int32],
    unit: Array,
    share: Array,
    given: Array,
    load_in: Array,
    source: NDArray[np.int16],
    alive: NDArray[np.bool_],
    busy: Array,
    arrivals: Array,
    loads: NDArray[np.int64],
) -> None:
    ranks, experts = unit.shape
    per_rank = len(slot_experts) // ranks
    replicas, seen = np.zeros(experts, np.int64), np.empty(experts, np.int64)
    for expert in range(experts):
        seen[expert] = -1
    for slot in range(len(slot_experts)):
        if alive[slot // per_rank]:
            replicas[slot_experts[slot]] += 1
    slot = 0
    for rank in range(ranks):
        busy[rank], arrivals[rank], loads[rank] = 0.0, 0.0, 0
        for _ in range(per_rank):
            expert = slot_experts[slot]
            slot += 1
            if not alive[rank]:
                continue
            if len(given):
                busy[rank] += unit[rank, expert] * _part(share[:, expert], given[slot - 1])
            else:
                # Duplicates on one rank may bring an expert past the replicas the table has.
                known = min(replicas[expert], share.shape[0])
                busy[rank] += unit[rank, expert] * share[known - 1, expert] * known / replicas[expert]
            if source[rank, expert] != rank and seen[expert] != rank:
                seen[expert] = rank
                arrivals[rank] += load_in[rank, expert]
                loads[rank] += 1


@helper()
def _part(share: Array, tokens: float) -> float:
    """What a slot with this part of its expert's tokens takes of the whole: `share` [replicas - 1], on straight lines
    between 1, 1/2, 1/3 … of them and 0."""
    most = len(share)
    if tokens >= 1.0:
        return float(share[0] * tokens)
    if tokens * most <= 1.0:
        return float(share[most - 1] * tokens * most)
    fewer = min(int(1.0 / tokens), most - 1)
    rest = (fewer + 1.0) * (1.0 - fewer * tokens)  # 0 at 1 / fewer, 1 at 1 / (fewer + 1)
    return float(share[fewer - 1] + rest * (share[fewer] - share[fewer - 1]))


def settle(old: NDArray[np.int32], new: NDArray[np.int32], ranks: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
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
