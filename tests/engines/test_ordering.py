"""The order of waiting requests, against a plain model of it: nothing lost, nobody starved, peek and pop agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coterie.batching import Selection, Window, strategies
from coterie.batching.scheduler import Scheduler, SchedulerConfig
from coterie.engines.ordering import Chooser, WaitingList
from coterie.engines.ordering_inputs import LoadSource, OrderingSettings, step_cost
from coterie.errors import ConfigError, InputError, UnknownNameError
from coterie.predictors import TokenTable
from coterie.traces import ActivationTrace, TraceMeta
from coterie.wire.footprints import WireFootprint

LAYERS, EXPERTS = 2, 8


@dataclass(eq=False)
class Request:
    number: int
    priority: int = 0
    stopped: bool = False
    blocked: bool = False


@dataclass
class Engine:
    """An engine of a few places; a request's load is drawn from its number."""

    places: int = 4
    runs: list[Request] = field(default_factory=list)
    known: bool = True
    broken: bool = False
    failures: int = 0

    def share(self, request: Request) -> np.ndarray | None:
        if self.broken:
            self.failures += 1
            raise RuntimeError("the predictor broke")
        return load(request.number) if self.known else None

    def tokens(self, request: Request) -> float:  # noqa: ARG002
        return 1.0

    def running(self) -> Sequence[Request]:
        return self.runs

    def free_places(self) -> int:
        return self.places - len(self.runs)

    def urgent(self, request: Request) -> bool:
        return request.stopped

    def blocked(self, request: Request) -> bool:
        return request.blocked

    def name(self, request: Request) -> str:
        return str(request.number)


def load(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 4, (LAYERS, EXPERTS)).astype(np.float64)


def make(engine: Engine, told: list[str] | None = None, **how: Any) -> tuple[Chooser[Request], WaitingList[Request]]:
    chooser = Chooser(
        OrderingSettings(**{"strategy": "greedy_variance", **how}), engine, (told if told is not None else []).append
    )
    return chooser, WaitingList(chooser)


def ranked(request: Request) -> tuple[int, int]:
    return request.priority, request.number


