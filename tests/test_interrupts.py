"""Ctrl-C in the middle of a compilation, at the place where Python would lose it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.registry import cpu_target

from coterie._interrupts import handle_interrupts
from coterie._numba import side_by_side

ENGINE = cpu_target.target_context.codegen()._engine._ee


@pytest.fixture
def compiler_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as LLVM hands over machine code for the first time, in a process that is the command's."""
    with handle_interrupts():
        pass
    notify = ENGINE._object_cache_notify

    def interrupt(module: Any, buffer: Any) -> None:
        monkeypatch.setattr(ENGINE, "_object_cache_notify", notify)
        signal.raise_signal(signal.SIGINT)
        notify(module, buffer)

    monkeypatch.setattr(ENGINE, "_object_cache_notify", interrupt)


@pytest.fixture
def interrupted(compiler_interrupts: None) -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    yield compiler_interrupts
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interrupted")
def test_interrupt_in_a_callback_of_the_compiler_is_raised_after_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        numba.njit(lambda number: number + 1)(1)
    assert numba.njit(lambda number: number + 2)(1) == 3, "heard once"


@pytest.mark.usefixtures("interrupted")
def test_loops_on_several_cores_compile_where_an_interrupt_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def double(indices: Any, out: Any) -> None:
        for index in indices:
            out[index] *= 2

    monkeypatch.setattr(numba, "get_num_threads", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(double, 10, np.ones(10))


@pytest.mark.usefixtures("compiler_interrupts")
def test_handlers_of_others_stay_while_it_compiles() -> None:
    heard = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        assert numba.njit(lambda number: number * 2)(2) == 4
    finally:
        signal.signal(signal.SIGINT, handler)
    assert heard == [signal.SIGINT]


def test_other_threads_compile_as_before() -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(numba.njit(lambda number: number * 3)(2)))
    thread.start()
    thread.join()
    assert results == [6]


def test_work_still_waiting_is_dropped_when_a_part_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "get_num_threads", lambda: 2)
    calls, release = [], threading.Event()

    def work(indices: Any) -> None:
        if len(indices) == 0:
            return
        calls.append(indices[0])
        if indices[0] == 0:
            raise ValueError("first part")
        release.wait(120)

    with pytest.raises(ValueError, match="first part"):
        side_by_side(work, 100)
    release.set()
    assert len(calls) < 8


def python(code: str) -> subprocess.CompletedProcess[str]:
    # A shell's background job ignores Ctrl-C; the process is given Python's own handler.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=300)


def test_the_command_ends_when_interrupted_in_the_compiler() -> None:
    done = python("""
import sys
from coterie.cli import main as cli

@cli.app.command("compile")
def compile_command():
    from coterie._numba import numba
    from numba.core.registry import cpu_target
    engine = cpu_target.target_context.codegen()._engine._ee
    notify = engine._object_cache_notify
    def interrupt(module, buffer):
        engine._object_cache_notify = notify
        signal.raise_signal(signal.SIGINT)
        notify(module, buffer)
    engine._object_cache_notify = interrupt
    numba.njit(lambda number: number + 1)(1)
    print("went on")

assert "numba" not in sys.modules, "the command imports it when it is needed"
sys.argv = ["coterie", "compile"]
cli.main()
""")
    assert (done.returncode, done.stdout) == (130, ""), done.stderr


def test_importing_and_compiling_leaves_handlers_and_events_alone() -> None:
    """As inside vLLM: only the command installs anything."""
    done = python("""
import coterie, coterie.routing, coterie.placement, coterie.cli.main
from coterie._numba import njit
from numba.core import event

seen = []
class Watch(event.Listener):
    def on_start(self, _): seen.append(signal.getsignal(signal.SIGINT))
    on_end = on_start

assert not any(event._registered.values()), event._registered
with event.install_listener("numba:compiler_lock", Watch()):
    def double(number): return 2 * number
    assert __import__("numba").njit(double)(4) == 8
assert seen and set(seen) == {signal.default_int_handler}, seen
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert not any(event._registered.values()), event._registered
print("as before")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "as before\n", "")
