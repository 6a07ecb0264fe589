"""CoterieConnector: a KV connector for vLLM that moves no KV and records experts.

One instance runs in the worker and fills the position store (:mod:`coterie.engines.vllm.capture`). Another runs in the
scheduler's process: it sends the worker each step's changes, and reads a request's positions when the request ends,
before its blocks are freed. That order makes a footprint exact even for a prefill of one step, whose worker metadata
would arrive after the answer is built.

Used alone or as a child of MultiConnector, beside a connector that moves KV. Nothing in this class may stop serving: a
failure is logged once and counted, and the hook returns the result of a connector without work.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from coterie.engines.vllm.capture import StepCapture, StepEdits, StoreWriter
from coterie.engines.vllm.engine import (
    MapReader,
    attention_group,
    bind_capture,
    block_copies,
    captured_layers,
    check_supported,
    computed_tokens,
    experts_per_token,
    finish_reason,
    moe_modules,
    positions_of,
)
from coterie.engines.vllm.metrics import CoterieMetrics, CoterieStats, interval_gauges
from coterie.engines.vllm.publisher import EventPublisher
from coterie.engines.vllm.settings import PREFIX, ConnectorSettings
from coterie.errors import CoterieError, InputError
from coterie.footprints.positions import PositionShape, PositionStore, block_positions, store_folder, sweep
from coterie.net.access import SECRET_VARIABLE, read_secret
from coterie.wire.expert_events import ExpertLoad, ExpertMap, RequestExperts
from coterie.wire.footprints import KEY, WireFootprint, encode_footprint

logger = init_logger("vllm.coterie")  # a child of vLLM's logger, so that its handlers print the messages

WRITTEN_TIMEOUT_S = 0.25
"""Seconds to wait for the GPU's copy of a finished request's last step; after that it has no footprint."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class CoterieMetadata(KVConnectorMetadata):
    """Metadata from the scheduler to the worker, every step."""

    edits: StepEdits


@dataclass
class CoterieWorkerMetadata(KVConnectorWorkerMetadata):
    """Metadata from the worker to the scheduler, every step: its number, and the expert map if that is new."""

    step: int
    slots: list[bytes] | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return other if self.slots is None else self  # the first rank alone reads the map


