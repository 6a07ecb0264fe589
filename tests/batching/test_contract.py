"""Every strategy passes the contract suite, and the suite finds each way to break the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from coterie.batching import Selection, Strategy, Window, strategies
from coterie.batching.base import SpreadCost
from coterie.testing import check_strategy

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", strategies.names())
def test_every_strategy_keeps_the_contract(name: str) -> None:
    check_strategy(lambda: strategies.make(name, {"cost": SpreadCost()}))
    check_strategy(lambda: strategies.make(name, {"cost": SpreadCost()}, max_skips=None))
    check_strategy(lambda: strategies.make(name, {"cost": SpreadCost()}, max_skips=1), seed=1)


Change = Callable[[np.ndarray, Window, np.ndarray, int, Generator], np.ndarray]


@dataclass(frozen=True)
class Altered:
    """First come, first served, the overdue before others, and then one thing wrong."""

    change: Change
    max_skips: int | None = 64
    said: str = "the oldest"

    def select(self, window: Window, running: np.ndarray, size: int, rng: Generator) -> Selection:
        late = window.skipped >= (self.max_skips or 1 << 62)
        late[:1] = True
        order = np.argsort(~late, kind="stable")[:size]
        return Selection(self.change(order, window, running, size, rng), self.said)


def test_the_unaltered_one_passes() -> None:
    check_strategy(lambda: Altered(lambda order, *_: order))
    check_strategy(lambda: Altered(lambda order, *_: order, max_skips=None))


def changed(array: np.ndarray) -> None:
    if array.size:
        array.flat[-1] += 1


def alters_loads(order: Any, window: Any, *_: object) -> Any:
    changed(window.loads)
    return order


def alters_skipped(order: Any, window: Any, *_: object) -> Any:
    changed(window.skipped)
    return order


def alters_running(order: Any, _window: Any, running: Any, *_: object) -> Any:
    changed(running)
    return order


def youngest_first(_order: Any, window: Any, _running: Any, size: Any, _rng: Any) -> Any:
    return np.arange(len(window.loads))[::-1][:size]


def only_arrival(order: Any, *_: object) -> np.ndarray:
    return np.arange(len(order))


def unseeded(order: Any, *_: object) -> np.ndarray:
    return np.concatenate([order[:1], np.random.default_rng().permutation(order[1:])])


def not_the_oldest_overdue(order: Any, window: Any, _running: Any, size: Any, _rng: Any) -> Any:
    late = np.flatnonzero(window.skipped[1:] >= 64)[::-1] + 1
    rest = [r for r in range(1, len(window.loads)) if r not in late]
    return np.array([0, *late, *rest][:size], np.int64) if len(order) else order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order, *_: order[:-1], r"picked 0, expected min\(size, window\)=1"),
        (lambda order, w, *_: np.append(order, len(order)) if len(order) < len(w.loads) else order, "expected min"),
        (lambda order, *_: order + 1, r"picked \[1\], which must be in 0 … 0"),
        (lambda order, *_: order - 1, r"picked \[-1\], which must be in 0 … 0"),
        (lambda order, *_: order * 0, "picked twice"),
        (lambda order, *_: order.astype(np.float64), "order must be a NumPy array"),
        (lambda order, *_: order.tolist(), "order must be a NumPy array"),
        (lambda order, *_: order[None, :], "order must be a NumPy array"),
        (youngest_first, "the oldest request is not in"),
        (only_arrival, r"overdue \[.*\] must be in"),
        (not_the_oldest_overdue, r"overdue \[.*\] must be in, oldest first"),
        (unseeded, "the same generator state gave"),
        (alters_loads, "select changed loads"),
        (alters_skipped, "select changed skipped"),
        (alters_running, "select changed running"),
        (lambda order, w, *_: order[: len(order) * int(bool(w.loads.shape[1] == 1 or len(order) < 3))], "2 layers"),
        (lambda order, _w, r, *_: order[: len(order) * int(not r.any())], "with a load running"),
        (lambda order, w, *_: order if w.loads.any() or not order.size else 1 // 0, "all loads 0.*ZeroDivisionError"),
        (lambda order, _w, _r, size, _: order if size else order[0], "size 0: select raised IndexError"),
        (lambda order, w, *_: order if len(w.loads) else order[0], "an empty window.*IndexError"),
    ],
)
def test_each_way_to_break_the_contract_is_found(change: Change, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_strategy(lambda: Altered(change))


@dataclass
class Remembers:
    max_skips: int | None = None
    calls: list[int] = field(default_factory=list)

    def select(self, window: Window, _running: np.ndarray, size: int, _rng: Generator) -> Selection:
        self.calls.append(size)
        order = np.arange(len(window.loads))
        order[1:] = np.roll(order[1:], len(self.calls))
        return Selection(order[:size], "another every time")


class Numbered:
    """Each one made behaves a little differently."""

    made = 0
    max_skips: int | None = None

    def __init__(self) -> None:
        Numbered.made += 1
        self.number = Numbered.made

    def select(self, window: Window, _running: np.ndarray, size: int, _rng: Generator) -> Selection:
        order = np.arange(len(window.loads))
        order[1:] = np.roll(order[1:], self.number)
        return Selection(order[:size], "by number")


class Silent:
    max_skips: int | None = None

    def select(self, window: Window, _running: np.ndarray, size: int, _rng: Generator) -> tuple[np.ndarray, str]:
        return np.arange(min(size, len(window.loads))), "a plain pair"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Remembers, "the same generator state gave .*, then"),
        (Numbered, "by a new strategy"),
        (Silent, "select returned tuple, not a Selection"),
        (object, "has no max_skips and select"),
        (lambda: Altered(lambda order, *_: order, max_skips=0), "max_skips=0 must be None or at least 1"),
        (lambda: Altered(lambda order, *_: order, said=""), "reason='' must be words"),
    ],
)
def test_state_and_wrong_shapes_of_a_strategy_are_found(make: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_strategy(make)


def test_the_page_lists_every_strategy() -> None:
    page = (DOCS / "batching.md").read_text()
    assert [name for name in strategies if f"`{name}`" not in page] == []
