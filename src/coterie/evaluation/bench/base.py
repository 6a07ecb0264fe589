"""Benchmarks of Coterie itself, as named groups: how fast, and for costs how exact.

A group returns rows with a `name`, its sizes, and `median_us` or `median_ms`. Machines differ: compare rows of one run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.costs.cells import MoeTable, expert_tokens
from coterie.costs.experts import MoeParams, layer_us
from coterie.costs.fit import fit_error
from coterie.costs.presets import Preset, fit_table, load_preset, nearest_shape, shape_spec
from coterie.costs.roofline import CurveLaw, RooflineLaw, TransferLaw
from coterie.costs.shipped import preset_names
from coterie.footprints.counting import accumulate_load
from coterie.registry import Registry
from coterie.traces import ActivationTrace
from coterie.traces.synthetic import generate_to, presets
from coterie.types import ModelSpec

Row = dict[str, Any]
Report = Callable[[str, int, int], None]
Bench = Callable[[Report], list[Row]]

TRACE_BYTES = 64_000_000
"""Size of the trace that is read and written."""

benches: Registry[Bench] = Registry("benchmark group", group="coterie.benches")


def median_us(call: Callable[[], object], repeats: int = 31) -> float:
    """Median time of a call, after one that warms up."""
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(samples), 3)


def _spaced_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Median over calls that each do their work anew, such as writing to a folder of their own."""
    samples = []
    for call in calls:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(samples), 3)


@benches.register("costs")
def bench_costs(report: Report) -> list[Row]:
    """How exact the step-time model is on held-out cells: MoE tables fitted again, the other parts as stored."""
    rows: list[Row] = []
    tables = [
        (preset, shape, table)
        for preset in map(load_preset, preset_names())
        for shape in preset.measurement.shapes
        for table in shape.moe
    ]
    for done, (preset, shape, table) in enumerate(tables):
        report(f"{preset.name} {shape.model} {table.dtype}", done, len(tables))
        spec = shape_spec(shape)
        fit = fit_table(spec, table, _cache_limit(preset))
        rows.append(
            {
                "name": "moe layer",
                "preset": preset.name,
                "model": shape.model,
                "dtype": table.dtype,
                "cells": fit.held_out.cells,
                "mape_pct": fit.held_out.mape_pct,
                "worst_pct": fit.held_out.worst_pct,
                "worst_cell": fit.held_out.worst_cell,
                "median_us": _predict_us(spec, fit.params, table),
            }
        )
    for preset, shape, table in tables:
        if len(preset.fits) > 1:
            rows.append(_unseen_row(preset, shape_spec(shape), table))
    for name in preset_names():
        rows += _part_rows(load_preset(name))
    return rows


def _cache_limit(preset: Preset) -> float:
    return float(preset.measurement.hardware.get("cache_bytes", float("inf")))


def _predict(spec: ModelSpec, params: MoeParams, table: MoeTable) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[cell] microseconds by a set of parameters, whatever shape they were fitted to."""
    p, out = params.array(), np.empty(len(table.cells))
    for index, cell in enumerate(table.cells):
        counts = np.zeros(spec.num_experts)
        counts[: cell.active] = expert_tokens(cell.tokens, spec.top_k, cell.active, cell.zipf)
        nbytes, flops = spec.expert_bytes(table.dtype), 2.0 * spec.expert_params
        out[index] = layer_us(p, counts, float(cell.tokens), nbytes, flops, cell.warm)
    return out


def _predict_us(spec: ModelSpec, params: MoeParams, table: MoeTable) -> float:
    cell = max(table.cells, key=lambda c: c.active)
    p, counts = params.array(), np.zeros(spec.num_experts)
    counts[: cell.active] = expert_tokens(cell.tokens, spec.top_k, cell.active, cell.zipf)
    nbytes, flops = spec.expert_bytes(table.dtype), 2.0 * spec.expert_params
    return median_us(lambda: layer_us(p, counts, float(cell.tokens), nbytes, flops, False))


def _unseen_row(preset: Preset, spec: ModelSpec, table: MoeTable) -> Row:
    """Predict a shape from the nearest other one: what a user's own model gets without calibrating."""
    others = Preset(
        preset.name,
        preset.version,
        preset.measurement,
        {name: fit for name, fit in preset.fits.items() if name != spec.name},
        preset.copies,
    )
    near = nearest_shape(others, spec)
    params = preset.fits[near].moe[table.dtype].params
    error = fit_error(_predict(spec, params, table), table.cells)
    return {
        "name": "unseen shape",
        "preset": preset.name,
        "model": spec.name,
        "dtype": table.dtype,
        "from": near,
        "cells": error.cells,
        "mape_pct": error.mape_pct,
        "worst_pct": error.worst_pct,
        "worst_cell": error.worst_cell,
        "median_us": _predict_us(spec, params, table),
    }


