"""Presets: a calibration with its fits, as one JSON file. The shipped presets were measured on real devices.

A preset keeps every measured cell next to the fits, so that anyone can re-fit, plot or check them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from coterie.costs.attention import attention_shape, layer_work
from coterie.costs.cells import (
    AttentionCell,
    ExchangeKind,
    Measurement,
    MoeTable,
    ShapeMeasurement,
    check_preset,
    preset_names,
)
from coterie.costs.experts import MoeParams
from coterie.costs.fit import MoeFit, fit_moe
from coterie.costs.movement import Contention, fit_contention
from coterie.costs.roofline import CurveLaw, RooflineLaw, TransferLaw, fit_curve, fit_roofline, fit_transfer, gemm_work
from coterie.costs.step import ONE_DEVICE, PLAIN, CostOptions, StepModel
from coterie.costs.whole_steps import EngineFit
from coterie.errors import ConfigError, InputError, TraceError, check_file, check_input_file, check_new_file
from coterie.models import get_model
from coterie.types import BYTES_PER_WEIGHT, Link, ModelSpec, Report, Topology, WeightDtype

VERSION = 1
ENGINES = ("vllm", "sglang", "trtllm")
"""Engines of public tables."""
KERNELS = "kernels"
"""Name in place of an engine's that asks for the prices of torch's kernels."""


class ShapeFit(msgspec.Struct, frozen=True):
    """Fits for one model's shape."""

    moe: dict[str, MoeFit]
    """Fits by weight dtype."""
    gemm: RooflineLaw
    decode_attention: RooflineLaw
    prefill_attention: RooflineLaw
    routing: CurveLaw | None = None
    """Routing time by tokens; None if it was not measured, which counts as 0."""


class Preset(msgspec.Struct, frozen=True):
    """Measurements and fits of one kind of device."""

    name: str
    version: int
    measurement: Measurement
    fits: dict[str, ShapeFit]
    """Fits by model."""
    copies: dict[str, TransferLaw]
    """Copy speeds by path."""
    all_to_all: TransferLaw | None = None
    """All-to-all time by the bytes that one rank sends; None if only one device was measured."""
    contention: dict[str, Contention] = {}
    """Slowdown of steps by copies, by path; empty if it was not measured."""
    engines: dict[str, dict[str, dict[WeightDtype, EngineFit]]] = {}
    """Whole steps by engine, model and weight dtype."""
    exchange: dict[ExchangeKind, TransferLaw] = {}
    """All-to-all between nodes, and of many rows inside one, by the bytes that one rank sends."""
    tables: dict[str, Preset] = {}
    """Kernels of engines by public tables, by engine: the preset that ``coterie calibrate --from`` writes, without its
    cells."""


def fit_preset(name: str, measurement: Measurement, report: Report | None = None) -> Preset:
    """Fit all measured cells."""
    fits = {}
    for done, shape in enumerate(measurement.shapes):
        if report:
            report(f"fit {shape.model}", done, len(measurement.shapes))
        fits[shape.model] = fit_shape(shape, float(measurement.hardware.get("cache_bytes", math.inf)))
    copies: dict[str, TransferLaw] = {
        path: fit_transfer(*zip(*((c.nbytes, c.us) for c in measurement.copies if c.path == path), strict=True))
        for path in sorted({cell.path for cell in measurement.copies})
    }
    sent = measurement.collectives
    kinds = {kind: [cell for cell in sent if cell.kind == kind] for kind in sorted({cell.kind for cell in sent})}
    exchange = {
        kind: fit_transfer([cell.nbytes for cell in cells], [cell.us for cell in cells])
        for kind, cells in kinds.items()
        if len(cells) >= 3
    }
    return Preset(
        name=name,
        version=VERSION,
        measurement=measurement,
        fits=fits,
        copies=copies,
        all_to_all=exchange.pop("node", None),
        contention=fit_contention(measurement.contention),
        exchange=exchange,
    )


def fit_shape(shape: ShapeMeasurement, cache_limit: float = math.inf) -> ShapeFit:
    spec = shape_spec(shape)
    gemm = [gemm_work(c.tokens, c.n, c.k) for c in shape.gemm]
    moe: dict[str, MoeFit] = {table.dtype: fit_table(spec, table, cache_limit) for table in shape.moe}
    return ShapeFit(
        moe=moe,
        routing=fit_curve([c.tokens for c in shape.routing], [c.us for c in shape.routing]) if shape.routing else None,
        gemm=fit_roofline([nbytes for nbytes, _ in gemm], [flops for _, flops in gemm], [c.us for c in shape.gemm]),
        decode_attention=_fit_attention(spec, [c for c in shape.attention if c.query == 1]),
        prefill_attention=_fit_attention(spec, [c for c in shape.attention if c.query > 1]),
    )


