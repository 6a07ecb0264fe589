"""What a shuffle of the tokens costs: the gather of rows by index, as a share of a MoE layer, on a GPU.

A layer here is the gate, top-k, the sort and permutation by expert, the experts (bf16 grouped GEMM) and the weighted
sum, under a CUDA graph that takes turns over two copies of the weights. A shuffled reduce-scatter needs one gather
before the collective and one after, to restore the order.

    python lab/benchmarks/gpu/shuffle_share.py [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.timing import (
    CalibrationSettings,
    Timer,
    activation_dtype,
    describe_hardware,
    describe_software,
)
from coterie.engines.kernels.routing import permute_by_expert
from coterie.engines.kernels.rows import gather_rows
from coterie.models import get_model

MODELS = ("deepseek-v2-lite", "gpt-oss-20b")
TOKENS = (256, 512, 1024, 2048, 4096)
COPIES = 8


def rows_of(model: str, device: Any, timer: Timer) -> list[dict[str, Any]]:
    spec, dtype = get_model(model), activation_dtype(device)
    experts = Experts(spec, "bf16" if device.type == "cuda" else "fp32", device, 2)
    gate = torch.randn(spec.hidden_size, spec.num_experts, device=device).to(dtype)

    def layer(x: Any, counts: list[int], copy: int) -> Any:
        weights, chosen = (x @ gate).topk(spec.top_k, dim=-1)
        permuted, routed = permute_by_expert(x, chosen, spec.num_experts)
        out = experts.forward(copy, permuted, routed.ends, counts)
        back = out[routed.places.long()].view(len(x), spec.top_k, -1)
        return torch.bmm(torch.softmax(weights, dim=-1)[:, None, :], back)

    def us(calls: list[Callable[[], Any]]) -> float:
        return statistics.median(timer.us(calls) for _ in range(3))

    rows = []
    for tokens in TOKENS:
        xs = [torch.randn(tokens, spec.hidden_size, device=device).to(dtype) for _ in range(COPIES)]
        counts = (xs[0] @ gate).topk(spec.top_k, dim=-1).indices.flatten().bincount(minlength=spec.num_experts)
        layer_us = us([partial(layer, xs[0], counts.tolist(), copy) for copy in (0, 1)])
        index = [torch.randperm(tokens, device=device) for _ in range(COPIES)]
        gathers = {
            f"block={block} warps={warps}": us(
                [partial(gather_rows, x, at, block=block, warps=warps) for x, at in zip(xs, index, strict=True)]
            )
            for block, warps in (
                ((1024, 4), (1024, 2), (2048, 4), (4096, 8)) if device.type == "cuda" else ((1024, 4),)
            )
        }
        default = gathers["block=1024 warps=4"]
        plain = us([lambda x=x, at=at: x[at] for x, at in zip(xs, index, strict=True)])  # type: ignore[misc]
        rows.append(
            {
                "model": model,
                "tokens": tokens,
                "layer_us": layer_us,
                "shuffle_us": default,
                "torch_us": plain,
                "share_pct": 100 * default / layer_us,
                "launches": gathers,
            }
        )
        print(
            f"{model:18} {tokens:5} tokens: layer {layer_us:8.1f} us, gather {default:5.2f} us "
            f"(torch {plain:5.2f}; {min(gathers, key=gathers.__getitem__)} best), "
            f"{100 * default / layer_us:.2f}% a gather",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = Timer(device, CalibrationSettings())
    with torch.inference_mode():
        rows = [row for model in MODELS for row in rows_of(model, device, timer)]
    found = {"rows": rows, "hardware": describe_hardware(device), "software": describe_software()}
    if options.output:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
