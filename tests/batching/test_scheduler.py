"""The waiting queue against a plain list, and its configuration against bad files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
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
from coterie.batching.scheduler import CapsConfig, Scheduler, SchedulerConfig
from coterie.errors import ConfigError, UnknownNameError

SHAPE = (2, 3)
RUNNING = np.zeros(SHAPE)


@dataclass
class Spy:
    """The oldest and any others; keeps what it was shown."""

    max_skips: int | None = None
    window: Window | None = None

    def select(self, window: Window, _running: np.ndarray, size: int, rng: Generator) -> Selection:
        self.window = Window(window.loads.copy(), window.skipped.copy(), window.queued)
        others = 1 + rng.permutation(max(0, len(window.loads) - 1))
        order = np.concatenate([np.zeros(min(1, len(window.loads)), np.int64), others])[:size]
        return Selection(rng.permutation(order), "any")


@dataclass
class Waiting:
    """What the reference knows of a request."""

    item: int
    arrival_s: float
    load: np.ndarray = field(repr=False)
    skipped: int = 0


class AgainstAList(RuleBasedStateMachine):
    """Many requests come and go, so that the scheduler's rows are used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.spy = Spy()
        self.config = SchedulerConfig(
            max_batch_size=5, window_size=12, min_batch_trigger=7, scheduling_interval_ms=2500.0
        )
        self.scheduler: Scheduler[int] = Scheduler(self.config, self.spy, SHAPE)
        self.queue: list[Waiting] = []
        self.rng = np.random.default_rng(0)
        self.now_s = 0.0
        self.pushed = 0

    @rule(count=st.sampled_from([1, 2, 10, 90]), gap_s=st.sampled_from([0.0, 0.5, 4.0]))
    def push(self, count: int, gap_s: float) -> None:
        for _ in range(count):
            self.now_s += gap_s
            load = self.rng.random(SHAPE)
            self.queue.append(Waiting(self.pushed, self.now_s, load.copy()))
            self.scheduler.push(self.pushed, load, self.now_s)
            load[:] = -1.0  # the scheduler keeps its own copy
            self.pushed += 1

    @rule(size=st.integers(0, 15), times=st.sampled_from([1, 8]))
    def take(self, size: int, times: int) -> None:
        for _ in range(times):
            self.take_one(size)

    def take_one(self, size: int) -> None:
        seen = self.queue[:12]
        batch = self.scheduler.next_batch(RUNNING, size, self.rng)
        window, order = self.spy.window, batch.selection.order.tolist()
        assert window is not None
        assert window.queued == len(self.queue)
        np.testing.assert_array_equal(window.loads, np.array([one.load for one in seen]).reshape(-1, *SHAPE))
        assert window.loads.flags.c_contiguous
        assert window.skipped.tolist() == [one.skipped for one in seen]
        assert batch.items == [seen[index].item for index in order]
        assert batch.skipped.tolist() == [seen[index].skipped for index in order], "as it was before"
        for index, one in enumerate(seen):
            one.skipped += index not in order and index < max(order, default=0)
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


def test_rows_of_requests_that_left_are_used_again():
    scheduler: Scheduler[int] = Scheduler(SchedulerConfig(), strategies["fcfs"](), SHAPE)
    rng = np.random.default_rng(0)
    for number in range(5000):
        scheduler.push(number, np.full(SHAPE, float(number)), float(number))
        if number % 8 == 7:
            assert scheduler.next_batch(RUNNING, 8, rng).items == list(range(number - 7, number + 1))
    assert len(scheduler) == 0
    assert len(scheduler._items) == 64, "memory follows the queue, not the run"
    assert scheduler._items == [None] * 64, "and keeps nobody alive"


def test_a_load_of_another_shape_is_refused():
    scheduler: Scheduler[str] = Scheduler(SchedulerConfig(), strategies["fcfs"](), SHAPE)
    for load in (np.zeros(3), np.zeros((1, 3)), np.zeros((2, 4)), np.float64(1.0)):
        with pytest.raises(ConfigError, match=r"load has shape .*; expected \(2, 3\)"):
            scheduler.push("a", load, 0.0)
    assert len(scheduler) == 0


