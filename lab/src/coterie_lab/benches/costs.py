"""How exact the step-time model is on cells that it was not fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import asdict

from coterie.answers.suites import Report
from coterie.costs.cells import MoeTable, expert_tokens, preset_names
from coterie.costs.experts import MoeParams, layer_us
from coterie.costs.fit import fit_error
from coterie.costs.presets import Preset, fit_table, load_preset, nearest_shape, shape_spec
from coterie.costs.roofline import CurveLaw, RooflineLaw, TransferLaw
from coterie.types import ModelSpec
from coterie_lab.benches.timing import Row, median_us


def bench_costs(report: Report) -> list[Row]:
    """Measure errors of the step-time model on held-out cells: MoE tables fitted again, the other parts as stored."""
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
        fit = fit_table(spec, table, float(preset.measurement.hardware.get("cache_bytes", float("inf"))))
        row = {"name": "moe layer", "preset": preset.name, "model": shape.model, "dtype": table.dtype}
        rows.append(row | asdict(fit.held_out) | {"median_us": _predict_us(spec, fit.params, table)})
    for preset, shape, table in tables:
        if len(preset.fits) > 1:
            rows.append(_unseen_row(preset, shape_spec(shape), table))
    for name in preset_names():
        rows += _part_rows(load_preset(name))
    return rows


def _predict(spec: ModelSpec, params: MoeParams, table: MoeTable) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Predict the microseconds of each cell by parameters that were fitted to any shape: [cell]."""
    out = np.empty(len(table.cells))
    for index, cell in enumerate(table.cells):
        counts = np.zeros(spec.num_experts)
        counts[: cell.active] = expert_tokens(cell.tokens, spec.top_k, cell.active, cell.zipf)
        p = params.array(spec.expert_bytes(table.dtype), 2.0 * spec.expert_params, cell.warm)
        out[index] = layer_us(p, counts, float(cell.tokens))
    return out


def _predict_us(spec: ModelSpec, params: MoeParams, table: MoeTable) -> float:
    cell = max(table.cells, key=lambda c: c.active)
    p, counts = params.array(spec.expert_bytes(table.dtype), 2.0 * spec.expert_params), np.zeros(spec.num_experts)
    counts[: cell.active] = expert_tokens(cell.tokens, spec.top_k, cell.active, cell.zipf)
    return median_us(lambda: layer_us(p, counts, float(cell.tokens)))


def _unseen_row(preset: Preset, spec: ModelSpec, table: MoeTable) -> Row:
    """Predict a shape from the nearest other one: what a user's own model gets without calibrating."""
    others = {name: fit for name, fit in preset.fits.items() if name != spec.name}
    near = nearest_shape(Preset(preset.name, preset.version, preset.measurement, others, preset.copies), spec)
    params = preset.fits[near].moe[table.dtype].params
    error = fit_error(_predict(spec, params, table), table.cells)
    row = {"name": "unseen shape", "preset": preset.name, "model": spec.name, "dtype": table.dtype, "from": near}
    return row | asdict(error) | {"median_us": _predict_us(spec, params, table)}


def _part_rows(preset: Preset) -> list[Row]:
    """Make rows of dense projections, attention, routing and copies, as fitted when the preset was made."""
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
    row = {"name": name, "preset": preset, "model": model}
    return row | asdict(part.held_out) | {"median_us": median_us(call)}
