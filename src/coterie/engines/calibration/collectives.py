"""Measure what joins the ranks: all-to-all between all of them, and messages between two.

Every rank is a process of its own: NCCL with one CUDA device each where there are enough, else gloo on the CPU. What
arrives is compared with what was sent, so that a time never stands for a transfer that did not happen.

Wrong for a fabric between machines: all ranks run on this one, and gloo's numbers are those of its loopback. Small
NCCL messages include what a launch from Python costs, which a server that replays CUDA graphs does not pay.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing.connection
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from coterie.costs.cells import CollectiveCell, CopyCell
from coterie.engines.calibration.calibrate import Report
from coterie.errors import ConfigError, UnavailableError, check_at_least, check_one_of

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None

Backend = Literal["auto", "gloo", "nccl"]

SIZES = tuple(1 << power for power in range(12, 25))
"""Bytes to send: 4 KB to 16 MB, from a decode step's tokens to a prefill's."""
REPEATS = 25
TIMEOUT_S = 300.0
"""Seconds for everything, including the start of the processes."""
GRACE_S = 2.0
"""Seconds to wait for the other ranks after the first failure: their errors may tell the cause."""
BURST = 10
"""Calls between two CUDA events, so that the host runs ahead and launches hide behind the transfers."""
POISON = 255
"""Initial value of receiving buffers; no payload contains it."""


class CollectiveMeasurement(msgspec.Struct, frozen=True):
    """Transfers between `world_size` ranks; a cell's `nbytes` is what leaves a rank."""

    cells: tuple[CollectiveCell, ...]
    """All-to-all with even splits. A rank also copies its own share, of nbytes ÷ (ranks - 1), which is not counted."""
    peers: tuple[CopyCell, ...]
    """From rank 0 to rank 1: half of there and back."""
    backend: str
    world_size: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Settings of every worker."""

    processes: int
    backend: str
    sizes: tuple[int, ...]
    repeats: int
    timeout_s: float
    """Seconds per operation: shorter than the whole, so that ranks waiting for a silent one fail."""
    store: str


class _Step(NamedTuple):
    """A worker says what it starts on."""

    done: int
    what: str


class _Failure(NamedTuple):
    reason: str
    monotonic_s: float
    """Time of failure: the first is the cause, the others follow within milliseconds."""


class _Answer(NamedTuple):
    cells: tuple[CollectiveCell, ...]
    peers: tuple[CopyCell, ...]


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

    A size that does not split evenly between the other ranks is rounded down; the cell says what was sent. A script
    must call this under ``if __name__ == "__main__":``, since each process imports the script once more.
    """
    _check(processes, backend, sizes, repeats, timeout_s)
    if torch is None:
        raise UnavailableError("measuring collectives needs torch: pip install 'coterie[torch]'")
    chosen = _choose(processes, backend)
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        store = (Path(folder) / "store").as_uri()
        plan = _Plan(
            processes=processes,
            backend=chosen,
            sizes=tuple(sizes),
            repeats=repeats,
            timeout_s=timeout_s / 2,
            store=store,
        )
        answer = _run(plan, time.monotonic() + timeout_s, report or (lambda *_: None))
    return CollectiveMeasurement(answer.cells, answer.peers, chosen, processes, _note(processes, chosen))


def _check(processes: int, backend: str, sizes: Sequence[int], repeats: int, timeout_s: float) -> None:
    if processes < 2:
        raise ConfigError(f"processes={processes} must be at least 2: a rank alone sends nothing")
    check_one_of(get_args(Backend), backend=backend)
    if not sizes:
        raise ConfigError("sizes must not be empty")
    if min(sizes) < processes - 1:
        raise ConfigError(f"sizes: {min(sizes)} bytes must be at least one for each of {processes - 1} other ranks")
    check_at_least(1, repeats=repeats)
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s} must be positive")