class WaitingMachine(RuleBasedStateMachine):
    """Whatever an engine may do, in any order."""

    @initialize(
        strategy=st.sampled_from(["greedy_variance", "random", "greedy_dot_product", "lpt", "power_of_d"]),
        window=st.integers(1, 6),
        batch=st.integers(1, 4),
        skips=st.integers(1, 3),
        by_priority=st.booleans(),
        seed=st.integers(0, 3),
    )
    def begin(self, strategy: str, window: int, batch: int, skips: int, by_priority: bool, seed: int) -> None:
        self.engine = Engine()
        self.limit, self.by_priority = skips, by_priority
        how = OrderingSettings(strategy=strategy, window_size=window, batch_size=batch, max_skips=skips, seed=seed)
        self.chooser = Watched(how, self.engine, lambda _: None)
        self.chooser.machine = self
        self.waiting = WaitingList(self.chooser, rank=ranked if by_priority else None)
        self.model: list[Request] = []  # as they wait, urgent ones aside
        self.stopped: list[Request] = []
        self.out: list[Request] = []
        self.count = 0
        self.age: dict[Request, int] = {}
        self.taken_now: set[Request] = set()
        self.front = 0

    def sort(self) -> None:
        for requests in (self.model, self.stopped):
            requests.sort(key=ranked if self.by_priority else self.age.__getitem__)

    def to_the_front(self, request: Request) -> None:
        self.front -= 1
        self.age[request] = self.front

    def best(self) -> int:
        return min((r.priority for r in [*self.model, *self.stopped]), default=0)

    @rule(priority=st.integers(0, 2))
    def arrive(self, priority: int) -> None:
        request = Request(self.count, priority if self.by_priority else 0)
        self.count += 1
        self.age[request] = self.count
        self.waiting.push(request)
        self.model.append(request)
        self.sort()

    @precondition(lambda self: self.model or self.stopped)
    @rule()
    def take(self) -> None:
        shown = self.waiting.peek()
        assert self.waiting.peek() is shown
        got = self.waiting.pop()
        assert got is shown
        assert got.priority == self.best(), "a lower class never goes first"
        urgent = [r for r in self.stopped if r.priority == self.best()]
        if urgent:
            assert got is urgent[0], "what was stopped goes first"
            self.stopped.remove(got)
        else:
            self.model.remove(got)
        self.out.append(got)
        self.engine.runs.append(got)
        self.taken_now.add(got)
        got.stopped = False

    @precondition(lambda self: self.engine.runs)
    @rule(at=st.integers(0, 20))
    def finish(self, at: int) -> None:
        self.engine.runs.pop(at % len(self.engine.runs))

    @precondition(lambda self: self.engine.runs)
    @rule()
    def stop(self) -> None:
        request = self.engine.runs.pop()
        request.stopped = True
        self.waiting.prepend(request)
        self.out.remove(request)
        self.taken_now.discard(request)
        self.to_the_front(request)
        self.stopped.append(request)
        self.sort()

    @precondition(lambda self: self.engine.runs)
    @rule()
    def put_back(self) -> None:
        """Looked at and not started: in the same step it goes back to its place, later to the front."""
        request = self.engine.runs.pop()
        self.waiting.prepend(request)
        self.out.remove(request)
        if request not in self.taken_now:
            self.to_the_front(request)
        self.taken_now.discard(request)
        self.model.append(request)
        self.sort()

    @precondition(lambda self: self.model or self.stopped)
    @rule(at=st.integers(0, 50), twice=st.booleans())
    def abort(self, at: int, twice: bool) -> None:
        requests = [*self.model, *self.stopped]
        request = requests[at % len(requests)]
        self.waiting.remove([request, request] if twice else [request])
        (self.model if request in self.model else self.stopped).remove(request)
        self.out.append(request)

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 50))
    def block_or_free(self, at: int) -> None:
        request = self.model[at % len(self.model)]
        request.blocked = not request.blocked
        self.waiting.refresh()
        self.taken_now.clear()

    @rule()
    def step(self) -> None:
        self.waiting.refresh()
        self.taken_now.clear()

    @rule(how=st.sampled_from(["known", "unknown", "broken"]))
    def predictor(self, how: str) -> None:
        self.engine.known, self.engine.broken = how == "known", how == "broken"

    @invariant()
    def holds_what_it_was_given(self) -> None:
        if not hasattr(self, "waiting"):
            return
        assert self.engine.failures == self.chooser.counters.failures, "no other failure than the predictor's"
        there = list(self.waiting)
        assert len(there) == len(self.waiting) == len(self.model) + len(self.stopped)
        assert set(there) == {*self.model, *self.stopped}
        assert [r for r in there if not r.stopped] == self.model
        assert not set(there) & {*self.out, *self.engine.runs}
        assert len(set(self.out)) == len(self.out), "handed out once"
        assert all(self.waiting.skips(r) <= self.limit for r in there), "nobody is passed over more often"
        assert self.chooser.counters.worst_skips <= self.limit
        assert set(self.waiting.upcoming()) == set(there)


class Watched(Chooser[Request]):
    """Holds each window against the model."""

    machine: WaitingMachine

    def choose(
        self, queue: str, window: list[Request], skips: list[int], queued: int, size: int
    ) -> list[Request] | None:
        model = self.machine.model
        best = min(r.priority for r in model)
        could = [r for r in model if r.priority == best and not r.blocked]
        assert window == could[: self.settings.window_size], "the oldest that could run"
        assert queued == sum(r.priority == best for r in model), "of the same class, the urgent aside"
        chosen = super().choose(queue, window, skips, queued, size)
        assert chosen is None or chosen[0] is window[0], "the oldest is in, and first"
        return chosen


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_whole_batches_are_those_of_the_offline_scheduler() -> None:
    """Where all places free up at once, the order is that of the same strategy replayed on the same arrivals."""
    for name in sorted(strategies):
        engine = Engine(places=8)
        _, waiting = make(engine, strategy=name, max_skips=3, seed=5)
        replay: Scheduler[int] = Scheduler(
            config := SchedulerConfig(strategy=name, max_skips=3), config.make(), (LAYERS, EXPERTS)
        )
        for number in range(120):
            waiting.push(Request(number))
            replay.push(number, load(number), 0.0)
        rng, ours, theirs = np.random.default_rng(5), [], []
        while waiting:
            waiting.refresh()
            while waiting and engine.free_places():
                engine.runs.append(waiting.pop())
            ours += [request.number for request in engine.runs]
            engine.runs.clear()
            theirs += replay.next_batch(np.zeros((LAYERS, EXPERTS)), 8, rng).items
        assert ours == theirs, name
        assert sorted(ours) == list(range(120))


