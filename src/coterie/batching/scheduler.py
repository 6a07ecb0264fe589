"""The waiting queue: when a batch starts, and which requests the strategy is shown.

The mechanism around a strategy. It keeps requests in order of arrival with the load each is expected to bring, shows
the strategy the oldest `window_size` of them, and counts whom it passes over. It has no clock: the simulator gives it
simulated time, an engine the wall clock's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching.base import DEFAULT_MAX_SKIPS, Loads, Selection, Strategy, Window, passed_over, strategies
from coterie.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a batch starts and how it is chosen; the ``scheduler`` part of a configuration file."""

    strategy: str = "greedy_variance"
    """Name of a registered strategy."""
    max_batch_size: int = 8
    """Requests of one batch at most."""
    window_size: int = 32
    """Oldest waiting requests a strategy may choose from."""
    min_batch_trigger: int = 16
    """Requests that must wait before a batch starts; fewer start once the oldest has waited an interval."""
    scheduling_interval_ms: float = 100.0
    """Longest the oldest request waits for the trigger while the server is free."""
    max_skips: int | None = DEFAULT_MAX_SKIPS
    """Times a request may be passed over before it must be taken; null never forces one."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "window_size", "min_batch_trigger"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.window_size < self.max_batch_size:
            raise ConfigError(f"window_size={self.window_size} must be at least max_batch_size={self.max_batch_size}")
        if not (math.isfinite(self.scheduling_interval_ms) and self.scheduling_interval_ms >= 0):
            raise ConfigError(f"scheduling_interval_ms={self.scheduling_interval_ms} must be a number of at least 0")
        if self.max_skips is not None and self.max_skips < 1:
            raise ConfigError(f"max_skips={self.max_skips} must be at least 1, or null")

    def make(self, **settings: Any) -> Strategy:
        """The strategy, with its cap on skips and whatever settings of its own are given."""
        return strategies[self.strategy](max_skips=self.max_skips, **settings)


class CapsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration file in the layout CAPS uses: a model, its experts, and the scheduler."""

    model_name: str | None = None
    """Checkpoint whose router gives the load vectors, where one is run: a folder, or the name it is known by."""
    quantization: str | None = None
    """Precision to load it in, such as bf16 or nf4; null takes the checkpoint's."""
    num_experts: int = 60
    top_k_experts: int = 4
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        if not 1 <= self.top_k_experts <= self.num_experts:
            raise ConfigError(f"top_k_experts={self.top_k_experts} must be in 1 … num_experts={self.num_experts}")

    @classmethod
    def read(cls, path: Path) -> CapsConfig:
        """From a JSON file; what is wrong is named with the file and the field."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not UTF-8: {error.reason}") from None
        except msgspec.DecodeError as error:
            words = " ".join(str(error).split())  # it may quote a field's name, which may hold line breaks
            raise ConfigError(f"{path}: {words}") from None
        if found.scheduler.strategy not in strategies:
            unknown = UnknownNameError("strategy", found.scheduler.strategy, strategies.names())
            raise ConfigError(f"{path}: scheduler.strategy: {unknown}")
        return found

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(msgspec.json.encode(self))
        return found


class ScheduledBatch(NamedTuple, Generic[T]):
    """Requests that start together."""

    items: list[T]
    skipped: NDArray[np.int64]
    """[item] times each was passed over before."""
    selection: Selection


class Scheduler(Generic[T]):
    """Waiting requests in order of arrival, and the choice of the next batch."""

    def __init__(self, config: SchedulerConfig, strategy: Strategy, shape: tuple[int, int]) -> None:
        self.config = config
        self.strategy = strategy
        self._interval_s = config.scheduling_interval_ms / 1000.0
        self._queue: list[int] = []  # rows, oldest first
        self._free: list[int] = []
        self._items: list[T | None] = []
        self._arrival_s: list[float] = []
        self._loads = np.zeros((0, *shape))  # [row, layer, expert]
        self._skipped = np.zeros(0, np.int64)  # [row]

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, item: T, load: Loads, now_s: float) -> None:
        """A request arrives, with the [layer, expert] load it is expected to bring."""
        if np.shape(load) != self._loads.shape[1:]:
            raise ConfigError(f"load has shape {np.shape(load)}; expected {self._loads.shape[1:]}")
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._items[row] = item
        self._arrival_s[row] = now_s
        self._loads[row] = load
        self._skipped[row] = 0
        self._queue.append(row)

    def _grow(self) -> None:
        size = len(self._items)
        more = max(64, size)
        self._loads = np.concatenate([self._loads, np.zeros((more, *self._loads.shape[1:]))])
        self._skipped = np.concatenate([self._skipped, np.zeros(more, np.int64)])
        self._items += [None] * more
        self._arrival_s += [0.0] * more
        self._free = list(range(size + more - 1, size - 1, -1))

    def due_s(self) -> float:
        """Since when a batch is due on a free server, or when it will be if nobody else arrives: inf is never."""
        if not self._queue:
            return math.inf
        due_s = self._arrival_s[self._queue[0]] + self._interval_s
        trigger = self.config.min_batch_trigger
        if len(self._queue) >= trigger:
            due_s = min(due_s, self._arrival_s[self._queue[trigger - 1]])
        return due_s

    def next_batch(self, running: Loads, size: int, rng: Generator) -> ScheduledBatch[T]:
        """Up to `size` requests leave the queue; `running` [layer, expert] is what they join."""
        rows = np.array(self._queue[: self.config.window_size], np.int64)
        skipped = self._skipped[rows]
        window = Window(self._loads[rows], skipped, len(self._queue))
        selection = self.strategy.select(window, running, size, rng)
        order = selection.order
        picked = self._checked(order, min(size, len(rows)), len(rows))
        self._skipped[rows[passed_over(order, len(rows))]] += 1
        chosen = rows[order].tolist()
        items: list[T] = [self._items[row] for row in chosen]
        for index in reversed(picked):
            del self._queue[index]
        for row in chosen:
            self._items[row] = None
        self._free += chosen
        return ScheduledBatch(items, skipped[order], selection)

    def _checked(self, order: NDArray[np.int64], expected: int, waiting: int) -> list[int]:
        """The indices in rising order. A strategy that breaks its contract would lose a request, or run one twice."""
        picked: list[int] = sorted(order.tolist())
        whole = len(picked) == expected == len(set(picked))
        if not whole or (picked and (picked[0] != 0 or picked[-1] >= waiting)):
            raise ConfigError(
                f"strategy {type(self.strategy).__name__} picked {order.tolist()}; expected {expected} different "
                f"indices of 0 … {waiting - 1}, with 0 among them"
            )
        return picked
