"""The engine loop: waiting → prefill → decode, one forward pass per step, in one thread.

A step holds one token of each decoding request, and prompts (or chunks of prompts) of the others, up to
`max_step_tokens`. Blocks are taken as a request grows. When they run out, KV staged for another worker is evicted first
(that worker can recompute it); then the newest request returns to the queue and is recomputed later.

The expert ids of every token are stored beside its KV: a reused block also provides its expert ids, so a request's
footprint is exact even if parts of it were cached, fetched or recomputed.
"""

from __future__ import annotations

import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.engines.worker.blocks import BlockTable, OutOfBlocksError, block_digests
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.events import EventStream, Reports
from coterie.engines.worker.metrics import WorkerMetrics
from coterie.engines.worker.model import PackedModel, RequestRows, StepResult
from coterie.engines.worker.requests import FinishReason, Output, WorkerRequest, draw_token
from coterie.engines.worker.transfer import (
    GRANT_FIELD,
    GrantError,
    Grants,
    Prefilled,
    StagedKV,
    prompt_digest,
    torch_codec,
)
from coterie.errors import check
from coterie.footprints import StepLog, block_positions, footprint
from coterie.wire.footprints import WireFootprint, attach_footprint

T = TypeVar("T")
Batch = dict[WorkerRequest, RequestRows]
"""Rows of each request in a step."""


