"""Ctrl-C while Numba compiles, for the command line.

Python runs a signal's handler at its next instruction. After a long optimisation in LLVM that is in a callback of
llvmlite, which swallows exceptions: the interrupt would be lost, and the program would continue. Here it is recorded
instead, and raised as soon as the compiler is back in Python.

Only the command line enables it. A program that imports Coterie, such as vLLM, keeps its own handlers and Numba's
events.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

_asked = False


def handle_interrupts() -> None:
    """Enable this for all later compilations. Does not import Numba itself."""
    global _asked
    if not _asked:
        _asked = True
        if "coterie._numba" in sys.modules:
            on_numba_import()


def on_numba_import() -> None:
    """Install the listener, once Numba is imported; does nothing unless enabled."""
    if not _asked:
        return
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.event import Event, Listener, register

    class Noted(Listener):  # type: ignore[misc]  # numba has no types
        """Replaces Python's default handler while the main thread compiles; any other handler stays."""

        noted = False

        def on_start(self, _event: Event) -> None:
            if _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self.interrupt)

        def on_end(self, _event: Event) -> None:
            if not _in_main_thread() or signal.getsignal(signal.SIGINT) != self.interrupt:
                return
            if not global_compiler_lock.is_locked():
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.noted:
                self.noted = False
                raise KeyboardInterrupt

        def interrupt(self, _number: int, frame: FrameType | None) -> None:
            while frame is not None and not frame.f_globals.get("__name__", "").startswith("llvmlite."):
                frame = frame.f_back
            if frame is None:
                raise KeyboardInterrupt
            self.noted = True

    noted: Any = Noted()
    for kind in ("numba:compiler_lock", "numba:run_pass"):
        register(kind, noted)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