def _guarded(default: Any) -> Callable[[F], F]:
    """Decorate a hook: log and count an exception and return `default` instead."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def call(self: CoterieConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self._failed(hook.__name__, error)
                return default

        return cast(F, call)

    return decorate


class CoterieConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector that records experts; settings: :class:`~coterie.engines.vllm.settings.ConnectorSettings`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = ConnectorSettings.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        self._rank = int(vllm_config.parallel_config.data_parallel_rank)
        self._path = self._settings.store_path(str(self._kv_transfer_config.engine_id), self._rank)
        self._owner = zlib.crc32(str(self._kv_transfer_config.engine_id).encode())
        self._counters: Counter[str] = Counter()
        self._counters_sent: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._store: PositionStore | None = None
        self._group, self._block_size = -1, 0
        # Worker.
        self._writer: StoreWriter | None = None
        self._maps: MapReader | None = None
        # Scheduler.
        self._step = 0
        self._processed = 0
        self._local: dict[str, int] = {}
        self._forget: list[int] = []
        self._cached: dict[str, int] = {}
        self._stuck_at = -1
        self._worker_errors = 0
        self._layer_ids: tuple[int, ...] = ()
        self._publisher: EventPublisher | None = None
        self.map_in_force: tuple[ExpertMap, tuple[int, ...]] | None = None
        """Scheduler: the newest map that the worker reported, and the model's layers that it is for."""
        self._sent = time.monotonic()
        self._sent_totals = (0, 0, 0)
        self._sent_load: Any = np.uint64(0)  # [layer, expert] tokens at the last report
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler()

    # Both sides.

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def _failed(self, where: str, error: Exception) -> None:
        if self._store is not None and self._role == KVConnectorRole.WORKER:
            self._store.note_error()  # the scheduler's instance reports it
        else:
            self._counters["errors"] += 1
        self._tell(where, repr(error), trace=not isinstance(error, CoterieError))

    def _tell(self, where: str, error: str | None, trace: bool = False) -> None:
        """Log the first failure of a kind."""
        if error is not None and where not in self._logged:
            self._logged.add(where)
            logger.warning("coterie: %s failed, serving goes on: %s", where, error, exc_info=trace)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self._start_capture(kv_caches)
        except CoterieError as error:
            logger.warning("coterie: experts are not captured: %s", error)
        except Exception as error:
            self._failed("register_kv_caches", error)

    def _start_capture(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        self._group, self._block_size = attention_group(self._kv_cache_config)
        check_supported(config)
        modules = moe_modules(config)
        layer_ids = captured_layers(modules, config)
        shape = PositionShape(
            self._kv_cache_config.num_blocks * self._block_size,
            len(layer_ids),
            experts_per_token(config.model_config),
            config.model_config.get_num_experts(),
        )
        layer_name = self._kv_cache_config.kv_cache_groups[self._group].layer_names[0]

        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        capture = StepCapture(
            layer_ids=layer_ids,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            device=next(iter(kv_caches.values())).device,
            positions_of=functools.partial(positions_of, layer_name),
            rank=self._rank,
            tp_size=group.world_size,
            gather=lambda ids: group.all_gather(ids, dim=0),
        )
        bind_capture(modules, capture, functools.partial(self._failed, "capture"))
        if group.rank_in_group != 0:
            return  # every rank sees the same experts; only the first writes them
        for path in sweep(store_folder(), PREFIX):
            logger.info("coterie: removed the position store of a dead engine: %s", path.name)
        self._maps = MapReader.of(modules, layer_ids)
        self._store = PositionStore.create(shape, self._path, layer_ids, self._owner)
        self._store.compile()
        self._writer = StoreWriter(
            self._store, capture, self._block_size, functools.partial(self._failed, "position store")
        )
        kv_bytes = sum(tensor.size for tensor in self._kv_cache_config.kv_cache_tensors)
        logger.info(
            "coterie: capturing %d layers x top %d of %d experts; position store %.1f MB for %d positions "
            "(blocks of %d), %.2f%% of the KV cache",
            shape.num_layers,
            shape.top_k,
            shape.num_experts,
            shape.nbytes / 1e6,
            shape.num_positions,
            self._block_size,
            100 * shape.nbytes / max(1, kv_bytes),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @_guarded(None)
    def wait_for_save(self) -> None:
        """Write the step's experts to the store; called once per step, after the forward pass."""
        metadata = self._connector_metadata
        if self._writer is not None and isinstance(metadata, CoterieMetadata):
            self._writer.submit(metadata.edits)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        metadata = self._connector_metadata  # still bound, even if saving is deferred until after a draft model
        if not isinstance(metadata, CoterieMetadata):
            return None
        if not metadata.edits.num_tokens:
            self.wait_for_save()  # vLLM 0.26 does not call it in a step without tokens; a second call does no harm
        return CoterieWorkerMetadata(metadata.edits.step, self._new_map())

    @_guarded(None)
    def _new_map(self) -> list[bytes] | None:
        return None if self._maps is None else self._maps.changed()

    # Scheduler side.

    def _start_scheduler(self) -> None:
        try:
            self._group, self._block_size = attention_group(self._kv_cache_config)
            endpoint = self._settings.endpoint(self._rank)
            if endpoint is not None:
                self._publisher = EventPublisher(
                    endpoint, self._rank, self._settings.events_queue, read_secret(SECRET_VARIABLE)
                )
                logger.info("coterie: expert events on %s", endpoint)
        except CoterieError as error:
            self._counters["errors"] += 1
            logger.warning("coterie: %s", error)

    def _attached(self) -> PositionStore | None:
        """Return the worker's store, attached on first use; None until it exists."""
        if self._store is None and self._path.exists():
            try:
                self._store = PositionStore.attach(self._path, self._owner)
            except InputError as error:
                self._failed("attach", error)
                return None
            self._store.compile()
            self._layer_ids = self._store.layer_ids
            unknown = sorted(set(self._settings.layers or ()) - set(self._layer_ids))
            if unknown:
                self._failed("layers", InputError(f"layers={unknown} do not route; those that do: {self._layer_ids}"))
        return self._store

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._local[request.request_id] = num_computed_tokens
        return 0, False

    @_guarded(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Mark a request's new blocks as unknown: they hold another request's rows until a step or KV load writes them.

        Done at once, not when the request runs: a second request may find loaded blocks before that.
        """
        local = self._local.get(request.request_id)
        if local is None or self._group < 0:
            return
        ids = blocks.get_block_ids()[self._group]
        end = len(ids) * self._block_size
        if local < end:
            self._forget += block_positions(ids, self._block_size, local, end).tolist()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._step += 1
        edits = StepEdits(self._step, scheduler_output.total_num_scheduled_tokens, [], [])
        try:
            for new in scheduler_output.scheduled_new_reqs:
                self._local.pop(new.req_id, None)
                self._cached[new.req_id] = new.num_computed_tokens
            forget, self._forget = self._forget, []
            edits = edits._replace(forget=forget, copies=block_copies(scheduler_output))
        except Exception as error:
            self._failed("build_connector_meta", error)
        return CoterieMetadata(edits)

    @_guarded(None)
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, CoterieWorkerMetadata):
            self._processed = metadata.step
            if metadata.slots is not None:
                parallel = self._vllm_config.parallel_config
                in_force = ExpertMap(
                    num_experts=self._vllm_config.model_config.get_num_experts(),
                    num_ranks=parallel.tensor_parallel_size * parallel.data_parallel_size,
                    version=1 if self.map_in_force is None else self.map_in_force[0].version + 1,
                    slots=metadata.slots,
                )
                self._attached()  # for the layers
                self.map_in_force = in_force, self._layer_ids
                if self._publisher is not None:
                    self._publisher.greeting = in_force
                    self._publisher.publish(in_force)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,) * (self._group + 1))

    @_guarded((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Build the request's footprint and event before its blocks are freed; never ask to keep the blocks."""
        self._local.pop(request.request_id, None)
        cached = self._cached.pop(request.request_id, 0)
        handoff = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        asked = {"handoff": handoff, "always": True, "never": False}[self._settings.footprint]
        listened = self._publisher is not None and self._publisher.wanted
        if not (asked or listened) or self._group < 0:
            return False, None
        store = self._attached()
        if store is None or not self._wait_written(store, request):
            self._counters["footprints_missing"] += asked
            self._counters["requests_missing"] += listened
            return False, None
        blocks = block_ids[self._group]
        count = min(computed_tokens(request), len(blocks) * self._block_size)
        positions = block_positions(blocks, self._block_size, 0, count)
        if listened and count:
            self._publish_request(store, request, positions, cached)
        return False, {KEY: self._footprint(store, positions)} if asked else None

    def _wait_written(self, store: PositionStore, request: Any) -> bool:
        """Wait until the request's last step is in the store; return whether it is. On a CPU it always is."""
        step = self._processed + (finish_reason(request) != "abort")
        until = time.monotonic() + WRITTEN_TIMEOUT_S
        while store.step < step and store.step != self._stuck_at:  # an earlier wait may have timed out at this step
            if time.monotonic() > until:
                self._stuck_at = store.step
            time.sleep(20e-6)
        return store.step >= step

    def _footprint(self, store: PositionStore, positions: np.ndarray[Any, np.dtype[np.int64]]) -> str:
        counts, known = store.footprint(positions)
        layer_ids = self._layer_ids
        kept = [row for row, layer in enumerate(layer_ids) if layer in (self._settings.layers or ())]
        if kept:  # empty: no layers chosen, or only layers without routing, which was logged at the start
            counts, layer_ids = counts[kept], tuple(layer_ids[row] for row in kept)
        self._counters["footprints"] += 1
        self._counters["footprints_incomplete"] += int(known < len(positions))
        return encode_footprint(WireFootprint(counts, layer_ids, known, len(positions) - known), deflate=False)

    def _publish_request(
        self, store: PositionStore, request: Any, positions: np.ndarray[Any, np.dtype[np.int64]], cached: int
    ) -> None:
        assert self._publisher is not None
        rows = store.read(positions)  # copy now: the blocks are freed when this returns
        build = functools.partial(
            RequestExperts.pack,
            rows.expert_ids,
            np.asarray(request.all_token_ids[: len(positions)], np.int32),
            rows.known,
            store.shape.num_experts,
            request_id=request.request_id,
            model=self._vllm_config.model_config.served_model_name,
            layer_ids=list(self._layer_ids),
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=cached,
            output_tokens=request.num_output_tokens,
            finish=finish_reason(request),
        )
        self._counters["requests"] += self._publisher.publish(build)

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._store is not None and self._role == KVConnectorRole.WORKER:
            self._store.unlink()

    # Metrics.

    @_guarded(None)
    def get_kv_connector_stats(self) -> CoterieStats | None:
        """Return metrics once per interval, on the scheduler's side; None otherwise."""
        if self._role != KVConnectorRole.SCHEDULER:
            return None
        now = time.monotonic()
        if now - self._sent < self._settings.load_interval_s:
            return None
        seconds, self._sent = now - self._sent, now
        store = self._attached()
        gauges: dict[str, float] = {"capture_on": float(store is not None and store.enabled)}
        layers: dict[int, float] = {}
        if store is not None:
            gauges["store_bytes"] = float(store.shape.nbytes)
            self._counters["errors"] += store.errors - self._worker_errors
            self._worker_errors = store.errors
            interval, layers = self._interval(store, seconds)
            gauges |= interval
        if self._publisher is not None:
            self._tell("expert events", self._publisher.last_error)
            for name, count in self._publisher.counts._asdict().items():
                self._counters[f"events_{name}"] = count
        counters, self._counters_sent = self._counters - self._counters_sent, self._counters.copy()
        return CoterieStats(data={"counters": dict(counters), "gauges": gauges, "layers": layers})

    def _interval(self, store: PositionStore, seconds: float) -> tuple[dict[str, float], dict[int, float]]:
        totals, load = store.totals, store.load.copy()
        steps, tokens, distinct = (now - then for now, then in zip(totals, self._sent_totals, strict=True))
        self._sent_totals = totals
        self._counters.update(steps=steps, tokens=tokens)
        delta, self._sent_load = load - self._sent_load, load
        if self._publisher is not None and self._publisher.wanted and steps:
            event = ExpertLoad(
                model=self._vllm_config.model_config.served_model_name,
                layer_ids=list(self._layer_ids),
                num_experts=store.shape.num_experts,
                seconds=seconds,
                steps=steps,
                tokens=tokens,
                counts=delta.astype("<u4").tobytes(),
            )
            self._publisher.publish(event)
        return interval_gauges(delta, self._layer_ids, distinct, steps)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CoterieStats:
        return CoterieStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> CoterieMetrics:
        return CoterieMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
