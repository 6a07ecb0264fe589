"""Children and folders end with this process, whatever ends it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE_S = 120.0
PARENT = """
import sys
from pathlib import Path
from coterie.net.processes import ServerProcess, temporary_folder

child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])"
child += "; print(p.pid, flush=True); time.sleep(3600)"
with temporary_folder() as folder:
    servers = [ServerProcess([sys.executable, "-c", child], "http://127.0.0.1:1", folder / f"{n}.log") for n in (0, 1)]
    for server in servers:
        server.launch()
        while not server.log_text().endswith("\\n"):
            pass
    if sys.argv[1] == "stop":
        servers.pop().stop()
    print(folder, *(pid for server in servers for pid in (server.pid, server.log_text().strip())), flush=True)
    sys.stdin.read()
"""


def wait_until_ended(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], PATIENCE_S)[0], f"process {pid} is left behind"
    finally:
        os.close(handle)


@pytest.mark.parametrize("how", ["kill", "terminate", "stop"])
def test_nothing_outlives_its_parent(how: str) -> None:
    """kill -9, or a second SIGTERM, left five processes and their folders."""
    command = [sys.executable, "-c", PARENT, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        folder, *pids = parent.stdout.readline().decode().split()
        assert Path(folder).is_dir()
        assert len(pids) == (2 if how == "stop" else 4)
        parent.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        parent.wait(PATIENCE_S)
    for pid in pids:
        wait_until_ended(int(pid))
    until = time.monotonic() + PATIENCE_S
    while Path(folder).exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(folder).exists()