def test_a_flatter_batch_than_in_order_of_arrival() -> None:
    engine = Engine(places=8)
    _, waiting = make(engine)
    for number in range(400):
        waiting.push(Request(number))
    spread = {"ours": [], "arrival": []}
    for batch in range(40):
        ours = [waiting.pop() for _ in range(8)]
        spread["ours"].append(sum(load(r.number) for r in ours).std())
        spread["arrival"].append(sum(load(n) for n in range(8 * batch, 8 * batch + 8)).std())
    assert np.mean(spread["ours"]) < 0.8 * np.mean(spread["arrival"])


def test_places_that_free_one_by_one_get_a_selection_too() -> None:
    """A selection of 8 lasts for 8 places; of 1, the oldest is always next."""
    for batch_size, moves in ((8, True), (1, False)):
        engine = Engine(places=8, runs=[Request(1000 + n) for n in range(8)])
        chooser, waiting = make(engine, batch_size=batch_size)
        for number in range(64):
            waiting.push(Request(number))
        out = []
        for _ in range(64):
            engine.runs.pop(0)
            waiting.refresh()
            out.append(waiting.pop())
            engine.runs.append(out[-1])
        assert ([r.number for r in out] != list(range(64))) is moves
        assert (chooser.counters.moved > 0) is moves
        assert chooser.counters.worst_skips <= 64


def test_the_running_load_is_that_of_who_runs() -> None:
    """Whoever came and went in between, and however many tokens each still has."""
    seen: list[np.ndarray] = []

    class Uneven(Engine):
        def tokens(self, request: Request) -> float:
            return 1.0 + (request.number + len(seen)) % 3

    @dataclass
    class Look:
        inner: Any
        max_skips: int | None = None

        def select(self, window: Window, running: np.ndarray, *rest: Any) -> Selection:
            expected = sum((load(r.number) * engine.tokens(r) for r in engine.runs), np.zeros((LAYERS, EXPERTS)))
            np.testing.assert_allclose(running, expected, atol=1e-9)
            seen.append(running)
            return self.inner.select(window, running, *rest)

    engine = Uneven(places=6)
    chooser, waiting = make(engine, batch_size=1)
    chooser.strategy = Look(chooser.strategy)
    rng = np.random.default_rng(1)
    for number in range(120):
        waiting.push(Request(number))
    while waiting:
        if len(engine.runs) == 6 or rng.random() < 0.4:
            del engine.runs[rng.integers(0, 6) :]
        else:
            engine.runs.append(waiting.pop())
    assert len(seen) > 20
    assert chooser.counters.failures == 0


def test_an_arrival_that_the_window_would_have_shown_makes_a_new_selection() -> None:
    engine = Engine()
    chooser, waiting = make(engine, window_size=4, batch_size=3)
    for number in range(4):
        waiting.push(Request(number))
    waiting.pop()
    assert chooser.counters.selections == 1
    waiting.push(Request(4))  # behind a window that was full
    waiting.pop()
    assert chooser.counters.selections == 1
    waiting.prepend(Request(5))
    assert waiting.pop().number == 5, "the oldest is first in a new selection"
    assert chooser.counters.selections == 2


def test_what_an_engine_looks_at_and_puts_back_keeps_its_place_and_its_skips() -> None:
    engine = Engine()
    _, waiting = make(engine, batch_size=4)
    for number in range(12):
        waiting.push(Request(number))
    for _ in range(3):  # the engine can start none of them, in three steps
        looked_at = [waiting.pop() for _ in range(4)]
        for request in reversed(looked_at):
            waiting.prepend(request)
        waiting.refresh()
        assert [request.number for request in waiting] == list(range(12))
        assert waiting.peek().number == 0


def test_a_batch_that_is_gone_makes_a_new_selection() -> None:
    engine = Engine(places=8, runs=[Request(100 + n) for n in range(8)])
    chooser, waiting = make(engine, batch_size=3)
    for number in range(10):
        waiting.push(Request(number))
    waiting.peek()
    del engine.runs[:3]
    waiting.refresh()
    waiting.peek()
    assert chooser.counters.selections == 1
    del engine.runs[:1]
    waiting.refresh()
    waiting.peek()
    assert chooser.counters.selections == 2


