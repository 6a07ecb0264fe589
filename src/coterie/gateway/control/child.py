"""The process of the control loop, as the gateway sees it: start it, talk to it, end it.

The two communicate over a socket pair: when the process ends, the gateway reads end-of-file. When the gateway ends for
any reason, the process is ended too (:func:`coterie.net.processes.leave_to_cleaner`). The process has its own session,
so that Ctrl-C reaches only the gateway.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from coterie.gateway.control.messages import (
    HEAD_BYTES,
    FromLoop,
    ToLoop,
    check_length,
    from_loop,
    pack_message,
    unpack_message,
)
from coterie.net.access import FleetAccess
from coterie.net.processes import leave_to_cleaner, take_from_cleaner

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
        self._process, self._errors = process, errors
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
    def pid(self) -> int:
        return self._process.pid

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
        self._process.terminate()  # SIGTERM at once: the process has nothing to save
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        take_from_cleaner(self._process.pid)
        said = self._errors.read_text(errors="replace").strip()[-LAST_WORDS:] if self._errors.exists() else ""
        how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"{how}: {' '.join(said.split())}" if said else how
