"""Measure a model's shape on this device: the MoE layer, routing, dense projections, attention, copies.

Experts run as ``torch._grouped_mm`` (bf16) and ``torch._scaled_grouped_mm`` (fp8, row-wise scales; activations are
quantised inside the timed region, as in a server). On a CPU they run as one matrix product per expert, as in CPU
engines. The cache is cold unless a cell says `warm`: calls rotate over enough copies of the layer that none finds its
weights in the cache, as in a real model, where the other layers have run in between.

The measured costs do not hold for other kernels: an engine with a faster grouped GEMM needs its own cells.
"""

from __future__ import annotations

import datetime
import operator
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coterie.costs.attention import attention_shape, layer_work
from coterie.costs.cells import (
    AttentionCell,
    CopyCell,
    GemmCell,
    Measurement,
    MoeCell,
    MoeTable,
    RoutingCell,
    ShapeMeasurement,
    expert_tokens,
)
from coterie.costs.shapes import dense_shapes
from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.timing import (
    DTYPES,
    CalibrationSettings,
    Timer,
    allowed_dtype,
    copies_to_flush,
    describe_hardware,
    describe_software,
    event_us,
    find_device,
    random,
)
from coterie.engines.optional import torch
from coterie.models import models
from coterie.types import ModelSpec, Report, WeightDtype

LAUNCHES = {"cuda": 8, "cpu": 1}
"""Calls of a small kernel in one CUDA graph, so that the launch of the graph adds little to the time of a call."""
CPU_FLOPS = 1e10
"""Maximum FLOPs of an attention cell on a CPU; larger cells are skipped since a call would take seconds."""