def test_nothing_known_is_order_of_arrival_and_said_once() -> None:
    told: list[str] = []
    chooser, waiting = make(Engine(known=False), told)
    for number in range(20):
        waiting.push(Request(number, blocked=number == 3))
    assert [waiting.pop().number for _ in range(20)] == list(range(20))
    assert (chooser.counters.selections, chooser.counters.moved) == (0, 0)
    assert chooser.counters.unknown > 1
    assert len(told) == 1
    assert "known load" in told[0]


def test_one_without_a_load_counts_as_the_mean() -> None:
    class Some(Engine):
        def share(self, request: Request) -> np.ndarray | None:
            return None if request.number == 1 else super().share(request)

    seen: list[Window] = []

    @dataclass
    class Look:
        inner: Any
        max_skips: int | None = None

        def select(self, window: Window, *rest: Any) -> Selection:
            seen.append(window)
            return self.inner.select(window, *rest)

    chooser, waiting = make(Some())
    chooser.strategy = Look(chooser.strategy)
    for number in range(3):
        waiting.push(Request(number))
    waiting.pop()
    np.testing.assert_allclose(seen[0].loads[1], (load(0) + load(2)) / 2)


@pytest.mark.parametrize("answer", [[0, 0, 1], [0], [1, 9, 2], [-1, 0, 1], None])
def test_a_strategy_that_fails_or_breaks_its_contract(answer: list[int] | None) -> None:
    class Bad:
        max_skips = 2

        def select(self, *_: Any) -> Selection:
            if answer is None:
                raise ZeroDivisionError
            return Selection(np.array(answer), "")

    told: list[str] = []
    chooser, waiting = make(Engine(), told, batch_size=3)
    chooser.strategy = Bad()
    for number in range(12):
        waiting.push(Request(number))
    assert [waiting.pop().number for _ in range(12)] == list(range(12))
    assert chooser.counters.failures >= 3
    assert len(told) == 1
    assert "serving goes on" in told[0]


def test_a_strategy_that_leaves_the_oldest_out_is_overruled() -> None:
    class Rude:
        max_skips = 2

        def select(self, window: Window, running: np.ndarray, size: int, *_: Any) -> Selection:  # noqa: ARG002
            return Selection(np.arange(len(window.skipped))[::-1][:size], "the youngest")

    chooser, waiting = make(Engine(), batch_size=3, window_size=6)
    chooser.strategy = Rude()
    for number in range(40):
        waiting.push(Request(number))
    out = [waiting.pop().number for _ in range(40)]
    assert sorted(out) == list(range(40))
    assert out[0] == 0
    assert chooser.counters.worst_skips <= 2


