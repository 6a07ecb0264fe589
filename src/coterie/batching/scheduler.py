"""Settings for when a batch starts and how it is chosen, and the waiting list of the simulated batch server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from numpy.random import Generator

from coterie.batching.base import DEFAULT_MAX_SKIPS, Loads, Strategy, strategies
from coterie.batching.waiting import Chooser, ChosenBatch, RowView, WaitingList
from coterie.errors import ConfigError, UnknownNameError, check, check_at_least, check_not_negative, file_errors


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a batch starts and how it is chosen; the ``scheduler`` part of a configuration file."""

    strategy: str = "greedy_variance"
    """Name of a registered strategy."""
    max_batch_size: int = 8
    """Largest number of requests in one batch."""
    window_size: int = 32
    """Number of oldest waiting requests a strategy may choose from."""
    min_batch_trigger: int = 16
    """Number of waiting requests at which a batch starts; fewer start once the oldest has waited an interval."""
    scheduling_interval_ms: float = 100.0
    """Longest time, in milliseconds, that the oldest request waits for the trigger while the server is free."""
    max_skips: int | None = DEFAULT_MAX_SKIPS
    """Times a request may be passed over before it must be taken; null for no limit."""

    def __post_init__(self) -> None:
        check_at_least(
            1,
            max_batch_size=self.max_batch_size,
            window_size=self.window_size,
            min_batch_trigger=self.min_batch_trigger,
            max_skips=self.max_skips,
        )
        check(
            self.window_size >= self.max_batch_size,
            f"window_size={self.window_size} must be at least max_batch_size={self.max_batch_size}",
        )
        check_not_negative(scheduling_interval_ms=self.scheduling_interval_ms)

    def make(self, context: Mapping[str, Any] | None = None) -> Strategy:
        """Make the strategy with this `max_skips`; `context` holds values that the server offers, such as `cost`."""
        return strategies.make(self.strategy, context, max_skips=self.max_skips)


class CapsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration file in the layout CAPS uses: a model, its experts, and the scheduler."""

    model_name: str | None = None
    """Checkpoint whose router gives the load vectors, if a model is run: a folder, or the model's name."""
    quantization: str | None = None
    """Precision to load the checkpoint in, such as bf16 or nf4; null takes the checkpoint's own."""
    num_experts: int = 60
    top_k_experts: int = 4
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        check(
            1 <= self.top_k_experts <= self.num_experts,
            f"top_k_experts={self.top_k_experts} must be in 1 … num_experts={self.num_experts}",
        )

    @classmethod
    def read(cls, path: Path) -> CapsConfig:
        """Read a JSON file; errors name the file and the field."""
        with file_errors(path):
            try:
                config = msgspec.json.decode(path.read_bytes(), type=cls)
            except msgspec.DecodeError as error:
                words = " ".join(str(error).split())  # it may quote a field's name, which may hold line breaks
                raise ConfigError(f"{path}: {words}") from None
        try:
            _ = strategies[config.scheduler.strategy]
        except UnknownNameError as error:
            raise ConfigError(f"{path}: scheduler.strategy: {error}") from None
        return config

    def to_json(self) -> dict[str, Any]:
        return cast(dict[str, Any], msgspec.to_builtins(self))


class Scheduler:
    """The simulator's waiting list: a request is a row of the expected loads.

    The scheduler has no clock: the caller reports arrivals with their times and asks when a batch is due.
    """

    def __init__(self, config: SchedulerConfig, strategy: Strategy, loads: Loads, rng: Generator) -> None:
        """`loads` is [request, layer, expert]. A strategy that breaks its contract raises an error."""
        self.config = config
        self._view = RowView(loads)
        self.chooser = Chooser(
            strategy, self._view, rng, window_size=config.window_size, batch_size=config.max_batch_size, strict=True
        )
        self._waiting = WaitingList(self.chooser)
        self._arrival_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: int, now_s: float) -> None:
        """Add a request that arrives at `now_s` seconds."""
        self._waiting.push(request)
        self._arrival_s[request] = now_s

    def due_s(self) -> float:
        """Return the time in seconds when a batch is due if no other request arrives; inf if no request waits."""
        if not self._waiting:
            return math.inf
        due_s = self._arrival_s[self._waiting.at(0)] + self.config.scheduling_interval_ms / 1000.0
        trigger = self.config.min_batch_trigger
        return min(due_s, self._arrival_s[self._waiting.at(trigger - 1)]) if len(self) >= trigger else due_s

    def next_batch(self, running: Loads) -> ChosenBatch[int]:
        """Take up to `max_batch_size` requests out of the queue; `running` [layer, expert] is the load they join."""
        self._view.load = running
        batch = self._waiting.take_batch(self.config.max_batch_size)
        for request in batch.items:
            del self._arrival_s[request]
        return batch
