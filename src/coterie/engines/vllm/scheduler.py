"""vLLM's schedulers with waiting queues in a strategy's order.

    --scheduler-cls coterie.engines.vllm.scheduler.ExpertAwareScheduler
    --additional-config '{"coterie": {"scheduler": {"strategy": "greedy_variance", "loads": "table.safetensors"}}}'

Only the order in which requests start changes; batching, preemption and every output stay vLLM's. A vLLM whose
queues have other interfaces keeps them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from coterie.batching.waiting import BatchTrigger, Chooser
from coterie.engines.vllm.interfaces import fits
from coterie.engines.waiting_settings import OrderingSettings
from coterie.errors import check
from coterie.wire.expert_events import ExpertMap

if TYPE_CHECKING:
    from coterie.engines.vllm.waiting import ChosenQueue

logger = init_logger("vllm.coterie")  # a child of vLLM's logger, so that its handlers print the messages

WHERE = "additional-config coterie.scheduler"
REPORT_S = 10.0
"""Seconds between log lines of the counters, while they change."""


def read_settings(additional_config: object) -> OrderingSettings:
    """Read the settings from vLLM's ``--additional-config``; invalid settings raise ConfigError."""
    ours = (additional_config if isinstance(additional_config, Mapping) else {}).get("coterie", {})
    check(isinstance(ours, Mapping), f"additional-config coterie: found {ours!r}, expected an object with 'scheduler'")
    unknown = sorted(set(ours) - {"scheduler"})
    check(not unknown, f"additional-config coterie: unknown {', '.join(map(repr, unknown))}; known: 'scheduler'")
    return OrderingSettings.parse(ours.get("scheduler", {}), WHERE)


class ExpertAwareMixin:
    """Mixin for either of vLLM's schedulers that replaces the waiting queues."""

    _chooser: Chooser[Any] | None = None
    _queues: Sequence[ChosenQueue] = ()
    _reported: dict[str, int] | None = None
    _next_report = 0.0
    _priced: ExpertMap | None = None
    """The map under which steps are priced; None for experts in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not fits("scheduler", "requests wait in vLLM's own order"):
            return
        from coterie.engines.vllm.waiting import chosen_queues  # fails to import with another vLLM

        mine: Any = self
        settings = read_settings(mine.vllm_config.additional_config)
        self._chooser, queues = chosen_queues(self, settings, partial(logger.warning, "coterie: %s"))
        self._settings, self._queues = settings, tuple(queues.values())
        self._trigger: BatchTrigger[Any] = BatchTrigger(
            settings.min_batch_trigger, settings.scheduling_interval_ms / 1000.0
        )
        vars(mine).update(queues)
        logger.info(
            "coterie: %s orders the waiting requests: %d at a time of a window of %d, skipped at most %s times each",
            settings.strategy,
            settings.batch_size,
            settings.window_size,
            settings.max_skips,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_map()
        held = bool(self._queues) and self._holds([request for queue in self._queues for request in queue])
        for queue in self._queues:
            queue.order.refresh()
            queue.held = held
        if self._chooser is not None and time.monotonic() > self._next_report:
            self._report(asdict(self._chooser.counters))
        base: Any = super()
        return base.schedule(*args, **kwargs)

    def _holds(self, waiting: list[Any]) -> bool:
        """Return whether the waiting requests are held back; preempted ones never are."""
        preempted = any(request.num_preemptions > 0 for request in waiting)
        return self._trigger.holds(waiting, time.monotonic()) and not preempted

    def _follow_map(self) -> None:
        """Price steps under the expert map in force, if it is new; one that does not fit is logged and left out."""
        if self._chooser is None or self._settings.device is None:
            return
        from coterie.engines.vllm.waiting import price_under, reported_map

        mine: Any = self
        seen = reported_map(mine.connector)
        if seen is None or seen[0] is self._priced:
            return
        self._priced = seen[0]
        try:
            price_under(self, self._settings, self._chooser, *seen)
            logger.info("coterie: steps are priced under expert map %d", seen[0].version)
        except Exception as error:  # whatever the map is, requests go on under the prices before
            logger.warning("coterie: steps are not priced under expert map %d: %s", seen[0].version, error)

    def _report(self, counters: dict[str, int]) -> None:
        self._next_report = time.monotonic() + REPORT_S
        if counters != self._reported:
            logger.info(
                "coterie: waiting requests since the start: %s",
                ", ".join(f"{name} {value}" for name, value in counters.items()),
            )
        self._reported = counters


class ExpertAwareScheduler(ExpertAwareMixin, Scheduler):
    """Scheduler for servers without async scheduling: CPUs, and with ``--no-async-scheduling``."""


class ExpertAwareAsyncScheduler(ExpertAwareMixin, AsyncScheduler):
    """Scheduler for servers with async scheduling, the default on GPUs."""
