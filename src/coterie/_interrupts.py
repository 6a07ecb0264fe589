"""Ctrl-C and SIGTERM, for the command line: context managers clean up, and one line reports the interrupt.

Python runs a signal's handler at its next instruction. After a long optimisation in LLVM that instruction is in a
callback of llvmlite, which swallows exceptions: the interrupt would be lost, and the program would continue. So the
interrupt is recorded instead, and raised as soon as the compiler is back in Python.

SIGTERM is handled as Ctrl-C is, so that no half-written folder stays behind; only the exit code differs.

Only the command line enables these handlers. A program that imports Coterie, such as vLLM, keeps its own handlers and
Numba's events.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes after Ctrl-C and after SIGTERM, as a shell reports them."""
WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}

_asked = False
_noted = False
"""Whether an interrupt arrived where an exception would be lost."""
_terminated = False


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process at a signal without a traceback, while modules are imported and no work has begun."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if _in_main_thread()}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    ours = {number: handler for number, handler in handlers.items() if handler in defaults}
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    os.write(2, f"{WORDS[128 + number]}\n".encode())
    os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """End the process after an interrupt with this exit code; threads are not waited for, further signals ignored.

    Python itself would end by SIGINT, not with a code, if the interrupt arrived inside exec().
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C until the end of the block. From now on the compiler loses neither.

    Does not import Numba itself.
    """
    global _asked, _terminated, _noted
    first, _asked = not _asked, True
    if first and "coterie._numba" in sys.modules:
        on_numba_import()
    _terminated = _noted = False
    ours = _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    hook, others = sys.unraisablehook, []

    def send_again(lost: Any) -> None:
        """Send the signal again: Python drops an exception raised in a callback, such as that of a weak reference."""
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, os.kill, (os.getpid(), interrupted_by() - 128)).start()
        else:
            others.append(traceback.format_exception(lost.exc_value))

    sys.unraisablehook = send_again
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
        for lines in others:  # not after an interrupt, which leaves objects half initialised
            sys.stderr.write("Exception ignored: " + "".join(lines))
    finally:
        sys.unraisablehook = hook
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code if an interrupt caused this error; None if it has another cause.

    Compiled code that calls Python turns an interrupt into a SystemError.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return None if seen is None else interrupted_by()


def interrupted_by() -> int:
    """Return the exit code after an interrupt: that of SIGTERM if it was received, else that of Ctrl-C."""
    return TERMINATED if _terminated else INTERRUPTED


def _terminate(_number: int, frame: FrameType | None) -> None:
    global _terminated
    _terminated = True
    handler = signal.getsignal(signal.SIGINT)  # none in a shell's background job, which ignores Ctrl-C
    (handler if callable(handler) else _interrupt)(signal.SIGINT, frame)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    global _noted
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("llvmlite."):
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    _noted = True


def on_numba_import() -> None:
    """Install the listener and the checks of Numba's cache after Numba's import; does nothing unless enabled."""
    if not _asked:
        return
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.event import Event, Listener, register

    from coterie._compiled_files import recompile_if_damaged

    recompile_if_damaged()

    class Noted(Listener):  # type: ignore[misc]  # numba has no types
        """Replaces Python's default handler while the main thread compiles; any other handler stays."""

        def on_start(self, _event: Event) -> None:
            if _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _interrupt)

        def on_end(self, _event: Event) -> None:
            global _noted
            if not _in_main_thread():
                return
            if signal.getsignal(signal.SIGINT) is _interrupt and not global_compiler_lock.is_locked():
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if _noted:
                _noted = False
                raise KeyboardInterrupt

    for kind in ("numba:compiler_lock", "numba:run_pass"):
        register(kind, Noted())


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
