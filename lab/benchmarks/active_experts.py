"""How much does a MoE layer slow down when more experts are active? Measured on the GPU at hand.

Qwen3-30B-A3B's shape, bf16, batch 64, 16 to 128 active experts: the experts alone, and the layer with the gather of
its tokens before and the weighted sum after, as one CUDA graph of one layer. Prints one JSON object.

    python lab/benchmarks/active_experts.py [--model qwen3-30b-a3b] [--batch 64] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from coterie.costs.cells import expert_tokens
from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.timing import CalibrationSettings, Timer, describe_hardware, describe_software
from coterie.models import get_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = get_model(options.model)
    timer = Timer(device, CalibrationSettings())
    experts = Experts(spec, "bf16" if device.type == "cuda" else "fp32", device, 2)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rng, rows = np.random.default_rng(0), []
    x = torch.randn(options.batch, spec.hidden_size, device=device).to(dtype)
    weights = torch.rand(options.batch, spec.top_k, 1, device=device).to(dtype)
    for active in (16, 32, 64, 128):
        counts = np.zeros(spec.num_experts, np.int64)
        counts[rng.permutation(spec.num_experts)[:active]] = expert_tokens(options.batch, spec.top_k, active)
        ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(device)
        order = torch.from_numpy(rng.permutation(options.batch * spec.top_k)).to(device)
        back = order.argsort()
        gathered = x[order // spec.top_k]
        listed = counts.tolist()

        def layer(copy: int) -> torch.Tensor:
            out = experts.forward(copy, x[order // spec.top_k], ends, listed)  # noqa: B023 - called in this turn
            return (out[back].view(options.batch, spec.top_k, -1) * weights).sum(dim=1)  # noqa: B023

        def only(copy: int) -> torch.Tensor:
            return experts.forward(copy, gathered, ends, listed)  # noqa: B023

        def both(
            call: Callable[..., Any],
        ) -> float:  # two copies in turn, so that neither finds its weights in the cache
            return statistics.median(timer.us([lambda: call(0), lambda: call(1)]) for _ in range(options.repeats))

        one = statistics.median(timer.us([lambda: layer(0)]) for _ in range(options.repeats))
        rows.append({"active": active, "experts_us": both(only), "layer_us": both(layer), "layer_alone_us": one})
    first, last = rows[0], rows[-1]
    ratios = {key.replace("_us", "_ratio"): last[key] / first[key] for key in first if key.endswith("_us")}
    print(
        json.dumps(
            {
                "model": spec.name,
                "batch": options.batch,
                "rows": rows,
                **ratios,
                "hardware": describe_hardware(device),
                "software": describe_software(),
            }
        )
    )


if __name__ == "__main__":
    main()
