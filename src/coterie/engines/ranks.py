"""Start the processes of one torch.distributed group and fail them together.

The caller's process starts the ranks, hosts the TCP store of their rendezvous, and reads one pipe per rank. A rank
that raises sends its error through the pipe; the pipe of a rank that dies closes. The caller writes either failure
into the store, where :class:`coterie.engines.torch_ep.group.Group` reads it, so that no rank waits for a dead peer.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from coterie.engines.optional import dist, torch
from coterie.errors import UnavailableError, check
from coterie.types import Report

GRACE_S = 2.0
"""Default seconds to wait for the other ranks after the first failure: their errors may show the cause."""
HOST = "127.0.0.1"
"""Address of the TCP store: all ranks run on this machine."""
CAUSE = "coterie/failed"
"""Store key of the reason why the first rank failed."""
FAILED = "coterie/failed/{}"
"""Store key, formatted with a rank, that this rank watches; its value is a copy of the reason under `CAUSE`."""

PRELOADED = ["torch.distributed", "coterie.engines.torch_ep.migration"]
"""Modules that the fork server imports once for all ranks: importing them in each rank would take seconds."""


class _Failure(NamedTuple):
    reason: str
    monotonic_s: float
    """Time of the failure. The earliest failure is the cause; the others follow within milliseconds."""


class _Answer(NamedTuple):
    value: Any


@dataclass(frozen=True, slots=True)
class RankMember:
    """One rank of a group, passed to the function that the rank runs. The process group is initialised."""

    rank: int
    processes: int
    backend: str
    timeout_s: float
    """Timeout of one collective operation, in seconds."""
    channel: Connection

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.rank) if self.backend == "nccl" else torch.device("cpu")

    def say(self, what: str, done: int = 0) -> None:
        """Tell the caller which step starts now: it is reported as progress and named in error messages."""
        self.channel.send((done, what))


def choose_backend(processes: int, backend: str = "auto") -> str:
    """Return "nccl" if there is a CUDA device for each rank, else "gloo" (CPU)."""
    check(torch is not None, "processes of a group need torch: pip install 'coterie[torch]'", UnavailableError)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = dist.is_available() and dist.is_nccl_available() and devices >= processes
    check(
        backend != "nccl" or nccl,
        f"backend 'nccl' needs {processes} CUDA devices and NCCL; torch sees {devices}",
        UnavailableError,
    )
    if nccl and backend != "gloo":
        return "nccl"
    check(dist.is_available() and dist.is_gloo_available(), "this torch was built without gloo", UnavailableError)
    return "gloo"


def run_ranks(
    target: Callable[[RankMember, Any], Any],
    argument: Any,
    processes: int,
    backend: str = "gloo",
    *,
    doing: str,
    timeout_s: float = 300.0,
    grace_s: float = GRACE_S,
    report: Report | None = None,
    steps: int = 0,
) -> list[Any]:
    """Run ``target(member, argument)`` on every rank and return the results, [rank]. Both are pickled.

    Raises UnavailableError, which names the rank that failed first, if a rank fails, dies or has not answered after
    `timeout_s`. `doing` names the failed activity in that message. `report` is called with each step that rank 0
    starts and the total `steps`. A script must call this under ``if __name__ == "__main__":``, since each process
    imports the script again.
    """
    check(timeout_s > 0, f"timeout_s={timeout_s} must be positive")
    backend = choose_backend(processes, backend)
    deadline = time.monotonic() + timeout_s
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    # Half of the total time per operation: ranks that wait for a silent rank fail before the caller gives up.
    run = partial(_process, target, argument, processes, backend, timeout_s / 2, store.port)
    ranks: list[_Rank] = []
    patience_s = 0.0
    try:
        for number in range(processes):
            ranks.append(_Rank(number, run))
        _listen(ranks, deadline, grace_s, store, steps, report or (lambda *_: None))
        if any(rank.answer is None for rank in ranks):
            raise UnavailableError(f"{doing} with {processes} {backend} processes: {_verdict(ranks)}")
        for rank in ranks:
            with contextlib.suppress(OSError):  # the rank has answered: how its process ends does not matter
                rank.channel.send(None)
        patience_s = 5.0
        return [rank.answer.value for rank in ranks if rank.answer is not None]
    finally:
        for rank in ranks:
            rank.end(patience_s)


class _Rank:
    """The caller's handle of one rank's process."""

    def __init__(self, number: int, run: Callable[[int, Connection], None]) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(number, theirs), name=f"coterie-rank-{number}", daemon=True)
        self.process.start()
        theirs.close()  # otherwise the channel would stay open when the process dies
        self.number = number
        self.at: str | None = None
        self.answer: _Answer | None = None
        self.failure: _Failure | None = None
        self.gone = False

    @property
    def where(self) -> str:
        return "before it joined the others" if self.at is None else f"at {self.at}"

    def end(self, patience_s: float) -> None:
        """Wait `patience_s` seconds for the process to end, then kill it: a stopped process does not handle SIGTERM."""
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.channel.close()
        self.process.close()


def _listen(ranks: Sequence[_Rank], deadline: float, grace_s: float, store: Any, steps: int, report: Report) -> None:
    """Wait until every rank has answered, failed or died, or until the deadline."""
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
                if isinstance(message, _Answer):
                    rank.answer = message
                elif isinstance(message, _Failure):
                    rank.failure = message
                else:  # the step that the rank starts now
                    done, rank.at = message
                    if rank.number == 0:
                        report(f"{len(ranks)} processes: {rank.at}", done, steps)
                    continue
            del waiting[rank.channel]
            if rank.answer is None and not troubled:
                troubled, deadline = True, min(deadline, time.monotonic() + grace_s)
                how = f"failed {rank.where}: {rank.failure.reason}" if rank.failure else f"{_death(rank)} {rank.where}"
                announce_failure(store, len(ranks), f"rank {rank.number} {how}")


def announce_failure(store: Any, processes: int, reason: str) -> None:
    """Write the failure where every rank watches. If several failures are announced, all ranks read the first."""
    cause = store.compare_set(CAUSE, "", reason).decode()
    for rank in range(processes):
        store.compare_set(FAILED.format(rank), "", cause)


def _verdict(ranks: Sequence[_Rank]) -> str:
    """Say why there is no result: dead ranks first, since the other ranks then fail for lack of a peer."""
    problems = [f"rank {rank.number} {_death(rank)} {rank.where}" for rank in ranks if rank.gone]
    failed = [(rank.failure.monotonic_s, rank, rank.failure.reason) for rank in ranks if rank.failure]
    failed.sort(key=lambda failure: failure[0])
    problems += [f"rank {rank.number} failed {rank.where}: {reason}" for _, rank, reason in failed]
    silent = [rank for rank in ranks if not (rank.gone or rank.failure or rank.answer)]
    return "; ".join(problems + [f"rank {rank.number} gave no answer in time, {rank.where}" for rank in silent])


def _death(rank: _Rank) -> str:
    rank.process.join(1.0)  # the channel closed a moment ago: the process may still be ending
    code = rank.process.exitcode
    if code is None:
        return "closed its channel"
    hint = "" if rank.at else ' (does the script lack if __name__ == "__main__"?)'
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}{hint}"


def _process(
    target: Callable[[RankMember, Any], Any],
    argument: Any,
    processes: int,
    backend: str,
    timeout_s: float,
    port: int,
    rank: int,
    channel: Connection,
) -> None:
    """Run one rank: join the group, run the target, answer, and stay until all ranks have answered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the caller, which ends its ranks
    member = RankMember(rank, processes, backend, timeout_s, channel)
    try:
        torch.set_num_threads(1)
        if member.device.type == "cuda":
            torch.cuda.set_device(member.device)
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend,
            store=dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=timeout),
            rank=rank,
            world_size=processes,
            timeout=timeout,
            device_id=member.device if member.device.type == "cuda" else None,
        )
        channel.send(_Answer(target(member, argument)))
        channel.recv()  # wait for the caller: leaving now would break the last transfer of a slower rank
    except Exception as error:  # report any error to the caller; the exit of this process tells the other ranks
        channel.send(_Failure(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", time.monotonic()))
        os._exit(1)  # a normal exit would block on operations that still wait for a peer
    dist.destroy_process_group()
