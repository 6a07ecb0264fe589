"""What capturing experts costs, by part, on this machine.

    python lab/benchmarks/capture_cost.py [--model deepseek-v3|DIR] [--tokens 64 8192] [--requests 512 8192]

Times, for a model's shape: the hook (all layers of a step, as one CUDA graph on a GPU), the copy of a step to the host,
the write to the position store, and the fetch of a request's footprint. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from coterie_lab.benches.timing import median_us


def parts(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from coterie.engines.calibration.timing import describe_hardware, describe_software
    from coterie.engines.vllm.capture import StepCapture, as_numpy
    from coterie.footprints.positions import PositionShape, PositionStore
    from coterie.models import get_model, model_from_config
    from coterie.wire.footprints import WireFootprint, encode_footprint

    spec = model_from_config(options.model) if Path(options.model).is_dir() else get_model(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers, rng = spec.num_moe_layers, np.random.default_rng(0)
    most = max(options.tokens)
    shape = PositionShape(max(2 * most, 2 * max(options.requests)), layers, spec.top_k, spec.num_experts)
    store = PositionStore.create(shape)
    positions = torch.arange(most, device=device)
    capture = StepCapture(range(layers), spec.top_k, spec.num_experts, most, device, lambda _: positions)
    context = SimpleNamespace(dp_metadata=None)
    rows = []
    for tokens in options.tokens:
        ids = np.argsort(rng.random((tokens, spec.num_experts)), axis=1)[:, : spec.top_k]
        routed = torch.as_tensor(ids, dtype=torch.int32, device=device)

        def hook(routed: torch.Tensor = routed) -> None:
            for layer in range(layers):
                capture.capture(layer, routed, context)

        hook()
        held = as_numpy(capture.ids[:tokens].cpu())
        row = {"tokens": tokens, "store_us": median_us(lambda h=held, n=tokens: store.write(np.arange(n), h))}  # type: ignore[misc]
        if device.type == "cuda":
            row |= _on_gpu(hook, capture, tokens)
        else:
            row |= {"hook_us": median_us(hook), "copy_us": 0.0}
        rows.append(row)
    fetches = []
    for tokens in options.requests:
        at = np.arange(tokens)
        store.write(at, rng.integers(0, spec.num_experts, (tokens, layers, spec.top_k)))

        def fetch(at: np.ndarray = at) -> str:
            counts, known = store.footprint(at)
            return encode_footprint(WireFootprint(counts, store.layer_ids, known, 0), deflate=False)

        row = {"tokens": tokens, "count_us": median_us(lambda a=at: store.footprint(a)), "fetch_us": median_us(fetch)}  # type: ignore[misc]
        fetches.append({**row, "bytes": len(fetch())})
    return {
        "model": spec.name,
        "layers": layers,
        "steps": rows,
        "requests": fetches,
        "hardware": describe_hardware(device),
        "software": describe_software(),
    }


def _on_gpu(hook: Callable[[], None], capture: Any, tokens: int) -> dict[str, float]:
    import torch

    from coterie.engines.calibration.timing import captured, event_us

    graph, _ = captured(hook)
    pinned = torch.empty((tokens, *capture.ids.shape[1:]), dtype=capture.ids.dtype, pin_memory=True)
    places = torch.empty(tokens, dtype=torch.int64, pin_memory=True)

    def copy() -> None:
        pinned.copy_(capture.ids[:tokens], non_blocking=True)
        places.copy_(capture.positions[:tokens], non_blocking=True)

    calls = {"hook_us": graph.replay, "copy_us": copy}
    return {name: round(statistics.median(event_us(call) for _ in range(50)), 2) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v3", help="name of a model, or its folder")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 8192], help="of a step")
    parser.add_argument("--requests", type=int, nargs="+", default=[512, 8192], help="tokens of requests")
    print(json.dumps(parts(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
