"""What a strategy is shown, what it is held to, and what happens where it fails or nothing is known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.batching import Selection, Window
from coterie.batching.waiting import DecisionFile
from coterie.errors import ConfigError
from waiting_engine import EXPERTS, LAYERS, Engine, Request, load, make


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
            return self.inner.select(window, running, *rest)  # type: ignore[no-any-return]

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


def test_nothing_known_is_order_of_arrival_and_said_once() -> None:
    chooser, waiting = make(engine := Engine(known=False))
    for number in range(20):
        waiting.push(Request(number, blocked=number == 3))
    assert [waiting.pop().number for _ in range(20)] == list(range(20))
    assert (chooser.counters.selections, chooser.counters.moved) == (0, 0)
    assert chooser.counters.unknown > 1
    assert len(engine.told) == 1
    assert "known load" in engine.told[0]


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
            return self.inner.select(window, *rest)  # type: ignore[no-any-return]

    chooser, waiting = make(Some())
    chooser.strategy = Look(chooser.strategy)
    for number in range(3):
        waiting.push(Request(number))
    waiting.pop()
    np.testing.assert_allclose(seen[0].loads[1], (load(0) + load(2)) / 2)


def test_loads_of_another_shape_are_left_out() -> None:
    class Two(Engine):
        def share(self, request: Request) -> np.ndarray | None:
            return np.ones((1, 3)) if request.number == 2 else super().share(request)

    chooser, waiting = make(engine := Two())
    for number in range(4):
        waiting.push(Request(number))
    assert {waiting.pop().number for _ in range(4)} == {0, 1, 2, 3}
    assert (chooser.counters.failures, chooser.counters.selections) == (1, 1)
    assert "shape" in engine.told[0]


@pytest.mark.parametrize("answer", [[0, 0, 1], [0], [1, 9, 2], [-1, 0, 1], None])
def test_a_strategy_that_fails_or_breaks_its_contract(answer: list[int] | None) -> None:
    class Bad:
        max_skips = 2

        def select(self, *_: Any) -> Selection:
            if answer is None:
                raise ZeroDivisionError
            return Selection(np.array(answer), "")

    chooser, waiting = make(engine := Engine(), Bad(), batch_size=3)
    for number in range(12):
        waiting.push(Request(number))
    assert [waiting.pop().number for _ in range(12)] == list(range(12))
    assert chooser.counters.failures >= 3
    assert len(engine.told) == 1
    assert "serving goes on" in engine.told[0]


def test_a_strategy_that_leaves_the_oldest_out_is_overruled() -> None:
    class Rude:
        max_skips = 2

        def select(self, window: Window, running: np.ndarray, size: int, *_: Any) -> Selection:  # noqa: ARG002
            return Selection(np.arange(len(window.skipped))[::-1][:size], "the youngest")

    chooser, waiting = make(Engine(), Rude(), batch_size=3, window_size=6)
    for number in range(40):
        waiting.push(Request(number))
    out = [waiting.pop().number for _ in range(40)]
    assert sorted(out) == list(range(40))
    assert out[0] == 0
    assert chooser.counters.worst_skips <= 2


def test_decisions_are_written_down(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    engine = Engine(runs=[Request(77)])
    _, waiting = make(engine, decided=DecisionFile(file), batch_size=3)
    for number in range(6):
        waiting.push(Request(number))
    order = [str(waiting.pop().number) for _ in range(3)]
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["window"] == ["0", "1", "2", "3", "4", "5"]
    assert (line["order"], line["running"], line["queued"], line["size"]) == (order, ["77"], 6, 3)
    assert "variance" in line["reason"]
    with pytest.raises(ConfigError, match="cannot be written"):
        DecisionFile(tmp_path / "no" / "file")
