"""Let a strategy choose the requests of a window to take, and check its contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching.base import Strategy, Window
from coterie.batching.picking import must_take
from coterie.batching.waiting.views import BatchDecision, ServerView, WaitingReport
from coterie.errors import ConfigError

T = TypeVar("T", bound=Hashable)

UNKNOWN = "no waiting request has a known load (no footprint, no table in 'loads'): they go in order of arrival"


class WindowChoice(NamedTuple):
    """Requests to take from a window."""

    order: list[int]
    """Indices into the window, in the order they are handed out."""
    reason: str
    """The strategy's explanation."""


class Chooser(Generic[T]):
    """The strategy and its view of the server, shared by all waiting lists of a server."""

    def __init__(
        self,
        strategy: Strategy,
        view: ServerView[T],
        rng: Generator,
        *,
        window_size: int,
        batch_size: int,
        strict: bool = False,
        report: WaitingReport | None = None,
        decided: Callable[[BatchDecision], None] | None = None,
    ) -> None:
        """The strategy sees the `window_size` oldest requests and selects `batch_size`, or as many as places are free.

        If `strict`, a strategy that fails or breaks its contract raises an error: a simulation must not continue in
        another order than it reports. Otherwise serving continues in order of arrival, and the report says so.
        `decided` is called with each selection.
        """
        self.strategy = strategy
        self.view = view
        self.window_size = window_size
        self.batch_size = batch_size
        self.strict = strict
        self.report = report or WaitingReport()
        self.counters = self.report.counters
        self._rng = rng
        self._decided = decided

    def warm_up(self, shape: tuple[int, int]) -> None:
        """Compile the strategy's loops now, not while requests wait; for loads of this shape [layer, expert]."""
        window = Window(np.ones((2, *np.maximum(shape, 1))), np.zeros(2, np.int64), 2)
        try:
            self.strategy.select(window, window.no_load(), 2, np.random.default_rng(0))
        except Exception as error:
            self._failed(error)

    def choose(self, queue: str, window: list[T], skips: list[int], queued: int, size: int) -> WindowChoice | None:
        """Choose `size` requests of a window, oldest first; None if no load is known or the strategy failed."""
        try:
            loads = self.view.loads(window)
            if loads is None:
                self.counters.unknown += 1
                self.report.once("unknown", UNKNOWN)
                return None
            shown = Window(loads, np.array(skips, np.int64), queued)
            selection = self.strategy.select(shown, self.view.running_load(), size, self._rng)
            choice = WindowChoice(self._in_turn(selection.order, shown, size), selection.reason)
        except Exception as error:
            self._failed(error)
            return None
        self.counters.selections += 1
        if self._decided is not None:
            names = [self.view.name(request) for request in window]
            running = [self.view.name(request) for request in self.view.running()]
            order = [names[index] for index in choice.order]
            try:
                self._decided(BatchDecision(queue, names, skips, queued, size, running, order, choice.reason))
            except Exception as error:
                self._decided = None
                self.report.failed("writing 'decisions'", error)
        return choice

    def _in_turn(self, order: NDArray[np.integer], window: Window, size: int) -> list[int]:
        """Check the strategy's order, and return it with the forced picks in front, oldest first."""
        array, waiting = np.asarray(order), len(window.skipped)
        picked: list[int] = array.tolist()
        due = must_take(window, size, self.strategy.max_skips)
        expected = min(size, waiting)
        whole = array.dtype.kind in "iu" and array.ndim == 1 and len(picked) == expected == len(set(picked))
        if whole and min(picked) >= 0 and max(picked) < waiting:
            if picked[: len(due)] == due:
                return picked
            if not self.strict or set(picked).issuperset(due):
                return [*due, *(index for index in picked if index not in due)][:size]
        raise ConfigError(
            f"strategy {type(self.strategy).__name__} picked {picked}; expected {expected} different indices of "
            f"0 … {waiting - 1}, with {', '.join(map(str, due))} among them"
        )

    def _failed(self, error: Exception) -> None:
        if self.strict:
            raise error
        self.report.failed(f"strategy {type(self.strategy).__name__}", error)
