"""Live migration: carry out a schedule between steps, with the same state machine on every rank.

Every rank runs its own :class:`~coterie.placement.migration.migrator.Migrator` on the same events in the same order, so
that all have the same state without a coordinator. Only the receiving rank knows when a copy has ended. Before each
step the ranks therefore exchange the ended copies in one small gather, and then switch, roll back or go on together.
Copies run in the background (:mod:`.mover`); a step uses new weights only if all ranks switched before it.

If a rank dies, the whole group fails: torch.distributed cannot go on with a smaller group. Weights that had not been
switched were never used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from coterie.engines.optional import torch
from coterie.engines.torch_ep.layer import ExpertParallelLayers
from coterie.engines.torch_ep.mover import MIGRATION, Ended, Mover
from coterie.errors import check
from coterie.placement.migration.migrator import (
    BeginTransfer,
    Cancel,
    EndStep,
    Event,
    FreeOld,
    FreeStaging,
    MigrationOutcome,
    Migrator,
    RolledBack,
    RunStep,
    StartStep,
    SwitchLayer,
    TransferDone,
    TransferFailed,
)
from coterie.placement.migration.rounds import Schedule, Transfer
from coterie.types import Placement

REPORTS = "migration reports"
"""Byte counter of the gathers before steps."""
REASON_WORDS = 14
"""Length of the failure reason in a report, in words of 8 bytes."""


class MigrationReport(NamedTuple):
    """Result of a migration on this rank."""

    switches: int
    rolled_back: tuple[RolledBack, ...]
    stopped: str | None
    steps: int
    """Number of steps that ran during the migration."""
    sent_bytes: int
    """Bytes of weights that this rank sent."""
    stall_s: float
    """Seconds that the migration took between steps, which delay the steps."""
    copy_s: float
    """Seconds of copying in the background."""


class LiveMigration:
    """Execution of one schedule. All ranks create it, and run its steps, together."""

    def __init__(self, layers: ExpertParallelLayers, schedule: Schedule, mover: Mover) -> None:
        weights = layers.weights
        check(
            schedule.limits.expert_bytes == weights.expert_bytes,
            f"the schedule's expert_bytes={schedule.limits.expert_bytes:g} must be the weights' {weights.expert_bytes}",
        )
        check(
            len(weights.free) >= schedule.staging_experts,
            f"the weights have staging for {len(weights.free)} experts; "
            f"the schedule may use {schedule.staging_experts}",
        )
        self._layers, self._mover, self._schedule = layers, mover, schedule
        self._migrator = Migrator(schedule)
        self._staged: dict[int, int | None] = {}  # transfer → staging row of this rank
        self._old: dict[int, list[int]] = {}  # switch → rows of this rank that the switch replaced
        self._steps, self._stall_s = 0, 0.0
        self._sent_before, self._busy_before = layers.group.bytes.sent[MIGRATION], mover.busy_s
        self._carry_out(self._migrator.start())

    @property
    def over(self) -> bool:
        """Whether the migration has ended and holds no staging rows."""
        return self._migrator.is_over(self._state)

    @property
    def placement(self) -> Placement:
        """Current placement of the experts."""
        current = self._schedule.current
        return Placement(np.array(self._state.rows, np.int32), current.num_ranks, current.num_experts)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Wrap the forward pass of a step: process ended copies first, then run the pass with one unchanging map."""
        group = self._layers.group
        start = time.perf_counter()
        with group.guard("migration"):
            if not self.over:
                for event in self._news():
                    self._handle(event)
            self._steps += 1
            self._handle(StartStep(self._steps))
        self._stall_s += time.perf_counter() - start
        yield
        start = time.perf_counter()
        with group.guard("migration"):
            self._handle(EndStep(self._steps))
        self._stall_s += time.perf_counter() - start

    def cancel(self, reason: str) -> None:
        """Roll back what has not switched; all ranks must call this between the same steps."""
        self._handle(Cancel(reason))

    def report(self) -> MigrationReport:
        state = self._state
        return MigrationReport(
            switches=state.version,
            rolled_back=state.rolled_back,
            stopped=state.stopped,
            steps=self._steps,
            sent_bytes=self._layers.group.bytes.sent[MIGRATION] - self._sent_before,
            stall_s=self._stall_s,
            copy_s=self._mover.busy_s - self._busy_before,
        )

    # ---------------------------------------------------------------------------------------------------------- events

    def _news(self) -> list[Event]:
        """Return the copies that have ended on any rank, the same on every rank and in the same order."""
        limit = self._schedule.staging_experts
        mine = torch.zeros((limit, 2 + REASON_WORDS), dtype=torch.int64, device=self._layers.group.device)
        for place, ended in enumerate(self._mover.ended(limit)):
            mine[place] = torch.from_numpy(_encode(ended))
        gathered = self._layers.group.all_gather(mine, REPORTS).cpu().numpy()
        news = [_decode(words) for rank in gathered for words in rank if words[0]]
        return [TransferDone(e.id) if e.error is None else TransferFailed(e.id, e.error) for e in news]

    def _handle(self, event: Event) -> None:
        self._carry_out(self._migrator.handle(self._state, event))

    # -------------------------------------------------------------------------------------------------------- commands

    def _carry_out(self, outcome: MigrationOutcome) -> None:
        self._state, weights = outcome.state, self._layers.weights
        for command in outcome.commands:
            match command:
                case RunStep():
                    self._layers.map = self._layers.step_map(command.rows)
                case BeginTransfer(transfer):
                    self._begin(transfer)
                case SwitchLayer(switch, layer):
                    self._switch(switch, layer)
                case FreeStaging(id):
                    row = self._staged.pop(id, None)
                    weights.free += [] if row is None else [row]
                case FreeOld(switch):
                    weights.free += self._old.pop(switch)

    def _begin(self, transfer: Transfer) -> None:
        """Start a transfer on its source and target ranks; other ranks do nothing."""
        rank, per_rank = self._layers.group.rank, self._schedule.current.slots_per_rank
        to = transfer.slot // per_rank
        if rank not in (transfer.source, to):
            return
        from_row = None
        if rank == transfer.source:
            own = self._state.rows[transfer.layer][rank * per_rank : (rank + 1) * per_rank]
            from_row = self._layers.weights.rows[transfer.layer][own.index(transfer.expert)]
        row = self._mover.begin(transfer, to, from_row)
        if rank == to:
            self._staged[transfer.id] = row

    def _switch(self, switch: int, layer: int) -> None:
        first = self._layers.group.rank * self._schedule.current.slots_per_rank
        transfers = self._schedule.switches[switch].transfers
        rows = {transfer.slot - first: self._staged.pop(transfer.id, None) for transfer in transfers}
        arriving = {slot: row for slot, row in rows.items() if row is not None}
        self._old[switch] = self._layers.weights.replace(layer, arriving)


def _encode(ended: Ended) -> np.ndarray:
    """Encode as 8-byte words: transfer id + 1, whether it failed, and the reason."""
    text = (ended.error or "").encode()[: 8 * REASON_WORDS].ljust(8 * REASON_WORDS, b"\0")
    return np.concatenate([[ended.id + 1, ended.error is not None], np.frombuffer(text, np.int64)])


def _decode(words: Any) -> Ended:
    return Ended(int(words[0]) - 1, words[2:].tobytes().rstrip(b"\0").decode(errors="ignore") if words[1] else None)
