"""A scheduler for transformers' continuous batching that starts waiting requests in a strategy's order.

    from transformers import ContinuousBatchingConfig

    name = register_scheduler(OrderingSettings(strategy="greedy_variance", loads="table.safetensors"))
    model.generate_batch(prompts, continuous_batching_config=ContinuousBatchingConfig(scheduler_type=name))

It equals the library's `fifo` except for the order of requests that have not started. Requests offloaded to host
memory keep their place in `fifo`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from coterie.batching.base import Loads
from coterie.batching.waiting import Chooser, RequestView, WaitingList, WaitingReport
from coterie.costs.lines import StepCost
from coterie.engines.waiting_settings import LoadSource, OrderingSettings, step_cost
from coterie.errors import check

NAME = "coterie"

logger = logging.getLogger("coterie.scheduler")


class _View(RequestView[str]):
    """View of the library scheduler's requests, by request id."""

    def __init__(self, scheduler: Any, source: LoadSource, phase: str) -> None:
        super().__init__(WaitingReport(partial(logger.warning, "coterie: %s")))
        self._scheduler, self._source, self._prefill = scheduler, source, phase == "prefill"

    def _state(self, request: str) -> Any:
        scheduler = self._scheduler
        return scheduler.waiting_requests.get(request) or scheduler.active_requests[request]

    def share(self, request: str) -> Loads | None:
        return self._source.share(self._state(request).initial_tokens, None)

    def tokens(self, request: str) -> float:
        return float(max(1, len(self._state(request).remaining_prefill_tokens))) if self._prefill else 1.0

    def running(self) -> Sequence[str]:
        return list(self._scheduler.active_requests)

    def free_places(self) -> int:
        return int(self._scheduler.max_requests_per_batch - len(self._scheduler.active_requests))

    def offloaded(self, request: str) -> bool:
        return bool(self._state(request).is_cpu_offloaded)

    def name(self, request: str) -> str:
        return request


class ExpertAwareScheduler(FIFOScheduler):  # type: ignore[misc]  # the library is not installed where types are checked
    """Scheduler for one group of settings; :func:`register_scheduler` creates a subclass with the settings."""

    settings: ClassVar[OrderingSettings]
    source: ClassVar[LoadSource]
    cost: ClassVar[StepCost | None]
    chooser: Chooser[str]
    waiting_requests_order: deque[str]

    def reset(self) -> None:
        super().reset()
        if not hasattr(self, "chooser"):  # reset() is also called by the base class's constructor
            self._view = _View(self, self.source, self.settings.phase)
            self.chooser = self.settings.chooser(self._view, self.source.shape, self.cost)
        self._order: WaitingList[str] = WaitingList(self.chooser, urgent=self._view.offloaded)

    def add_waiting_request(self, state: Any) -> None:
        super().add_waiting_request(state)
        self._order.push(state.request_id)

    def schedule_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._order.remove([request for request in self._order if request not in self.waiting_requests])  # cancelled
        self._order.refresh()
        scheduled = super().schedule_batch(*args, **kwargs)
        for request in self._order:
            if request not in self.waiting_requests:
                self._order.take(request)
        return scheduled

    def _get_waiting_candidates(self) -> Any:
        """Return the waiting requests; called in every step, but a selection runs only if a request can start."""
        if self._view.free_places() < 1:
            return super()._get_waiting_candidates()
        arrived = self.waiting_requests_order
        self.waiting_requests_order = deque(self._order.upcoming())
        try:
            return super()._get_waiting_candidates()
        finally:
            self.waiting_requests_order = arrived


def register_scheduler(settings: OrderingSettings, name: str = NAME, model: Any = None, typical_batch: int = 32) -> str:
    """Register a scheduler with these settings in the library under `name`; return `name`.

    A name may be registered again with other settings, but the library's own names are refused. If the settings have a
    `device`, `model` is required for its shape, and `typical_batch` is the number of requests that usually run at once.
    """
    taken = SCHEDULER_MAPPING.get(name)
    check(
        taken is None or issubclass(taken, ExpertAwareScheduler),
        f"name={name!r} is a scheduler of the library; known: {', '.join(sorted(SCHEDULER_MAPPING))}",
    )
    check(settings.min_batch_trigger == 1, "min_batch_trigger: only vLLM's scheduler holds requests back")
    cost = None
    if settings.device is not None:
        check(model is not None, f"device={settings.device!r} needs the model: its shape decides what a step takes")
        cost = step_cost(settings.device, settings.phase, model.config.to_dict(), typical_batch)
    settings.make(cost)  # raise configuration errors here, not in the library's thread
    fields = {"settings": settings, "source": LoadSource.open(settings.loads), "cost": cost}
    SCHEDULER_MAPPING[name] = type(
        "ExpertAwareScheduler", (ExpertAwareScheduler,), {**fields, "__doc__": ExpertAwareScheduler.__doc__}
    )
    return name