def _fit_attention(spec: ModelSpec, cells: Sequence[AttentionCell]) -> RooflineLaw:
    work = [layer_work(attention_shape(spec), c.batch, c.query, float(c.batch * c.seen)) for c in cells]
    # A time per query takes several batch sizes to fit, and prefill has none: its kernels fill the device.
    queries = [c.batch for c in cells] if len({c.batch for c in cells if c.query == 1}) > 5 else None
    return fit_roofline([nbytes for nbytes, _ in work], [flops for _, flops in work], [c.us for c in cells], queries)


def fit_table(spec: ModelSpec, table: MoeTable, cache_limit: float = math.inf) -> MoeFit:
    nbytes, flops = spec.expert_bytes(table.dtype), 2.0 * spec.expert_params
    return fit_moe(table.cells, spec.top_k, spec.num_experts, nbytes, flops, cache_limit)


@cache
def load_preset(name_or_path: str) -> Preset:
    """Load a shipped preset by name, or a user's preset by path."""
    check_preset(name_or_path)
    path = Path(name_or_path)
    if name_or_path in preset_names():
        raw = files("coterie").joinpath(f"costs/presets/{name_or_path}.json").read_bytes()
    else:
        check_input_file(path)
        raw = path.read_bytes()
    try:
        preset = msgspec.json.decode(raw, type=Preset)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, "preset", str(error)) from None
    check_file(preset.version == VERSION, path, "version", f"found {preset.version}, expected {VERSION}")
    _check(path, preset)
    return preset


RATES = ("bytes_per_us", "flops_per_us", "tile_flops_per_us", "stream_bytes_per_us", "cache_bytes_per_us", "us")
SIZES = ("tile_rows", "columns", "places", "wave_us", "tokens", "active", "batch", "query", "n", "k", "nbytes", "ranks")
LEAST, MOST = 1e-9, 1e18
"""Valid range of rates and sizes: wider than any device needs, yet no product of them overflows."""


def _check(path: Path, preset: Preset) -> None:
    """Raise TraceError if a preset has values that cannot price a step."""
    check_file(preset.fits or preset.engines, path, "fits", "is empty, as is engines: one must hold a shape at least")
    for part in ("fits", "copies", "all_to_all", "contention", "engines", "exchange"):
        _check_ranges(path, part, getattr(preset, part))
    for tables in preset.tables.values():
        _check(path, tables)
    for name, fit in preset.fits.items():
        for dtype in fit.moe or ["none"]:
            check_file(
                dtype in BYTES_PER_WEIGHT,
                path,
                f"fits.{name}.moe",
                f"holds {dtype!r}, expected weight dtypes out of {', '.join(BYTES_PER_WEIGHT)}",
            )
    shapes = {shape.model: shape for shape in preset.measurement.shapes}
    for name in preset.fits:
        try:
            shape_spec(shapes[name])
        except KeyError:
            raise TraceError(path, f"fits.{name}", "has no measurement: measurement.shapes must name it") from None
        except (InputError, TypeError) as error:
            raise TraceError(path, f"measurement.shapes, {name}", str(error)) from None
    _check_ranges(path, "measurement", preset.measurement)


