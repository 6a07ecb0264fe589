"""Print how well prices fitted to AIConfigurator's tables predict cells held out of the fit, and served requests.

    python lab/benchmarks/table_errors.py [SYSTEM]        default: h200_sxm; needs the package aiconfigurator-core

Served: every row of the package's ``silicon_sample.csv`` with gpt-oss-120b in vLLM on one H200 (system h200_sxm,
tp_size 1, mode agg). The time per output token is predicted as a decode step of the row's concurrency, with contexts
half grown and experts drawn uniformly, plus a prefill step for every other request that arrives meanwhile.
"""

from __future__ import annotations

import csv
import sys
from typing import NamedTuple

import numpy as np

from coterie.costs.aiconfigurator import find_tables, read_tables
from coterie.costs.presets import fit_preset, step_model
from coterie.costs.roofline import Quality
from coterie.costs.step import Batch
from coterie.errors import ConfigError
from coterie.models import get_model, models


def held_out(system: str, engine: str) -> None:
    for spec in models().values():
        try:
            measurement = read_tables([spec], system, engine)
        except ConfigError as error:
            print(f"<!-- {error} -->")
            continue
        fit = fit_preset(system, measurement).fits[spec.name]
        for table in measurement.shapes[0].moe:
            row(f"{engine}: {table.kernel}", f"{spec.name}, {table.dtype}", fit.moe[table.dtype].held_out)
        kind = "latent attention" if spec.kv_lora_rank else "attention"
        row(f"{engine}: {kind}, decode", spec.name, fit.decode_attention.held_out)
        row(f"{engine}: {kind}, prefill", spec.name, fit.prefill_attention.held_out)
        row(f"{engine}: projections", spec.name, fit.gemm.held_out)


def row(table: str, shape: str, error: Quality) -> None:
    print(f"| {table} | {shape} | {error.cells} | {error.mape_pct:.1f} | {error.worst_pct:.0f} |")


class Served(NamedTuple):
    """A served row: prompt and output tokens, requests in flight, milliseconds per output token."""

    prompt: int
    output: int
    requests: int
    tpot_ms: float


def served_rows(system: str) -> list[Served]:
    wanted = {"model_path": "openai/gpt-oss-120b", "backend": "vllm", "system": system, "tp_size": "1", "mode": "agg"}
    with (find_tables() / "silicon_sample.csv").open() as stream:
        rows = [r for r in csv.DictReader(stream) if all(r[name] == value for name, value in wanted.items())]
    # Some rows are in the file twice.
    return sorted(
        {Served(int(r["isl"]), int(r["osl"]), int(r["batch_size"]), float(r["silicon_tpot_ms"])) for r in rows}
    )


def served_error_pct(row: Served) -> float:
    spec = get_model("gpt-oss-120b")
    model, rng = step_model(spec, "h200", engine="vllm"), np.random.default_rng(0)
    chosen = rng.random((spec.num_moe_layers, row.requests, spec.num_experts)).argsort(axis=2)[:, :, : spec.top_k]
    load = np.stack([np.bincount(layer.ravel(), minlength=spec.num_experts) for layer in chosen])
    decode = model.step(load, Batch(row.requests, int(row.requests * (row.prompt + row.output / 2)))).total_s
    even = np.full_like(load, row.prompt * spec.top_k // spec.num_experts)
    prefill = model.step(even, Batch(prefill_tokens=row.prompt)).total_s
    predicted_ms = 1e3 * (decode + (row.requests - 1) / row.output * prefill)
    print(f"| {row.prompt} | {row.output} | {row.requests} | {row.tpot_ms:.2f} | {predicted_ms:.2f} |")
    return 100.0 * (predicted_ms / row.tpot_ms - 1.0)


def main() -> None:
    system = sys.argv[1] if len(sys.argv) > 1 else "h200_sxm"
    print("| table | shape | cells | mean error % | worst % |\n|---|---|---|---|---|")
    for engine in ("vllm", "sglang", "trtllm"):
        held_out(system, engine)
    exchange = fit_preset(system, read_tables([get_model("qwen3-30b-a3b")], system, "sglang"))
    for kind, law in (("node", exchange.all_to_all), *exchange.exchange.items()):
        if law:
            law_text = f"{law.latency_us:.0f} us + bytes ÷ {law.bytes_per_us / 1e3:.0f} GB/s"
            row(f"sglang: DeepEP, {kind}", law_text, law.held_out)
    if system == "h200_sxm":
        print("\n| prompt | output | in flight | TPOT, ms | predicted |\n|---|---|---|---|---|")
        errors = np.array([served_error_pct(one) for one in served_rows(system)])
        print(f"served: mean error {np.abs(errors).mean():.1f}%, {errors.min():.0f} to {errors.max():+.0f}%")


if __name__ == "__main__":
    main()
