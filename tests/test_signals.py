"""Ctrl-C and SIGTERM of the whole command: one line, an exit code, nothing left behind. And Numba's damaged cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import without_compiling
from coterie._interrupts import INTERRUPTED, TERMINATED, exit_code

COMMAND = [sys.executable, "-m", "coterie"]
BEGIN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""A shell's background job ignores Ctrl-C; the process is given Python's own handler."""


def python(code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=300, **more)


@pytest.mark.parametrize("module", ["numpy", "typer", "coterie.cli.verbs.fit"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported(module: str, number: signal.Signals) -> None:
    done = python(f"""
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal({int(number)})
        return None
assert {module!r} not in sys.modules
from coterie.__main__ import main
assert {module!r} not in sys.modules, "the entry point imports nothing large"
sys.meta_path.insert(0, Interrupt())
sys.argv = ["coterie", "fit", "trace", "--workers", "2", "-o", "router"]
main()
""")
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"{word}\n")


VERB = """
from coterie.cli import main as cli
@cli.app.command("wait")
def wait_command():
    {body}
sys.argv = ["coterie", "wait"]
from coterie.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemError('returned a result with an exception set') from KeyboardInterrupt()",
        "exec('signal.raise_signal(2)')",  # Python itself would end by the signal, not with a code
        "import weakref; ref = weakref.ref(set(), lambda _: signal.raise_signal(2)); import time; time.sleep(100)",
        "import asyncio; asyncio.run(asyncio.sleep(0)); signal.raise_signal(2)",
    ],
)
def test_an_interrupt_in_any_guise_is_130(body: str) -> None:
    done = python(VERB.format(body=body))
    assert (done.returncode, done.stdout) == (INTERRUPTED, ""), done.stderr
    assert done.stderr.strip() == "interrupted"


def test_an_error_that_is_no_interrupt_stays_one() -> None:
    assert exit_code(ValueError()) is None
    assert exit_code(KeyboardInterrupt()) == INTERRUPTED
    done = python(VERB.format(body="raise SystemError('a bug')"))
    assert done.returncode == 1
    assert "SystemError: a bug" in done.stderr


@pytest.mark.parametrize("ignored", [False, True])
def test_terminated_leaves_no_hidden_folder(tmp_path: Path, ignored: bool) -> None:
    """Also where Ctrl-C is ignored, as in a shell's background job."""
    process = subprocess.Popen(
        [*COMMAND, "generate", tmp_path / "t", "--size", "8GB", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None,
    )
    try:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob(".t.*.tmp/activations*")):  # there once writing begins
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, without_compiling(err).strip()) == (TERMINATED, "", "terminated")
    assert not list(tmp_path.iterdir())


LOOP = """
def double(numbers):
    total = 0.0
    for number in numbers:
        total += 2 * number
    return total
"""
CALL = VERB.format(body="import check")
DAMAGE = """
import sys
from pathlib import Path
import numpy as np
from coterie._numba import njit
sys.path.insert(0, ".")
import loop

def call():
    assert njit()(loop.double)(np.arange(4.0)) == 12.0  # a new dispatcher, which reads the cache

call()
for kind in ("nbi", "nbc"):
    (file,) = Path("cache").rglob(f"*double*.{kind}")
    good = file.read_bytes()
    for bad in (b"", good[: len(good) // 2], np.random.default_rng(0).bytes(len(good))):
        file.write_bytes(bad)
        call()
        assert file.read_bytes() != bad, "compiled again, and kept"
print("as before")
"""


def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "check.py").write_text(DAMAGE)
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = python("sys.path.insert(0, '.')\n" + CALL, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "as before\n", "")


@pytest.mark.parametrize("folder", ["/proc/none"])
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, folder: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "check.py").write_text(DAMAGE.partition("call()\nfor")[0] + "call(); print('done')")
    env = {**os.environ, "NUMBA_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = python("sys.path.insert(0, '.')\n" + CALL, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
