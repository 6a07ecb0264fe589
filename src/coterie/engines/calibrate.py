"""Measure a model's shape on the device at hand: the MoE layer, routing, dense projections, attention, copies.

On CUDA every timing is a graph replay between events: launch gaps of eager Python would hide what is measured.
Experts run as ``torch._grouped_mm`` (bf16) and ``torch._scaled_grouped_mm`` (fp8, row-wise scales, activations
quantised inside the timed region, as a server must). On a CPU they run as one matrix product per expert, which is
what CPU engines do. The cache is cold unless a cell says `warm`: calls rotate over enough copies of the layer that
none finds its weights in the cache, as in a real model, where the other layers have just passed through.

Costs made from this are wrong for kernels that differ: an engine with a faster grouped GEMM wants its own cells.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

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
from coterie.errors import ConfigError, UnavailableError
from coterie.models import models
from coterie.types import ModelSpec, WeightDtype

try:
    import torch
except ImportError:
    torch = None

Report = Callable[[str, int, int], None]
"""progress(what, done, total)"""

MAX_COPIES = 64
"""Copies of a layer to rotate over, at most: tiny shapes would need thousands to fill a cache."""


def _flush_bytes(device: Any) -> float:
    """Weights to rotate over so that none stays cached: four times the last-level cache."""
    return 4.0 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 64e6


def _copies(device: Any, nbytes: float) -> int:
    return max(2, min(MAX_COPIES, int(np.ceil(_flush_bytes(device) / nbytes))))


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """What to measure, and how long."""

    dtypes: tuple[WeightDtype, ...] = ()
    """Weight dtypes of the experts. CUDA: bf16, fp8. CPU: fp32, bf16. None given: both of CUDA's, or fp32."""
    tokens: tuple[int, ...] = (
        1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
    )  # fmt: skip
    """Batch sizes of the MoE cells. Powers of two alone would hide what a partly filled tile costs."""
    skews: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Zipf exponents measured beside the even spread."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Context lengths of the attention cells."""
    cell_ms: float = 20.0
    """Time to spend on one cell in one pass."""
    passes: int = 3
    """Times to go over all MoE cells, each in another order; a cell's time is the median of its passes."""
    min_repeats: int = 5

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"tokens={self.tokens} must be at least one batch size of at least 1")


class Timer:
    """Median time of a callable on one device."""

    def __init__(self, device: Any, settings: CalibrationSettings) -> None:
        self.device = device
        self.settings = settings

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


