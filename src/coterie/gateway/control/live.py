"""The gateway's side of the control loop: runs its process and applies its decisions.

A new fit is read and tested in a thread, then put in force between two requests; running requests keep their workers.
A fit is used only with the router it was made for. When an administrator or a reload sets another router, the loop
restarts with that router. The loop's fits are never saved: after a restart the configured fit is in force.

The gateway and the process communicate over a socket pair: when the process ends, the gateway reads end-of-file. When
the gateway ends for any reason, the process is ended too (:func:`coterie.net.processes.leave_to_cleaner`). The process
has its own session, so that Ctrl-C reaches only the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coterie.errors import CoterieError, InputError, check, check_given
from coterie.gateway.config import ControlSection, WorkerEntry
from coterie.gateway.control.messages import (
    HEAD_BYTES,
    AskKept,
    Connected,
    ControlView,
    FromLoop,
    KeptAnswer,
    MapSeen,
    SentNames,
    SetUp,
    StreamEntry,
    Swapped,
    Told,
    ToLoop,
    Unable,
    UseFit,
    check_length,
    from_loop,
    pack_message,
    unpack_message,
)
from coterie.gateway.exchange.pool import Pool
from coterie.gateway.fleet.spec import RouterSpec, check_spec
from coterie.gateway.watching.logs import Log
from coterie.gateway.watching.metrics import Metrics
from coterie.net.access import FleetAccess
from coterie.net.processes import leave_to_cleaner, take_from_cleaner, temporary_folder
from coterie.routing import RouterFit, routers
from coterie.wire.expert_events import ExpertMap

MODULE = "coterie.gateway.control.process"
END_S = 5.0
"""Seconds between SIGTERM to the process and SIGKILL."""
MOST_UNREAD = 4 << 20
"""Bytes of unread messages above which optional messages to the process are dropped."""
LAST_WORDS = 400
"""Number of last characters of the process's output that are quoted when it ends."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""Environment that limits libraries to one thread: they must not take the cores that requests need."""