def _check_ranges(path: Path, field: str, value: object) -> None:
    """Raise TraceError for rates and sizes not above 0, and for times and shares below 0, at any depth."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in ("hardware", "spec"):  # hardware is only information; ModelSpec checks its own fields
                _check_ranges(path, f"{field}.{name}", getattr(value, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_ranges(path, f"{field}.{name}", item)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            _check_ranges(path, f"{field}[{index}]", item)
    elif isinstance(value, int | float):
        name = field.rpartition(".")[2].partition("[")[0]
        least = 1.0 if name == "sharpness" else LEAST if name in RATES + SIZES else 0.0
        check_file(least <= value <= MOST, path, field, f"is {value}, expected a number in {least:g} … {MOST:g}")


def save_preset(preset: Preset, path: Path) -> None:
    """Write a preset; raise ConfigError if the file exists."""
    check_new_file(path)
    tmp = path.with_name(path.name + ".tmp")
    # Each cell on a line of its own, so that a diff shows the cells that changed.
    raw = msgspec.json.encode(preset).replace(b'{"tokens"', b'\n{"tokens"').replace(b'{"batch"', b'\n{"batch"')
    tmp.write_bytes(raw + b"\n")
    tmp.replace(path)


def step_model(
    spec: ModelSpec,
    preset: str | Preset = "h200",
    dtype: WeightDtype | None = None,
    topology: Topology = ONE_DEVICE,
    options: CostOptions = PLAIN,
    engine: str | None = None,
) -> StepModel:
    """Return the step-time model of a shape on a device, in a weight dtype (by default the shape's own).

    Steps take the time that `engine` was measured to take, or else that of its kernels in public tables; by default
    those of the first engine that is known for this shape. Where there is none, or for the engine "kernels", they take
    that of the preset's own kernels. :attr:`StepModel.caveat` says what the prices are of. Ranks with the usual links
    exchange rows as measured in the tables.
    """
    chosen, wanted = load_preset(preset) if isinstance(preset, str) else preset, dtype or spec.weight_dtype
    tabled = (name for name in ENGINES if name in chosen.measurement.software)
    tried = [engine] if engine else [*chosen.engines, *chosen.tables, *tabled]
    steps = (chosen.engines.get(name, {}).get(spec.name, {}).get(wanted) for name in tried)
    whole = next((fit for fit in steps if fit is not None), None)
    tables = {name: chosen if name in chosen.measurement.software else chosen.tables.get(name) for name in tried}
    known = {name: table for name, table in tables.items() if table is not None}
    by_table = [
        name for name, table in known.items() if spec.name in table.fits and wanted in table.fits[spec.name].moe
    ]
    for name in by_table or known:
        topology = _measured_exchange(known[name], topology)
    same: Any = {
        "spec": spec,
        "dtype": wanted,
        "contention": dict(chosen.contention),
        "topology": topology,
        "options": options,
    }
    if whole is not None:
        return StepModel(
            moe=whole.moe.params,
            decode_attention=whole.decode_attention,
            prefill_attention=whole.prefill_attention,
            rest=whole.rest,
            head=whole.head,
            **same,
        )
    source = known[by_table[0]] if by_table else chosen
    if not by_table and (engine not in (None, KERNELS) or not chosen.fits):
        raise ConfigError(f"{spec.name} in {wanted} was not measured {_where(chosen, engine, known)}")
    nearest = nearest_shape(source, spec)
    laws = source.fits[nearest]
    return StepModel(
        moe=moe_params(laws, wanted),
        routing=laws.routing,
        gemm=laws.gemm,
        decode_attention=laws.decode_attention,
        prefill_attention=laws.prefill_attention,
        measured=nearest == spec.name and wanted in laws.moe,
        kernels=f"{by_table[0]} in public tables" if by_table else "torch",
        **same,
    )


def _where(preset: Preset, engine: str | None, tables: dict[str, Preset]) -> str:
    """Return where a shape was not measured, and which were."""
    known = {(m, dtype) for name, table in tables.items() for m, fit in table.fits.items() for dtype in fit.moe}
    for name, models in preset.engines.items():
        known |= {(m, dtype) for m, dtypes in models.items() for dtype in dtypes if engine in (None, name)}
    listed = ", ".join(f"{model} in {dtype}" for model, dtype in sorted(known)) or "nothing"
    return f"in {engine} on {preset.name}, but {listed}" if engine else f"on {preset.name}, but {listed}"


def _measured_exchange(preset: Preset, topology: Topology) -> Topology:
    """Return the topology with the all-to-all of a preset, if that holds one and the links are those it is of."""
    usual = ONE_DEVICE.intra, ONE_DEVICE.inter
    if preset.all_to_all is None or topology.exchange or (topology.intra, topology.inter) != usual:
        return topology
    laws = {"node": preset.all_to_all, **preset.exchange}
    links = {
        kind: Link(f"{preset.name} {kind}", law.bytes_per_us * 1e6, law.latency_us * 1e-6) for kind, law in laws.items()
    }
    return replace(
        topology, exchange=(links["node"], links.get("nodes", topology.inter), links.get("bulk", links["node"]))
    )


def moe_params(fit: ShapeFit, dtype: WeightDtype) -> MoeParams:
    """Return the parameters of the dtype if it was measured; else derive them from the widest measured dtype.

    Streaming time scales with the bytes of the dtype. Compute keeps the widest dtype's rate, since narrower weights are
    unpacked to 16 bits on devices without units for them (mxfp4 on Hopper). Tiles have 16 rows up to 16 rows per expert
    and 64 above, as in kernels for such weights.
    """
    if dtype in fit.moe:
        return fit.moe[dtype].params
    widest = fit.moe[max(fit.moe, key=lambda known: BYTES_PER_WEIGHT[known])].params
    rate = widest.tile_flops_per_us[0]
    return msgspec.structs.replace(
        widest, tile_rows=(16, 64), switch_rows=16.0, tile_flops_per_us=(rate, rate), partial_penalty=0.0
    )


def nearest_shape(preset: Preset, spec: ModelSpec) -> str:
    """Return the measured shape whose fits predict `spec`: its own if measured, else the one nearest in expert size.

    Bandwidth, compute rate and tiles carry over between shapes; ``coterie bench costs`` reports how well (rows
    named `unseen shape`).
    """
    if spec.name in preset.fits:
        return spec.name
    known = {s.model: shape_spec(s) for s in preset.measurement.shapes if s.model in preset.fits}
    return min(known, key=lambda name: abs(math.log(known[name].expert_params / spec.expert_params)))


def shape_spec(shape: ShapeMeasurement) -> ModelSpec:
    """Return the ModelSpec of a measured shape."""
    return get_model(shape.model) if shape.spec is None else ModelSpec(**shape.spec)
