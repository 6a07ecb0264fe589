"""Clean up after a parent process, whatever ended it: ``python cleaner.py``, started by :mod:`coterie.net.processes`.

The parent writes lines to standard input, each a sign and a JSON value: ``+123`` registers process group 123,
``+"/tmp/x"`` a folder, and ``-`` unregisters either. Standard input closes when the parent ends, even if it is killed.
Then the registered groups are ended and the folders removed. Imports only the standard library, to start in 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time

TERMINATE_S = 5.0
"""Seconds between SIGTERM to the groups and SIGKILL."""


def main() -> None:
    left: set[int | str] = set()
    for line in sys.stdin:
        value = json.loads(line[1:])
        left.add(value) if line[0] == "+" else left.discard(value)
    groups = [value for value in left if isinstance(value, int)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            _signal(group, number)
        until = time.monotonic() + TERMINATE_S
        while any(_signal(group, 0) for group in groups) and time.monotonic() < until:
            time.sleep(0.01)
    for value in left.difference(groups):
        shutil.rmtree(str(value), ignore_errors=True)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group (0 only probes it); return whether the group exists."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
