"""The predicted time of a step: the objective by which every policy is scored.

    layer = max over ranks of experts(rank) + routing + all_to_all
    step  = sum over layers of attention + dense, + sum over MoE layers of layer, + the output head

Terms that depend on the engine are switches: weights that stay in the cache, CUDA-graph padding, overlap of the
all-to-all with compute. All are off by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.attention import attention_shape, attention_us
from coterie.costs.composition import COMPUTED, NO_CROSSING, StepTables, add_projections, layers_us
from coterie.costs.exchange import ExchangeTraffic, arrival_links, traffic_links
from coterie.costs.experts import TILES, MoeParams, blend_table, expert_table, layer_us
from coterie.costs.movement import Contention
from coterie.costs.replicas import Slots, slot_tokens
from coterie.costs.roofline import CurveLaw, RooflineLaw, as_fitted, gemm_work
from coterie.costs.shapes import dense_shapes
from coterie.errors import ConfigError, check, check_share
from coterie.types import ModelSpec, Placement, Topology, WeightDtype

VLLM_GRAPHS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Batch sizes for which vLLM has CUDA graphs unless told otherwise."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Terms of the step time that depend on the engine."""

    cache_resident: bool = False
    """Count weights that fit in the cache as read from it. Right for a benchmark that repeats one layer; in a model the
    other layers evict them in between."""
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes for which the engine has a CUDA graph: a decode batch is padded up to the next one."""
    padding: float = 0.0
    """Share of the padding rows that choose experts of their own, each as a random token: 0 if the engine masks them, 1
    is an upper bound. A row on an expert that has rows already costs nothing."""
    overlap: float = 0.0
    """Share of the experts' time behind which an all-to-all can hide."""

    def __post_init__(self) -> None:
        check_share(overlap=self.overlap, padding=self.padding)
        check(
            list(self.graph_sizes) == sorted(set(self.graph_sizes)) and not any(size < 1 for size in self.graph_sizes),
            f"graph_sizes={self.graph_sizes} must rise from at least 1",
        )

    def padded(self, tokens: int) -> int:
        """Return the padded size of a decode-only batch: the next CUDA-graph size, or `tokens` if there is none."""
        return next((size for size in self.graph_sizes if size >= tokens), tokens)


class Batch(NamedTuple):
    """Requests and tokens of a step."""

    decode_requests: int = 0
    """Requests that decode one token each."""
    decode_context: int = 0
    """Cached tokens, summed over the decoding requests."""
    prefill_tokens: int = 0
    """Prompt tokens computed in this step."""
    prefill_context: int = 0
    """Tokens cached before the prompt tokens (chunked prefill, prefix hits), summed over prompts."""
    prefill_requests: int = 1
    """Prompts that the prompt tokens belong to; a prompt attends only to itself."""

    @property
    def tokens(self) -> int:
        return self.decode_requests + self.prefill_tokens

    @property
    def outputs(self) -> int:
        """Tokens that pass the output head."""
        return self.decode_requests + (self.prefill_requests if self.prefill_tokens else 0)


class StepTime(NamedTuple):
    """Terms of a step's time, in seconds."""

    attention_s: float
    dense_s: float
    routing_s: float
    moe_s: NDArray[np.float64]
    """[layer] time of the slowest rank's experts."""
    all_to_all_s: NDArray[np.float64]
    """[layer] exposed time of the all-to-all, not hidden behind the experts."""

    @property
    def total_s(self) -> float:
        device = self.attention_s + (self.dense_s + self.routing_s)
        return device + float(self.moe_s.sum() + self.all_to_all_s.sum())