class Engine:
    """Scheduler and KV cache of a worker. Run with :meth:`start` (a thread) or, in tests, by calling :meth:`step`."""

    step_clock = staticmethod(time.perf_counter)
    """Clock for the forward passes in the step log."""
    codec = staticmethod(torch_codec)
    """Factory of the codec for staged KV; it must fit the model's array type."""

    @classmethod
    def load_model(cls, config: WorkerConfig) -> PackedModel:
        return PackedModel(config.model, config.dtype, config.device, config.kv_blocks, config.block_size)

    def __init__(
        self,
        model: PackedModel,
        config: WorkerConfig,
        kv_stream: EventStream | None = None,
        expert_stream: EventStream | None = None,
    ) -> None:
        self.model, self.config = model, config
        self.engine_id = uuid.uuid4().hex
        self.metrics = WorkerMetrics({"model": self.served_name, "role": config.role})
        self.log = StepLog()
        """Log of the steps that have decode rows; counts only those rows."""
        self.blocks = BlockTable(config.kv_blocks, config.block_size)
        shape = (config.max_tokens, len(model.capture.layer_ids), model.capture.top_k)
        self._experts = np.zeros(shape, model.expert_dtype)  # [position, layer, k]
        self._waiting: deque[WorkerRequest] = deque()
        self._running: list[WorkerRequest] = []
        self._staged = StagedKV(self.blocks, self.metrics, config.kv_ttl_s)
        self.grants = Grants(config.fleet_secret)
        self._reports = Reports(self.served_name, model.capture, config.load_interval_s, kv_stream, expert_stream)
        footprint(self._experts[:1], model.capture.num_experts)  # compile the kernel now, or load it from the cache
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._on_end: Callable[[], object] = lambda: None
        self.failure: str | None = None
        """Error that ended the engine's thread, if any."""

    # ------------------------------------------------------------------------------------------- from any thread

    def start(self, on_end: Callable[[], object] = lambda: None) -> None:
        """Start the engine's thread; it calls `on_end` if it ends by itself, which only a bug can cause."""
        self._on_end = on_end
        self._thread = threading.Thread(target=self._loop, name="coterie-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the engine's thread: abort remaining requests and release staged KV."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._shut_down()

    @property
    def served_name(self) -> str:
        return self.config.served_model_name or self.model.name

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._inbox)

    def submit(self, request: WorkerRequest) -> None:
        self._post(lambda: self._waiting.append(request))

    def abort(self, key: str) -> None:
        """End the request of a disconnected client and release its KV. Unknown keys are ignored."""
        self._post(lambda: self._abort(key))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps, in the engine's thread."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # the caller handles it
                    future.set_exception(error)

        self._post(run)
        return future

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # ------------------------------------------------------------------------- in the engine's thread, between steps

    def export(self, key: str) -> bytes | None:
        """Return staged KV as bytes; None for an unknown key. The KV stays staged until it is released."""
        staged = self._staged.get(key)
        if staged is None:
            return None
        count, tokens = len(staged.prompt), np.asarray(staged.prompt, np.int32)
        tensors, expert_ids = self.model.store.pack(staged.blocks, count), self._ids_of(staged.blocks, count)
        return self.codec().to_bytes(Prefilled(self.model.identity, tokens, expert_ids, tensors))

    def hand_out(self, key: str, grant: str | None) -> bytes | None:
        """Return staged KV as bytes and release it. None for an unknown key; a wrong grant raises GrantError."""
        staged = self._staged.get(key)
        if staged is None:
            return None
        check(
            self.grants.valid(grant, key, staged.digest),
            f"the grant is not for the KV of request {key!r}, or it has expired",
            GrantError,
        )
        data = self.export(key)
        self.release(key, "fetched")
        return data

    def release(self, key: str, why: str) -> bool:
        """Release staged KV; return whether there was any."""
        return self._staged.release(key, why)

    def clear_cache(self) -> None:
        """Forget all cached prefixes; raises ConfigError while blocks are in use."""
        self.blocks.clear()
        self._reports.blocks(self.blocks.take_events())

    def refresh_gauges(self) -> None:
        values = {
            ("running", ""): len(self._running),
            ("waiting", ""): len(self._waiting),
            ("kv_staged", ""): len(self._staged),
            ("kv_blocks", "used"): self.blocks.used,
            ("kv_blocks", "cached"): self.blocks.cached,
            ("kv_blocks", "empty"): self.blocks.available - self.blocks.cached,
        }
        for name, stream in (("kv", self._reports.kv_stream), ("experts", self._reports.expert_stream)):
            values["events_published_total", name] = stream.published if stream else 0
            values["events_dropped_total", name] = stream.dropped if stream else 0
        for (name, label), value in values.items():
            self.metrics.set(name, label, value)

    # ---------------------------------------------------------------------------------------------------- the loop

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    if self.idle and not self._closing:
                        due = [at for at in (self._staged.due, self._reports.due) if at is not None]
                        self._wake.wait(max(0.0, min(due) - time.monotonic()) if due else None)
                    if self._closing:
                        break
                self.step()
        except Exception as error:
            self.failure = _words(error)
            traceback.print_exc()
            self._on_end()
        finally:
            self._shut_down()

    def step(self) -> bool:
        """Execute commands, run one forward pass if there is work, and report it. Return False if nothing ran."""
        while self._inbox:
            self._inbox.popleft()()
        self._staged.release_expired()
        batch = self._schedule()
        if batch:
            self._run(batch)
        self._reports.blocks(self.blocks.take_events())
        self._reports.load()
        return bool(batch)

    def _schedule(self) -> Batch:
        budget = self.config.max_step_tokens
        batch: Batch = {}
        preempted = self.metrics.get("preemptions_total")
        # Decoding requests (one token each) first: chunks of prompts would take the whole budget.
        for request in sorted(self._running, key=lambda request: request.length - request.computed > 1):
            count = min(request.length - request.computed, budget)
            # A request may have been preempted earlier in this loop, and the budget may be spent.
            if count and request in self._running and self._grow(request, request.computed + count):
                batch[request] = request.rows(count)
                budget -= count
        if self.metrics.get("preemptions_total") > preempted:  # no room: a new request would be preempted at once
            return batch
        while self._waiting and budget and len(self._running) < self.config.max_batch:
            request = self._waiting[0]
            try:
                self._admit(request)
            except OutOfBlocksError:
                if not self._running and self._staged.evict_oldest():
                    continue
                break
            except Exception as error:  # fetched KV that does not fit fails only its own request
                self._end(request, "error", _words(error))
                continue
            self._waiting.popleft()
            self._running.append(request)
            batch[request] = request.rows(min(request.length - request.computed, budget))
            budget -= len(batch[request].tokens)
        return batch

    def _grow(self, request: WorkerRequest, tokens: int) -> bool:
        """Take blocks for the first `tokens` tokens of a running request; False if the request itself was preempted."""
        wanted = -(-tokens // self.config.block_size) - len(request.blocks)
        while wanted > self.blocks.available:
            if self._staged.evict_oldest():
                continue
            last = self._running[-1]
            self._preempt(last)
            if last is request:
                return False
        request.blocks += self.blocks.take(max(0, wanted))
        return True

    def _preempt(self, request: WorkerRequest) -> None:
        self._running.remove(request)
        self._let_go(request)
        self._waiting.appendleft(request)
        self.metrics.add("preemptions_total")

    def _admit(self, request: WorkerRequest) -> None:
        """Take blocks for all tokens of a request: cached ones first, then fetched KV; the rest is computed."""
        size = self.config.block_size
        request.digests = block_digests(request.tokens(0, request.length), size, request.digests, request.salt)
        findable = request.digests[: (request.length - 1) // size]  # the last token is always computed, for its logits
        cached = self.blocks.find(findable)
        self.blocks.hold(cached)
        try:
            taken = self.blocks.take(-(-request.length // size) - len(cached))
        except OutOfBlocksError:
            self.blocks.release(cached)
            raise
        request.blocks, request.stored = cached + taken, len(cached)
        hit = request.computed = len(cached) * size
        fetched = 0 if request.prefilled is None else self._take_over(request, request.prefilled)
        request.prefilled = None  # after a preemption its blocks may still be cached; else they are recomputed
        if not request.output:
            request.cached_tokens = hit
            self.metrics.add("prefix_blocks_total", "hit", len(cached))
            self.metrics.add("prefix_blocks_total", "miss", len(findable) - len(cached))
            self.metrics.add("prompt_tokens_total", "prefix_cache", hit)
            self.metrics.add("prompt_tokens_total", "transfer", fetched)
            self.metrics.add("prompt_tokens_total", "computed", len(request.prompt) - hit - fetched)

    def _take_over(self, request: WorkerRequest, prefilled: Prefilled) -> int:
        """Write fetched KV, all but the last prompt token's, to the request's blocks; return the tokens written."""
        start, end = request.computed, len(request.prompt) - 1
        if start >= end:
            return 0
        kv_positions = block_positions(request.blocks, self.config.block_size, start, end)
        self.model.store.unpack(prefilled.tensors, kv_positions, start)
        self._experts[kv_positions] = prefilled.expert_ids[start:end]
        request.computed = end
        self._store_full(request)
        return end - start

    def _run(self, batch: Batch) -> None:
        started, worked = time.perf_counter(), self.step_clock()
        try:
            result = self.model.step(list(batch.values()))
        except Exception as error:  # only the requests of this step fail
            self.metrics.add("step_failures_total")
            for request in batch:
                self._end(request, "error", _words(error))
            return
        self.metrics.add("step_seconds_total", by=time.perf_counter() - started)
        self._count(batch, result, self.step_clock() - worked)
        row = sampled = 0
        for request, rows in batch.items():
            kv_positions = block_positions(request.blocks, self.config.block_size, rows.start, rows.end)
            self._experts[kv_positions] = result.expert_ids[row : row + len(kv_positions)]
            row += len(kv_positions)
            request.computed = rows.end
            self._store_full(request)
            if rows.sample:
                token = draw_token(result.logits[sampled], request.sampling, request.rng)
                sampled += 1
                self._deliver(request, request.append(token, self.model.eos))

    def _count(self, batch: Batch, result: StepResult, seconds: float) -> None:
        phases = np.concatenate(
            [np.arange(rows.start, rows.end) >= len(request.prompt) for request, rows in batch.items()]
        )  # [row] whether the token was generated
        decoded = int(phases.sum())
        self.metrics.add("steps_total")
        self.metrics.add("step_rows_total", "decode", decoded)
        self.metrics.add("step_rows_total", "prefill", len(phases) - decoded)
        if decoded:
            touched = (footprint(result.expert_ids[phases], self.model.capture.num_experts) > 0).sum(axis=1)  # [layer]
            for name in ("min", "mean", "max"):
                self.metrics.add("distinct_experts_sum", name, float(getattr(touched, name)()))
            self.metrics.add("distinct_experts_steps_total")
            self.log.add(time.monotonic(), decoded, float(touched.mean()), seconds)
        self._reports.step(result.expert_ids)

    def _store_full(self, request: WorkerRequest) -> None:
        """Make the request's newly full blocks findable in the block table."""
        full = request.computed // self.config.block_size
        if full <= request.stored:
            return
        tokens = request.tokens(0, full * self.config.block_size)
        request.digests = block_digests(tokens, self.config.block_size, request.digests, request.salt)
        self.blocks.store(request.blocks, request.digests[:full], tokens, request.stored, request.salt)
        request.stored = full

    def _deliver(self, request: WorkerRequest, output: Output) -> None:
        self.metrics.add("generated_tokens_total")
        finish = output.finish
        if finish is None:
            request.emit(output)
            return
        self._reports.request(request, self._ids_of(request.blocks, request.computed), finish)
        self._running.remove(request)
        if request.hand_over:
            output = output._replace(kv_transfer_params=self._stage(request))
        else:
            self._let_go(request)
        self.metrics.add("requests_total", finish)
        request.emit(output)

    def _stage(self, request: WorkerRequest) -> dict[str, Any]:
        """Stage the prompt's KV for another worker; return ``kv_transfer_params`` with its location and footprint."""
        count, digest = len(request.prompt), prompt_digest(request.prompt, request.salt)
        self._staged.add(request.key, request.prompt, request.blocks, digest)
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_block_ids": list(request.blocks),
            "remote_host": request.address[0],
            "remote_port": request.address[1],
            "remote_request_id": request.key,
            GRANT_FIELD: self.grants.sign(request.key, digest, time.time() + self.config.kv_ttl_s),
        }
        capture = self.model.capture
        counts = footprint(self._ids_of(request.blocks, count), capture.num_experts)
        attach_footprint(params, WireFootprint(counts, capture.layer_ids, count))
        return params

    def _abort(self, key: str) -> None:
        request = next((request for request in (*self._running, *self._waiting) if request.key == key), None)
        if request is None:
            self.release(key, "dropped")
        else:
            self._end(request, "abort")

    def _end(self, request: WorkerRequest, finish: FinishReason, error: str | None = None) -> None:
        """End a request before it finished, by abort or error."""
        (self._running if request in self._running else self._waiting).remove(request)
        if request.computed:
            self._reports.request(request, self._ids_of(request.blocks, request.computed), finish)
        self._let_go(request)
        self.metrics.add("requests_total", finish)
        request.emit(Output((), "", finish, error=error))

    def _let_go(self, request: WorkerRequest) -> None:
        self.blocks.release(request.blocks)
        request.blocks = []
        request.computed = request.stored = 0

    def _ids_of(self, blocks: Sequence[int], count: int) -> NDArray[np.unsignedinteger]:
        """Return the expert ids of a request's first `count` tokens, [token, layer, k]."""
        return self._experts[block_positions(blocks, self.config.block_size, 0, count)]

    def _shut_down(self) -> None:
        for request in (*self._running, *self._waiting):
            self._end(request, "abort")
        self._staged.release_all()
        while self._inbox:  # answer the callers that still wait
            self._inbox.popleft()()
        for request in list(self._waiting):
            self._end(request, "abort")
        self.blocks.clear()
        self._reports.blocks(self.blocks.take_events())
        self._reports.load(now=True)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
