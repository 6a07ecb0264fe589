"""Schedule moves safely and in few rounds: transfers are grouped into rounds, and rounds into switches of a layer.

Layers move one after another. Weights arrive in staging memory, beside the slots in use, and the layer switches to its
new map once all transfers of the switch have arrived, so that no slot is overwritten while a step may use it. In a
round each rank sends at most one expert and receives at most one. By König's theorem a switch needs exactly as many
rounds as the largest number of experts that a rank sends or receives, and this schedule uses that many. Loads from the
host and copies inside a rank have no sender to wait for.

Staging is limited. A layer that needs more staging moves in several switches, each of which leaves every expert a slot
on a living rank. Experts that change places in a ring must switch together; a ring that needs more staging than there
is gets cut into shorter rings, at one extra transfer per cut. Staging for two experts per rank is always enough. With
staging for one expert, a ring with two slots on a rank may be impossible to cut: the layer is then refused, with the
reason, and keeps its map.

The time of a round is that of its slowest move. Wrong by up to the ratio of the link speeds if moves inside and between
nodes share rounds, or if several ranks share the network between nodes at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from coterie.costs.movement import link_between, transfer_s
from coterie.errors import ConfigError, check, check_positive
from coterie.placement.base import HOST, Moves
from coterie.placement.migration._switching import switch_order
from coterie.placement.moves import moves_between
from coterie.types import Placement, Topology


class Transfer(NamedTuple):
    """Transfer of one expert of one layer into the staging memory of a slot."""

    id: int
    """Index of the transfer in the schedule, from 0."""
    layer: int
    slot: int
    expert: int
    source: int
    """Rank that sends the expert, or HOST; the slot's own rank for a copy inside the device."""
    seconds: float
    """Transfer time on the link, without other traffic."""


