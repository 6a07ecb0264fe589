"""What routers save in the steps that vllm_steps.py replayed: measured and predicted, as rows of a Markdown table.

    python lab/benchmarks/gpu/replay_saving.py JOBS.npz STEPS.jsonl [JOBS.npz STEPS.jsonl …]

Files of one model and dtype. A token's time is that of its step; a step's wall time is its GPU time and the median gap
between the steps of its decoder. Intervals resample requests. Decoders that were not replayed under every router are
left out. Also prints which routers' measured savings differ, and whether the prediction has them in the same order.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.cells import step_load
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, StepModel
from coterie.models import get_model

DRAWS = 1000
ROUTERS = ("round_robin", "join_shortest_queue", "locality_band", "latency_aware")
"""In the order of the table; savings are against the first."""
SIZES = (1, 2, 4, *range(8, 65, 8))
"""Sizes of vLLM's CUDA graphs, to which decode batches are padded."""
GPU, WALL, PREDICTED = 1, 2, 3
"""Columns of a request's sums, after its tokens; the last is experts a layer."""


class Decoder(NamedTuple):
    """A replayed decoder."""

    job: dict[str, Any]
    steps: list[dict[str, Any]]
    who: NDArray[np.int32]
    at: NDArray[np.int32]
    ids: NDArray[np.uint8]


def read_decoders(files: list[str]) -> Iterator[tuple[dict[str, Any], Decoder]]:
    """Yield the header of a file with each of its decoders."""
    for jobs_path, steps_path in zip(files[::2], files[1::2], strict=True):
        with np.load(jobs_path) as opened:
            arrays = {name: opened[name] for name in opened.files}
        jobs = json.loads(str(arrays["jobs"]))
        header, *lines = (json.loads(line) for line in Path(steps_path).read_text().splitlines())
        for line in lines:
            number = line["job"]
            who, at = arrays[f"who_{number}"], arrays[f"at_{number}"]
            yield header, Decoder(jobs[number], line["steps"], who, at, arrays["ids"])


def add_times(decoder: Decoder, model: StepModel, sums: dict[int, Any], off: list[float]) -> None:
    """Add tokens, times and experts of a decoder's steps to the sums of its requests."""
    assert model.rest is not None
    assert model.head is not None
    pairs = zip(decoder.steps, decoder.steps[1:], strict=False)
    gap = float(np.median([then["period_ms"] - now["gpu_ms"] for now, then in pairs if then["period_ms"]]))
    decoded: Counter[int] = Counter()
    for step in decoder.steps:
        here = decoder.who[step["step"]] >= 0
        who = decoder.who[step["step"]][here].tolist()
        rows = decoder.ids[decoder.at[step["step"]][here]]
        padded = next(size for size in SIZES if size >= len(who))
        # Padding rows took the experts of the first row.
        load = step_load(np.concatenate([rows, np.repeat(rows[:1], padded - len(who), axis=0)]), model.spec.num_experts)
        cached = sum(decoder.job["contexts"][str(one)] + decoded[one] for one in who)
        decoded.update(who)
        fixed = 1e-3 * (model.rest.us(padded) + model.head.us(len(who)))
        batch = Batch(decode_requests=len(who), decode_context=cached)
        predicted = fixed + 1e3 * (model.attention_s(batch) + float(model.moe_s(load, len(who)).sum()))
        off.append(100.0 * (predicted / step["gpu_ms"] - 1.0))
        experts = float((load > 0).sum(axis=1).mean())
        for one in who:
            sums[one] += (1.0, step["gpu_ms"], step["gpu_ms"] + gap, predicted, experts)


def savings(sums: NDArray[np.float64], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return percent saved of a token's GPU, wall and predicted time, from sums [..., 5]."""
    columns = slice(GPU, PREDICTED + 1)
    return 100.0 * (1.0 - sums[..., columns] / sums[..., :1] / (base[..., columns] / base[..., :1]))


def main() -> None:
    files = sys.argv[1:] if len(sys.argv) >= 3 and len(sys.argv) % 2 else sys.exit(__doc__)
    found = list(read_decoders(files))
    header = found[0][0]
    model = step_model(get_model(header["model"]), "h200", header["dtype"], engine="vllm")
    routers = [name for name in ROUTERS if any(decoder.job["router"] == name for _, decoder in found)]
    replayed = Counter((decoder.job["load"], decoder.job["decoder"]) for _, decoder in found)
    sums: dict[tuple[int, str], dict[int, Any]] = defaultdict(lambda: defaultdict(lambda: np.zeros(5)))
    off: list[float] = []
    for _, decoder in found:
        if replayed[decoder.job["load"], decoder.job["decoder"]] == len(routers):
            add_times(decoder, model, sums[decoder.job["load"], decoder.job["router"]], off)
    errors = np.abs(off)
    print(f"{header['model']} {header['dtype']}: {len(off)} steps")
    print(f"predicted {errors.mean():.2f}% off, {errors.max():.1f}% at worst, {np.mean(off):+.2f}% on average")
    rng = np.random.default_rng(0)
    for load in sorted({load for load, _ in sums}):
        requests = sorted(set().union(*(sums[load, name] for name in routers)))
        table = np.array([[sums[load, name].get(one, np.zeros(5)) for one in requests] for name in routers])
        drawn = rng.integers(len(requests), size=(DRAWS, len(requests)))
        resampled = np.stack([table[:, draw].sum(axis=1) for draw in drawn])  # [draw, router, column]
        totals = table.sum(axis=1)
        saved, samples = savings(totals, totals[:1]), savings(resampled, resampled[:, :1])
        low, high = np.percentile(samples, (2.5, 97.5), axis=0)
        for at, name in enumerate(routers):
            _, gpu, wall, _, experts = totals[at] / totals[at, 0]
            ends = [f"{saved[at, k]:.1f} [{low[at, k]:.1f}, {high[at, k]:.1f}]" for k in (0, 1)]
            shown = [load, name, f"{experts:.1f}", f"{gpu:.2f}", f"{wall:.2f}", *ends, f"{saved[at, 2]:.1f}"]
            print(f"| {' | '.join(map(str, shown))} |")
        for a, b in combinations(range(len(routers)), 2):
            bounds = np.percentile(samples[:, b, 1] - samples[:, a, 1], (2.5, 97.5))
            if bounds[0] > 0 or bounds[1] < 0:
                same = (saved[b, 2] > saved[a, 2]) == (bounds[0] > 0)
                print(
                    f"  {load}: {routers[b]} - {routers[a]} [{bounds[0]:.1f}, {bounds[1]:.1f}], predicted "
                    f"{saved[b, 2] - saved[a, 2]:+.1f}: {'same order' if same else 'OTHER ORDER'}"
                )


if __name__ == "__main__":
    main()
