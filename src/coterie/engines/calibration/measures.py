"""Everything of a step that is not its experts: routing, projections, attention, copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from coterie.costs.attention import attention_work
from coterie.costs.cells import AttentionCell, CopyCell, GemmCell, RoutingCell
from coterie.costs.shapes import dense_shapes
from coterie.engines.calibration.timing import CalibrationSettings, Timer, activation_dtype, copies_to_flush
from coterie.types import ModelSpec

try:
    import torch
except ImportError:
    torch = None

LAUNCHES = 8
"""Calls of a small kernel in one CUDA graph, so that launching the graph itself does not count."""
CPU_FLOPS = 1e10
"""Attention past this is left out on a CPU, where it would take seconds a call."""


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