NO_LAYERS = np.zeros(0)
ONE_DEVICE = Topology(1)
PLAIN = CostOptions()


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step times of one model on one kind of device. Create it with :func:`coterie.costs.presets.step_model`."""

    spec: ModelSpec
    dtype: WeightDtype
    moe: MoeParams
    decode_attention: RooflineLaw
    prefill_attention: RooflineLaw
    routing: CurveLaw | None = None
    """Time of gate, top-k, gather and weighted sum, by tokens. None counts as 0."""
    gemm: RooflineLaw | None = None
    """Time of projections; None if `rest` has it."""
    topology: Topology = ONE_DEVICE
    options: CostOptions = PLAIN
    measured: bool = True
    """False if the shape or the dtype was not measured: rates are those of the nearest measured shape, and streaming
    time scales with the bytes of this shape and dtype."""
    kernels: str = "torch"
    """What the kernels are of, unless whole steps were measured."""
    contention: dict[str, Contention] = field(default_factory=dict)
    """Slowdown of steps by copies, by path; empty if it was not measured."""
    rest: CurveLaw | None = None
    """Time of a whole step without its experts, its attention to cached tokens and its output head, by tokens, as
    measured in an engine. It stands for projections and routing; None prices these by `gemm` and `routing`."""
    head: CurveLaw | None = None
    """Time of output head and sampling, by output tokens; set if `rest` is."""

    @property
    def caveat(self) -> str:
        """Return a sentence on what the prices rest on if whole steps of an engine were not measured, else nothing."""
        nearest = "" if self.measured else ", at the rates of the nearest shape or weights"
        priced = f"prices are of kernels of {self.kernels}{nearest}."
        said = f"{self.spec.name} in {self.dtype} was not run in an engine here: {priced}"
        return "" if self.rest else said

    def on(self, topology: Topology) -> StepModel:
        """Return the model on other ranks. Ranks with the same links exchange rows as fast as measured for these."""
        same = (topology.intra, topology.inter) == (self.topology.intra, self.topology.inter)
        exchange = topology.exchange or (self.topology.exchange if same else None)
        return replace(self, topology=replace(topology, exchange=exchange))

    def expert_prices(self) -> NDArray[np.float64]:
        """Return [31] prices of this model's experts, for :func:`~coterie.costs.experts.rank_us`."""
        spec = self.spec
        return self.moe.array(spec.expert_bytes(self.dtype), 2.0 * spec.expert_params, self.options.cache_resident)

    def experts_us(self, counts: NDArray[np.float64], tokens: int) -> float:
        """Return microseconds of one device's experts in one layer; counts [expert] are rows, possibly fractions."""
        return layer_us(self.expert_prices(), counts, float(tokens))

    def moe_s(self, load: NDArray[np.integer], tokens: int, placement: Placement | None = None) -> NDArray[np.float64]:
        """Return [layer] seconds of the slowest rank's experts; load [layer, expert] are the step's tokens."""
        placed = PlacedStepModel(self, placement)
        return np.asarray(1e-6 * placed.layers_us(placed.slot_rows(load), np.full(placed.num_ranks, tokens))[0])

    def dense_s(self, tokens: int, outputs: int | None = None) -> float:
        """Return seconds of a step's projections: attention, shared and dense MLPs, and the head for `outputs` tokens.

        `outputs` is `tokens` by default.
        """
        if self.rest and self.head:
            return 1e-6 * (self.rest.us(tokens) + self.head.us(tokens if outputs is None else outputs))
        total = self._gemm_us(tokens if outputs is None else outputs, self.spec.vocab_size, self.spec.hidden_size)
        for shapes, times in dense_shapes(self.spec):
            total += times * sum(self._gemm_us(tokens, n, k) for n, k in shapes)
        return total * 1e-6

    def _gemm_us(self, tokens: int, n: int, k: int) -> float:
        assert self.gemm
        return self.gemm.us(*gemm_work(tokens, n, k))

    def attention_s(self, batch: Batch) -> float:
        """Return seconds of a step's attention over all layers."""
        us = attention_us(
            attention_shape(self.spec),
            as_fitted(self.decode_attention),
            as_fitted(self.prefill_attention),
            batch.decode_requests,
            np.array([batch.decode_context]),
            batch.prefill_tokens,
            np.array([batch.prefill_context]),
            batch.prefill_requests,
        )
        return float(us[0]) * 1e-6

    def routing_us(self, tokens: int) -> float:
        """Return microseconds of gate, top-k, gather and weighted sum in one MoE layer."""
        return self.routing.us(tokens) if self.routing and not self.rest else 0.0

    def running_tokens(self, batch: Batch) -> int:
        """Return the tokens that the step computes; a decode-only batch is padded."""
        return batch.tokens if batch.prefill_tokens else self.options.padded(batch.tokens)

    def touched_by_padding(self, batches: Sequence[Batch]) -> float:
        """Return the chance that the padding rows of a step choose a given expert; `batches` are those of its ranks."""
        rows = sum(self.running_tokens(batch) - batch.tokens for batch in batches)
        return float(1.0 - (1.0 - self.spec.top_k / self.spec.num_experts) ** (self.options.padding * rows))

    def step(
        self,
        load: NDArray[np.integer],
        batch: Batch,
        placement: Placement | None = None,
        traffic: ExchangeTraffic | None = None,
    ) -> StepTime:
        """Return the times of a step. `load` [MoE layer, expert] are tokens of all ranks, `batch` is one rank's batch.

        A rank exchanges the rows that it computes, whose tokens are spread evenly over all ranks; `traffic` overrides
        the bytes that it exchanges in a layer.
        """
        placed = PlacedStepModel(self, placement)
        if traffic is None:
            return placed.step(load, batch)
        crossing = np.ones((2, len(load), placed.num_ranks), np.int64)
        placed.links = traffic_links(traffic, self.topology, self.options.overlap)
        return placed.step(load, batch, crossing)

    def tables(self, most_tokens: int) -> StepTables:
        """Return lookup tables for simulating many steps of up to `most_tokens` tokens over all ranks."""
        spec, options = self.spec, self.options
        check(
            not options.cache_resident,
            "cache_resident=True holds for one layer that repeats; a fleet's steps pass through all",
        )
        sizes = range(max(most_tokens, options.padded(most_tokens)) + 1)
        p, experts, dense = self.expert_prices(), np.zeros((3, TILES, len(sizes))), np.zeros((2, len(sizes)))
        expert_table(p, experts)
        if self.rest and self.head:
            dense[:] = [[law.us(tokens) for tokens in sizes] for law in (self.rest, self.head)]
        else:
            rows = [(n, k, layers) for pairs, layers in dense_shapes(spec) for n, k in pairs]
            assert self.gemm
            law = self.gemm.numbers()
            add_projections(law, np.array(rows, np.float64), dense[0])
            add_projections(law, np.array([[spec.vocab_size, spec.hidden_size, 1]], np.float64), dense[1])
            dense[0] += spec.num_moe_layers * np.array([self.routing_us(tokens) for tokens in sizes])
        return StepTables(
            p=p,
            experts=experts,
            blend=blend_table(self.moe.sharpness),
            dense=dense,
            padded=np.array([[options.padded(t), 1.0 - self.touched_by_padding([Batch(t)])] for t in sizes]).T.copy(),
            attention=np.concatenate(
                [attention_shape(spec), self.decode_attention.numbers(), self.prefill_attention.numbers()]
            ),
        )