def test_a_broken_strategy_loses_nobody():
    """The queue is as it was before, so that whoever catches the error can go on."""

    @dataclass(frozen=True)
    class Twice:
        max_skips: int | None = None

        def select(self, _window: Window, _running: np.ndarray, size: int, _rng: Generator) -> Selection:
            return Selection(np.zeros(size, np.int64), "the oldest, again and again")

    scheduler: Scheduler[int] = Scheduler(SchedulerConfig(), Twice(), SHAPE)
    for number in range(10):
        scheduler.push(number, RUNNING, 0.0)
    rng = np.random.default_rng(0)
    message = r"^strategy Twice picked \[0, 0, 0\]; expected 3 different indices of 0 … 9, with 0 among them$"
    with pytest.raises(ConfigError, match=message):
        scheduler.next_batch(RUNNING, 3, rng)
    scheduler.strategy = strategies["fcfs"]()
    batch = scheduler.next_batch(RUNNING, 10, rng)
    assert batch.items == list(range(10))
    assert batch.skipped.tolist() == [0] * 10


def test_an_empty_queue_gives_an_empty_batch():
    for name in strategies.names():
        scheduler: Scheduler[int] = Scheduler(SchedulerConfig(), strategies[name](), SHAPE)
        assert scheduler.next_batch(RUNNING, 8, np.random.default_rng(0)).items == []


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


def test_the_published_file_reads_and_is_the_default(tmp_path: Path):
    found = CapsConfig.read(written(tmp_path, PUBLISHED))
    assert found.model_name == "Qwen/Qwen1.5-MoE-A2.7B-Chat"
    assert found.quantization == "nf4"
    assert msgspec.structs.replace(found, model_name=None, quantization=None) == CapsConfig()
    assert found.scheduler.max_skips == 64, "the publication has no cap; ours is on unless turned off"
    assert isinstance(found.scheduler.make(), Strategy)


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
def test_a_configuration_survives_its_file(tmp_path_factory: pytest.TempPathFactory, config: CapsConfig):
    path = written(tmp_path_factory.mktemp("c"), json.dumps(config.to_json()))
    assert CapsConfig.read(path) == config


def test_the_cap_on_skips_reaches_the_strategy():
    assert SchedulerConfig(max_skips=None).make().max_skips is None
    assert SchedulerConfig(strategy="power_of_d", max_skips=3).make(d=2).max_skips == 3
    with pytest.raises(UnknownNameError, match="Did you mean 'greedy_variance'"):
        SchedulerConfig(strategy="greedy_varience").make()


BAD_SCHEDULERS = [
    ({"max_batch_size": 0}, "max_batch_size=0 must be at least 1"),
    ({"window_size": -4}, "window_size=-4 must be at least 1"),
    ({"min_batch_trigger": 0}, "min_batch_trigger=0 must be at least 1"),
    ({"window_size": 7}, "window_size=7 must be at least max_batch_size=8"),
    ({"scheduling_interval_ms": -0.5}, "scheduling_interval_ms=-0.5 must be a number of at least 0"),
    ({"max_skips": 0}, "max_skips=0 must be at least 1, or null"),
]


@pytest.mark.parametrize(("setting", "message"), BAD_SCHEDULERS)
def test_bad_settings_are_named_in_code_and_in_a_file(tmp_path: Path, setting: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as raised:
        SchedulerConfig(**setting)
    assert str(raised.value) == message
    path = written(tmp_path, json.dumps({"scheduler": setting}))
    with pytest.raises(ConfigError) as raised:
        CapsConfig.read(path)
    assert str(raised.value) == f"{path}: {message} - at `$.scheduler`"


@pytest.mark.parametrize("interval", [math.nan, math.inf])
def test_an_interval_that_is_no_number_is_refused(interval: float):
    with pytest.raises(ConfigError, match=f"scheduling_interval_ms={interval} must be a number of at least 0"):
        SchedulerConfig(scheduling_interval_ms=interval)


@pytest.mark.parametrize("experts", [0, 3])
def test_more_experts_a_token_than_there_are_is_refused(experts: int):
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
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str | bytes, named: str):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        CapsConfig.read(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: ")
    assert named in line
    assert "\n" not in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=rf"^{path}: cannot be read: \w+"):
            CapsConfig.read(path)


@given(st.integers(0, len(PUBLISHED)), st.binary(max_size=6), st.integers(0, 6))
@settings(max_examples=300)
def test_a_damaged_file_reads_or_is_one_line(tmp_path_factory: pytest.TempPathFactory, at: int, put: bytes, cut: int):
    whole = PUBLISHED.encode()
    path = written(tmp_path_factory.getbasetemp(), whole[:at] + put + whole[at + cut :])
    line = f"{path}: "
    try:
        CapsConfig.read(path)
    except ConfigError as error:
        line = str(error)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
