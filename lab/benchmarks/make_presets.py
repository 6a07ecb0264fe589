"""Make the shipped presets again from measured cells.

    python lab/benchmarks/make_presets.py rtx-pro-6000 KERNELS_FOLDER OUT.json  kernels/qwen3-30b-a3b-rtx-pro-6000
    python lab/benchmarks/make_presets.py contention PRESET MINE.json OUT.json   of calibrate --contention
    python lab/benchmarks/make_presets.py tables PRESET SYSTEM OUT.json          kernels of vLLM and SGLang
    python lab/benchmarks/make_presets.py steps PRESET OUT.json MODEL DTYPE CELLS.npz [MODEL DTYPE CELLS.npz …]

The first reads the kernel times published with LLMServingSim for Qwen3-30B-A3B; the second adds contention; the third
the public tables of the package aiconfigurator-core, for every known model that they hold; the fourth whole steps, the
--cells of coterie calibrate on the preset's device, in place of those there. Nothing else is fitted again. The torch
kernels of the preset h200 were calibrated in November 2026; its cells are in the preset.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coterie.costs.aiconfigurator import read_tables
from coterie.costs.cells import AttentionCell, GemmCell, Measurement, MoeCell, MoeTable, ShapeMeasurement, StepCell
from coterie.costs.presets import Preset, fit_preset, load_preset, save_preset
from coterie.costs.whole_steps import EngineFit, fit_steps
from coterie.errors import ConfigError
from coterie.models import get_model, models


def rtx_pro_6000(folder: Path) -> Measurement:
    def rows(name: str) -> list[dict[str, str]]:
        with (folder / name).open() as stream:
            return list(csv.DictReader(stream))

    moe = tuple(
        # The kernel was repeated on the same weights: what fits in its 128 MB of cache stayed there.
        MoeCell(int(r["tokens"]), int(r["activated_experts"]), float(r["time_us"]), warm=True)
        for r in rows("moe.csv")
    )
    projections = {"qkv_proj": (5120, 2048), "o_proj": (2048, 4096)}
    gemm = tuple(
        GemmCell(int(r["tokens"]), *projections[r["layer"]], float(r["time_us"]))
        for r in rows("dense.csv")
        if r["layer"] in projections
    )
    attention = []
    for r in rows("attention.csv"):
        chunk, past, decoding, context = (int(r[k]) for k in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        if chunk and not decoding:
            attention.append(AttentionCell(1, chunk, past, float(r["time_us"])))
        elif decoding and not chunk:
            attention.append(AttentionCell(decoding, 1, context, float(r["time_us"])))
    shape = ShapeMeasurement(
        "qwen3-30b-a3b", (MoeTable("bf16", "vLLM fused MoE (Triton)", moe),), (), gemm, tuple(attention)
    )
    return Measurement(
        hardware={
            "device": "NVIDIA RTX PRO 6000 Blackwell",
            "memory_bytes": 101_973_000_000,  # 94.97 GiB, as CUDA reports it
            "cache_bytes": 134_217_728,
        },
        software={"source": "casys-kaist/LLMServingSim @5daddb2, MIT"},
        date="2026-11",
        shapes=(shape,),
        note="kernel times published with LLMServingSim; no routing, copies or other shapes",
    )


def add_contention(preset: Preset, other: Preset) -> Preset:
    """Return the preset with the contention of another, which must be of the same device."""
    device, here = preset.measurement.hardware["device"], other.measurement.hardware["device"]
    if device != here:
        raise SystemExit(f"the preset is of {device}, the cells are of {here}")
    measurement = msgspec.structs.replace(preset.measurement, contention=other.measurement.contention)
    return msgspec.structs.replace(preset, measurement=measurement, contention=other.contention)


def read_cells(path: Path) -> tuple[str, list[StepCell]]:
    """Return the engine's version and the cells of a file that coterie calibrate --cells wrote."""
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files}
    software = str(columns.pop("software"))
    rows = zip(*(columns[name] if name == "load" else columns[name].tolist() for name in StepCell._fields), strict=True)
    return software, [StepCell(*row) for row in rows]


def add_steps(preset: Preset, measured: list[str]) -> Preset:
    places = int(preset.measurement.hardware["multiprocessors"])
    steps: dict[str, dict[Any, EngineFit]] = {}
    for model, dtype, path in zip(measured[::3], measured[1::3], measured[2::3], strict=True):
        software, cells = read_cells(Path(path))
        fit = fit_steps(get_model(model), dtype, cells, software, places)  # type: ignore[arg-type]
        steps.setdefault(model, {})[dtype] = fit
        print(model, dtype, "decode", fit.moe.held_out, "prefill", fit.rest.held_out)
    return msgspec.structs.replace(preset, engines={**preset.engines, "vllm": steps})


def add_tables(preset: Preset, system: str, engines: tuple[str, ...] = ("vllm", "sglang")) -> Preset:
    """Nest the fits of tables without their cells: those are in the package."""
    tables = {}
    for engine in engines:
        specs = []
        for spec in models().values():
            try:
                read_tables([spec], system, engine)
            except ConfigError as error:
                print(error, file=sys.stderr)
            else:
                specs.append(spec)
        made = fit_preset(f"{system} {engine}", read_tables(specs, system, engine))
        shapes = tuple(
            ShapeMeasurement(s.model, tuple(MoeTable(t.dtype, t.kernel, ()) for t in s.moe))
            for s in made.measurement.shapes
        )
        bare = msgspec.structs.replace(made.measurement, shapes=shapes, collectives=())
        tables[engine] = msgspec.structs.replace(made, measurement=bare)
    return msgspec.structs.replace(preset, tables=tables)


def main() -> None:
    match sys.argv[1:]:
        case ["rtx-pro-6000", source, out]:
            preset = fit_preset("rtx-pro-6000", rtx_pro_6000(Path(source)))
            for model, fit in preset.fits.items():
                for dtype, moe in fit.moe.items():
                    print(model, dtype, moe.held_out.mape_pct, moe.held_out.worst_pct)
                print(model, fit.gemm.held_out, fit.decode_attention.held_out, fit.prefill_attention.held_out)
        case ["contention", old, mine, out]:
            preset = add_contention(load_preset(old), load_preset(mine))
            print(preset.contention)
        case ["tables", old, system, out]:
            preset = add_tables(load_preset(old), system)
        case ["steps", old, out, *measured] if measured and len(measured) % 3 == 0:
            preset = add_steps(load_preset(old), measured)
        case _:
            raise SystemExit(__doc__)
    save_preset(preset, Path(out))


if __name__ == "__main__":
    main()
