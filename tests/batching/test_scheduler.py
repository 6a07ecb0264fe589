"""The waiting queue against a plain list, and its configuration against bad files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.random import Generator

from coterie.batching import Selection, Strategy, Window, strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import CapsConfig, Scheduler, SchedulerConfig
from coterie.errors import ConfigError, InputError, TraceError, UnknownNameError

SHAPE = (2, 3)
RUNNING = np.zeros(SHAPE)


@dataclass
class Spy:
    """The oldest and any others; keeps what it was shown."""

    max_skips: int | None = None
    window: Window | None = None
    running: np.ndarray | None = None

    def select(self, window: Window, running: np.ndarray, size: int, rng: Generator) -> Selection:
        self.window = Window(window.loads.copy(), window.skipped.copy(), window.queued)
        self.running = running
        others = 1 + rng.permutation(len(window.loads) - 1)
        return Selection(np.concatenate([[0], others])[:size], "any")


@dataclass
class Waiting:
    """What the reference knows of a request."""

    request: int
    arrival_s: float
    skipped: int = 0


class AgainstAList(RuleBasedStateMachine):
    """Many requests come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.spy = Spy()
        self.config = SchedulerConfig(
            max_batch_size=5, window_size=12, min_batch_trigger=7, scheduling_interval_ms=2500.0
        )
        self.rng = np.random.default_rng(0)
        self.loads = self.rng.random((6000, *SHAPE))
        self.scheduler = Scheduler(self.config, self.spy, self.loads, self.rng)
        self.queue: list[Waiting] = []
        self.now_s = 0.0
        self.pushed = 0

    @rule(count=st.sampled_from([1, 2, 10, 90]), gap_s=st.sampled_from([0.0, 0.5, 4.0]))
    def push(self, count: int, gap_s: float) -> None:
        for _ in range(count):
            self.now_s += gap_s
            self.queue.append(Waiting(self.pushed, self.now_s))
            self.scheduler.push(self.pushed, self.now_s)
            self.pushed += 1

    @rule(times=st.sampled_from([1, 8]))
    def take(self, times: int) -> None:
        for _ in range(times):
            self.take_one()

    def take_one(self) -> None:
        seen = self.queue[:12]
        running = self.rng.random(SHAPE)
        batch = self.scheduler.next_batch(running)
        if not seen:
            assert batch.items == []
            return
        window = self.spy.window
        assert window is not None
        assert self.spy.running is running
        assert window.queued == len(self.queue)
        np.testing.assert_array_equal(window.loads, self.loads[[one.request for one in seen]])
        assert window.loads.flags.c_contiguous
        assert window.skipped.tolist() == [one.skipped for one in seen]
        at = {one.request: index for index, one in enumerate(seen)}
        order = [at[request] for request in batch.items]
        assert len(set(order)) == len(order) == min(5, len(seen))
        assert order[0] == 0
        assert batch.skipped == [seen[index].skipped for index in order], "as it was before"
        for index, one in enumerate(seen):
            one.skipped += index not in order and index < max(order)
        self.queue = [one for index, one in enumerate(self.queue) if index not in order]

    @invariant()
    def same(self) -> None:
        assert len(self.scheduler) == len(self.queue)
        due_s = math.inf
        if self.queue:
            due_s = self.queue[0].arrival_s + 2.5
        if len(self.queue) >= 7:
            due_s = min(due_s, self.queue[6].arrival_s)
        assert self.scheduler.due_s() == due_s


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=40, stateful_step_count=30)


def scheduler_of(strategy: Any, count: int, **how: Any) -> Scheduler:
    """With all requests waiting."""
    scheduler = Scheduler(SchedulerConfig(**how), strategy, np.ones((count, *SHAPE)), np.random.default_rng(0))
    for number in range(count):
        scheduler.push(number, 0.0)
    return scheduler


def test_nothing_is_kept_of_requests_that_left() -> None:
    scheduler = scheduler_of(strategies.make("fcfs"), 800)
    for first in range(0, 800, 8):
        assert scheduler.next_batch(RUNNING).items == list(range(first, first + 8))
    assert len(scheduler) == len(scheduler._arrival_s) == 0
    assert len(scheduler._waiting._handed_out) == 8, "the last batch may be put back"


