"""Servers as processes: ready, dead before, deaf, stopped, killed with their children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.errors import ConfigError, UnavailableError
from coterie.net.http_client import healthy
from coterie.net.processes import ServerProcess, free_port

SERVE = """
import http.server, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
def end(*_):
    print("asked to end", flush=True)
    sys.exit(7)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, end)
if "parent" in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(tmp_path: Path, *words: str) -> ServerProcess:
    port = free_port()
    argv = [sys.executable, "-c", SERVE, str(port), *words]
    return ServerProcess(argv, f"http://127.0.0.1:{port}/", tmp_path / "logs" / "server.log")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_starts_answers_and_stops_with_its_own_code(tmp_path: Path) -> None:
    one = server(tmp_path)
    with one.start():
        assert healthy(one.url)
        assert (one.returncode, healthy(one.url)) == (None, True)
        with pytest.raises(ConfigError, match="runs already"):
            one.start()
    assert one.returncode == 7
    assert "asked to end" in one.log_text()
    assert not healthy(one.url)
    assert one.stop() == 7, "stopping twice does no harm"
    with one.start():  # the same command again, with a log of its own
        assert "asked to end" not in one.log_text()
    assert one.log.read_text().count("asked to end") == 2


def test_one_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    script = "import sys; print('the model is not there', file=sys.stderr); sys.exit(3)"
    one = ServerProcess([sys.executable, "-c", script], f"http://127.0.0.1:{free_port()}", tmp_path / "log")
    with pytest.raises(UnavailableError, match=r"(?s)ended with code 3 before.*the model is not there"):
        one.start()


def test_the_first_traceback_is_shown_however_much_follows(tmp_path: Path) -> None:
    script = "print('Traceback (most recent call last)\\nthe cause\\n' + 'later\\n' * 200 + 'end')\nraise SystemExit(1)"
    one = ServerProcess([sys.executable, "-c", script], f"http://127.0.0.1:{free_port()}", tmp_path / "log")
    with pytest.raises(UnavailableError, match=r"(?s)the cause.*….*end$") as failed:
        one.start()
    assert str(failed.value).count("later") < 100


def test_one_that_never_answers_is_ended(tmp_path: Path) -> None:
    script = "import time; print('loading', flush=True); time.sleep(600)"
    one = ServerProcess([sys.executable, "-c", script], f"http://127.0.0.1:{free_port()}", tmp_path / "log")
    one.launch()
    while "loading" not in one.log_text():
        time.sleep(0.01)
    with pytest.raises(UnavailableError, match=r"(?s)did not answer .*/health within 0\.8 s.*loading"):
        one.wait_ready(0.8)
    assert one.returncode == -signal.SIGKILL
    assert not alive(one.pid)


def test_another_server_at_its_url_is_not_taken_for_it(tmp_path: Path) -> None:
    with server(tmp_path).start() as other:
        one = ServerProcess([sys.executable, "-c", "raise SystemExit('port in use')"], other.url, tmp_path / "log")
        one.launch()
        while one.returncode is None:
            time.sleep(0.01)
        with pytest.raises(UnavailableError, match=r"(?s)ended with code 1.*port in use"):
            one.wait_ready()


def test_a_deaf_one_is_killed_and_so_are_children(tmp_path: Path) -> None:
    one = server(tmp_path, "deaf", "parent").start()
    child = int(one.log_text().split()[1])
    assert alive(child)
    assert one.stop(0.3) == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)


def test_children_that_outlive_a_clean_end_are_ended_too(tmp_path: Path) -> None:
    one = server(tmp_path, "parent").start()
    child = int(one.log_text().split()[1])
    assert one.stop() == 7
    deadline = time.monotonic() + 120
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(child)


def test_what_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no-such-command: No such file"):
        ServerProcess(["no-such-command"], "http://127.0.0.1:1", tmp_path / "log").start()
    with pytest.raises(ConfigError, match="must begin with http"):
        ServerProcess(["true"], "127.0.0.1:1", tmp_path / "log")
    with pytest.raises(ConfigError, match="was not started"):
        _ = ServerProcess(["true"], "http://127.0.0.1:1", tmp_path / "log").pid


def test_environment_is_added_to(tmp_path: Path) -> None:
    script = "import os; print(os.environ['COTERIE_TEST'], os.environ['PATH'])"
    one = ServerProcess(
        [sys.executable, "-c", script], "http://127.0.0.1:1", tmp_path / "log", {"COTERIE_TEST": "here"}
    )
    one.launch()
    while one.returncode is None:
        time.sleep(0.01)
    assert one.stop() == 0
    assert one.log_text().strip() == f"here {os.environ['PATH']}"


def test_ports_of_several_processes_differ_and_no_connection_gets_one() -> None:
    script = "from coterie.net.processes import free_port; print(*(free_port() for _ in range(100))); input()"
    command = [sys.executable, "-c", script]
    drawing = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        drawn = []
        for one in drawing:
            assert one.stdout is not None
            drawn += [int(word) for word in one.stdout.readline().split()]
    finally:
        for one in drawing:
            one.communicate("\n", timeout=60)
    assert len(set(drawn)) == len(drawn) == 400
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if given.exists():
        first, last = (int(word) for word in given.read_text().split())
        assert not any(first <= port <= last for port in drawn) or first < 11_000