def _choose(processes: int, backend: Backend) -> str:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = dist.is_available() and dist.is_nccl_available() and devices >= processes
    if backend == "nccl" and not nccl:
        raise UnavailableError(f"backend 'nccl' needs {processes} CUDA devices and NCCL; torch sees {devices}")
    if nccl and backend != "gloo":
        return "nccl"
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnavailableError("this torch was built without gloo")
    return "gloo"


def _note(processes: int, backend: str) -> str:
    if backend == "nccl":
        return ""
    cores = os.cpu_count() or 1
    shared = f"; {processes} processes share {cores} cores" if processes > cores else ""
    return f"gloo between processes of one machine, over its loopback{shared}"


class _Rank:
    """A worker process, from the parent's side."""

    def __init__(self, number: int, plan: _Plan) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(
            target=_worker, args=(number, plan, theirs), name=f"coterie-rank-{number}", daemon=True
        )
        self.process.start()
        theirs.close()  # else the channel would stay open when the worker dies
        self.number = number
        self.at: str | None = None
        self.answer: _Answer | None = None
        self.failure: _Failure | None = None
        self.gone = False

    @property
    def where(self) -> str:
        return "before it joined the others" if self.at is None else f"at {self.at}"

    def end(self, patience_s: float) -> None:
        """Leave no process behind. Killed, not asked: a stopped one would not hear."""
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.channel.close()
        self.process.close()


def _run(plan: _Plan, deadline: float, report: Report) -> _Answer:
    ranks: list[_Rank] = []
    patience_s = 0.0
    try:
        for number in range(plan.processes):
            ranks.append(_Rank(number, plan))
        _listen(ranks, deadline, 2 * len(plan.sizes), report)
        answers = [rank.answer for rank in ranks]
        if answers[0] is None or None in answers:
            raise UnavailableError(f"measuring with {plan.processes} {plan.backend} processes: {_verdict(ranks)}")
        for rank in ranks:
            with contextlib.suppress(OSError):  # it has answered: how it ends does not matter
                rank.channel.send(None)
        patience_s = 5.0
        return answers[0]
    finally:
        for rank in ranks:
            rank.end(patience_s)


def _listen(ranks: Sequence[_Rank], deadline: float, total: int, report: Report) -> None:
    """Wait until every rank has answered, failed or died, or time is up."""
    waiting = {rank.channel: rank for rank in ranks}
    troubled = False
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for rank in [rank for channel, rank in waiting.items() if channel in ready]:
            try:
                message = rank.channel.recv()
            except (EOFError, OSError):
                rank.gone = True
            else:
                if isinstance(message, _Step):
                    rank.at = message.what
                    if rank.number == 0:
                        report(f"{len(ranks)} processes: {message.what}", message.done, total)
                    continue
                if isinstance(message, _Answer):
                    rank.answer = message
                else:
                    rank.failure = message
            del waiting[rank.channel]
            if rank.answer is None and not troubled:
                troubled, deadline = True, min(deadline, time.monotonic() + GRACE_S)


def _verdict(ranks: Sequence[_Rank]) -> str:
    """Why there is no result: the dead first, since the others then fail for their lack."""
    found = [f"rank {rank.number} {_death(rank)} {rank.where}" for rank in ranks if rank.gone]
    failed = [
        (rank.failure.monotonic_s, rank.number, rank.where, rank.failure.reason) for rank in ranks if rank.failure
    ]
    found += [f"rank {number} failed {where}: {reason}" for _, number, where, reason in sorted(failed)]
    silent = [rank for rank in ranks if not (rank.gone or rank.failure or rank.answer)]
    found += [f"rank {rank.number} gave no answer in time, {rank.where}" for rank in silent]
    return "; ".join(found)


def _death(rank: _Rank) -> str:
    rank.process.join(1.0)  # its channel closed a moment ago
    code = rank.process.exitcode
    if code is None:
        return "closed its channel"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if rank.at is None:
        return f'ended with exit code {code} (does the script lack if __name__ == "__main__"?)'
    return f"ended with exit code {code}"


