"""The predicted time of a step: the one objective every policy is scored by.

    layer = max over ranks of experts(rank) + routing + all_to_all
    step  = sum over layers of attention + dense, + sum over MoE layers of layer, + the output head

Terms that depend on the engine are switches: weights that stay in the cache, CUDA-graph padding, overlap of the
all-to-all with compute. All are off unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.attention import attention_shape, attention_us
from coterie.costs.contention import Contention
from coterie.costs.dense import gemm_work
from coterie.costs.exchange import ExchangeTraffic, all_to_all_us, exposed
from coterie.costs.experts import MoeParams, layer_us, slowest_us
from coterie.costs.movement import transfer_s
from coterie.costs.replicas import slot_tokens
from coterie.costs.roofline import CurveLaw, RooflineLaw, TransferLaw
from coterie.costs.shapes import dense_shapes
from coterie.errors import ConfigError
from coterie.types import Link, ModelSpec, Placement, Topology, WeightDtype


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Terms of the step time that depend on the engine."""

    cache_resident: bool = False
    """Count weights that fit in the cache as read from it. True of a benchmark that repeats one layer; in a model the
    other layers pass through the cache in between."""
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes for which the engine has a CUDA graph: a decode batch is padded up to the next one."""
    overlap: float = 0.0
    """Share of the experts' time behind which an all-to-all can hide."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap <= 1.0:
            raise ConfigError(f"overlap={self.overlap} must be in 0 … 1")
        if list(self.graph_sizes) != sorted(set(self.graph_sizes)) or any(size < 1 for size in self.graph_sizes):
            raise ConfigError(f"graph_sizes={self.graph_sizes} must rise from at least 1")

    def padded(self, tokens: int) -> int:
        """Padded size of a batch that only decodes."""
        return next((size for size in self.graph_sizes if size >= tokens), tokens)


class Batch(NamedTuple):
    """Requests and tokens of a step."""

    decode_requests: int = 0
    """Requests that add one token each."""
    decode_context: int = 0
    """Tokens cached by those requests, summed."""
    prefill_tokens: int = 0
    """Prompt tokens computed in this step."""
    prefill_context: int = 0
    """Tokens already cached before them (chunked prefill, prefix hits), summed."""
    prefill_requests: int = 1
    """Prompts those tokens belong to; each attends to itself alone."""

    @property
    def tokens(self) -> int:
        return self.decode_requests + self.prefill_tokens

    @property
    def outputs(self) -> int:
        """Tokens that pass the output head."""
        return self.decode_requests + (self.prefill_requests if self.prefill_tokens else 0)


class StepTime(NamedTuple):
    """A step's parts, in seconds."""

    attention_s: float
    dense_s: float
    routing_s: float
    moe_s: NDArray[np.float64]
    """[layer] slowest rank's experts."""
    all_to_all_s: NDArray[np.float64]
    """[layer] exposed part of the all-to-all."""

    @property
    def total_s(self) -> float:
        return self.attention_s + self.dense_s + self.routing_s + float(self.moe_s.sum() + self.all_to_all_s.sum())