def test_decisions_are_written_down(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    engine = Engine(runs=[Request(77)])
    _, waiting = make(engine, decisions=str(file), batch_size=3)
    for number in range(6):
        waiting.push(Request(number))
    order = [str(waiting.pop().number) for _ in range(3)]
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["window"] == ["0", "1", "2", "3", "4", "5"]
    assert (line["order"], line["running"], line["queued"], line["size"]) == (order, ["77"], 6, 3)
    assert "variance" in line["reason"]
    with pytest.raises(ConfigError, match="cannot be written"):
        make(engine, decisions=str(tmp_path / "no" / "file"))


def test_settings_that_are_wrong_are_one_line() -> None:
    for found, words in (
        ({"strategy": "lpt", "windows": 3}, "windows.*settings: strategy, options, window_size"),
        ({}, "strategy"),
        ({"strategy": "lpt", "window_size": 0}, "window_size=0 must be at least 1"),
        ({"strategy": "lpt", "max_skips": 0}, "max_skips=0"),
        ({"strategy": "lpt", "phase": "both"}, "phase"),
        ("lpt", "object"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            OrderingSettings.parse(found, "here")
        assert "\n" not in str(raised.value)
        assert str(raised.value).startswith("here: ")
    with pytest.raises(UnknownNameError, match="greedy_variance"):
        OrderingSettings(strategy="greedy_varianc").make()
    with pytest.raises(ConfigError, match="options"):
        OrderingSettings(strategy="lpt", options={"d": 3}).make()
    assert OrderingSettings(strategy="power_of_d", options={"d": 3}).make().d == 3


QWEN3 = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


def test_a_device_decides_whether_like_or_unlike_requests_go_together() -> None:
    """Two kinds of request in turn. On one H200 a decode batch of one kind streams fewer experts; without a device,
    and across ranks that each hold one kind's experts, the even batch is the better."""

    class Kinds(Engine):
        def share(self, request: Request) -> np.ndarray | None:
            load = np.zeros((48, 128))
            start = 64 * (request.number % 2)
            load[:, start : start + 16] = 0.5
            return load

    for device, ranks, alike in (("h200", 1, True), (None, 1, False), ("h200", 2, False)):
        how = OrderingSettings(strategy="latency_aware", device=device, batch_size=8)
        cost = None if device is None else step_cost(device, "decode", QWEN3, 8, ranks)
        chooser: Chooser[Request] = Chooser(how, Kinds(places=8), lambda _: None, (48, 128), cost)
        waiting = WaitingList(chooser)
        for number in range(256):
            waiting.push(Request(number))
        odd = sum(waiting.pop().number % 2 for _ in range(8))
        assert (odd == 0) is alike, (device, ranks)
        assert alike or odd == 4
        assert chooser.counters.failures == 0
    with pytest.raises(ConfigError, match=r"device='h200'.*'lpt'.*cost"):
        OrderingSettings(strategy="lpt", device="h200").make(step_cost("h200", "decode", QWEN3, 8))
    assert step_cost("h200", "prefill", QWEN3, 8).by_tokens


def table() -> TokenTable:
    ids = np.random.default_rng(0).integers(0, EXPERTS // 2, (50, LAYERS, 2))
    ids[..., 1] += EXPERTS // 2  # top-2, different
    meta = TraceMeta("test", EXPERTS, LAYERS, 2, (1, 3))
    trace = ActivationTrace.from_arrays(meta, ids, np.array([0, 50]), token_ids=np.arange(50, dtype=np.int32))
    return TokenTable(smoothing=0.0).fit(trace)


def test_shares_from_table_and_footprint() -> None:
    source = LoadSource(table())
    predicted = source.share([4, 4, 9], None)
    assert predicted is not None
    np.testing.assert_allclose(predicted.sum(axis=1), 2.0)  # top-2 of one token
    counts = np.zeros((1, EXPERTS), np.uint32)
    counts[0, 5] = 6
    both = source.share([4, 4, 9], WireFootprint(counts, (3,), 3))
    assert both is not None
    np.testing.assert_allclose(both[0], predicted[0])
    np.testing.assert_allclose(both[1], np.minimum(counts[0] / 3, 1.0))  # 6 of 3 tokens cannot be
    assert source.share(None, None) is not None, "popularity"
    with pytest.raises(InputError, match="experts"):
        source.share([1], WireFootprint(np.ones((1, 4), np.uint32), (3,), 3))
    bare = LoadSource.open(None, 4, EXPERTS)
    assert bare.share([1, 2], None) is None
    alone = bare.share(None, WireFootprint(counts, (3,), 12))
    assert alone is not None
    np.testing.assert_allclose(alone[3], counts[0] / 12)
    assert not alone[:3].any()
    assert bare.share(None, WireFootprint(counts, (3,), 0)) is None


def test_loads_of_another_shape_are_left_out() -> None:
    class Two(Engine):
        def share(self, request: Request) -> np.ndarray | None:
            return np.ones((1, 3)) if request.number == 2 else super().share(request)

    told: list[str] = []
    chooser, waiting = make(Two(), told)
    for number in range(4):
        waiting.push(Request(number))
    assert {waiting.pop().number for _ in range(4)} == {0, 1, 2, 3}
    assert (chooser.counters.failures, chooser.counters.selections) == (1, 1)
    assert "shape" in told[0]


def test_an_empty_list() -> None:
    _, waiting = make(Engine())
    assert not waiting
    assert waiting.upcoming() == list(waiting) == []
    waiting.remove([Request(1)])
    for call in (waiting.peek, waiting.pop):
        with pytest.raises(IndexError):
            call()
