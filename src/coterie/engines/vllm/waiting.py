"""vLLM's waiting queues in a strategy's order, and the view of vLLM's scheduler that strategies use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.request import RequestStatus

from coterie.batching.base import Loads
from coterie.batching.waiting import Chooser, RequestView, WaitingList, WaitingReport
from coterie.costs.lines import StepCost
from coterie.engines.waiting_settings import LoadSource, OrderingSettings, step_cost
from coterie.errors import check
from coterie.types import Placement
from coterie.wire.expert_events import ExpertMap
from coterie.wire.footprints import footprint_of


class SchedulerView(RequestView[Any]):
    """View of the requests in vLLM's scheduler."""

    def __init__(self, scheduler: Any, source: LoadSource, phase: str, report: WaitingReport) -> None:
        super().__init__(report)
        self._scheduler, self.source, self._prefill = scheduler, source, phase == "prefill"

    def share(self, request: Any) -> Loads | None:
        return self.source.share(request.prompt_token_ids, footprint_of(request.kv_transfer_params))

    def tokens(self, request: Any) -> float:
        return float(max(1, request.num_tokens - request.num_computed_tokens)) if self._prefill else 1.0

    def running(self) -> Sequence[Any]:
        running: Sequence[Any] = self._scheduler.running
        return running

    def free_places(self) -> int:
        scheduler = self._scheduler
        return places(scheduler) - len(scheduler.running) - int(scheduler.num_waiting_for_streaming_input)

    def urgent(self, request: Any) -> bool:
        """Return whether the request was preempted."""
        return bool(request.num_preemptions > 0)

    def blocked(self, request: Any) -> bool:
        """Return whether the request cannot start now.

        Same rule as Scheduler._handle_blocked_waiting_request, which cannot be called since it changes the request.
        """
        status = request.status
        if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id not in self._scheduler.finished_recving_kv_req_ids
        if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            output = request.structured_output_request
            return not output or output.grammar is None
        return bool(status == RequestStatus.WAITING_FOR_STREAMING_REQ)

    def name(self, request: Any) -> str:
        return str(request.request_id)


class ChosenQueue(RequestQueue):
    """A waiting queue for either policy of vLLM. Iteration is by arrival; the next request is chosen on peek or pop.

    vLLM returns requests that it preempted, and requests that it examined but could not start. Preempted requests go
    first; the others become the oldest of those that may be chosen. Under the priority policy both keep their place by
    priority and arrival.
    """

    def __init__(self, chooser: Chooser[Any], view: SchedulerView, name: str, policy: SchedulingPolicy) -> None:
        self.order: WaitingList[Any] = WaitingList(
            chooser,
            name,
            rank=_priority_and_age if policy == SchedulingPolicy.PRIORITY else None,
            urgent=view.urgent,
            blocked=view.blocked,
        )
        self.held = False
        """Whether none of the requests may start in this step: vLLM then finds the queue empty, but counts it."""

    def add_request(self, request: Any) -> None:
        self.order.push(request)

    def pop_request(self) -> Any:
        return self.order.pop()

    def peek_request(self) -> Any:
        return self.order.peek()

    def prepend_request(self, request: Any) -> None:
        self.order.prepend(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.order.prepend(request)

    def remove_request(self, request: Any) -> None:
        check(request in self.order, f"{request.request_id} is not waiting", ValueError)
        self.order.remove([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        self.order.remove(requests)

    def __bool__(self) -> bool:
        return len(self.order) > 0 and not self.held

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)


def _priority_and_age(request: Any) -> tuple[int, tuple[float, str]]:
    return request.priority, (request.arrival_time, request.request_id)


def places(scheduler: Any) -> int:
    """Return the number of requests that may run at once; vLLM 0.26 has one limit where later versions have two."""
    return int(getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs)


def cost_of(scheduler: Any, settings: OrderingSettings, placement: Placement | None = None) -> StepCost | None:
    """Return the cost of this server's steps under a placement, or None without a device.

    Without a placement experts are in order; without expert parallelism, on one rank.
    """
    if settings.device is None:
        return None
    config, parallel = scheduler.vllm_config, scheduler.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size if parallel.enable_expert_parallel else 1
    model = config.model_config.hf_config.to_dict()
    return step_cost(settings.device, settings.phase, model, places(scheduler), ranks, placement)


def reported_map(connector: Any) -> tuple[ExpertMap, tuple[int, ...]] | None:
    """Return the map in force and its layers as a CoterieConnector, alone or in a MultiConnector, knows it."""
    each = (getattr(one, "map_in_force", None) for one in (connector, *getattr(connector, "_connectors", ())))
    return next((seen for seen in each if seen is not None), None)


def price_under(
    scheduler: Any, settings: OrderingSettings, chooser: Chooser[Any], reported: ExpertMap, layer_ids: Sequence[int]
) -> None:
    """Price steps under this map of the model's layers `layer_ids` from now on. Raises CoterieError if it is none."""
    source: LoadSource = chooser.view.source  # type: ignore[attr-defined]
    cost = cost_of(scheduler, settings, source.placement(reported.placement(), layer_ids))
    chooser.strategy = settings.make(cost)


def chosen_queues(scheduler: Any, settings: OrderingSettings, tell: Any) -> tuple[Chooser[Any], dict[str, ChosenQueue]]:
    """Create a queue for each of vLLM's, by attribute of the scheduler, with the requests that it already holds."""
    model = scheduler.vllm_config.model_config
    source = LoadSource.open(settings.loads, model.get_total_num_hidden_layers(), model.get_num_experts())
    if source.table is not None:
        source.share([0], None)  # compile now, not at the first request
    view = SchedulerView(scheduler, source, settings.phase, WaitingReport(tell))
    chooser = settings.chooser(view, source.shape, cost_of(scheduler, settings))
    names = ("waiting", "kv_holding_waiting", "skipped_waiting")  # the last is vLLM 0.26's, of requests put aside
    queues = {n: ChosenQueue(chooser, view, n, scheduler.policy) for n in names if hasattr(scheduler, n)}
    for name, queue in queues.items():
        for request in getattr(scheduler, name):
            queue.add_request(request)
    return chooser, queues
