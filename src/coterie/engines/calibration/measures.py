"""Timing on one device, and everything of a step that is not its experts: routing, projections, attention, copies.

On CUDA every timing is a graph replay between events: launch gaps of eager Python would hide what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from coterie.costs.attention import attention_work
from coterie.costs.cells import AttentionCell, CopyCell, GemmCell, RoutingCell
from coterie.costs.dense import dense_shapes
from coterie.errors import ConfigError, check_at_least
from coterie.types import ModelSpec, WeightDtype

try:
    import torch
except ImportError:
    torch = None

LAUNCHES = 8
"""Calls of a small kernel in one CUDA graph, so that launching the graph itself does not count."""
CPU_FLOPS = 1e10
"""Attention past this is left out on a CPU, where it would take seconds a call."""
MAX_COPIES = 64
"""Copies of a layer to rotate over, at most: tiny shapes would need thousands to fill a cache."""


def _flush_bytes(device: Any) -> float:
    """Weights to rotate over so that none stays cached: four times the last-level cache."""
    return 4.0 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 64e6


def copies_to_flush(device: Any, nbytes: float) -> int:
    return max(2, min(MAX_COPIES, int(np.ceil(_flush_bytes(device) / nbytes))))


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings of a calibration."""

    dtypes: tuple[WeightDtype, ...] = ()
    """Weight dtypes of the experts. CUDA: bf16, fp8. CPU: fp32, bf16. None given: bf16 and fp8, or fp32."""
    tokens: tuple[int, ...] = (
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
    )
    """Batch sizes of the MoE cells. Powers of two alone would hide what a partly filled tile costs."""
    skews: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Zipf exponents measured in addition to the even spread."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Context lengths of the attention cells."""
    cell_ms: float = 20.0
    """Time to spend on one cell in one pass."""
    passes: int = 3
    """Passes over all MoE cells, each in another order; a cell's time is the median of its passes."""
    min_repeats: int = 5

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"tokens={self.tokens} must be at least one batch size of at least 1")
        check_at_least(1, passes=self.passes, min_repeats=self.min_repeats)


class Timer:
    """Median time of a callable on one device."""

    def __init__(self, device: Any, settings: CalibrationSettings) -> None:
        self.device = device
        self.settings = settings

    def median_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Median over the passes, for the kernels too few to be measured in shuffled passes."""
        return round(statistics.median(self.us(calls) for _ in range(self.settings.passes)), 3)

    def us(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds of one call; the calls take turns, so each finds the cache as the others left it."""
        if self.device.type == "cuda":
            return self._graph_us(calls)
        for call in calls:
            call()
        samples: list[float] = []
        stop = time.perf_counter() + self.settings.cell_ms / 1e3
        while len(samples) < self.settings.min_repeats or time.perf_counter() < stop:
            for call in calls:  # each timed alone: a tiny shape has 64 copies to go round, and one round is enough
                start = time.perf_counter()
                call()
                samples.append((time.perf_counter() - start) * 1e6)
        return statistics.median(samples)

    def _graph_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        first = self._replay_us(graph)
        repeats = int(max(self.settings.min_repeats, min(200, self.settings.cell_ms * 1e3 / max(first, 1.0))))
        samples = [self._replay_us(graph) for _ in range(repeats)]
        del graph
        return statistics.median(samples) / len(calls)

    @staticmethod
    def _replay_us(graph: Any) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


