"""Live migration: carry out a schedule between steps, with the same state machine on every rank.

Every rank runs its own :class:`~coterie.placement.migration.migrator.Migrator` on the same events in the same order, so
that all have the same state without a coordinator. Only the receiving rank knows when a copy has ended. Before each
step the ranks therefore exchange the ended copies in one small gather, and then switch, roll back or go on together.
Copies run in the background; a step uses new weights only if all ranks switched before it.

If a rank dies, the whole group fails: torch.distributed cannot go on with a smaller group. Weights that had not been
switched were never used.

Experts are copied between ranks in a separate thread. Messages use a separate process group, so that they do not mix
with those of the layers. Both ends may fail, and each must learn of the other's failure instead of waiting for it:

    receiver ──▶ sender     ready or not (no free staging row)
    sender   ──▶ receiver   a header: whether the weights follow, and their checksum
    sender   ──▶ receiver   the weights

A rank copies in the order of transfers, so that the first unfinished transfer can always proceed. A cancelled copy runs
to its end: gloo cannot abort one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from coterie.engines.optional import dist, torch
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.layer import ExpertParallelLayers, SlotWeights
from coterie.errors import UnavailableError, check
from coterie.placement import HOST, Schedule, Transfer
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
from coterie.types import Placement

READY, HEADER, WEIGHTS = range(3)
"""Message tags."""
MIGRATION = "migration"
"""Byte counter of sent weights."""


class Ended(NamedTuple):
    """A finished or failed copy to this rank."""

    id: int
    error: str | None


class _Job(NamedTuple):
    transfer: Transfer
    to: int
    from_row: int | None
    """Row of the weights on the sending rank."""
    into_row: int | None
    """Staging row on the receiving rank; None if none was free."""
    error: str


class Mover:
    """Copies experts for any number of migrations. One per rank; all ranks create it at the same time."""

    def __init__(self, group: Group, weights: SlotWeights) -> None:
        self.group, self.weights = group, weights
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._messages = dist.new_group(backend="gloo")
        self._thread = threading.Thread(target=self._work, name="coterie-mover", daemon=True)
        self._thread.start()

    def begin(self, transfer: Transfer, to: int, from_row: int | None) -> int | None:
        """Queue this rank's part of a copy to rank `to`; return the row that is filled on this rank, or None."""
        into_row, error = None, ""
        if to == self.group.rank:
            try:
                into_row = self.stage(transfer)
            except Exception as caught:  # sent to the sender, and to all ranks through `ended`
                error = f"rank {to} has no staging: {caught}"
        self._jobs.put(_Job(transfer, to, from_row, into_row, error))
        return into_row

    def ended(self, limit: int) -> list[Ended]:
        """Return the copies to this rank that have ended since the last call, at most `limit`."""
        return [self._ended.get() for _ in range(min(limit, self._ended.qsize()))]

    def close(self) -> None:
        """End the thread after the queued copies."""
        self._jobs.put(None)
        self._thread.join()

    # ------------------------------------------------------------------------------------------------- what may fail

    def stage(self, transfer: Transfer) -> int:  # noqa: ARG002  a mover may stage by expert
        """Return a free row for arriving weights."""
        return self.weights.free.pop()

    def read(self, transfer: Transfer, row: int) -> Any:  # noqa: ARG002
        """Return the weights to send."""
        return self.weights.block[row]

    def send(self, weights: Any, to: int) -> None:
        dist.send(weights, to, group=self._messages, tag=WEIGHTS)
        self.group.sent_bytes[MIGRATION] += weights.numel() * weights.element_size()

    # ---------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = None
            try:
                self._copy(job)
            except Exception as caught:  # any error rolls the layer back; a lost peer also ends the group
                error = " ".join(str(caught).split()) or type(caught).__name__
            if job.to == self.group.rank:
                self._ended.put(Ended(job.transfer.id, error))

    def _copy(self, job: _Job) -> None:
        transfer = job.transfer
        if transfer.source not in (HOST, job.to):
            (self._receive if job.to == self.group.rank else self._send)(job)
        elif job.into_row is None:
            raise UnavailableError(job.error)
        elif transfer.source == HOST:
            self.weights.fill(job.into_row, transfer.layer, transfer.expert)
        else:
            self.weights.block[job.into_row].copy_(self.weights.block[job.from_row])

    def _receive(self, job: _Job) -> None:
        source = job.transfer.source
        self._send_numbers(READY, source, job.into_row is not None)
        check(job.into_row is not None, job.error, UnavailableError)
        sends, checksum = self._receive_numbers(HEADER, source, 2)
        check(sends, f"rank {source} could not send expert {job.transfer.expert}", UnavailableError)
        row = self.weights.block[job.into_row]
        dist.recv(row, source, group=self._messages, tag=WEIGHTS)
        check(
            _checksum(row) == checksum,
            f"expert {job.transfer.expert} arrived damaged from rank {source}",
            UnavailableError,
        )

    def _send(self, job: _Job) -> None:
        if not self._receive_numbers(READY, job.to, 1)[0]:
            return
        try:
            weights = self.read(job.transfer, job.from_row if job.from_row is not None else -1)
        except Exception:  # the receiver reports the failure
            self._send_numbers(HEADER, job.to, 0, 0)
            return
        self._send_numbers(HEADER, job.to, 1, _checksum(weights))
        self.send(weights, job.to)

    def _send_numbers(self, tag: int, to: int, *numbers: int) -> None:
        dist.send(torch.tensor(numbers, dtype=torch.int64), to, group=self._messages, tag=tag)

    def _receive_numbers(self, tag: int, source: int, count: int) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64)
        dist.recv(numbers, source, group=self._messages, tag=tag)
        return [int(number) for number in numbers.tolist()]


def _checksum(weights: Any) -> int:
    return zlib.crc32(weights.view(torch.uint8).numpy())


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
        self._sent_before = layers.group.sent_bytes[MIGRATION]
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
            sent_bytes=self._layers.group.sent_bytes[MIGRATION] - self._sent_before,
            stall_s=self._stall_s,
        )

    # ---------------------------------------------------------------------------------------------------------- events

    def _news(self) -> list[Event]:
        """Return the copies that have ended on any rank, the same on every rank and in the same order."""
        limit = self._schedule.staging_experts
        mine = torch.zeros((limit, 2 + REASON_WORDS), dtype=torch.int64)
        for place, ended in enumerate(self._mover.ended(limit)):
            mine[place] = torch.from_numpy(_encode(ended))
        gathered = self._layers.group.all_gather(mine, REPORTS).numpy()
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
