"""Contract check of batch selection strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator, default_rng

from coterie.batching.base import Loads, Selection, Strategy, Window
from coterie.batching.picking import must_take
from coterie.testing._require import no_error, require, unchanged

FAR = 1_000_000
"""Number of skips used for overdue requests if the strategy has no limit."""


class _Case(NamedTuple):
    name: str
    window: Window
    running: Loads
    size: int


def check_strategy(make: Callable[[], Strategy], seed: int = 0) -> None:
    """Raise AssertionError if what `make()` returns breaks the contract of a batch selection strategy.

    It must return min(size, window) different indices into the window. The oldest request and the overdue ones, oldest
    first, must be among them. The same snapshot and generator state must give the same selection, and the snapshot must
    not be changed. The cases are windows with a running load, several layers, no load at all, fractions, one request or
    none, and sizes from 0 to more than the window. A strategy that passes may still choose badly.
    """
    strategy = make()
    require(isinstance(strategy, Strategy), f"{strategy!r} has no max_skips and select(window, running, size, rng)")
    limit = strategy.max_skips
    require(limit is None or limit >= 1, f"{strategy!r}: max_skips={limit!r} must be None or at least 1")
    for case in _cases(default_rng(seed), limit):
        _check_case(make, strategy, case, seed)


def _cases(rng: Generator, limit: int | None) -> Iterator[_Case]:
    overdue = FAR if limit is None else limit
    for waiting, layers, experts in ((1, 1, 4), (7, 2, 5), (32, 1, 60), (40, 3, 16)):
        loads = rng.integers(0, 50, (waiting, layers, experts)).astype(np.float64)
        fresh = np.zeros(waiting, np.int64)
        running = rng.integers(0, 200, (layers, experts)).astype(np.float64)
        nothing = np.zeros((layers, experts))
        sizes = sorted({0, 1, 2, waiting // 4, waiting // 2, waiting - 1, waiting, waiting + 3})
        shape = f"{waiting} waiting, {layers} layers, {experts} experts"
        for size in sizes:
            fractions = rng.random(loads.shape)
            late = np.where(rng.random(waiting) < 0.3, overdue, overdue - 1)
            last = np.where(np.arange(waiting) == waiting - 1, overdue + 1, 0)
            yield from (
                _Case(shape, Window(loads, fresh, waiting), nothing, size),
                _Case(f"{shape}, with a load running", Window(loads, fresh, waiting + 9), running, size),
                _Case(f"{shape}, all loads 0", Window(np.zeros_like(loads), fresh, waiting), nothing, size),
                _Case(f"{shape}, all alike", Window(np.ones_like(loads), fresh, waiting), running, size),
                _Case(f"{shape}, fractions", Window(fractions, fresh, waiting), running / 200, size),
                _Case(f"{shape}, some overdue", Window(loads, late, waiting), running, size),
                _Case(f"{shape}, the youngest overdue", Window(loads, last, waiting), nothing, size),
                _Case(f"{shape}, all overdue", Window(loads, fresh + overdue, waiting), nothing, size),
            )
    empty = Window(np.zeros((0, 2, 4)), np.zeros(0, np.int64), 0)
    yield from (_Case("an empty window", empty, empty.no_load(), size) for size in (0, 1, 8))


def _check_case(make: Callable[[], Strategy], strategy: Strategy, case: _Case, seed: int) -> None:
    window, running = case.window, case.running
    where = f"{strategy!r}, {case.name}, size {case.size}"
    with unchanged(f"{where}: select", loads=window.loads, skipped=window.skipped, running=running):
        selected = _select(strategy, case, seed, where)
    order = _checked_order(selected, case, where)
    due = must_take(window, case.size, strategy.max_skips)
    if due:
        require(0 in order, f"{where}: the oldest request is not in {order}")
        left_out = [request for request in due if request not in order]
        require(not left_out, f"{where}: overdue {left_out} must be in, oldest first, but picked were {order}")

    for who, same in (("", strategy), (" by a new strategy", make())):
        again = _select(same, case, seed, where).order.tolist()
        require(again == order, f"{where}: the same generator state gave {order}, then {again}{who}")


def _select(strategy: Strategy, case: _Case, seed: int, where: str) -> Selection:
    with no_error(f"{where}: select"):
        return strategy.select(case.window, case.running, case.size, default_rng(seed))


def _checked_order(selected: Selection, case: _Case, where: str) -> list[int]:
    """Return the picks; they must be min(size, window) different requests of the window."""
    require(isinstance(selected, Selection), f"{where}: select returned {type(selected).__name__}, not a Selection")
    array, waiting = selected.order, len(case.window.loads)
    require(
        isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu",
        f"{where}: order must be a NumPy array [pick] of whole numbers; found {array!r}",
    )
    order = [int(request) for request in array]
    outside = [request for request in order if not 0 <= request < waiting]
    require(not outside, f"{where}: picked {outside}, which must be in 0 … {waiting - 1}")
    require(len(set(order)) == len(order), f"{where}: picked twice in {order}")
    expected = min(case.size, waiting)
    require(len(order) == expected, f"{where}: picked {len(order)}, expected min(size, window)={expected}")
    require(isinstance(selected.reason, str) and selected.reason, f"{where}: reason={selected.reason!r} must be words")
    return order
