"""Measure a model's shape on the device at hand: the MoE layer, routing, dense projections, attention, copies.

Experts run as ``torch._grouped_mm`` (bf16) and ``torch._scaled_grouped_mm`` (fp8, row-wise scales, activations
quantised inside the timed region, as a server must). On a CPU they run as one matrix product per expert, which is
what CPU engines do. The cache is cold unless a cell says `warm`: calls rotate over enough copies of the layer that
none finds its weights in the cache, as in a real model, where the other layers have just passed through.

Costs made from this are wrong for kernels that differ: an engine with a faster grouped GEMM wants its own cells.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from coterie.costs.cells import Measurement, MoeCell, MoeTable, ShapeMeasurement, expert_tokens
from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.measures import measure_attention, measure_copies, measure_gemm, measure_routing
from coterie.engines.calibration.timing import (
    CalibrationSettings,
    Timer,
    copies_to_flush,
    describe_hardware,
    describe_software,
    find_device,
)
from coterie.errors import ConfigError
from coterie.models import models
from coterie.types import ModelSpec, WeightDtype

try:
    import torch
except ImportError:
    torch = None

Report = Callable[[str, int, int], None]
"""progress(what, done, total)"""


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
            # Enough copies of the layer in turn to flush the cache and no more; a warm cell repeats the first.
            turns = copies_to_flush(device, cell.active * spec.expert_bytes(dtype))
            ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(device)
            rows = (x, ends, counts.tolist())
            layers = [0] * turns if cell.warm else range(turns)
            calls = [partial(experts.forward, layer, *rows) for layer in layers]
            samples[index].append(timer.us(calls))
    cells = [
        MoeCell(cell.tokens, cell.active, round(statistics.median(times), 3), cell.zipf, cell.warm)
        for cell, times in zip(grid, samples, strict=True)
    ]
    return MoeTable(dtype, experts.kernel, tuple(cells))


def calibrate(
    specs: Sequence[ModelSpec], settings: CalibrationSettings, device: str = "auto", report: Report | None = None
) -> Measurement:
    """Measure every shape on one device. What does not fit in its memory is left out, and the note says so."""
    at = find_device(device, "calibration")
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


def _dtypes(settings: CalibrationSettings, device: Any) -> tuple[WeightDtype, ...]:
    allowed: tuple[WeightDtype, ...] = ("bf16", "fp8") if device.type == "cuda" else ("fp32", "bf16")
    for dtype in settings.dtypes:
        if dtype not in allowed:
            raise ConfigError(f"dtype {dtype!r} cannot be measured on {device.type}; it must be {' or '.join(allowed)}")
    return settings.dtypes or (allowed if device.type == "cuda" else allowed[:1])
