"""Measure the links between ranks: all-to-all between all ranks, and messages between two.

Every rank is a separate process: NCCL with one CUDA device per rank if there are enough, else gloo on the CPU. The
received bytes are compared with the sent ones, so that no time is reported for a failed transfer.

The times do not hold for a fabric between machines: all ranks run on this machine, and gloo uses its loopback. Small
NCCL messages include the launch overhead of Python, which a server that replays CUDA graphs does not pay.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec

from coterie.costs.cells import CollectiveCell, CopyCell
from coterie.engines.calibration.timing import event_us
from coterie.engines.optional import dist, torch
from coterie.engines.ranks import RankMember, choose_backend, run_ranks
from coterie.errors import UnavailableError, check, check_at_least, check_one_of
from coterie.types import Report

Backend = Literal["auto", "gloo", "nccl"]

SIZES = tuple(1 << power for power in range(12, 25))
"""Message sizes in bytes: 4 KB to 16 MB, from the tokens of a decode step to those of a prefill."""
REPEATS = 25
TIMEOUT_S = 300.0
"""Timeout of the whole measurement in seconds, including the start of the processes."""
BURST = 10
"""Calls between two CUDA events, so that the host runs ahead and launch overhead hides behind the transfers."""
POISON = 255
"""Initial value of receiving buffers; no payload contains it."""


class CollectiveMeasurement(msgspec.Struct, frozen=True):
    """Transfers between `world_size` ranks; a cell's `nbytes` is the number of bytes that leave a rank."""

    cells: tuple[CollectiveCell, ...]
    """All-to-all with even splits. `nbytes` leaves out the nbytes ÷ (ranks - 1) that a rank copies to itself."""
    peers: tuple[CopyCell, ...]
    """Messages from rank 0 to rank 1: half of the round trip."""
    backend: str
    world_size: int
    note: str = ""


def measure_collectives(
    processes: int,
    backend: Backend = "auto",
    sizes: Sequence[int] = SIZES,
    report: Report | None = None,
    *,
    repeats: int = REPEATS,
    timeout_s: float = TIMEOUT_S,
) -> CollectiveMeasurement:
    """Time all-to-all between `processes` ranks, and send and receive between the first two, for each size.

    A size that does not split evenly between the other ranks is rounded down; the cell holds the size sent. A script
    must call this under ``if __name__ == "__main__":``, since each process imports the script again.
    """
    _check(processes, backend, sizes, repeats)
    chosen = choose_backend(processes, backend)
    cells, peers = run_ranks(
        _measure,
        (tuple(sizes), repeats),
        processes,
        chosen,
        doing="measuring",
        timeout_s=timeout_s,
        report=report,
        steps=2 * len(sizes),
    )[0]
    return CollectiveMeasurement(cells, peers, chosen, processes, _note(processes, chosen))


def _check(processes: int, backend: str, sizes: Sequence[int], repeats: int) -> None:
    check(processes >= 2, f"processes={processes} must be at least 2: a rank alone sends nothing")
    check_one_of(get_args(Backend), backend=backend)
    check(sizes, "sizes must not be empty")
    check(
        min(sizes) >= processes - 1,
        f"sizes: {min(sizes)} bytes must be at least one for each of {processes - 1} other ranks",
    )
    check_at_least(1, repeats=repeats)


def _note(processes: int, backend: str) -> str:
    if backend == "nccl":
        return ""
    cores = os.cpu_count() or 1
    shared = f"; {processes} processes share {cores} cores" if processes > cores else ""
    return f"gloo between processes of one machine, over its loopback{shared}"


def _measure(
    member: RankMember, plan: tuple[tuple[int, ...], int]
) -> tuple[tuple[CollectiveCell, ...], tuple[CopyCell, ...]]:
    (sizes, repeats), cells, peers = plan, [], []
    for done, nbytes in enumerate(sizes):
        member.say(f"all-to-all of {nbytes:,} bytes", done)
        cells.append(_all_to_all(member, repeats, nbytes // (member.processes - 1)))
    for done, nbytes in enumerate(sizes, start=len(sizes)):
        member.say(f"send and receive of {nbytes:,} bytes", done)
        peers.append(_send_receive(member, repeats, nbytes))
    return tuple(cells), tuple(peers)


def _all_to_all(member: RankMember, repeats: int, share: int) -> CollectiveCell:
    sent = torch.cat([payload(member.rank, to, share) for to in range(member.processes)]).to(member.device)
    expected = torch.cat([payload(source, member.rank, share) for source in range(member.processes)])
    received = torch.full_like(sent, POISON)
    return CollectiveCell(
        member.processes,
        share * (member.processes - 1),
        _timed(lambda: dist.all_to_all_single(received, sent), repeats, received, expected),
    )


def _send_receive(member: RankMember, repeats: int, nbytes: int) -> CopyCell:
    rank, peer, device = member.rank, 1 - member.rank, member.device
    sent, expected = payload(rank, peer, nbytes).to(device), payload(peer, rank, nbytes)
    received = torch.full_like(sent, POISON)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(sent, peer)
            dist.recv(received, peer)
        elif rank == 1:
            dist.recv(received, peer)
            dist.send(sent, peer)
        else:
            received.copy_(expected)  # this rank does not transfer, but must reach the barriers with the others

    us = _timed(there_and_back, repeats, received, expected, apart=rank > 1)
    return CopyCell("peer", nbytes, round(us / 2, 3))


def payload(source: int, to: int, nbytes: int) -> Any:
    """Return [nbytes] uint8 that count up from the sender's rank at even indices and the receiver's at odd ones.

    A share that arrives at the wrong rank or offset is therefore detected.
    """
    values = torch.arange(nbytes, dtype=torch.int32)
    values[0::2] += source
    values[1::2] += to
    return values.remainder_(251).to(torch.uint8)


def check_received(received: Any, expected: Any) -> None:
    """Raise UnavailableError if any byte differs."""
    wrong = torch.nonzero(received.cpu() != expected)
    if len(wrong):
        at = int(wrong[0])
        raise UnavailableError(
            f"{len(wrong):,} bytes arrived wrong: byte {at} is {int(received[at])}, {int(expected[at])} was sent"
        )


def _timed(call: Callable[[], Any], repeats: int, received: Any, expected: Any, apart: bool = False) -> float:
    """Return the microseconds of a call: the median over repeats of the slowest rank's time.

    The received bytes are checked after the first, untimed call and after the last. The time of a rank that is
    `apart` does not count.
    """
    call()
    check_received(received, expected)
    received.fill_(POISON)
    times = torch.zeros(repeats, dtype=torch.float64, device=received.device)  # [repeat] microseconds
    for repeat in range(repeats):
        dist.barrier()
        times[repeat] = _clock_us(call, received.device) * (not apart)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    check_received(received, expected)
    return round(float(statistics.median(times.tolist())), 3)


def _clock_us(call: Callable[[], Any], device: Any) -> float:
    if device.type == "cuda":
        return event_us(lambda: [call() for _ in range(BURST)]) / BURST
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6