def _worker(rank: int, plan: _Plan, channel: Connection) -> None:
    """One rank's process: join, measure, answer, and stay until all have answered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if plan.backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            plan.backend,
            init_method=plan.store,
            rank=rank,
            world_size=plan.processes,
            timeout=datetime.timedelta(seconds=plan.timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        channel.send(_measure(rank, plan, device, channel))
    except Exception as error:  # whatever it is, the parent must hear of it; its ending tells the other ranks
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        channel.send(_Failure(reason, time.monotonic()))
        return
    channel.recv()  # a rank that left now would break the last transfer of a slower one
    dist.destroy_process_group()


def _measure(rank: int, plan: _Plan, device: Any, channel: Connection) -> _Answer:
    cells, peers = [], []
    for done, nbytes in enumerate(plan.sizes):
        channel.send(_Step(done, f"all-to-all of {nbytes:,} bytes"))
        cells.append(_all_to_all(rank, plan, device, nbytes // (plan.processes - 1)))
    for done, nbytes in enumerate(plan.sizes, start=len(plan.sizes)):
        channel.send(_Step(done, f"send and receive of {nbytes:,} bytes"))
        peers.append(_send_receive(rank, plan, device, nbytes))
    return _Answer(tuple(cells), tuple(peers))


def _all_to_all(rank: int, plan: _Plan, device: Any, share: int) -> CollectiveCell:
    others = range(plan.processes)
    sent = torch.cat([payload(rank, to, share) for to in others]).to(device)
    expected = torch.cat([payload(source, rank, share) for source in others])
    received = torch.full_like(sent, POISON)
    us = _timed(lambda: dist.all_to_all_single(received, sent), plan, device, received, expected)
    return CollectiveCell(plan.processes, share * (plan.processes - 1), us)


def _send_receive(rank: int, plan: _Plan, device: Any, nbytes: int) -> CopyCell:
    peer = 1 - rank
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
            received.copy_(expected)  # takes no part, but must meet the others at the barriers

    us = _timed(there_and_back, plan, device, received, expected, apart=rank > 1)
    return CopyCell("peer", nbytes, round(us / 2, 3))


def payload(source: int, to: int, nbytes: int) -> Any:
    """[nbytes] uint8 that counts up from the sender in even places, from the receiver in odd ones.

    So a share that came to the wrong rank or place is seen.
    """
    values = torch.arange(nbytes, dtype=torch.int32)
    values[0::2] += source
    values[1::2] += to
    return values.remainder_(251).to(torch.uint8)


def check_received(received: Any, expected: Any) -> None:
    """Raise if one byte differs."""
    wrong = torch.nonzero(received.cpu() != expected)
    if len(wrong):
        at = int(wrong[0])
        found, right = int(received[at]), int(expected[at])
        raise UnavailableError(f"{len(wrong):,} bytes arrived wrong: byte {at} is {found}, {right} was sent")


def _timed(
    call: Callable[[], Any], plan: _Plan, device: Any, received: Any, expected: Any, apart: bool = False
) -> float:
    """Microseconds of a call: the slowest rank's in each repeat, and the median of these.

    What arrived is checked after the first, untimed call, and again after the last.
    """
    call()
    check_received(received, expected)
    received.fill_(POISON)
    times = torch.zeros(plan.repeats, dtype=torch.float64, device=device)  # [repeat] microseconds
    for repeat in range(plan.repeats):
        dist.barrier()
        took = _clock_us(call, device)
        times[repeat] = 0.0 if apart else took
    dist.all_reduce(times, dist.ReduceOp.MAX)
    check_received(received, expected)
    return round(float(statistics.median(times.tolist())), 3)


def _clock_us(call: Callable[[], Any], device: Any) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(BURST):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / BURST
