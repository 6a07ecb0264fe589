"""Invariants of every simulated run; each one names the bug that it prevents (docs/invariants.md).

The checks take time, so a run makes them only on request; tests always request them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError

TOLERANCE_S = 1e-9


class InvariantError(CoterieError):
    """A simulated run broke one of its own rules: a defect of the simulator, never of its input."""


def require_invariant(number: int, condition: bool, words: str) -> None:
    if not condition:
        raise InvariantError(f"INV-{number} broken: {words}")


def check_clock(before_s: float, now_s: float) -> None:
    """INV-18: the clock never goes back."""
    if not now_s >= before_s:  # called at every event: format the message only on failure
        require_invariant(18, False, f"the clock went from {before_s} s back to {now_s} s")


def check_once(times_run: NDArray[np.int64], waiting: int) -> None:
    """INV-19: when a run ends, every request has run exactly once and none waits."""
    other = np.flatnonzero(times_run != 1)
    for row in other:
        require_invariant(19, False, f"request {row} ran {times_run[row]} times, {other.size} not once; {waiting} wait")
    require_invariant(19, waiting == 0, f"every request ran, but {waiting} still wait")


def check_tokens(decoded: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """INV-19 for tokens: every token of every request was decoded once."""
    for row in np.flatnonzero(decoded != tokens):
        require_invariant(19, False, f"request {row} decoded {decoded[row]} of {tokens[row]} tokens")


def check_times(arrival_s: NDArray[np.float64], start_s: NDArray[np.float64], finish_s: NDArray[np.float64]) -> None:
    """INV-20: a request starts after it arrives and ends after it starts."""
    in_order = (start_s >= arrival_s - TOLERANCE_S) & (finish_s >= start_s)  # NaN fails too
    for row in np.flatnonzero(~in_order):
        require_invariant(
            20, False, f"request {row} arrived {arrival_s[row]}, started {start_s[row]}, ended {finish_s[row]} s"
        )


def check_places(running: int, places: int, waiting: int) -> None:
    """INV-21: no place stays empty while a request waits."""
    require_invariant(
        21, running == places or not waiting, f"{running} of {places} places are taken while {waiting} wait"
    )


def check_work(busy_s: float, batches_s: NDArray[np.float64], idle_while_due_s: float, clock_s: float) -> None:
    """INV-21: the server is busy for exactly as long as its batches take, and never idle while one is due."""
    total = float(batches_s.sum())
    rounding = len(batches_s) * np.spacing(clock_s)  # the clock rounds the end of each batch
    slack = 1e-9 * max(1.0, total) + rounding
    require_invariant(21, abs(busy_s - total) <= slack, f"busy for {busy_s} s, batches took {total} s")
    require_invariant(21, idle_while_due_s <= TOLERANCE_S, f"idle for {idle_while_due_s} s while a batch was due")