def activation_dtype(device: Any) -> Any:
    # Many CPUs have no bf16 products and emulate them a hundred times slower than fp32.
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure_routing(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[RoutingCell, ...]:
    """Gate, top-k, softmax, sort by expert, gather, and the weighted sum at the end, as plain torch kernels.

    Engines fuse most of this: their share of a step is smaller.
    """
    timer, dtype = Timer(device, settings), activation_dtype(device)
    gate = torch.randn(spec.hidden_size, spec.num_experts, device=device).to(dtype)

    def route(x: Any) -> Any:
        weights, experts = (x @ gate).topk(spec.top_k, dim=-1)
        order = experts.flatten().argsort()
        gathered = x[order // spec.top_k]
        back = torch.empty_like(gathered)
        back[order] = gathered
        weights = torch.softmax(weights, dim=-1)[:, None, :]
        return torch.bmm(weights, back.view(len(x), spec.top_k, -1))

    cells = []
    for tokens in settings.tokens:
        x = torch.randn(tokens, spec.hidden_size, device=device).to(dtype)
        cells.append(RoutingCell(tokens, timer.median_us([partial(route, x)] * _launches(device))))
    return tuple(cells)


def gemm_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(n, k) of the dense projections, each once: attention in and out, shared and dense MLPs."""
    return sorted({shape for shapes, _ in dense_shapes(spec) for shape in shapes})


def measure_gemm(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[GemmCell, ...]:
    timer, dtype = Timer(device, settings), activation_dtype(device)
    cells = []
    for n, k in gemm_shapes(spec):
        weights = [torch.randn(n, k, device=device).to(dtype).t() for _ in range(copies_to_flush(device, 2 * n * k))]
        for tokens in settings.tokens[:: 3 if len(settings.tokens) > 9 else 1]:
            x = torch.randn(tokens, k, device=device).to(dtype)
            calls = [lambda x=x, w=w: x @ w for w in weights]
            cells.append(GemmCell(tokens, n, k, timer.median_us(calls)))
    return tuple(cells)


def _launches(device: Any) -> int:
    return LAUNCHES if device.type == "cuda" else 1


class _Attention(NamedTuple):
    batch: int
    query: int
    context: int


def attention_grid(settings: CalibrationSettings) -> list[_Attention]:
    """Decode: one query a request over its context. Prefill: a prompt over itself, and chunks over what came before."""
    contexts = settings.contexts
    decode = [_Attention(batch, 1, context) for batch in (1, 4, 16, 64, 256) for context in contexts]
    between = [(a + b) // 2 for a, b in pairwise(contexts)]
    prompts = [_Attention(1, query, 0) for query in sorted({*contexts, *between})]
    chunks = [_Attention(1, query, context) for query in contexts[1:3] for context in contexts[1:]]
    return [*decode, *prompts, *chunks]


def measure_attention(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[AttentionCell, ...]:
    """Attention of one layer, its cache cold.

    Grouped heads run as ``scaled_dot_product_attention``. Latent attention (DeepSeek, GLM) decodes in its absorbed
    form, every head over one shared latent, as two batched products around a softmax (slower than a fused kernel),
    and prefills with its heads expanded, as engines do.
    """
    timer = Timer(device, settings)
    cells = []
    limit = 8e9 if device.type == "cuda" else 5e8
    for one in attention_grid(settings):
        nbytes = one.batch * (one.context + one.query) * spec.kv_bytes_per_token / spec.num_layers
        flops = attention_work(spec, one.batch, one.query, one.batch * (one.context + one.query)).flops
        if nbytes > limit or (device.type != "cuda" and flops > CPU_FLOPS):
            continue
        causal = not (one.query > 1 and one.context)  # torch aligns a causal mask with the first token, not the last
        launches = _launches(device)
        turns = min(launches, copies_to_flush(device, nbytes))
        calls = [_attention_call(spec, device, one, causal and one.query > 1) for _ in range(turns)]
        repeated = calls * max(1, launches // turns)
        cells.append(AttentionCell(*one, timer.median_us(repeated), causal))
        del calls, repeated
    return tuple(cells)


def _attention_call(spec: ModelSpec, device: Any, one: _Attention, causal: bool) -> Callable[[], Any]:
    dtype, length = activation_dtype(device), one.context + one.query

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    if spec.kv_lora_rank and one.query == 1:
        width = spec.kv_lora_rank + spec.rope_head_dim
        q, latent = random(one.batch, spec.num_heads, width), random(one.batch, length, width)

        def absorbed() -> Any:
            scores = torch.softmax(q @ latent.transpose(1, 2), dim=-1)
            return scores @ latent[..., : spec.kv_lora_rank]

        return absorbed
    kv_heads = spec.num_heads if spec.kv_lora_rank else spec.num_kv_heads
    width = spec.head_dim + spec.rope_head_dim
    q = random(one.batch, spec.num_heads, one.query, width)
    k, v = (random(one.batch, kv_heads, length, width) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=causal, enable_gqa=spec.num_heads != kv_heads)


def measure_copies(device: Any, settings: CalibrationSettings) -> tuple[CopyCell, ...]:
    """Weights moving inside the device, from and to pinned host memory, and to a peer device if there is one."""
    cells = []
    for nbytes in (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28):
        here = _filled(nbytes, device)
        there = torch.empty_like(here)
        cells.append(CopyCell("device", nbytes, _copy_us(device, there, here, settings)))
        if device.type == "cuda":
            host = torch.randint(0, 255, (nbytes,), dtype=torch.uint8).pin_memory()
            cells.append(CopyCell("host-to-device", nbytes, _copy_us(device, here, host, settings)))
            cells.append(CopyCell("device-to-host", nbytes, _copy_us(device, host, here, settings)))
            if torch.cuda.device_count() > 1:
                peer = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
                cells.append(CopyCell("peer", nbytes, _copy_us(device, peer, here, settings)))
    return tuple(cells)


def _filled(nbytes: int, device: Any) -> Any:
    """Bytes whose pages exist. On a CPU a repeated pattern: random ones take far longer to make than to copy."""
    if device.type != "cuda":
        return torch.arange(256, dtype=torch.uint8).repeat(nbytes // 256)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)


def _copy_us(device: Any, to: Any, source: Any, settings: CalibrationSettings) -> float:
    if device.type != "cuda":
        return round(Timer(device, settings).us([lambda: to.copy_(source)]), 3)
    samples: list[float] = []
    for repeat in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        to.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            samples.append(float(start.elapsed_time(end)) * 1e3)
    return round(statistics.median(samples), 3)
