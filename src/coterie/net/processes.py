"""Servers as child processes: start one, wait until it answers, end it and all that it started.

For engines and workers: a server is a command, a URL whose ``/health`` answers 200, and a log file for its output. A
server that ends before it is ready raises with its first traceback and the end of the log.

Servers and temporary folders do not outlive this process, even if it is killed: they are left to a small process
(:mod:`coterie.net.cleaner`) that sees its end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from coterie.errors import ConfigError, UnavailableError
from coterie.net.http_client import healthy

POLL_S = 0.05
START_S = 120.0
"""Seconds within which a server must answer: vLLM takes 30 to 90 s on two cores."""
STOP_S = 20.0
"""Seconds between asking a server to end and killing it."""
LOG_LINES = 40
"""Lines of the log's first traceback, and of its end, in an error."""


LOWEST_PORT = 10_000
"""Ports below it may be those of services."""
TRIES = 1_000
_held: dict[int, int] = {}
"""Port that `free_port` returned → file descriptor: while that is open, no other process is given the port."""


def free_port(host: str = "127.0.0.1") -> int:
    """A free TCP port for a server that starts later, returned only once while this process lives.

    It is outside the range from which the system gives ports to connections, as one of those would take it before a
    server that loads for ten seconds listens; and on Linux no other process's `free_port` returns it.
    """
    end = _first_of_system()
    if end < LOWEST_PORT + TRIES:  # the system gives nearly all of them
        end = 65_536
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randrange(LOWEST_PORT, end)
        if port not in _held and _is_free(host, port) and _hold(port):
            return port
    raise UnavailableError(f"none of {TRIES:,} ports of {host} from {LOWEST_PORT} to {end - 1} is free")


def _first_of_system() -> int:
    """First port that the system gives to connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        return 49_152


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _hold(port: int) -> bool:
    """False if another process holds it. The name is of the network namespace, as ports are."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":  # others have no names without a file
            holder.bind(f"\0coterie-port-{port}")
    except OSError:
        holder.close()
        return False
    _held[port] = holder.detach()  # kept until the process ends
    return True


_to_cleaner: int | None = None
"""Pipe to the process that cleans up after this one; None until it is needed."""


def leave_to_cleaner(left: int | Path) -> None:
    """End a process group, or remove a folder, when this process ends, whatever ends it."""
    global _to_cleaner
    if _to_cleaner is None:
        reading, _to_cleaner = os.pipe()  # no other child inherits the end that is written to
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("cleaner.py"))],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
            setpgroup=0,  # Ctrl-C is for this process, not for the cleaner
        )
        os.close(reading)
    _tell_cleaner("+", left)


def take_from_cleaner(left: int | Path) -> None:
    """The group has ended, or the folder is removed."""
    _tell_cleaner("-", left)


def _tell_cleaner(sign: str, left: int | Path) -> None:
    line = f"{sign}{json.dumps(left if isinstance(left, int) else str(left))}\n"
    if _to_cleaner is not None:
        with contextlib.suppress(OSError):  # someone ended the cleaner
            os.write(_to_cleaner, line.encode())


@contextlib.contextmanager
def temporary_folder(prefix: str = "coterie-") -> Iterator[Path]:
    """A private folder for the block; removed even if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        leave_to_cleaner(Path(name))
        try:
            yield Path(name)
        finally:
            take_from_cleaner(Path(name))


class ServerProcess:
    """A server's process, in its own process group so that its children end with it.

    >>> with ServerProcess(argv, "http://127.0.0.1:8100", Path("worker.log")) as server:  # doctest: +SKIP
    ...     ask(server.url)
    """

    def __init__(
        self, argv: Sequence[str | os.PathLike[str]], url: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """`env` is added to this process's environment; output is appended to `log`."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"url={url!r} must begin with http:// or https://")
        self.argv = [os.fspath(word) for word in argv]
        self.url = url.rstrip("/")
        self.log = log
        self.env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs. Negative: ended by that signal."""
        process = self._started()
        if process.returncode is not None:
            return process.returncode
        # Look without reaping: until it is reaped no other process can get its number, which names the group too.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def start(self, timeout_s: float = START_S) -> Self:
        """Start and wait until healthy; a server that ends or does not answer in time is ended, and raises."""
        return self.launch().wait_ready(timeout_s)

    def launch(self) -> Self:
        """Start without waiting: several servers load at once, then each is waited for."""
        if self._process is not None and self.returncode is None:
            raise ConfigError(f"{self.url}: process {self.pid} runs already; stop it first")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise UnavailableError(f"{self.argv[0]}: {error.strerror or error}") from None
        leave_to_cleaner(self._process.pid)
        return self

    def wait_ready(self, timeout_s: float = START_S) -> Self:
        deadline = time.monotonic() + timeout_s
        try:
            while not healthy(self.url):
                if self.returncode is not None:
                    self._fail(f"ended with code {self.returncode} before it was ready")
                if time.monotonic() > deadline:
                    self._fail(f"did not answer {self.url}/health within {timeout_s:g} s")
                time.sleep(POLL_S)
            if self.returncode is not None:  # then another process answers at this URL
                self._fail(f"ended with code {self.returncode}, and something else answers {self.url}/health")
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Ask it to end (SIGTERM), kill it if it does not, and return its exit code. May be called twice."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self.returncode is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.kill()

    def kill(self) -> int:
        """End it now, and all it started (SIGKILL to its group)."""
        process = self._started()
        if process.returncode is None:  # not reaped, so its number is not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        take_from_cleaner(process.pid)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process itself; none if it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def log_text(self) -> str:
        """Log output since this start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ConfigError(f"{self.url}: {shlex.join(self.argv)} was not started")
        return self._process

    def _fail(self, what: str) -> None:
        lines = self.log_text().splitlines()
        end = max(0, len(lines) - LOG_LINES)
        # If one process starts another, the end of the first one's output only says that the second failed.
        cause = next((at for at, line in enumerate(lines[:end]) if "Traceback (most recent call last)" in line), end)
        shown = [*lines[cause : min(cause + LOG_LINES, end)], *(["…"] if cause + LOG_LINES < end else []), *lines[end:]]
        said = "\n".join(shown) or "(nothing)"
        raise UnavailableError(f"{shlex.join(self.argv)} {what}; {self.log} ends:\n{said}")


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port but does not listen yet: until its server is ready, clients are refused."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UnavailableError(f"host {host!r}: {error}") from None
    listener = socket.socket(family, kind, number)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "; choose another port, or stop what uses it" if error.errno == errno.EADDRINUSE else ""
        raise UnavailableError(f"{host}:{port}: {error.strerror}{hint}") from None
    return listener
