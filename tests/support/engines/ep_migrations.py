"""Migrations under traffic and ranks that fail, run by every rank of a group."""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.engines.ranks import RankMember
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.layer import ExpertParallelLayers, SlotWeights, TorchExchange
from coterie.engines.torch_ep.migration import LiveMigration, Mover
from coterie.errors import ConfigError, RankFailedError
from coterie.placement.migration.rounds import MigrationLimits, Transfer, schedule_moves
from coterie.types import Placement, Topology
from ep_cases import EXPERTS, LAYERS, Case, dense, hidden_rows, load_expert, make_layers, placement_of, routing

STAGING = 2
REPLICATED = Case("migration", "even", replicas=2)
FAULTS = ("stage", "read", "send")


class FaultyMover(Mover):
    """Fails by the transfer: no staging, weights that cannot be read, a bit that changes on the way."""

    migration = 0

    def fault(self, transfer: Transfer) -> str | None:
        draw = int(np.random.default_rng([self.migration, transfer.id]).integers(0, 40))
        return FAULTS[draw] if draw < len(FAULTS) else None

    def stage(self, transfer: Transfer) -> int:
        if self.fault(transfer) == "stage":
            raise MemoryError("injected")
        return super().stage(transfer)

    def read(self, transfer: Transfer, row: int) -> Any:
        fault = self.fault(transfer)
        if fault == "read":
            raise OSError("injected")
        self.damage = fault == "send"
        return super().read(transfer, row).clone()

    def send(self, weights: Any, to: int) -> None:
        if self.damage:
            weights.view(torch.uint8)[5] ^= 1
        super().send(weights, to)


class Migrated(NamedTuple):
    """What a rank saw of many migrations."""

    switches: int
    steps: int
    migrations: int
    wrong_steps: int
    wrong_weights: int
    reasons: list[str]
    moved_bytes: float
    """By the schedules, all ranks; switches that were rolled back included."""
    sent_bytes: int
    stall_s: float
    free: int


def migrate(member: RankMember, wanted: int) -> Migrated:
    """Random placements one after the other, until there were `wanted` switches; every step is checked."""
    group = Group(timeout_s=member.timeout_s)
    member.say("migrations")
    rng = np.random.default_rng(3)
    placement = placement_of(REPLICATED, group.size, rng)
    layers = staged_layers(group, placement)
    weights = layers.weights
    mover = FaultyMover(group, weights)
    limits = MigrationLimits(weights.expert_bytes, STAGING * weights.expert_bytes)
    batches = [batch(layer, group.rank, rng) for layer in range(LAYERS) for _ in range(4)]
    switches = steps = wrong = number = sent = 0
    stall = moved = 0.0
    reasons: list[str] = []
    while switches < wanted:
        schedule = schedule_moves(placement, placement_of(REPLICATED, group.size, rng), Topology(group.size), limits)
        number += 1
        FaultyMover.migration = number
        migration = LiveMigration(layers, schedule, mover)
        while not migration.over:
            layer, hidden, experts, shares, expected = batches[steps % len(batches)]
            with migration.step():
                wrong += not torch.equal(layers.forward(layer, hidden, experts, shares), expected)
            steps += 1
        placement, report = migration.placement, migration.report()
        switches += report.switches
        reasons += [back.reason for back in report.rolled_back]
        sent, stall = sent + report.sent_bytes, stall + report.stall_s
        moved += schedule.moved_bytes
    found = Migrated(
        switches,
        steps,
        number,
        wrong,
        wrong_rows(weights, placement, group.rank),
        reasons,
        moved,
        sent,
        stall,
        len(weights.free),
    )
    mover.close()
    group.close()
    return found


def staged_layers(group: Group, placement: Placement) -> ExpertParallelLayers:
    weights = SlotWeights(placement, group.rank, load_expert("exact"), staging=STAGING, activation="relu")
    return ExpertParallelLayers(group, placement, weights, TorchExchange(group, placement.slots_per_rank))


def batch(layer: int, rank: int, rng: np.random.Generator) -> tuple[int, Any, Any, Any, Any]:
    """Tokens of this rank, and what the dense layer gives for them."""
    placement = Placement.linear(LAYERS, EXPERTS, 1)
    rows = rng.integers(0, 9, 8)[rank]
    own = np.random.default_rng([rank, int(rng.integers(0, 2**32))])
    hidden = hidden_rows(int(rows), "exact", own)
    experts, weights = routing(REPLICATED, int(rows), placement, layer, own)
    return layer, hidden, experts, weights, dense(layer, hidden, experts, weights, "exact")


def wrong_rows(weights: SlotWeights, placement: Placement, rank: int) -> int:
    """Slots whose weights are not their expert's."""
    wrong, per_rank = 0, placement.slots_per_rank
    for layer in range(LAYERS):
        own = placement.slot_experts[layer, rank * per_rank : (rank + 1) * per_rank].tolist()
        for row, expert in zip(weights.rows[layer], own, strict=True):
            right = torch.cat([part.flatten() for part in load_expert("exact")(layer, expert)])
            wrong += not torch.equal(weights.block[row], right)
    return wrong


# ------------------------------------------------------------------------------------------------- ranks that fail


def cancelled(member: RankMember, _: None) -> tuple[str | None, int, int]:
    """A migration cancelled after its first step; steps go on until it holds nothing."""
    group = Group(timeout_s=member.timeout_s)
    rng = np.random.default_rng(4)
    placement = placement_of(REPLICATED, group.size, rng)
    layers = staged_layers(group, placement)
    weights = layers.weights
    mover = Mover(group, weights)
    limits = MigrationLimits(weights.expert_bytes, STAGING * weights.expert_bytes)
    target = placement_of(REPLICATED, group.size, rng)
    migration = LiveMigration(layers, schedule_moves(placement, target, Topology(group.size), limits), mover)
    with migration.step():
        pass
    migration.cancel("enough")
    while not migration.over:
        with migration.step():
            pass
    mover.close()
    group.close()
    return migration.report().stopped, wrong_rows(weights, migration.placement, group.rank), len(weights.free)


def fails(member: RankMember, how: str) -> str:
    """The error that this rank raised; rank 1 fails, in the way asked for, while the others wait in a collective."""
    group = Group(timeout_s=member.timeout_s)
    layers = make_layers(group, placement_of(REPLICATED, group.size, np.random.default_rng(0)), "exact", True)
    layer, hidden, experts, weights, _ = batch(0, group.rank, np.random.default_rng(0))
    member.say("the failure")
    try:  # around the first pass too: a fast rank may fail while a slow one is still in it
        layers.forward(layer, hidden, experts, weights)
        if group.rank == 1 and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "is silent":
            group.timeout_s = 1.0  # of an operation that cannot end
        if group.rank == 1 and how == "is silent":
            group._watch.join(member.timeout_s)
            group.check()
        if group.rank == 1 and how == "raises":
            layers.forward(layer, hidden, experts - EXPERTS, weights)
        layers.forward(layer, hidden, experts, weights)
    except (RankFailedError, ConfigError) as error:
        if how == "dies":
            raise
        return f"{type(error).__name__}: {error}"
    return "nothing"
