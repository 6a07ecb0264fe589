"""Fit whole steps that vllm_steps.py measured, and add them to a preset.

    python lab/benchmarks/gpu/fit_steps.py PRESET.json ENGINE JOBS.npz STEPS.jsonl [JOBS.npz STEPS.jsonl …]

A decode step is the sum of a time by rows (as measured at each batch size), a time per cached token, and the experts of
every layer: a first tile of each touched expert, further tiles, or waves of tiles. The kernel's tiles are chosen by the
error on steps held out. In prefill the experts get what dense kernels and attention leave of the largest prompt.
Prompts of up to HOST tokens, which the host launches more slowly than the device runs them, give the time of launches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from coterie.costs.attention import CACHED_BYTES, LAYERS, attention_shape
from coterie.costs.experts import MoeParams, Waves
from coterie.costs.fit import FitError, MoeFit
from coterie.costs.presets import EngineFit, Preset, load_preset, step_model
from coterie.costs.roofline import CurveLaw, Quality, RooflineLaw
from coterie.costs.step import Batch, StepModel
from coterie.engines.replay.batches import step_load
from coterie.models import get_model
from coterie.types import ModelSpec

Floats = NDArray[np.float64]

PLACES, BLOCK, ROWS_IN_WAVES = 132, 256, 16
"""Multiprocessors of an H200; columns and rows of a tile in Triton's kernels for mxfp4."""
UNALIGNED = 0.25
"""Pairs of token and expert per expert up to which vLLM gives every pair a tile of its own."""
SPLITS = ((), (16, 32), (16,), (32,))
"""Candidates: tile sizes up to 32 rows and above it; none for kernels that run in waves."""
LARGE, FOLDS, FEWEST, HOST = 128, 5, 1024, 2048
"""Rows of a tile in prefill; folds; shortest prompt, because a server has CUDA graphs for shorter ones; HOST."""
STEPS_IN = 20
"""Tokens that a request has decoded when a step is timed, about the mean."""


class Cell(NamedTuple):
    """A decode step: the median of its repeats."""

    rows: int
    cached: float
    load: NDArray[np.int64]
    """[layer, expert] tokens."""
    routing: str
    forward_us: float
    head_us: float


Prompts = dict[str, dict[int, float]]
"""Microseconds of prefill by routing and tokens."""


def read_steps(jobs: Path, steps: Path, spec: ModelSpec) -> tuple[dict[str, Any], list[Cell], Prompts]:
    """Return the header, decode cells, and prefill."""
    header, *lines = (json.loads(line) for line in steps.read_text().splitlines())
    cells: list[Cell] = []
    prompts: Prompts = {"even": {}, "recorded": {}}
    with np.load(jobs) as arrays:
        ids = arrays["ids"]
        for line in lines:
            if line["kind"] == "prefill" and line["tokens"] >= FEWEST:
                prompts[line["routing"]][line["tokens"]] = 1e3 * float(np.median([s["gpu_ms"] for s in line["steps"]]))
            if line["kind"] != "decode" or "padding" in line:
                continue
            at, repeats = arrays[f"at_{line['job']}"], dict[bytes, list[Any]]()
            for step in line["steps"]:
                repeats.setdefault(at[step["step"]].tobytes(), []).append(step)
            for same in repeats.values():
                first = same[0]["step"]
                forward, whole = (float(np.median([s[name] for s in same])) for name in ("forward_ms", "gpu_ms"))
                load = step_load(ids[at[first]], spec.num_experts)
                cached = line["rows"] * (line["context"] + STEPS_IN)
                cells.append(
                    Cell(line["rows"], cached, load, line["routing"][first], 1e3 * forward, 1e3 * (whole - forward))
                )
    return header, cells, prompts


def expert_columns(cell: Cell, spec: ModelSpec, split: tuple[int, ...]) -> list[float]:
    """Return what the time of a step's experts is linear in, summed over layers."""
    touched, pairs = int((cell.load > 0).sum()), int(cell.load.sum())
    if not split:
        tiles = np.ceil(cell.load / ROWS_IN_WAVES).sum(axis=1)
        first, second = columns(spec)
        return [float((np.maximum(2, np.ceil(tiles * first / PLACES)) + np.ceil(tiles * second / PLACES)).sum())]
    further = [0.0] * (1 + len(split))
    if pairs <= UNALIGNED * cell.load.size:
        further[0] = pairs - touched
    else:
        size = 0 if cell.rows <= 32 else len(split) - 1
        further[1 + size] = float(np.ceil(cell.load / split[size]).sum()) - touched
    return [touched, *further]