def test_loads_of_any_kind_are_shown_as_contiguous_floats() -> None:
    spy = Spy()
    loads = np.arange(24, dtype=np.int32).reshape(3, 2, 4).transpose(2, 1, 0)  # [request, layer, expert]
    scheduler = Scheduler(SchedulerConfig(), spy, loads.astype(np.float64), np.random.default_rng(0))
    for number in (3, 1):
        scheduler.push(number, 0.0)
    scheduler.next_batch(RUNNING)
    assert spy.window is not None
    assert spy.window.loads.dtype == np.float64
    assert spy.window.loads.flags.c_contiguous
    np.testing.assert_array_equal(spy.window.loads, loads[[3, 1]])


@dataclass(frozen=True)
class Picks:
    """The same answer whatever it is shown."""

    order: Any
    max_skips: int | None = None

    def select(self, *_: Any) -> Selection:
        return Selection(np.array(self.order), "by heart")


@pytest.mark.parametrize(
    "picked", [[0, 0, 0], [0, 1], [0, 1, 2, 3], [1, 2, 3], [0, 1, 10], [0, -1, 1], [0.0, 1.0, 2.0], [[0, 1, 2]], []]
)
def test_a_broken_strategy_loses_nobody(picked: Any) -> None:
    """The queue is as it was before, so that whoever catches the error can go on."""
    scheduler = scheduler_of(Picks(picked), 10, max_batch_size=3)
    with pytest.raises(ConfigError) as raised:
        scheduler.next_batch(RUNNING)
    expected = f"strategy Picks picked {picked}; expected 3 different indices of 0 … 9, with 0 among them"
    assert str(raised.value) == expected
    scheduler.chooser.strategy = strategies.make("fcfs")
    taken = [scheduler.next_batch(RUNNING) for _ in range(4)]
    assert [request for batch in taken for request in batch.items] == list(range(10))
    assert all(batch.skipped == [0] * len(batch.items) for batch in taken)


def test_a_strategy_that_leaves_out_who_must_be_taken_is_refused() -> None:
    scheduler = scheduler_of(Picks([0, 2, 3], max_skips=2), 12, max_batch_size=3)
    assert scheduler.next_batch(RUNNING).items == [0, 2, 3]
    assert scheduler.chooser.counters.moved == 2, "2 and 3, while 1 stays"
    assert scheduler.next_batch(RUNNING).items == [1, 5, 6]  # 4 was passed over
    assert scheduler.next_batch(RUNNING).skipped == [1, 0, 0]
    scheduler = scheduler_of(Picks([0, 3, 4], max_skips=1), 12, max_batch_size=3)
    scheduler.next_batch(RUNNING)
    with pytest.raises(ConfigError, match=r"picked \[0, 3, 4\].*, with 0, 1 among them$"):
        scheduler.next_batch(RUNNING)


def test_an_empty_queue_gives_an_empty_batch() -> None:
    for name in strategies.names():
        scheduler = scheduler_of(strategies.make(name, {"cost": SpreadCost()}), 0)
        assert scheduler.next_batch(RUNNING).items == []


# Configuration ------------------------------------------------------------------------------------------------------