class Child:
    """A started process of the control loop."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process, self._errors = process, errors
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, folder: Path, access: FleetAccess) -> Child:
        """Start the process; its output goes to a file in `folder`. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = await asyncio.to_thread(cls._spawned, theirs.fileno(), folder, access)
            child._reader, child._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return child

    @classmethod
    def _spawned(cls, file: int, folder: Path, access: FleetAccess) -> Child:
        errors = folder / "process.err"
        with errors.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ONE_THREAD, **access.environment},
                pass_fds=(file,),
                start_new_session=True,
            )
        leave_to_cleaner(process.pid)
        return cls(process, errors)

    @property
    def is_behind(self) -> bool:
        """Whether the process reads so slowly that optional messages should be dropped."""
        return self._writer.transport.get_write_buffer_size() > MOST_UNREAD

    def send(self, message: ToLoop) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack_message(message))

    async def receive(self) -> FromLoop | None:
        """Return the next message; None when the process has ended. Raises InputError for an invalid message."""
        try:
            head = await self._reader.readexactly(HEAD_BYTES)
            data = await self._reader.readexactly(check_length(int.from_bytes(head, "big")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return unpack_message(from_loop, data)

    def hang_up(self) -> None:
        """Close the socket, which makes the process end and `receive` return None."""
        self._writer.close()

    async def ended(self) -> str:
        """End the process if it still runs, wait for it, and return a description of how it ended."""
        self.hang_up()
        self.process.terminate()  # SIGTERM at once: the process has nothing to save
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> str:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        take_from_cleaner(self.process.pid)
        said = self._errors.read_text(errors="replace").strip()[-LAST_WORDS:] if self._errors.exists() else ""
        how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"{how}: {' '.join(said.split())}" if said else how


ANSWER_S = 60.0
"""Seconds that the process has to send kept requests: it may be compiling or planning."""
EVENTS = 512
"""Number of decisions of the loop that are kept."""
PAUSES_S = (0.5, 2.0, 10.0, 30.0)
"""Seconds before the first, second, … restart of a process that ended; later restarts use the last value."""
STEADY_S = 60.0
"""Seconds of running after which a process counts as stable: the next pause is the shortest again."""
PLANS = ("plan_made", "plan_written", "plan_confirmed", "plan_not_taken")
LOGGED = frozenset(("refit_taken", "refit_failed", "swap_failed", "fall_back", *PLANS))
"""Kinds of decisions that get a log line."""
REFITS = {"refit_taken": "taken", "refit_kept": "kept", "refit_failed": "failed"}


def uses_fit(spec: RouterSpec) -> bool:
    """Whether a router is made from a fit."""
    return spec.fit is not None and spec.router in routers and "fitted" in routers.parameters(spec.router)


def is_wanted(section: ControlSection, spec: RouterSpec, workers: Sequence[WorkerEntry]) -> bool:
    """Whether a gateway with this config, router and these workers runs the loop."""
    if section.enabled is not None:
        return section.enabled
    heard = [worker for worker in workers if worker.expert_events is not None]
    return bool(heard) and (uses_fit(spec) or any(worker.placement_rank is not None for worker in heard))


class LiveControl:
    """Runs the control loop for one pool. Construct it in a running event loop; then `start`, `close`."""

    def __init__(
        self,
        section: ControlSection,
        pool: Pool,
        workers: Callable[[], Sequence[WorkerEntry]],
        access: FleetAccess,
        metrics: Metrics,
        log: Log,
        follow: Callable[[str, ExpertMap], None],
    ) -> None:
        """`pool` is the pool of decode workers; `workers` returns all workers of the fleet.

        `follow` is called with a worker and the expert map that it reports.
        """
        self.section = section
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        """Decisions of the loop, newest last."""
        self.counts: Counter[str] = Counter()
        """Decisions by kind."""
        self.problem: str | None = "the loop's process has not told anything yet"
        """Reason why the loop does not run; None while it runs."""
        self._pool, self._workers, self._access = pool, workers, access
        self._metrics, self._log, self._follow = metrics, log, follow
        self._stack = contextlib.ExitStack()
        """Removes the folder at the end, if it is temporary."""
        self.folder = (
            self._stack.enter_context(temporary_folder("coterie-control-"))
            if section.folder is None
            else Path(section.folder)
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._configured: str | None = pool.spec.fit
        """Path of the router's configured fit, which a fit of the loop may have replaced."""
        self._own: set[str] = set()
        """Paths of fits that the loop has put in force."""
        self._generation = 0
        self._setup: SetUp | None = None
        self.child: Child | None = None
        self.connected: frozenset[str] | None = None
        """Workers whose expert events have a connection; None while nothing reads them."""
        self._told: bytes = b""
        self._view: ControlView | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._swaps: set[asyncio.Task[None]] = set()
        self._sent: list[tuple[str, str]] = []
        self._asked: deque[asyncio.Future[bytes]] = deque()
        """Answers that the process owes, in order of asking."""

    @property
    def view(self) -> ControlView | None:
        """Latest snapshot that the loop sent; None before the first."""
        if self._told:
            self._view, self._told = msgspec.msgpack.decode(self._told, type=ControlView), b""
        if self._view is not None:
            self._view.events = list(self.events)
        return self._view

    def as_configured(self, spec: RouterSpec) -> RouterSpec:
        """Return the spec with the configured fit in place of a fit of the loop, which does not outlive the gateway."""
        return msgspec.structs.replace(spec, fit=self._configured) if spec.fit in self._own else spec

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="control loop")
        self.refresh(self.section)

    async def close(self) -> None:
        """End the process, and remove its folder if that is temporary."""
        self._closing.set()
        if self.child is not None:
            self.child.hang_up()
        if self._task is not None:
            await self._task
        await asyncio.gather(*self._swaps, return_exceptions=True)
        await asyncio.to_thread(self._stack.close)

    def refresh(self, section: ControlSection) -> None:
        """Apply changes of workers, router and settings; a changed router or setting restarts the loop."""
        self.section = section
        spec = self._pool.spec
        if not uses_fit(spec) and self._setup is not None:
            spec = self._setup.spec  # no fit to swap; the loop continues for the previous router
        if self.as_configured(spec) is spec:
            self._configured = spec.fit
        before = self._setup
        if before is None or (before.spec, before.section) != (spec, section):
            self._generation += 1
            self.connected = None
        self._setup = self._wanted(spec)
        if self._setup != before:
            self._send(self._setup)

    def sent(self, name: str, worker: str) -> None:
        """Note that a request is about to be sent to a worker: the loop counts events of such requests only."""
        if not self._sent:
            asyncio.get_running_loop().call_soon(self._tell_sent)  # one message for all of this loop iteration
        self._sent.append((name, worker))

    def _tell_sent(self) -> None:
        requests, self._sent = self._sent, []
        if self.child is not None and not self.child.is_behind:
            self.child.send(SentNames(requests))

    async def kept(self) -> bytes:
        """Return the requests that the process keeps, as in :class:`KeptAnswer`; empty if there are none."""
        if self.child is None:
            return b""
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self.child.send(AskKept())
        await asyncio.wait([answer], timeout=ANSWER_S)
        return answer.result() if answer.done() else b""

    def _wanted(self, spec: RouterSpec) -> SetUp:
        rows = {worker: row for row, worker in enumerate(self._pool.ids) if worker is not None}
        return SetUp(
            generation=self._generation,
            spec=spec,
            rows=max(rows.values(), default=0) + 1,
            section=self.section,
            folder=str(self.folder),
            streams=[
                StreamEntry(
                    worker.id, worker.expert_events, worker.secure_events, worker.placement_rank, rows.get(worker.id)
                )
                for worker in self._workers()
                if worker.expert_events is not None
            ],
        )

    def _send(self, message: SetUp | Swapped) -> None:
        if self.child is not None:
            self.child.send(message)

    # -------------------------------------------------------------------------------------------------------- process

    async def _run(self) -> None:
        """Keep the process running, restarting it after failures, until the gateway ends."""
        ended = 0
        while not self._closing.is_set():
            started = time.monotonic()
            how = await self._session()
            if self._closing.is_set():
                return
            ended = 0 if time.monotonic() - started > STEADY_S else ended + 1
            self._metrics.control_restarts.inc()
            self.problem = f"the loop's process {how}"
            self._log.warning(f"{self.problem}; it is started again")
            pause_s = PAUSES_S[min(ended, len(PAUSES_S)) - 1] if ended else PAUSES_S[0]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)

    async def _session(self) -> str:
        """Run one process until it ends; return a description of how it ended."""
        try:
            child = await Child.start(self.folder, self._access)
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        self.child, problem = child, ""
        try:
            if self._setup is not None:  # with the fit in force, which an earlier process may have made
                self._setup = msgspec.structs.replace(self._setup, spec=self._pool.spec)
                child.send(self._setup)
            while not self._closing.is_set() and (message := await child.receive()) is not None:
                self._take(message)
        except InputError as error:
            problem = str(error)
        finally:
            self.child = self.connected = None
            while self._asked:
                self._asked.popleft().set_result(b"")
            how = await child.ended()
        return problem or how

    def _take(self, message: FromLoop) -> None:
        if isinstance(message, KeptAnswer):
            self._asked.popleft().set_result(message.kept)
        elif message.generation != self._generation:
            return
        elif isinstance(message, Told):
            self._learn(message)
        elif isinstance(message, UseFit):
            task = asyncio.create_task(self._swap(message), name=f"swap to fit {message.fit}")
            self._swaps.add(task)
            task.add_done_callback(self._swaps.discard)
        elif isinstance(message, MapSeen):
            self._follow(message.worker, message.map)
        elif isinstance(message, Connected):
            self.connected = frozenset(message.workers)
        elif isinstance(message, Unable):
            self.problem = message.problem
            self._log.warning(f"the control loop cannot run: {message.problem}")

    def _learn(self, told: Told) -> None:
        metrics, self.problem = self._metrics, None
        for name, count in told.counters.items():
            source, _, reason = name.partition(".")
            (metrics.control_ignored if source == "ignored" else metrics.control_stream).inc(reason, by=count)
        for event in told.events:
            kind = str(event["kind"])
            self.events.append(event)
            self.counts[kind] += 1
            metrics.control_events.inc(kind)
            if kind in REFITS:
                metrics.control_refits.inc(REFITS[kind])
            if kind in LOGGED:
                self._log.control(kind, str(event["reason"]), event.get("values", {}))
        if told.fit_s is not None:
            metrics.control_fit_seconds.set(told.fit_s)
        if told.view:
            self._told = told.view

    async def _swap(self, asked: UseFit) -> None:
        """Put a fit in force. It is read and tested in a thread, so that requests are not delayed."""
        before = self._pool.spec
        spec = msgspec.structs.replace(before, fit=asked.path)
        try:
            check(uses_fit(spec), f"router {spec.router!r} uses no fit", InputError)
            fitted = await asyncio.to_thread(_tried, spec, max(1, len(self._pool.members)))
            check(
                self._pool.spec == before, f"another router was set meanwhile: {self._pool.spec.router!r}", InputError
            )
            self._pool.reload(spec, {"fitted": fitted})
        except CoterieError as error:
            self._send(Swapped(asked.generation, asked.fit, str(error)))
            return
        self._own.add(asked.path)
        self._metrics.control_swaps.inc()
        if self._setup is not None:
            self._setup = msgspec.structs.replace(self._setup, spec=spec)
        self._send(Swapped(asked.generation, asked.fit))


def _tried(spec: RouterSpec, workers: int) -> RouterFit:
    """Load the fit of a router, make the router from it and test it; return the fit."""
    fitted = RouterFit.load(check_given(spec.fit, f"router {spec.router!r} uses no fit"))
    check_spec(spec, {"fitted": fitted}, workers)
    return fitted
