"""A simulator that is broken on purpose breaks INV-18 to INV-21, and the run says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from coterie.batching import Selection, Window, strategies
from coterie.batching.scheduler import Scheduler, SchedulerConfig
from coterie.batching.waiting import ChosenBatch
from coterie.errors import ConfigError
from coterie.sim import DecodeRequests, Execution, Run, Simulation, decode, run_batches, run_decode, server
from sim_checks import (
    InvariantError,
    check_clock,
    check_once,
    check_places,
    check_times,
    check_tokens,
    check_work,
    checked,
)

CONFIG = SchedulerConfig(max_batch_size=4, window_size=8, min_batch_trigger=4, scheduling_interval_ms=300.0)
COUNT = 30
ARRIVAL_S = np.cumsum(np.random.default_rng(3).exponential(0.2, COUNT))
LOADS = np.random.default_rng(4).random((COUNT, 1, 6))


def batches(strategy: Any = None, seconds: float = 0.1, check: bool = True) -> Run:
    timed, run = Execution(seconds, 1.0, 1.0), checked(run_batches) if check else run_batches
    return run(ARRIVAL_S, LOADS, lambda _: timed, CONFIG, strategy or strategies.make("fcfs"), np.random.default_rng(0))


def decoded(strategy: Any = None, seconds: float = 0.1, check: bool = True) -> Run:
    timed, run = Execution(seconds, 1.0, 1.0), checked(run_decode) if check else run_decode
    tokens = np.arange(COUNT) % 3 + 1
    requests = DecodeRequests(ARRIVAL_S, tokens, np.zeros(COUNT, np.int64), tokens, np.zeros((3, 1, 2), np.uint8))
    strategy = strategy or strategies.make("fcfs")
    return run(requests, LOADS, lambda *_: timed, 3, CONFIG, strategy, np.random.default_rng(0))


EACH = pytest.mark.parametrize("run", [batches, decoded])
BOTH = pytest.mark.parametrize(("run", "module"), [(batches, server), (decoded, server)])


@EACH
def test_the_unbroken_run_passes(run: Callable[..., Run]) -> None:
    assert len(run().start_s) == COUNT


# Kernels ------------------------------------------------------------------------------------------------------------


class LastFirst(Simulation):
    """Runs whatever was asked for last, whenever it is."""

    def run(self, until_s: float = math.inf) -> None:  # noqa: ARG002
        while self._heap:
            last = max(self._heap, key=lambda event: event[1])
            self._heap.remove(last)
            self.now_s = last[0]
            last[2]()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._asked += 1
        self._heap.append((time_s, self._asked, action))


class Early(Simulation):
    """Lets requests arrive half a second before their time."""

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        super().at(max(self.now_s, time_s - 0.5) if action.__name__ == "arrive" else time_s, action)


class Slow(Simulation):
    """Lets everything take a tenth longer than it was told."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        super().after(1.1 * delay_s, action)


class Forgetful(Simulation):
    """Loses its 10th arrival, and with it all that would have come after."""

    arrivals = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self.arrivals += action.__name__ == "arrive"
        if self.arrivals != 10 or action.__name__ != "arrive":
            super().at(time_s, action)


