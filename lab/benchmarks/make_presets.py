"""Make the shipped presets again from measured cells.

    python lab/benchmarks/make_presets.py h200 MEASUREMENTS.jsonl OUT.json      one measurement a line, as calibrated
    python lab/benchmarks/make_presets.py rtx-pro-6000 KERNELS_FOLDER OUT.json  kernels/qwen3-30b-a3b-rtx-pro-6000
    python lab/benchmarks/make_presets.py contention PRESET CELLS.json OUT.json  cells of gpu/contention.py
    python lab/benchmarks/make_presets.py tables PRESET SYSTEM OUT.json          kernels of vLLM and SGLang

The first joins measurements of several shapes on one machine (copies: median over them); the second reads the kernel
times published with LLMServingSim for Qwen3-30B-A3B; the third adds contention and fits nothing else again, and so does
the fourth with the public tables of the package aiconfigurator-core, for every known model that they hold.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

from coterie.costs.aiconfigurator import read_tables
from coterie.costs.cells import (
    AttentionCell,
    ContentionCell,
    CopyCell,
    GemmCell,
    Measurement,
    MoeCell,
    MoeTable,
    ShapeMeasurement,
)
from coterie.costs.movement import fit_contention
from coterie.costs.presets import Preset, fit_preset, load_preset, save_preset
from coterie.errors import ConfigError
from coterie.models import models


def joined(path: Path) -> Measurement:
    parts = [msgspec.json.decode(line, type=Measurement) for line in path.read_bytes().splitlines()]
    if len({str(sorted(p.hardware.items())) for p in parts}) != 1:
        raise SystemExit("the measurements come from different devices")
    times: dict[tuple[Any, int], list[float]] = {}
    for part in parts:
        for cell in part.copies:
            times.setdefault((cell.path, cell.nbytes), []).append(cell.us)
    copies = tuple(CopyCell(p, n, round(statistics.median(us), 3)) for (p, n), us in times.items())
    return msgspec.structs.replace(
        parts[0],
        shapes=tuple(shape for part in parts for shape in part.shapes),
        copies=copies,
        note="; ".join(part.note for part in parts if part.note),
    )


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


class ContentionRun(msgspec.Struct, frozen=True):
    """A file written by gpu/contention.py."""

    hardware: dict[str, str | int | float]
    software: dict[str, str]
    date: str
    model: str
    batch: int
    context: int
    contention: tuple[ContentionCell, ...]


def add_contention(preset: Preset, run: ContentionRun) -> Preset:
    device, here = preset.measurement.hardware["device"], run.hardware["device"]
    if device != here:
        raise SystemExit(f"the preset is of {device}, the cells are of {here}")
    where = f"{run.model}, bf16, {run.batch} requests of {run.context} tokens, {run.date}"
    measurement = preset.measurement
    note = "; ".join(filter(None, (measurement.note, f"contention: decode steps of {where}")))
    measurement = msgspec.structs.replace(measurement, contention=run.contention, note=note)
    return msgspec.structs.replace(preset, measurement=measurement, contention=fit_contention(run.contention))


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
    if len(sys.argv) == 5 and sys.argv[1] == "tables":
        save_preset(add_tables(load_preset(sys.argv[2]), sys.argv[3]), Path(sys.argv[4]))
        return
    if len(sys.argv) == 5 and sys.argv[1] == "contention":
        run = msgspec.json.decode(Path(sys.argv[3]).read_bytes(), type=ContentionRun)
        made = add_contention(load_preset(sys.argv[2]), run)
        save_preset(made, Path(sys.argv[4]))
        print(made.contention)
        return
    if len(sys.argv) != 4 or sys.argv[1] not in ("h200", "rtx-pro-6000"):
        raise SystemExit(__doc__)
    name, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    measurement = joined(source) if name == "h200" else rtx_pro_6000(source)
    preset = fit_preset(name, measurement, lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr))
    save_preset(preset, target)
    for model, fit in preset.fits.items():
        for dtype, moe in fit.moe.items():
            print(model, dtype, moe.held_out.mape_pct, moe.held_out.worst_pct)
        print(model, fit.gemm.held_out, fit.decode_attention.held_out, fit.prefill_attention.held_out, fit.routing)
    print(preset.copies)


if __name__ == "__main__":
    main()