class Experts:
    """Copies of one MoE layer's weights, and its forward pass for given tokens per expert."""

    def __init__(self, spec: ModelSpec, dtype: WeightDtype, device: Any, copies: int) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        hidden, inner, count = spec.hidden_size, spec.expert_intermediate_size, spec.num_experts
        self.layers = []
        for _ in range(copies):
            # [expert, out, in], viewed as [expert, in, out]: the layout both grouped GEMMs want.
            up = self._weights(count, 2 * inner, hidden)
            down = self._weights(count, hidden, inner)
            self.layers.append((up.transpose(1, 2), down.transpose(1, 2)))
        if dtype == "fp8":
            self.up_scale = torch.full((count, 2 * inner), 0.02, device=device)
            self.down_scale = torch.full((count, hidden), 0.02, device=device)

    @property
    def kernel(self) -> str:
        if self.device.type != "cuda":
            return "torch.mm per expert"
        return "torch._scaled_grouped_mm, row-wise scales" if self.dtype == "fp8" else "torch._grouped_mm"

    def _weights(self, *shape: int) -> Any:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
        out = torch.empty(shape, dtype=kind[self.dtype], device=self.device)
        for expert in out:  # one at a time: a whole layer in float32 may not fit beside the copies
            expert.copy_(torch.randn(expert.shape, device=self.device, dtype=torch.float32).mul_(0.02))
        return out

    def forward(self, layer: int, x: Any, offsets: Any, counts: Sequence[int]) -> Any:
        """x [assignment, hidden], sorted by expert; offsets [expert] ends of each expert's rows."""
        up, down = self.layers[layer]
        if self.device.type != "cuda":
            return self._loop(up, down, x, counts)
        from coterie.engines.kernels import quantize_rows, silu_mul, silu_mul_quantize

        if self.dtype == "fp8":
            gate_up = self._fp8(*quantize_rows(x), up, self.up_scale, offsets)
            return self._fp8(*silu_mul_quantize(gate_up), down, self.down_scale, offsets)
        return torch._grouped_mm(silu_mul(torch._grouped_mm(x, up, offs=offsets)), down, offs=offsets)

    @staticmethod
    def _fp8(x: Any, scale: Any, weight: Any, weight_scale: Any, offsets: Any) -> Any:
        return torch._scaled_grouped_mm(
            x, weight, scale, weight_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def _loop(self, up: Any, down: Any, x: Any, counts: Sequence[int]) -> Any:
        out, start = torch.empty_like(x), 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                gate, inner = torch.mm(x[rows], up[expert]).chunk(2, dim=-1)
                torch.mm(torch.nn.functional.silu(gate) * inner, down[expert], out=out[rows])
                start += count
        return out


def active_levels(spec: ModelSpec) -> list[int]:
    """Numbers of active experts to measure: top_k doubled up to all, and three eighths and quarters of all."""
    levels = {spec.num_experts, *(max(spec.top_k, spec.num_experts * part // 8) for part in (3, 6))}
    level = spec.top_k
    while level < spec.num_experts:
        levels.add(level)
        level *= 2
    return sorted(levels)


def moe_grid(spec: ModelSpec, settings: CalibrationSettings) -> Iterator[MoeCell]:
    """The cells to measure, with no time yet."""
    for tokens in settings.tokens:
        for active in active_levels(spec):
            if spec.top_k <= active <= tokens * spec.top_k:
                yield MoeCell(tokens, active, 0.0)
    for tokens in (64, 512, 4096):
        if tokens <= max(settings.tokens) and tokens * spec.top_k >= spec.num_experts:
            for skew in settings.skews:
                yield MoeCell(tokens, spec.num_experts, 0.0, zipf=skew)
    for tokens in (16, 64):
        if tokens <= max(settings.tokens):
            for active in active_levels(spec)[:3]:
                if active <= tokens * spec.top_k:
                    yield MoeCell(tokens, active, 0.0, warm=True)


def measure_moe(
    spec: ModelSpec, dtype: WeightDtype, device: Any, settings: CalibrationSettings, report: Report
) -> MoeTable:
    """Time every cell of the grid for one weight dtype."""
    timer = Timer(device, settings)
    experts = Experts(spec, dtype, device, _copies(device, spec.top_k * spec.expert_bytes(dtype)))
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
            offsets = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(device)
            # Enough copies of the layer in turn to flush the cache and no more; a warm cell repeats the first.
            turns = _copies(device, cell.active * spec.expert_bytes(dtype))
            rows = (x, offsets, counts.tolist())
            layers = [0] * turns if cell.warm else range(turns)
            calls = [partial(experts.forward, layer, *rows) for layer in layers]
            samples[index].append(timer.us(calls))
    cells = [
        MoeCell(cell.tokens, cell.active, round(statistics.median(times), 3), cell.zipf, cell.warm)
        for cell, times in zip(grid, samples, strict=True)
    ]
    return MoeTable(dtype, experts.kernel, tuple(cells))


def measure_routing(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[RoutingCell, ...]:
    """Gate, softmax, top-k, sort by expert, gather, and the weighted sum at the end."""
    timer, dtype = Timer(device, settings), _activation_dtype(device)
    gate = torch.randn(spec.hidden_size, spec.num_experts, device=device).to(dtype)
    cells = []
    for tokens in settings.tokens:
        x = torch.randn(tokens, spec.hidden_size, device=device).to(dtype)

        def call(x: Any = x, tokens: int = tokens) -> Any:
            weights, experts = torch.softmax((x @ gate).float(), dim=-1).topk(spec.top_k, dim=-1)
            order = experts.flatten().argsort()
            gathered = x[order // spec.top_k]
            back = torch.empty_like(gathered)
            back[order] = gathered
            return (back.view(tokens, spec.top_k, -1) * weights[..., None].to(dtype)).sum(dim=1)

        cells.append(RoutingCell(tokens, round(timer.us([call]), 3)))
    return tuple(cells)


def gemm_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(n, k) of the dense projections of one layer: attention in and out, shared or dense MLP."""
    hidden = spec.hidden_size
    shapes = {(spec.num_heads * spec.head_dim, hidden), (hidden, spec.num_heads * spec.head_dim)}
    kv = spec.kv_lora_rank + spec.rope_head_dim if spec.kv_lora_rank else 2 * spec.num_kv_heads * spec.head_dim
    shapes.add((kv, hidden))
    for inner in (spec.shared_intermediate_size, spec.dense_intermediate_size):
        if inner:
            shapes |= {(2 * inner, hidden), (hidden, inner)}
    return sorted(shapes)


def measure_gemm(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[GemmCell, ...]:
    timer, dtype = Timer(device, settings), _activation_dtype(device)
    cells = []
    for n, k in gemm_shapes(spec):
        weights = [torch.randn(n, k, device=device).to(dtype).t() for _ in range(_copies(device, 2 * n * k))]
        for tokens in settings.tokens[::3]:
            x = torch.randn(tokens, k, device=device).to(dtype)
            calls = [lambda x=x, w=w: x @ w for w in weights]
            cells.append(GemmCell(tokens, n, k, round(timer.us(calls), 3)))
    return tuple(cells)


def measure_attention(spec: ModelSpec, device: Any, settings: CalibrationSettings) -> tuple[AttentionCell, ...]:
    """Decode (one query a request over its context) and prefill (a prompt over itself).

    Grouped heads run as ``scaled_dot_product_attention``. Latent attention (DeepSeek, GLM) runs in its absorbed
    form, every head over one shared latent, as two batched products around a softmax: slower than a fused kernel.
    """
    timer = Timer(device, settings)
    cells = []
    decode = [(batch, 1, context) for batch in (1, 4, 16, 64, 256) for context in settings.contexts]
    prefill = [(1, query, 0) for query in settings.contexts]
    prefill += [(1, 512, context) for context in settings.contexts if context >= 512]  # a chunk over what came before
    limit = 24e9 if device.type == "cuda" else 1e9
    for batch, query, context in decode + prefill:
        length = context + query
        if batch * length * spec.kv_bytes_per_token / spec.num_layers > limit:
            continue
        if query > 1 and batch * spec.num_heads * query * length * 4 > limit and spec.kv_lora_rank:
            continue  # the unfused scores would not fit
        causal = not (query > 1 and context)  # torch aligns a causal mask with the first token, not with the last
        call = _attention_call(spec, device, batch, query, length, causal and query > 1)
        cells.append(AttentionCell(batch, query, context, round(timer.us([call]), 3), causal))
    return tuple(cells)


def _attention_call(
    spec: ModelSpec, device: Any, batch: int, query: int, length: int, causal: bool
) -> Callable[[], Any]:
    dtype, heads = _activation_dtype(device), spec.num_heads

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    if spec.kv_lora_rank:
        width = spec.kv_lora_rank + spec.rope_head_dim
        q, latent = random(batch, heads * query, width), random(batch, length, width)

        def call() -> Any:
            scores = torch.softmax(q @ latent.transpose(1, 2), dim=-1)
            return scores @ latent[..., : spec.kv_lora_rank]

        return call
    q = random(batch, heads, query, spec.head_dim)
    k, v = (random(batch, spec.num_kv_heads, length, spec.head_dim) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=causal, enable_gqa=spec.num_heads != spec.num_kv_heads)


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


def calibrate(
    specs: Sequence[ModelSpec],
    settings: CalibrationSettings,
    device: str = "auto",
    report: Report | None = None,
) -> Measurement:
    """Measure every shape on one device. What does not fit in its memory is left out, and the note says so."""
    if torch is None:
        raise UnavailableError("calibration needs torch: pip install 'coterie[torch]'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnavailableError(f"device {device!r} was asked for, but torch sees no CUDA device")
    at = torch.device(device)
    report = report or (lambda *_: None)
    dtypes = _dtypes(settings, at)
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
                    spec.name,
                    tuple(tables),
                    measure_routing(spec, at, settings),
                    measure_gemm(spec, at, settings),
                    measure_attention(spec, at, settings),
                    None if models().get(spec.name) == spec else asdict(spec),
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


def _dtypes(settings: CalibrationSettings, device: Any) -> tuple[WeightDtype, ...]:
    allowed: tuple[WeightDtype, ...] = ("bf16", "fp8") if device.type == "cuda" else ("fp32", "bf16")
    for dtype in settings.dtypes:
        if dtype not in allowed:
            raise ConfigError(f"dtype {dtype!r} cannot be measured on {device.type}; it must be {' or '.join(allowed)}")
    return settings.dtypes or (allowed if device.type == "cuda" else allowed[:1])


def _activation_dtype(device: Any) -> Any:
    # Many CPUs have no bf16 products and emulate them a hundred times slower than fp32.
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def describe_hardware(device: Any) -> dict[str, str | int | float]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {
            "device": found.name,
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
            "cache_bytes": found.L2_cache_size,
        }
    return {"device": f"CPU {platform.machine()}", "threads": torch.get_num_threads()}


def describe_software() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    return versions