@BOTH
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (LastFirst, "^INV-18 broken: the clock went from .* s back to .* s$"),
        (Forgetful, r"^INV-19 broken: request 9 ran 0 times, 21 not once; 0 wait$"),
        (Early, r"^INV-20 broken: request \d+ arrived .*, started .*, ended .* s$"),
        (Slow, "^INV-21 broken: busy for .* s, batches took .* s$"),
    ],
)
def test_a_broken_kernel_is_caught(
    run: Callable[..., Run], module: Any, kernel: type[Simulation], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Simulation", kernel)
    with pytest.raises(InvariantError, match=message):
        run()


# Schedulers ---------------------------------------------------------------------------------------------------------


class Loses(Scheduler):
    """Drops the last of a batch of more than one."""

    def next_batch(self, running: np.ndarray) -> ChosenBatch[int]:
        batch = super().next_batch(running)
        keep = max(1, len(batch.items) - 1)
        return batch._replace(items=batch.items[:keep], skipped=batch.skipped[:keep])


class Repeats(Scheduler):
    """Puts the first request of the run back into its queue once it has left."""

    again = True

    def next_batch(self, running: np.ndarray) -> ChosenBatch[int]:
        batch = super().next_batch(running)
        if self.again:
            self.again = False
            self.push(batch.items[0], 0.0)
        return batch


class Late(Scheduler):
    """Says a batch is due a while after it was; the truth is known afterwards."""

    asked = 0

    def due_s(self) -> float:
        self.asked += 1
        return super().due_s() + (0.05 if self.asked % 2 else 0.0)


@BOTH
@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (Loses, r"^INV-19 broken: request \d+ ran 0 times, \d+ not once; 0 wait$"),
        (Repeats, r"^INV-19 broken: request 0 ran 2 times"),
    ],
)
def test_a_broken_scheduler_is_caught(
    run: Callable[..., Run], module: Any, scheduler: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Scheduler", scheduler)
    with pytest.raises(InvariantError, match=message):
        run()


def test_a_batch_that_starts_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Scheduler", Late)
    with pytest.raises(InvariantError, match=r"^INV-21 broken: idle for 0\.0\d* s while a batch was due$"):
        batches()


class Drowsy(server._BatchServer):
    """Overlooks a full queue at first, and starts half a second later."""

    def arrive(self) -> None:
        self.busy, busy = True, self.busy
        super().arrive()
        self.busy = busy
        if not busy:
            self.sim.after(0.5, lambda: None if self.busy else self.start())


def test_a_trigger_that_is_overlooked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BatchServer", Drowsy)
    with pytest.raises(InvariantError, match=r"^INV-21 broken: idle for .* s while a batch was due$"):
        batches()


class Asleep(decode._Decoder):
    """Takes a while to notice an arrival when idle."""

    def arrive(self) -> None:
        self.busy, busy = True, self.busy
        super().arrive()
        self.busy = busy
        if not busy:
            self.sim.after(0.02, lambda: None if self.busy else self.start())


def test_an_idle_decoder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_Decoder", Asleep)
    with pytest.raises(InvariantError, match=r"^INV-21 broken: idle for 0\.0\d* s while a batch was due$"):
        decoded()


def test_a_token_that_is_not_decoded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(decode._Decoder):
        def end_step(self) -> None:
            super().end_step()
            if not np.isnan(self.finish_s[7]):
                self.decoded[7] = 1

    monkeypatch.setattr(decode, "_Decoder", Cut)
    with pytest.raises(InvariantError, match=r"^INV-19 broken: request 7 decoded 1 of 2 tokens$"):
        decoded()


# The rules themselves -----------------------------------------------------------------------------------------------


def test_the_rules_on_plain_numbers() -> None:
    check_clock(1.0, 1.0)
    check_once(np.ones(3, np.int64), 0)
    check_tokens(np.array([1, 2]), np.array([1, 2]))
    check_times(np.array([1.0]), np.array([1.0]), np.array([1.0]))
    check_work(2.0, np.array([1.5, 0.5]), 0.0, 10.0)
    broken: tuple[tuple[Callable[[], None], str], ...] = (
        (lambda: check_clock(1.0, 0.5), "INV-18"),
        (lambda: check_clock(1.0, math.nan), "INV-18"),
        (lambda: check_once(np.array([1, 0, 1]), 1), "INV-19 broken: request 1 ran 0 times"),
        (lambda: check_once(np.array([1, 1, 2]), 0), "INV-19 broken: request 2 ran 2 times"),
        (lambda: check_once(np.array([1, 1]), 1), "INV-19 broken: every request ran, but 1 still wait"),
        (lambda: check_tokens(np.array([1, 3]), np.array([1, 2])), "INV-19 broken: request 1 decoded 3 of 2"),
        (lambda: check_times(np.array([1.0]), np.array([0.9]), np.array([2.0])), "INV-20"),
        (lambda: check_times(np.array([1.0]), np.array([2.0]), np.array([1.9])), "INV-20"),
        (lambda: check_times(np.array([1.0]), np.array([math.nan]), np.array([math.nan])), "INV-20"),
        (lambda: check_work(2.1, np.array([1.5, 0.5]), 0.0, 10.0), "INV-21"),
        (lambda: check_work(math.nan, np.array([1.5, 0.5]), 0.0, 10.0), "INV-21"),
        (lambda: check_work(2.0, np.array([1.5, 0.5]), 0.01, 10.0), "INV-21"),
        (lambda: check_places(1, 3, 2), "INV-21"),
    )
    for check, message in broken:
        with pytest.raises(InvariantError, match=message):
            check()


def test_a_late_clock_may_round_but_no_more() -> None:
    """Counted from 1970, a clock tells a quarter of a microsecond apart."""
    check_work(1.0 + 1e-5, np.full(100, 0.01), 0.0, 1.7e9)
    with pytest.raises(InvariantError, match="INV-21"):
        check_work(1.0 + 1e-4, np.full(100, 0.01), 0.0, 1.7e9)
    with pytest.raises(InvariantError, match="INV-21"):
        check_work(1.0 + 1e-5, np.full(100, 0.01), 0.0, 1e3)


# What is given to the simulator -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picks:
    """First come, first served, changed."""

    change: Callable[[np.ndarray, int], np.ndarray]
    max_skips: int | None = None

    def select(self, window: Window, _running: np.ndarray, size: int, _rng: Generator) -> Selection:
        waiting = len(window.loads)
        return Selection(self.change(np.arange(min(size, waiting)), waiting), "changed")


@EACH
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda order, _: order * 0 if len(order) > 1 else np.append(order, 0),
        lambda order, _: np.append(order, order[-1]),
        lambda order, _: order[:-1],
        lambda order, _: order[:0],
        lambda order, waiting: np.append(order[:-1], waiting),
        lambda order, _: order - 1,
        lambda order, waiting: np.arange(waiting)[::-1][: len(order)] if waiting > len(order) else order - 1,
    ],
    ids=["one twice", "one more", "one dropped", "none", "past the window", "negative", "not the oldest"],
)
def test_a_strategy_that_breaks_its_contract_is_named(
    run: Callable[..., Run], check: bool, change: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    message = r"^strategy Picks picked \[.*\]; expected \d different indices of 0 … \d, with 0 among them$"
    with pytest.raises(ConfigError, match=message):
        run(Picks(change), check=check)


@EACH
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("seconds", [math.nan, -0.1, -1e-300, math.inf, -math.inf])
def test_a_time_that_no_batch_takes_is_refused(run: Callable[..., Run], check: bool, seconds: float) -> None:
    message = rf"^execution model: seconds={seconds} of a batch of \d must be a finite number of at least 0$"
    with pytest.raises(ConfigError, match=message):
        run(seconds=seconds, check=check)
