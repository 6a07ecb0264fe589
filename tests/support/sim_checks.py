"""Invariants of simulated runs (docs/invariants.md), checked by watching a server from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.sim import Run, decode, server
from coterie.sim.fleet.requests import FleetRequests
from coterie.sim.group.serving import GroupServedRun

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


def checked(run: Callable[..., Run]) -> Callable[..., Run]:
    """Return a function that runs a batch server or a decoder as `run` does, and checks it meanwhile and at its end."""

    def checking(*arguments: Any, **settings: Any) -> Run:
        with (
            patch.object(server, "_BatchServer", _watched(server._BatchServer)),
            patch.object(decode, "_Decoder", _watched(decode._Decoder)),
        ):
            return run(*arguments, **settings)

    return checking


def _watched(kind: Any) -> Any:
    """Return a subclass of a simulated server that checks INV-18 to INV-21."""

    class Watched(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.seen_s = self.busy_s = self.free_since_s = self.idle_while_due_s = 0.0
            self.times_run = np.zeros(len(self.arrivals), np.int64)
            self.select, self.scheduler.next_batch = self.scheduler.next_batch, self.next_batch

        def next_batch(self, running: NDArray[np.float64]) -> Any:
            batch = self.select(running)
            np.add.at(self.times_run, batch.items, 1)  # `+=` would count a row that occurs twice only once
            return batch

        def look_at_clock(self) -> None:
            check_clock(self.seen_s, self.sim.now_s)
            self.seen_s = self.sim.now_s

        def arrive(self) -> None:
            self.look_at_clock()
            super().arrive()

        def waiting(self) -> int:
            return len(self.scheduler) + len(getattr(self, "planned", ()))

        def due_s(self, joining: NDArray[np.int64]) -> float:
            """Return when the requests that start now could have started, the server being free."""
            if isinstance(self, decode._Decoder):
                return float(self.arrivals[joining.min()])
            config, queue = self.scheduler.config, np.flatnonzero(np.isnan(self.start_s[: self.next]))
            queue = np.union1d(queue, joining)
            due_s = self.arrivals[queue[0]] + config.scheduling_interval_ms / 1000.0
            trigger = config.min_batch_trigger
            return float(min(due_s, self.arrivals[queue[trigger - 1]])) if len(queue) >= trigger else float(due_s)

        def start(self) -> None:
            steps, was_busy, before = len(self.batches), self.busy, self.start_s.copy()
            super().start()
            if isinstance(self, decode._Decoder):
                check_places(len(self.running), self.places, self.waiting())
            if len(self.batches) > steps:
                self.began_s = self.sim.now_s
                joining = np.flatnonzero(np.isnan(before) & ~np.isnan(self.start_s))
                if not was_busy and len(joining):
                    idle_s = self.sim.now_s - max(self.due_s(joining), self.free_since_s)
                    self.idle_while_due_s = max(self.idle_while_due_s, idle_s)
            elif was_busy and not self.busy:
                self.free_since_s = self.sim.now_s

        def on_timer(self) -> None:
            self.look_at_clock()
            super().on_timer()

        def end(self) -> None:
            self.look_at_clock()
            self.busy_s += self.sim.now_s - self.began_s
            self.free_since_s = self.sim.now_s

        def finish(self) -> None:
            self.end()
            super().finish()

        def end_step(self) -> None:
            self.end()
            super().end_step()

        def serve(self) -> Run:
            run: Run = super().serve()
            check_once(self.times_run, self.waiting())
            check_times(run.arrival_s, run.start_s, run.finish_s)
            check_work(self.busy_s, run.batch_s, self.idle_while_due_s, self.sim.now_s)
            if isinstance(self, decode._Decoder):
                check_tokens(self.decoded, self.requests.tokens)
            return run

    return Watched


def check_served(run: GroupServedRun, requests: FleetRequests, kv_tokens: int | None = None) -> None:
    """Check INV-19, 20, 21, 29 and 30.

    No request is lost, times are in order, steps do not overlap, token counts agree, and KV memory is freed.
    """
    arrived, done, dropped = int((run.arrival_s <= run.end_s).sum()), run.done, int(run.dropped.sum())
    require_invariant(
        29,
        arrived == done + run.queued + run.running + dropped,
        f"{arrived} arrived, {done} are done, {run.queued} wait, {run.running} run and {dropped} are dropped",
    )
    finished = np.isfinite(run.finish_s)
    check_times(run.arrival_s[finished], run.first_s[finished], run.finish_s[finished])
    check_tokens(run.decoded[finished], requests.output_tokens[: len(finished)][finished])
    tokens = int(np.maximum(run.decoded[np.isfinite(run.first_s)] - 1, 0).sum())
    require_invariant(
        19, int(run.steps.decoded.sum()) == tokens, f"steps decoded {run.steps.decoded.sum()} tokens of {tokens}"
    )
    if not run.running:
        counted, wanted = int(run.steps.prompt.sum()), int(requests.prompt_tokens[: len(finished)][finished].sum())
        require_invariant(19, counted == wanted, f"steps computed {counted} prompt tokens of {wanted}")
        held = int(run.kv_held.sum())
        require_invariant(30, held == 0, f"nothing runs, and requests hold {held} tokens of KV memory")
    most = int(run.kv_most.max(initial=0))
    require_invariant(30, kv_tokens is None or most <= kv_tokens, f"{most} tokens of KV memory of {kv_tokens} in use")
    ends = run.steps.start_s + run.steps.seconds
    late = np.flatnonzero(run.steps.start_s[1:] < ends[:-1] - 1e-9 * ends[:-1])
    require_invariant(21, not len(late), f"{len(late)} steps start before the one before them ended")