PUBLISHED = """{
  "model_name": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
  "quantization": "nf4",
  "num_experts": 60,
  "top_k_experts": 4,
  "scheduler": {
    "strategy": "greedy_variance",
    "max_batch_size": 8,
    "window_size": 32,
    "min_batch_trigger": 16,
    "scheduling_interval_ms": 100
  }
}
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "l4_config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_published_file_reads_and_is_the_default(tmp_path: Path) -> None:
    config = CapsConfig.read(written(tmp_path, PUBLISHED))
    assert config.model_name == "Qwen/Qwen1.5-MoE-A2.7B-Chat"
    assert config.quantization == "nf4"
    assert msgspec.structs.replace(config, model_name=None, quantization=None) == CapsConfig()
    assert config.scheduler.max_skips == 64, "the publication has no cap; ours is on unless turned off"
    assert isinstance(config.scheduler.make(), Strategy)


@given(
    st.builds(
        CapsConfig,
        model_name=st.none() | st.text(max_size=5),
        num_experts=st.integers(4, 512),
        scheduler=st.builds(
            SchedulerConfig,
            strategy=st.sampled_from(strategies.names()),
            max_batch_size=st.integers(1, 8),
            window_size=st.integers(8, 99),
            min_batch_trigger=st.integers(1, 99),
            scheduling_interval_ms=st.floats(0, 1e6),
            max_skips=st.none() | st.integers(1, 99),
        ),
    )
)
def test_a_configuration_survives_its_file(tmp_path_factory: pytest.TempPathFactory, config: CapsConfig) -> None:
    path = written(tmp_path_factory.mktemp("c"), json.dumps(config.to_json()))
    assert CapsConfig.read(path) == config


def test_the_cap_on_skips_reaches_the_strategy() -> None:
    assert SchedulerConfig(max_skips=None).make().max_skips is None
    assert SchedulerConfig(strategy="power_of_d", max_skips=3).make({"d": 2}).max_skips == 3
    with pytest.raises(UnknownNameError, match="Did you mean 'greedy_variance'"):
        SchedulerConfig(strategy="greedy_varience").make()


BAD_SCHEDULERS = [
    ({"max_batch_size": 0}, "max_batch_size=0 must be at least 1"),
    ({"window_size": -4}, "window_size=-4 must be at least 1"),
    ({"min_batch_trigger": 0}, "min_batch_trigger=0 must be at least 1"),
    ({"window_size": 7}, "window_size=7 must be at least max_batch_size=8"),
    ({"scheduling_interval_ms": -0.5}, "scheduling_interval_ms=-0.5 must be a finite number of at least 0"),
    ({"max_skips": 0}, "max_skips=0 must be at least 1"),
]


@pytest.mark.parametrize(("setting", "message"), BAD_SCHEDULERS)
def test_bad_settings_are_named_in_code_and_in_a_file(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SchedulerConfig(**setting)
    assert str(raised.value) == message
    path = written(tmp_path, json.dumps({"scheduler": setting}))
    with pytest.raises(ConfigError) as raised:
        CapsConfig.read(path)
    assert str(raised.value) == f"{path}: {message} - at `$.scheduler`"


@pytest.mark.parametrize("interval", [math.nan, math.inf])
def test_an_interval_that_is_no_number_is_refused(interval: float) -> None:
    with pytest.raises(ConfigError, match=f"scheduling_interval_ms={interval} must be a finite number of at least 0"):
        SchedulerConfig(scheduling_interval_ms=interval)


@pytest.mark.parametrize("experts", [0, 3])
def test_more_experts_a_token_than_there_are_is_refused(experts: int) -> None:
    with pytest.raises(ConfigError, match=f"^top_k_experts=4 must be in 1 … num_experts={experts}$"):
        CapsConfig(num_experts=experts)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "truncated"),
        (PUBLISHED[:-5], "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"num_experts": "60"}', "Expected `int`, got `str` - at `$.num_experts`"),
        ('{"num_experts": 60.5}', "Expected `int`, got `float` - at `$.num_experts`"),
        ('{"top_k_experts": 61}', "top_k_experts=61 must be in 1 … num_experts=60"),
        ('{"scheduler": {"max_batch": 8}}', "Object contains unknown field `max_batch` - at `$.scheduler`"),
        ('{"a\\nb": 8}', "Object contains unknown field `a b`"),
        ('{"scheduler": {"max_batch_size": 1e99}}', "$.scheduler.max_batch_size"),
        ('{"scheduler": {"scheduling_interval_ms": 1e999}}', "$.scheduler.scheduling_interval_ms"),
        ('{"scheduler": {"scheduling_interval_ms": NaN}}', "malformed"),
        ('{"scheduler": null}', "Expected `object`, got `null` - at `$.scheduler`"),
        (
            '{"scheduler": {"strategy": "greedy_varience"}}',
            "scheduler.strategy: Unknown strategy 'greedy_varience'. Did you mean 'greedy_variance'?",
        ),
        ('{"scheduler": {"strategy": "x\\ny"}}', r"scheduler.strategy: Unknown strategy 'x\ny'."),
        (b'{"model_name": "\xff"}', "is not UTF-8"),
        (b'{"\xff": 1}', "is not UTF-8"),
        (b"\xff\xfe{", "malformed"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str | bytes, named: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as raised:
        CapsConfig.read(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: ")
    assert named in line
    assert "\n" not in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, problem in ((tmp_path, "is a folder"), (tmp_path / "none.json", "does not exist")):
        with pytest.raises(TraceError, match=f"^{path}: file: {problem}"):
            CapsConfig.read(path)


@given(st.integers(0, len(PUBLISHED)), st.binary(max_size=6), st.integers(0, 6))
@settings(max_examples=300)
def test_a_damaged_file_reads_or_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, at: int, put: bytes, cut: int
) -> None:
    whole = PUBLISHED.encode()
    path = written(tmp_path_factory.getbasetemp(), whole[:at] + put + whole[at + cut :])
    line = f"{path}: "
    try:
        CapsConfig.read(path)
    except InputError as error:
        line = str(error)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
