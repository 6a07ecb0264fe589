"""Copy experts between ranks in a separate thread while steps run.

Messages use a separate process group, so that they do not mix with those of the layers. Both ends may fail, and each
must learn of the other's failure instead of waiting for it:

    receiver ──▶ sender     ready or not (no free staging row)
    sender   ──▶ receiver   a header: whether the weights follow, and their checksum
    sender   ──▶ receiver   the weights

A rank copies in the order of transfers, so that the first unfinished transfer can always proceed. A cancelled copy runs
to its end: gloo cannot abort one.

On a GPU, weights go through host memory with gloo: correct but slower than NCCL would be; not tested.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from typing import Any, NamedTuple

from coterie.engines.optional import dist, torch
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.weights import SlotWeights
from coterie.errors import UnavailableError, check
from coterie.placement.base import HOST
from coterie.placement.migration.rounds import Transfer

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
        self.busy_s = 0.0
        """Seconds spent copying."""
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
        """Return the weights to send, in host memory."""
        return self.weights.block[row].cpu()

    def send(self, weights: Any, to: int) -> None:
        dist.send(weights, to, group=self._messages, tag=WEIGHTS)
        self.group.bytes.sent[MIGRATION] += weights.numel() * weights.element_size()

    # ---------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            start = time.perf_counter()
            error = None
            try:
                self._copy(job)
            except Exception as caught:  # any error rolls the layer back; a lost peer also ends the group
                error = " ".join(str(caught).split()) or type(caught).__name__
            self.busy_s += time.perf_counter() - start
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
        if job.into_row is None:
            raise UnavailableError(job.error)
        sends, checksum = self._receive_numbers(HEADER, source, 2)
        check(sends, f"rank {source} could not send expert {job.transfer.expert}", UnavailableError)
        row = self.weights.block[job.into_row]
        arriving = row if row.device.type == "cpu" else torch.empty_like(row, device="cpu")
        dist.recv(arriving, source, group=self._messages, tag=WEIGHTS)
        check(
            _checksum(arriving) == checksum,
            f"expert {job.transfer.expert} arrived damaged from rank {source}",
            UnavailableError,
        )
        if arriving is not row:
            row.copy_(arriving)

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