def measure_routing(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[RoutingCell, ...]:
    """Time gate, top-k, softmax, sort by expert, gather and the final weighted sum, as plain torch kernels.

    Engines fuse most of these kernels, so that routing takes a smaller share of their steps.
    """
    timer, gate = Timer(device, settings), random(device, spec.hidden_size, spec.num_experts)

    def route(x: Any) -> Any:
        weights, experts = (x @ gate).topk(spec.top_k, dim=-1)
        order = experts.flatten().argsort()
        gathered = x[order // spec.top_k]
        back = torch.empty_like(gathered)
        back[order] = gathered
        weights = torch.softmax(weights, dim=-1)[:, None, :]
        return torch.bmm(weights, back.view(len(x), spec.top_k, -1))

    def calls(tokens: int) -> list[Callable[[], Any]]:
        return [partial(route, random(device, tokens, spec.hidden_size))] * LAUNCHES[device.type]

    return tuple(RoutingCell(tokens, timer.median_us(calls(tokens))) for tokens in settings.tokens)


def gemm_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return the distinct (n, k) shapes of the dense projections: attention in and out, shared and dense MLPs."""
    return sorted({shape for shapes, _ in dense_shapes(spec) for shape in shapes})


def measure_gemm(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[GemmCell, ...]:
    timer, cells = Timer(device, settings), []
    for n, k in gemm_shapes(spec):
        weights = [random(device, n, k).t() for _ in range(copies_to_flush(device, 2 * n * k))]
        for tokens in settings.tokens[:: 3 if len(settings.tokens) > 9 else 1]:
            x = random(device, tokens, k)
            cells.append(GemmCell(tokens, n, k, timer.median_us([partial(operator.matmul, x, w) for w in weights])))
    return tuple(cells)


class _Attention(NamedTuple):
    batch: int
    query: int
    context: int


def attention_grid(settings: CalibrationSettings) -> list[_Attention]:
    """Return the attention shapes to measure.

    Decode: one query per request over its context. Prefill: whole prompts, and chunks over a cached context.
    """
    contexts = settings.contexts
    decode = [_Attention(batch, 1, context) for batch in (1, 4, 16, 64, 256) for context in contexts]
    between = [(a + b) // 2 for a, b in pairwise(contexts)]
    prompts = [_Attention(1, query, 0) for query in sorted({*contexts, *between})]
    chunks = [_Attention(1, query, context) for query in contexts[1:3] for context in contexts[1:]]
    return [*decode, *prompts, *chunks]


def measure_attention(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[AttentionCell, ...]:
    """Time the attention of one layer with a cold cache.

    Grouped heads run as ``scaled_dot_product_attention``. Latent attention (DeepSeek, GLM) decodes in its absorbed
    form, every head over one shared latent, as two batched products around a softmax (slower than a fused kernel),
    and prefills with its heads expanded, as engines do.
    """
    timer, launches, cells = Timer(device, settings), LAUNCHES[device.type], []
    for shape in attention_grid(settings):
        tokens = shape.batch * (shape.context + shape.query)
        nbytes = tokens * spec.kv_bytes_per_token / spec.num_layers
        _, flops = layer_work(attention_shape(spec), shape.batch, shape.query, float(tokens))
        if nbytes > 8e9 if device.type == "cuda" else nbytes > 5e8 or flops > CPU_FLOPS:
            continue
        causal = not (shape.query > 1 and shape.context)  # torch aligns a causal mask with the first cached token
        turns = min(launches, copies_to_flush(device, nbytes))
        calls = [_attention_call(spec, device, shape, causal and shape.query > 1) for _ in range(turns)]
        cells.append(AttentionCell(*shape, timer.median_us(calls * max(1, launches // turns)), causal))
        del calls  # the next shape's tensors need the memory
    return tuple(cells)


def _attention_call(spec: ModelSpec, device: Any, shape: _Attention, causal: bool) -> Callable[[], Any]:
    batch, query, length = shape.batch, shape.query, shape.context + shape.query
    if spec.kv_lora_rank and query == 1:
        width = spec.kv_lora_rank + spec.rope_head_dim
        q, latent = random(device, batch, spec.num_heads, width), random(device, batch, length, width)

        def absorbed() -> Any:
            return torch.softmax(q @ latent.transpose(1, 2), dim=-1) @ latent[..., : spec.kv_lora_rank]

        return absorbed
    kv_heads = spec.num_heads if spec.kv_lora_rank else spec.num_kv_heads
    width = spec.head_dim + spec.rope_head_dim
    q = random(device, batch, spec.num_heads, query, width)
    k, v = (random(device, batch, kv_heads, length, width) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=causal, enable_gqa=spec.num_heads != kv_heads)


def measure_copies(device: Any, settings: CalibrationSettings) -> tuple[CopyCell, ...]:
    """Time copies inside the device, from and to pinned host memory, and to a peer device if there is one."""
    cells = []
    for nbytes in (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28):
        data = _filled(nbytes, device)
        paths: dict[Any, Any] = {"device": (torch.empty_like(data), data)}  # path → target and source
        if device.type == "cuda":
            host = torch.randint(0, 255, (nbytes,), dtype=torch.uint8).pin_memory()
            paths |= {"host-to-device": (data, host), "device-to-host": (host, data)}
            if torch.cuda.device_count() > 1:
                paths["peer"] = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1"), data
        for path, (to, source) in paths.items():
            cells.append(CopyCell(path, nbytes, _copy_us(device, to, source, settings)))
    return tuple(cells)


def _filled(nbytes: int, device: Any) -> Any:
    """Return `nbytes` bytes in mapped pages. A CPU gets a repeated pattern: random bytes take longer than the copy."""
    if device.type != "cuda":
        return torch.arange(256, dtype=torch.uint8).repeat(nbytes // 256)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)


def _copy_us(device: Any, to: Any, source: Any, settings: CalibrationSettings) -> float:
    if device.type != "cuda":
        return round(Timer(device, settings).us([lambda: to.copy_(source)]), 3)
    samples = [event_us(lambda: to.copy_(source, non_blocking=True)) for _ in range(12)]
    return round(statistics.median(samples[2:]), 3)


def active_levels(spec: ModelSpec) -> list[int]:
    """Return the numbers of active experts to measure: top_k doubled up to all experts, and 3/8 and 6/8 of all."""
    parts = (max(spec.top_k, spec.num_experts * part // 8) for part in (3, 6))
    doubled = (spec.top_k << power for power in range(spec.num_experts.bit_length()))
    return sorted({spec.num_experts, *parts, *(level for level in doubled if level < spec.num_experts)})


def moe_grid(spec: ModelSpec, settings: CalibrationSettings) -> Iterator[MoeCell]:
    """Yield the cells to measure; their times are still 0."""
    largest, levels = max(settings.tokens), active_levels(spec)
    even = [MoeCell(tokens, active, 0.0) for tokens in settings.tokens for active in levels]
    skewed = [
        MoeCell(tokens, spec.num_experts, 0.0, zipf=skew) for tokens in (64, 512, 4096) for skew in settings.skews
    ]
    warm = [MoeCell(tokens, active, 0.0, warm=True) for tokens in (16, 64) for active in levels[:3]]
    for cell in (*even, *skewed, *warm):
        if cell.tokens <= largest and cell.active <= cell.tokens * spec.top_k:
            yield cell


def measure_moe(
    spec: ModelSpec, dtype: WeightDtype, device: Any, settings: CalibrationSettings, report: Report
) -> MoeTable:
    """Time every cell of the grid for one weight dtype."""
    timer = Timer(device, settings)
    experts = Experts(spec, dtype, device, copies_to_flush(device, spec.top_k * spec.expert_bytes(dtype)))
    activations = torch.float32 if dtype == "fp32" else torch.bfloat16
    grid = list(moe_grid(spec, settings))
    samples: list[list[float]] = [[] for _ in grid]
    rng = np.random.default_rng(0)
    for visit in range(settings.passes):
        for done, index in enumerate(rng.permutation(len(grid))):
            report(f"{spec.name} {dtype} experts", visit * len(grid) + done, settings.passes * len(grid))
            cell = grid[index]
            counts = np.zeros(spec.num_experts, np.int64)
            chosen = rng.permutation(spec.num_experts)[: cell.active]
            counts[chosen] = expert_tokens(cell.tokens, spec.top_k, cell.active, cell.zipf)
            x = torch.randn(int(counts.sum()), spec.hidden_size, device=device, dtype=torch.float32).to(activations)
            ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(device)
            # Rotate over just enough copies of the layer to flush the cache; a warm cell repeats the first copy.
            turns = copies_to_flush(device, cell.active * spec.expert_bytes(dtype))
            layers = [0] * turns if cell.warm else range(turns)
            calls = [partial(experts.forward, layer, x, ends, counts.tolist()) for layer in layers]
            samples[index].append(timer.us(calls))
    times = (round(statistics.median(per_pass), 3) for per_pass in samples)
    cells = (msgspec.structs.replace(cell, us=us) for cell, us in zip(grid, times, strict=True))
    return MoeTable(dtype, experts.kernel, tuple(cells))


def calibrate(
    specs: Sequence[ModelSpec], settings: CalibrationSettings, device: str = "auto", report: Report | None = None
) -> Measurement:
    """Measure every shape on one device. Dtypes that do not fit in memory are skipped and named in the note."""
    at = find_device(device, "calibration")
    report = report or (lambda *_: None)
    checked = tuple(allowed_dtype(dtype, at, "measured") for dtype in settings.dtypes)
    dtypes = checked or (DTYPES["cuda"] if at.type == "cuda" else ("fp32",))
    shapes, left_out = [], []
    with torch.inference_mode():
        for spec in specs:
            tables = []
            for dtype in dtypes:
                try:
                    tables.append(measure_moe(spec, dtype, at, settings, report))
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    left_out.append(f"{spec.name} {dtype}: {str(error).splitlines()[0]}")
                if at.type == "cuda":
                    torch.cuda.empty_cache()
            report(f"{spec.name} attention and dense", 0, 1)
            shapes.append(
                ShapeMeasurement(
                    model=spec.name,
                    moe=tuple(tables),
                    routing=measure_routing(spec, at, settings),
                    gemm=measure_gemm(spec, at, settings),
                    attention=measure_attention(spec, at, settings),
                    spec=None if models().get(spec.name) == spec else asdict(spec),
                )
            )
            if at.type == "cuda":
                torch.cuda.empty_cache()
        copies = measure_copies(at, settings)
    return Measurement(
        hardware=describe_hardware(at),
        software=describe_software(),
        date=datetime.date.today().isoformat(),
        shapes=tuple(shapes),
        copies=copies,
        note="; ".join(f"left out {reason}" for reason in left_out),
    )