def _part_rows(preset: Preset) -> list[Row]:
    """Dense projections, attention, routing and copies, as fitted when the preset was made."""
    rows: list[Row] = []
    for model, fit in preset.fits.items():
        parts = {
            "dense": fit.gemm,
            "decode attention": fit.decode_attention,
            "prefill attention": fit.prefill_attention,
            "routing": fit.routing,
        }
        rows += [_part_row(name, preset.name, model, part) for name, part in parts.items() if part is not None]
    rows += [_part_row("copy", preset.name, path, part) for path, part in preset.copies.items()]
    return rows


def _part_row(name: str, preset: str, model: str, part: RooflineLaw | TransferLaw | CurveLaw) -> Row:
    call = (lambda: part.us(1e6, 1e9)) if isinstance(part, RooflineLaw) else (lambda: part.us(1e6))
    quality = part.held_out
    return {
        "name": name,
        "preset": preset,
        "model": model,
        "cells": quality.cells,
        "mape_pct": quality.mape_pct,
        "worst_pct": quality.worst_pct,
        "median_us": median_us(call),
    }


@benches.register("traces")
def bench_traces(report: Report) -> list[Row]:
    """Opening, reading, writing, generating and counting activation traces."""

    rows: list[Row] = []
    settings = presets["balanced"]
    with tempfile.TemporaryDirectory() as folder:
        generate_to(Path(folder) / "warm", settings, np.random.default_rng(0), nbytes=1_000_000)
        report("generate", 0, 4)
        paths = [Path(folder) / f"trace{n}" for n in range(3)]
        draw = partial(generate_to, settings=settings, nbytes=TRACE_BYTES)
        spent = _spaced_ms([partial(draw, path, rng=np.random.default_rng(0)) for path in paths])
        path = paths[0]
        trace = ActivationTrace.open(path)
        sizes = {"mbytes": round(trace.nbytes / 1e6, 1), "requests": trace.num_requests, "tokens": trace.num_tokens}
        rows.append({"name": "generate", **sizes, "median_ms": spent})
        report("open", 1, 4)
        rows.append({"name": "open", **sizes, "median_us": median_us(lambda: ActivationTrace.open(path))})
        read = median_us(lambda: trace.request(7).expert_ids.sum())
        rows.append({"name": "read one request", **sizes, "median_us": read})
        report("count", 2, 4)
        load = np.zeros((trace.meta.num_layers, trace.meta.num_experts), np.int64)

        def count() -> None:
            for chunk in trace.chunks():
                accumulate_load(chunk.tokens.expert_ids, load)

        rows.append({"name": "count load", **sizes, "median_ms": round(median_us(count, 5) / 1e3, 3)})
        report("copy", 3, 4)
        spent = _spaced_ms([partial(trace.save, Path(folder) / f"copy{n}") for n in range(3)])
        rows.append({"name": "copy", **sizes, "median_ms": spent})
    return rows
