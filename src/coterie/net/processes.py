"""Servers as child processes: start a server, wait until it answers, end it with all its children.

For engines and workers: a server is a command, a URL whose ``/health`` returns 200, and a log file for its output. If
a server ends before it is ready, the error raised quotes its first traceback and the end of its log.

Servers and temporary folders do not outlive this process, even if it is killed: a small helper process
(:mod:`coterie.net.cleaner`) notices its end and removes them.
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

from coterie.errors import ConfigError, UnavailableError, check, check_given

POLL_S = 0.05
START_S = 120.0
"""Seconds within which a server must become healthy: vLLM takes 30 to 90 s on two cores."""
STOP_S = 20.0
"""Seconds between SIGTERM to a server and SIGKILL."""
LOG_LINES = 40
"""Number of lines that an error quotes from the log's first traceback, and again from the log's end."""


LOWEST_PORT = 10_000
"""Lowest port that `free_port` returns: ports below it may belong to well-known services."""
TRIES = 1_000
_held: dict[int, int] = {}
"""Port that `free_port` returned → descriptor of a socket; while it is open, no other process gets the port."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port for a server that starts later. No port is returned twice in the life of this process.

    The port is outside the system's ephemeral range if possible: an outgoing connection could take an ephemeral port
    while the server loads, for ten seconds or more. On Linux no other process's `free_port` returns the same port.
    """
    end = _first_of_system()
    if end < LOWEST_PORT + TRIES:  # the ephemeral range covers nearly all ports
        end = 65_536
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randrange(LOWEST_PORT, end)
        if port not in _held and _is_free(host, port) and _hold(port):
            return port
    raise UnavailableError(f"none of {TRIES:,} ports of {host} from {LOWEST_PORT} to {end - 1} is free")


def _first_of_system() -> int:
    """Return the first port of the system's ephemeral range, used for outgoing connections."""
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
    """Reserve a port among `free_port` callers; return False if another process holds it.

    The reservation is an abstract Unix socket, whose name is private to the network namespace, as ports are.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":  # only Linux has socket names without a file
            holder.bind(f"\0coterie-port-{port}")
    except OSError:
        holder.close()
        return False
    _held[port] = holder.detach()  # kept until the process ends
    return True


_to_cleaner: int | None = None
"""Write end of the pipe to the cleaner process; None until the cleaner is started."""


def leave_to_cleaner(left: int | Path) -> None:
    """Have the cleaner end a process group, or remove a folder, when this process ends for any reason."""
    global _to_cleaner
    if _to_cleaner is None:
        reading, _to_cleaner = os.pipe()  # not inheritable: a child's copy would keep the cleaner waiting
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("cleaner.py"))],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
            setpgroup=0,  # own process group: Ctrl-C must not end the cleaner
        )
        os.close(reading)
    _tell_cleaner("+", left)


def take_from_cleaner(left: int | Path) -> None:
    """Unregister a process group that has ended, or a folder that is removed."""
    _tell_cleaner("-", left)


def _tell_cleaner(sign: str, left: int | Path) -> None:
    line = f"{sign}{json.dumps(left if isinstance(left, int) else str(left))}\n"
    if _to_cleaner is not None:
        with contextlib.suppress(OSError):  # the cleaner has been ended from outside
            os.write(_to_cleaner, line.encode())


@contextlib.contextmanager
def temporary_folder(prefix: str = "coterie-") -> Iterator[Path]:
    """Create a private folder for the block; it is removed even if this process is killed."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        leave_to_cleaner(Path(name))
        try:
            yield Path(name)
        finally:
            take_from_cleaner(Path(name))


class ServerProcess:
    """A server process, in its own process group so that its children end with it.

    >>> with ServerProcess(argv, "http://127.0.0.1:8100", Path("worker.log")) as server:  # doctest: +SKIP
    ...     ask(server.url)
    """

    def __init__(
        self, argv: Sequence[str | os.PathLike[str]], url: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """`env` is added to this process's environment; the server's output is appended to `log`."""
        check(urlsplit(url).scheme in ("http", "https"), f"url={url!r} must begin with http:// or https://")
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
        """Exit code of the process, minus the signal number if a signal ended it; None while it runs."""
        process = self._started()
        if process.returncode is not None:
            return process.returncode
        # WNOWAIT does not reap: an unreaped process keeps its pid, which is also the group id, so neither is reused.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def start(self, timeout_s: float = START_S) -> Self:
        """Start the server and wait until it is healthy. If it exits or is late, kill it and raise UnavailableError."""
        return self.launch().wait_ready(timeout_s)

    def launch(self) -> Self:
        """Start the server without waiting, so that several can load at once; then call `wait_ready` on each."""
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
        from coterie.net.http_client import healthy  # slow to import

        deadline = time.monotonic() + timeout_s
        try:
            while not healthy(self.url):
                if self.returncode is not None:
                    self._fail(f"ended with code {self.returncode} before it was ready")
                if time.monotonic() > deadline:
                    self._fail(f"did not answer {self.url}/health within {timeout_s:g} s")
                time.sleep(POLL_S)
            if self.returncode is not None:  # another process answers at this URL
                self._fail(f"ended with code {self.returncode}, and something else answers {self.url}/health")
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Send SIGTERM, kill the server if it has not ended in time, and return its exit code. May be called twice."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self.returncode is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.kill()

    def kill(self) -> int:
        """Kill the server and its children at once (SIGKILL to the group), and return its exit code."""
        process = self._started()
        if process.returncode is None:  # not reaped, so its pid is not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        take_from_cleaner(process.pid)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process, not its group; do nothing if it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def log_text(self) -> str:
        """Return the log output since the last launch."""
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
        return check_given(self._process, f"{self.url}: {shlex.join(self.argv)} was not started")

    def _fail(self, what: str) -> None:
        lines = self.log_text().splitlines()
        end = max(0, len(lines) - LOG_LINES)
        # If the server starts another process that fails, the end of the log only says so: the cause is further up.
        cause = next((at for at, line in enumerate(lines[:end]) if "Traceback (most recent call last)" in line), end)
        shown = [*lines[cause : min(cause + LOG_LINES, end)], *(["…"] if cause + LOG_LINES < end else []), *lines[end:]]
        said = "\n".join(shown) or "(nothing)"
        raise UnavailableError(f"{shlex.join(self.argv)} {what}; {self.log} ends:\n{said}")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port but not listening: clients are refused until the server listens."""
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