class PlacedStepModel:
    """A step model on one placement; values that are the same in every step are computed once."""

    def __init__(self, model: StepModel, placement: Placement | None = None) -> None:
        """Without a placement all experts are on one rank, whatever the topology."""
        if placement is not None:
            check_placement(model, placement)
        self.model = model
        self.num_ranks = 1 if placement is None else placement.num_ranks
        self.links = arrival_links(model.spec, model.topology, model.options.overlap)
        self._slots = None if placement is None else Slots.of(placement)
        self._prices = model.expert_prices()
        self._dense_s: dict[tuple[int, int], tuple[float, float]] = {}

    def slot_rows(self, load: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return [layer, slot] tokens of a step from load [layer, expert]."""
        check(
            load.ndim == 2 and load.shape[1] == self.model.spec.num_experts,
            f"load has shape {load.shape}; expected [layer, {self.model.spec.num_experts}]",
        )
        if load.size and load.min() < 0:
            raise ConfigError(f"load holds {load.min()}; tokens must not be negative")
        rows = np.ascontiguousarray(load, np.int64)
        return rows if self._slots is None else slot_tokens(rows, self._slots)

    def layers_us(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        crossing: NDArray[np.int64] = NO_CROSSING,
        touched: float = 0.0,
    ) -> NDArray[np.float64]:
        """Return [2, layer] :func:`~coterie.costs.composition.layers_us` for rows [layer, slot] and tokens [rank]."""
        out = np.empty((2, len(rows)))
        layers_us(self._prices, *COMPUTED, self.links, rows, crossing, tokens, touched, False, out)
        return out

    def rest(self, batch: Batch) -> StepTime:
        """Return the times of one rank's batch without the experts and the exchange."""
        if not batch.tokens:
            return StepTime(0.0, 0.0, 0.0, NO_LAYERS, NO_LAYERS)
        model, sizes = self.model, (self.model.running_tokens(batch), batch.outputs)
        if sizes not in self._dense_s:
            self._dense_s[sizes] = model.dense_s(*sizes), model.routing_us(sizes[0]) * 1e-6 * model.spec.num_moe_layers
        return StepTime(model.attention_s(batch), *self._dense_s[sizes], NO_LAYERS, NO_LAYERS)

    def step(self, load: NDArray[np.integer], batch: Batch, crossing: NDArray[np.int64] = NO_CROSSING) -> StepTime:
        """Return the times of a step in which every rank runs `batch`; load [layer, expert] is that of all ranks."""
        spec = self.model.spec
        check(
            len(load) == spec.num_moe_layers,
            f"load has {len(load)} layers; {spec.name} has {spec.num_moe_layers} MoE ones",
        )
        rows, tokens = self.slot_rows(load), np.full(self.num_ranks, self.model.running_tokens(batch))
        if not batch.tokens:
            return StepTime(0.0, 0.0, 0.0, np.zeros(len(load)), np.zeros(len(load)))
        touched = self.model.touched_by_padding([batch] * self.num_ranks)
        moe, exchange = 1e-6 * self.layers_us(rows, tokens, crossing, touched)
        return self.rest(batch)._replace(moe_s=moe, all_to_all_s=exchange)


def in_order(model: StepModel) -> Placement | None:
    """Return the placement of the experts in order on the ranks of the model's topology; None for one rank."""
    ranks, spec = model.topology.num_ranks, model.spec
    return None if ranks == 1 else Placement.linear(spec.num_moe_layers, spec.num_experts, ranks)


def check_placement(model: StepModel, placement: Placement) -> None:
    """Raise unless a placement has the model's layers and experts, and either one rank or the topology's ranks."""
    spec, ranks = model.spec, model.topology.num_ranks
    check(
        placement.num_ranks in (1, ranks),
        f"placement.num_ranks={placement.num_ranks} must equal topology.num_ranks={ranks}",
    )
    check(
        (placement.num_layers, placement.num_experts) == (spec.num_moe_layers, spec.num_experts),
        f"placement is for {placement.num_layers} layers of {placement.num_experts} experts; "
        f"{spec.name} has {spec.num_moe_layers} of {spec.num_experts}",
    )