ONE_DEVICE = Topology(1)
PLAIN = CostOptions()


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step times of one model on one kind of device; make one with :func:`coterie.costs.presets.step_model`."""

    spec: ModelSpec
    dtype: WeightDtype
    moe: MoeParams
    routing: CurveLaw | None
    """Gate, top-k, gather and weighted sum, by tokens. None counts as 0."""
    gemm: RooflineLaw
    decode_attention: RooflineLaw
    prefill_attention: RooflineLaw
    copies: dict[str, TransferLaw]
    """Movement inside a device and between it and its host."""
    topology: Topology = ONE_DEVICE
    options: CostOptions = PLAIN
    measured: bool = True
    """False where the shape or the dtype was not measured: the nearest shape's rates are used, streaming follows the
    bytes of this one."""
    contention: dict[str, Contention] = field(default_factory=dict)
    """What copies take from the steps beside them, by path; empty where it was not measured."""

    def experts_us(self, counts: NDArray[np.float64], tokens: int) -> float:
        """One device's experts of one layer; counts [expert] rows."""
        spec = self.spec
        return layer_us(
            self.moe.array(),
            counts,
            float(tokens),
            spec.expert_bytes(self.dtype),
            2.0 * spec.expert_params,
            self.options.cache_resident,
        )

    def moe_s(self, load: NDArray[np.integer], tokens: int, placement: Placement | None = None) -> NDArray[np.float64]:
        """[layer] seconds of the slowest rank's experts; load [layer, expert] tokens of the step."""
        spec = self.spec
        if load.ndim != 2 or load.shape[1] != spec.num_experts:
            raise ConfigError(f"load has shape {load.shape}; expected [layer, {spec.num_experts}]")
        if load.size and load.min() < 0:
            raise ConfigError(f"load holds {load.min()}; tokens must not be negative")
        p, nbytes, flops = self.moe.array(), spec.expert_bytes(self.dtype), 2.0 * spec.expert_params
        slots = np.asarray(load, np.float64) if placement is None else slot_tokens(load, placement)
        ranks = 1 if placement is None else placement.num_ranks
        by_rank = np.ascontiguousarray(slots).reshape(len(slots), ranks, -1)  # [layer, rank, slot of the rank]
        batch = np.full(ranks, float(tokens))
        resident = self.options.cache_resident
        return np.array([slowest_us(p, rows, batch, nbytes, flops, resident) for rows in by_rank]) * 1e-6

    def dense_s(self, tokens: int, outputs: int | None = None) -> float:
        """Projections of one step: attention's, shared and dense MLPs, and the head for the `outputs` that need it."""
        total = self._gemm_us(tokens if outputs is None else outputs, self.spec.vocab_size, self.spec.hidden_size)
        for shapes, times in dense_shapes(self.spec):
            total += times * sum(self._gemm_us(tokens, n, k) for n, k in shapes)
        return total * 1e-6

    def _gemm_us(self, tokens: int, n: int, k: int) -> float:
        return self.gemm.us(*gemm_work(tokens, n, k))

    def attention_s(self, batch: Batch) -> float:
        """Attention of one step over all layers."""
        found = attention_us(
            attention_shape(self.spec),
            self.decode_attention.as_fitted(),
            self.prefill_attention.as_fitted(),
            batch.decode_requests,
            np.array([batch.decode_context]),
            batch.prefill_tokens,
            np.array([batch.prefill_context]),
            batch.prefill_requests,
        )
        return float(found[0]) * 1e-6

    def routing_us(self, tokens: int) -> float:
        """Gate, top-k, gather and weighted sum of one MoE layer."""
        return self.routing.us(tokens) if self.routing else 0.0

    def running_tokens(self, batch: Batch) -> int:
        """Tokens that the step computes: a batch that only decodes is padded."""
        return batch.tokens if batch.prefill_tokens else self.options.padded(batch.tokens)

    def step(
        self,
        load: NDArray[np.integer],
        batch: Batch,
        placement: Placement | None = None,
        traffic: ExchangeTraffic | None = None,
    ) -> StepTime:
        """The whole step. `load` [MoE layer, expert] tokens of all ranks together; `batch` is one rank's."""
        if len(load) != self.spec.num_moe_layers:
            raise ConfigError(f"load has {len(load)} layers; {self.spec.name} has {self.spec.num_moe_layers} MoE ones")
        if placement is not None and placement.num_ranks != self.topology.num_ranks:
            raise ConfigError(
                f"placement.num_ranks={placement.num_ranks} must equal topology.num_ranks={self.topology.num_ranks}"
            )
        if not batch.tokens:
            return StepTime(0.0, 0.0, 0.0, np.zeros(len(load)), np.zeros(len(load)))
        tokens = self.running_tokens(batch)
        moe = self.moe_s(load, tokens, placement)
        exchange = np.zeros(len(moe))
        if placement is not None and placement.num_ranks > 1:
            per_layer = [traffic] * len(moe) if traffic else self._traffic(load, placement)
            exchange = np.array([all_to_all_us(one, self.topology) for one in per_layer]) * 1e-6
            exchange = exposed(exchange, self.options.overlap, moe)
        routing = self.routing_us(tokens) * 1e-6 * len(moe)
        return StepTime(self.attention_s(batch), self.dense_s(tokens, batch.outputs), routing, moe, exchange)

    def _traffic(self, load: NDArray[np.integer], placement: Placement) -> list[ExchangeTraffic]:
        """[layer] all-to-all time, from the rows of the busiest rank; replicas share tokens from all ranks."""
        slots = slot_tokens(load, placement)
        arriving = slots.reshape(len(slots), placement.num_ranks, -1).sum(axis=2).max(axis=1)
        return [ExchangeTraffic.arriving(rows, self.spec, self.topology) for rows in arriving]

    def move_s(self, link: Link | str = "host-to-device", experts: int = 1) -> float:
        """Moving one layer's weights of some experts over a link, or over a path measured on this device."""
        nbytes = experts * self.spec.expert_bytes(self.dtype)
        if isinstance(link, Link):
            return transfer_s(link, nbytes)
        if link not in self.copies:
            raise ConfigError(f"path {link!r} was not measured; known: {', '.join(sorted(self.copies))}")
        return self.copies[link].us(nbytes) * 1e-6

    def kv_transfer_s(self, tokens: int, link: Link) -> float:
        """Handing the KV cache of `tokens` tokens from a prefill to a decode worker."""
        return transfer_s(link, tokens * self.spec.kv_bytes_per_token)