@dataclass(frozen=True)
class Switch:
    """An atomic change of a layer's map: all of its transfers take effect together, or none does."""

    layer: int
    rounds: tuple[tuple[Transfer, ...], ...]
    before: tuple[int, ...]
    """[slot] expert in each slot before the switch; `after` likewise."""
    after: tuple[int, ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(chain.from_iterable(self.rounds))

    @property
    def seconds(self) -> float:
        return sum(max(transfer.seconds for transfer in transfers) for transfers in self.rounds)


class Refusal(NamedTuple):
    """A layer that keeps its map because there is no safe order of switches."""

    layer: int
    reason: str


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """Resources of a migration."""

    expert_bytes: float = 44e6
    """Bytes of the weights of one expert of one layer."""
    staging_bytes: float = float("inf")
    """Staging memory of each rank, in bytes; an expert occupies it until the weights it replaces are unused."""

    def __post_init__(self) -> None:
        check_positive(expert_bytes=self.expert_bytes)
        check(
            self.staging_bytes >= self.expert_bytes,
            f"staging_bytes={self.staging_bytes:g} must hold at least one expert of {self.expert_bytes:g} bytes",
        )

    def staging_experts(self, most: int) -> int:
        """Return the number of experts that fit into the staging memory of a rank, at most `most`."""
        return int(min(most, self.staging_bytes // self.expert_bytes))


DEFAULT_LIMITS = MigrationLimits()


@dataclass(frozen=True)
class Schedule:
    """Ordered switches of a migration. Make one with :func:`schedule_moves`."""

    current: Placement
    placement: Placement
    """Placement after the migration: the plan's, except in refused layers."""
    topology: Topology
    limits: MigrationLimits
    switches: tuple[Switch, ...]
    """Switches in the order in which they are executed."""
    refusals: tuple[Refusal, ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, indexed by their id."""
        return tuple(transfer for switch in self.switches for transfer in switch.transfers)

    @cached_property
    def staging_experts(self) -> int:
        """Number of experts that each rank may have in staging at the same time."""
        return self.limits.staging_experts(self.current.slots_per_rank)

    @property
    def moved_bytes(self) -> float:
        """Bytes sent over links; copies inside a rank are not counted."""
        per_rank = self.current.slots_per_rank
        return sum(t.source != t.slot // per_rank for t in self.transfers) * self.limits.expert_bytes

    @property
    def ready_s(self) -> list[float]:
        """[switch] seconds from the start until its last expert has arrived, without other traffic on the links."""
        return list(accumulate(switch.seconds for switch in self.switches))

    @property
    def movement_s(self) -> float:
        """Transfer seconds of all rounds, one after another."""
        return sum((switch.seconds for switch in self.switches), 0.0)


def schedule_moves(
    current: Placement,
    target: Placement,
    topology: Topology,
    limits: MigrationLimits = DEFAULT_LIMITS,
    moves: Moves | None = None,
) -> Schedule:
    """Schedule the rounds and switches from `current` to `target`, the placement of a plan with these `moves`.

    Experts are fetched from the sources named in the moves. If a layer needs several switches, an earlier switch may
    have overwritten the source or created a nearer copy: then the nearest copy is used.
    """
    _check(current, target, topology)
    if moves is None:
        moves = moves_between(current, target.slot_experts, topology, limits.expert_bytes)
    elif (wrong := np.flatnonzero(target.slot_experts[moves.layer, moves.slot] != moves.expert)).size:
        layer, slot, expert = (int(of[wrong[0]]) for of in (moves.layer, moves.slot, moves.expert))
        raise ConfigError(
            f"the moves put expert {expert} into slot {slot} of layer {layer}; the target has "
            f"{target.slot_experts[layer, slot]} there"
        )
    alive = topology.rank_speeds > 0
    planned = {
        (layer, slot): source
        for layer, slot, source in zip(moves.layer.tolist(), moves.slot.tolist(), moves.source.tolist(), strict=True)
    }
    per_rank, budget = current.slots_per_rank, limits.staging_experts(current.slots_per_rank)
    switches: list[Switch] = []
    refusals: list[Refusal] = []
    result, next_id = current.slot_experts.copy(), 0
    changed = (current.slot_experts != target.slot_experts) & np.repeat(alive, per_rank)[None, :]
    for layer in np.flatnonzero(changed.any(axis=1)).tolist():
        before = tuple(current.slot_experts[layer].tolist())
        wanted = {slot: int(target.slot_experts[layer, slot]) for slot in np.flatnonzero(changed[layer]).tolist()}
        ordering = switch_order(before, wanted, alive.tolist(), per_rank, budget)
        if isinstance(ordering, str):
            refusals.append(Refusal(layer, f"layer {layer} stays as it is: {ordering}"))
            continue
        for arriving in ordering:
            switch = _switch(layer, before, arriving, planned, topology, limits, per_rank, next_id)
            next_id += len(arriving)
            switches.append(switch)
            before = switch.after
        result[layer] = before
    placement = Placement(result, current.num_ranks, current.num_experts)
    return Schedule(current, placement, topology, limits, tuple(switches), tuple(refusals))


def _check(current: Placement, target: Placement, topology: Topology) -> None:
    check(
        current.slot_experts.shape == target.slot_experts.shape and current.num_ranks == target.num_ranks,
        f"the target has shape {target.slot_experts.shape} on {target.num_ranks} ranks; "
        f"the current placement {current.slot_experts.shape} on {current.num_ranks}",
    )
    check(
        current.num_ranks == topology.num_ranks,
        f"placement.num_ranks={current.num_ranks} must equal topology.num_ranks={topology.num_ranks}",
    )


# ------------------------------------------------------------------------------------------------------------ rounds


def _switch(
    layer: int,
    before: tuple[int, ...],
    arriving: Mapping[int, int],
    planned: Mapping[tuple[int, int], int],
    topology: Topology,
    limits: MigrationLimits,
    per_rank: int,
    first_id: int,
) -> Switch:
    """Make one switch. The source of each expert is the nearest holder in `before`; the planned source wins a tie."""
    holders: dict[int, list[int]] = {}
    speeds, rates = topology.rank_speeds.tolist(), topology.rates.T.tolist()
    for slot, expert in enumerate(before):
        if speeds[slot // per_rank] > 0:
            holders.setdefault(expert, []).append(slot // per_rank)
    sends: Counter[int] = Counter()
    fetches: list[tuple[int, int, int, float]] = []  # slot, expert, source, seconds
    for slot, expert in sorted(arriving.items(), key=lambda item: (len(holders.get(item[1], ())), item[0])):
        rank = slot // per_rank
        source = _nearest(holders.get(expert, ()), rank, planned.get((layer, slot)), rates[rank], sends)
        sends[source] += 1
        link = topology.host if source == HOST else link_between(topology, source, rank)
        fetches.append((slot, expert, source, 0.0 if source == rank else transfer_s(link, limits.expert_bytes)))
    fetches.sort(key=lambda fetch: (-fetch[3], fetch[0]))  # slow transfers first, so that they share rounds
    rounds = edge_rounds([fetch[2] for fetch in fetches], [fetch[0] // per_rank for fetch in fetches])
    by_round: list[list[Transfer]] = [[] for _ in range(max(rounds) + 1)]
    for id, (number, fetch) in enumerate(sorted(zip(rounds, fetches, strict=True), key=itemgetter(0)), first_id):
        by_round[number].append(Transfer(id, layer, *fetch))
    after = tuple(arriving.get(slot, expert) for slot, expert in enumerate(before))
    return Switch(layer, tuple(map(tuple, by_round)), before, after)


def _nearest(
    holders: Sequence[int], rank: int, planned: int | None, rates: Sequence[float], sends: Counter[int]
) -> int:
    """Return the holder from which an expert is fetched to `rank`; `rates` [source] are those to it."""
    return min(holders, key=lambda h: (h != rank, -rates[h], h != planned, sends[h], h), default=HOST)


def edge_rounds(senders: Sequence[int], receivers: Sequence[int]) -> list[int]:
    """Return the round of each transfer: in a round no rank sends two experts or receives two.

    The number of rounds is the minimum: the most transfers that one rank sends or receives. HOST may send any number in
    a round, and a copy inside a rank uses no link. (Edge colouring of a bipartite graph.)
    """
    pairs = list(zip(senders, receivers, strict=True))
    sends = Counter(sender for sender, receiver in pairs if sender not in (HOST, receiver))
    gets = Counter(receiver for sender, receiver in pairs if sender != receiver)
    rounds = range(max([*sends.values(), *gets.values()], default=0))
    by_sender: dict[int, dict[int, int]] = {rank: {} for rank in sends}  # round → transfer
    by_receiver: dict[int, dict[int, int]] = {rank: {} for rank in gets}
    # Table of the sender and of the receiver of each transfer. Transfers from the host get a table each: no limit.
    outs = [by_sender.get(sender, {}) for sender in senders]
    ins = [by_receiver.get(receiver, {}) for receiver in receivers]
    colours = [0] * len(pairs)
    for transfer, (sender, receiver) in enumerate(pairs):
        if sender == receiver:
            continue
        free = next(n for n in rounds if n not in outs[transfer])
        if free in ins[transfer]:
            other = next(n for n in rounds if n not in ins[transfer])
            _flip(ins[transfer], free, other, outs, ins, colours)
        colours[transfer] = free
        outs[transfer][free] = ins[transfer][free] = transfer
    return colours


def _flip(
    start: dict[int, int],
    free: int,
    other: int,
    outs: list[dict[int, int]],
    ins: list[dict[int, int]],
    colours: list[int],
) -> None:
    """Exchange two rounds along the alternating path that starts at a receiver, so that it is free in round `free`.

    The path reaches senders by transfers of round `free` only, so never the new sender, which has none in that round.
    """
    path, at, wanted = [], start, free
    while wanted in at:
        transfer = at[wanted]
        path.append(transfer)
        at, wanted = (outs[transfer], other) if wanted == free else (ins[transfer], free)
    for transfer in path:
        for table in (outs[transfer], ins[transfer]):
            del table[colours[transfer]]
    for transfer in path:
        colours[transfer] = free + other - colours[transfer]
        outs[transfer][colours[transfer]] = ins[transfer][colours[transfer]] = transfer