def columns(spec: ModelSpec) -> tuple[int, int]:
    width = spec.expert_params // (3 * spec.hidden_size)
    return -(-2 * width // BLOCK), -(-spec.hidden_size // BLOCK)


def fit_decode(cells: list[Cell], spec: ModelSpec, split: tuple[int, ...]) -> tuple[Floats, FitError, list[int]]:
    """Return the coefficients (by batch size, per cached token, of the experts) and the error on steps held out."""
    sizes = sorted({cell.rows for cell in cells})
    x = np.array(
        [[float(cell.rows == n) for n in sizes] + [cell.cached, *expert_columns(cell, spec, split)] for cell in cells]
    )
    us = np.array([cell.forward_us for cell in cells])
    scale = np.maximum(np.abs(x).max(axis=0), 1e-12)

    def solve(keep: NDArray[np.bool_]) -> Floats:
        return np.asarray(nnls(x[keep] / us[keep, None] / scale, np.ones(keep.sum()))[0] / scale)

    fold, predicted = np.random.default_rng(0).permutation(len(cells)) % FOLDS, np.empty(len(cells))
    for number in range(FOLDS):
        predicted[fold == number] = x[fold == number] @ solve(fold != number)
    error = 100.0 * np.abs(predicted / us - 1.0)
    worst = cells[int(error.argmax())]
    said = f"{worst.rows} rows, {worst.cached:.0f} cached tokens, {worst.routing}"
    quality = FitError(round(float(error.mean()), 2), round(float(error.max()), 2), len(cells), said)
    return solve(np.ones(len(cells), bool)), quality, sizes


def expert_params(spec: ModelSpec, split: tuple[int, ...], found: Floats, nbytes: float, large_us: float) -> MoeParams:
    flops, even = 2.0 * spec.expert_params, spec.top_k / spec.num_experts
    shared: dict[str, Any] = {"overhead_us": 0.0, "token_us": 0.0, "row_us": 0.0, "sharpness": 30.0}
    shared |= {"fill_penalty": 0.0, "partial_penalty": 0.0}
    if not split:
        first, second = columns(spec)
        tiles_us = (float(found[0]), large_us * PLACES / (first + second))
        return MoeParams(
            stream_bytes_per_us=float(f"{nbytes / (found[0] * (first + second) / PLACES):.6g}"),
            tile_flops_per_us=(1.0, 1.0),
            tile_rows=(ROWS_IN_WAVES, LARGE),
            switch_rows=(64 * even,),
            waves=Waves(tuple(float(f"{us:.6g}") for us in tiles_us), (first, second), PLACES, 2),
            **shared,
        )
    rows, further = [1, *split, LARGE], [*found[1:], large_us]
    rates = [float(f"{n * flops / max(us, 1e-3):.6g}") for n, us in zip(rows, further, strict=True)]
    switches = [UNALIGNED, *([32 * even] if len(split) > 1 else []), 64 * even]
    return MoeParams(
        stream_bytes_per_us=float(f"{nbytes / found[0]:.6g}"),
        tile_flops_per_us=tuple(rates),
        tile_rows=tuple(rows),
        switch_rows=tuple(switches),
        **shared,
    )


def prompt_us(model: StepModel, tokens: int, load: NDArray[np.int64]) -> float:
    """Return microseconds of a prompt's experts and attention."""
    batch = Batch(prefill_tokens=tokens, prefill_requests=1)
    return 1e6 * (float(model.moe_s(load, tokens).sum()) + model.attention_s(batch))


def fit_engine(preset: Preset, engine: str, jobs: Path, steps: Path) -> tuple[str, str, EngineFit]:
    header = json.loads(steps.read_text().splitlines()[0])
    spec, dtype = get_model(header["model"]), header["dtype"]
    header, cells, prompts = read_steps(jobs, steps, spec)
    split = min(SPLITS, key=lambda one: fit_decode(cells, spec, one)[1].mape_pct)
    found, quality, sizes = fit_decode(cells, spec, split)
    by_rows, per_token, experts = found[: len(sizes)], float(found[len(sizes)]), found[len(sizes) + 1 :]
    shape = attention_shape(spec)
    law = RooflineLaw(1e-3, float(f"{shape[CACHED_BYTES] * shape[LAYERS] / per_token:.6g}"), 1e12, 30.0, quality)
    kernels = step_model(spec, preset, "bf16")
    most = max(prompts["even"])
    dense = 1e6 * (kernels.dense_s(most, 1) + kernels.attention_s(Batch(prefill_tokens=most, prefill_requests=1)))
    tiles = spec.num_moe_layers * spec.num_experts * -(-most * spec.top_k // (spec.num_experts * LARGE))
    params = expert_params(spec, split, experts, spec.expert_bytes(dtype), (prompts["even"][most] - dense) / tiles)
    launch_us = float(np.mean([us for tokens, us in prompts["even"].items() if tokens <= HOST]))
    heads = [(n, float(np.median([c.head_us for c in cells if c.rows == n]))) for n in sizes]
    apart = [100.0 * abs(dict(heads)[cell.rows] / cell.head_us - 1.0) for cell in cells]
    spread = Quality(round(float(np.mean(apart)), 2), round(max(apart), 2), len(cells))
    head = CurveLaw(tuple(float(n) for n, _ in heads), tuple(round(us, 1) for _, us in heads), spread)

    def fit_with(rest: CurveLaw) -> EngineFit:
        software = f"{engine} {header['vllm']}, torch {header['torch']}"
        return EngineFit(software, MoeFit(params, quality), rest, head, law, round(launch_us, 1))

    def model_with(rest: CurveLaw) -> StepModel:
        whole = {engine: {spec.name: {dtype: fit_with(rest)}}}
        return step_model(spec, msgspec.structs.replace(preset, engines=whole), dtype, engine=engine)

    at, us = [float(n) for n in sizes], [float(value) for value in by_rows]
    bare = model_with(CurveLaw((0.0, 1.0), (0.0, 0.0), spread))
    for tokens, measured in prompts["even"].items():
        if tokens <= HOST:
            continue
        load = np.full((spec.num_moe_layers, spec.num_experts), tokens * spec.top_k // spec.num_experts)
        at.append(float(tokens))
        us.append(max(us[len(sizes) - 1], measured - prompt_us(bare, tokens, load) - head.us(1)))
    rest = CurveLaw(tuple(at), tuple(round(value, 1) for value in us), spread)
    # The error of prefill: recorded prompts, priced with their own loads; the fit has seen even ones only.
    off = []
    with np.load(jobs) as arrays:
        listed = json.loads(str(arrays["jobs"]))
        for number, job in enumerate(listed):
            if job["kind"] == "prefill" and job["routing"] == "recorded" and job["tokens"] in prompts["recorded"]:
                load = step_load(arrays["ids"][arrays[f"at_{number}"][0]], spec.num_experts)
                batch = Batch(prefill_tokens=job["tokens"], prefill_requests=1)
                predicted = 1e6 * model_with(rest).step(load, batch).total_s
                off.append(100.0 * abs(predicted / prompts["recorded"][job["tokens"]] - 1.0))
    seen = Quality(round(float(np.mean(off)), 2), round(max(off), 2), len(off))
    print(f"{spec.name} {dtype}: tiles {split or 'in waves'}; decode {quality}; prefill {seen}")
    return spec.name, dtype, fit_with(msgspec.structs.replace(rest, held_out=seen))


def main() -> None:
    path, engine, *files = sys.argv[1:] if len(sys.argv) >= 5 and len(sys.argv) % 2 else sys.exit(__doc__)
    preset = load_preset(path)
    fits: dict[str, dict[Any, EngineFit]] = {}
    for jobs, steps in zip(files[::2], files[1::2], strict=True):
        model, dtype, fit = fit_engine(preset, engine, Path(jobs), Path(steps))
        fits.setdefault(model, {})[dtype] = fit
    added = msgspec.structs.replace(preset, engines={**preset.engines, engine: fits})
    raw = msgspec.json.encode(added).replace(b'{"tokens"', b'\n{"tokens"').replace(b'{"batch"', b'\n{"batch"')
    written = Path(path).with_suffix(".tmp")
    written.write_bytes(raw + b"\n")
    written.replace(path)


if __name__ == "__main__":
    main()
