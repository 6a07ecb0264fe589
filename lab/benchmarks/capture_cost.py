"""What capturing experts costs: its parts on this machine, and the throughput of a vLLM server with capture on and off.

    python lab/benchmarks/capture_cost.py parts [--model deepseek-v3|DIR] [--tokens 64 8192] [--requests 512 8192]
    python lab/benchmarks/capture_cost.py server [--rounds 40] [--model DIR]

`parts` times, for a model's shape: the hook (all layers of a step, as one CUDA graph on a GPU), the copy of a step to
the host, the write to the position store, and the fetch of a request's footprint. `server` starts vLLM with the plugin
on, sends the same requests round after round, and turns capture on and off between rounds inside that one server, in
balanced order. Each prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from coterie_lab.benches.timing import median_us

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "engines"))  # real vLLM servers


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


def server(options: argparse.Namespace) -> dict[str, Any]:
    from coterie.engines.calibration.timing import describe_software
    from coterie.engines.vllm.settings import ConnectorSettings
    from coterie.footprints import PositionStore
    from coterie.net.processes import free_port
    from coterie.prompts import load_prompts, take_in_turn
    from vllm_servers import Fleet

    name = f"cost-{free_port()}"
    how = {"settings": {"footprint": "always"}, "model": options.model, "extra": ("--no-enable-prefix-caching",)}
    prompts = [prompt.prompt for prompt in take_in_turn(load_prompts(), options.requests)]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fleet(Path(folder))) as fleet:
        (vllm,) = fleet.start({name: how})

        def tokens_per_s() -> float:
            started = time.perf_counter()
            answers = vllm.complete_all(
                prompts, options.concurrency, max_tokens=options.max_tokens, ignore_eos=True, return_token_ids=False
            )
            return float(sum(one["usage"]["total_tokens"] for one in answers) / (time.perf_counter() - started))

        store = PositionStore.attach(ConnectorSettings(store=name).store_path("", 0))
        for _ in range(2):
            tokens_per_s()
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(options.rounds):
            for on in (True, False) if number % 2 else (False, True):
                store.enabled = on
                speeds[on].append(tokens_per_s())
            last = f"off {speeds[False][-1]:.0f}, on {speeds[True][-1]:.0f} tokens/s"
            print(f"{number + 1} of {options.rounds}: {last}", file=sys.stderr)
    ratios = np.array(speeds[True]) / np.array(speeds[False])
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(ratios, len(ratios))) for _ in range(4000)]
    return {
        "rounds": options.rounds,
        "requests": options.requests,
        "concurrency": options.concurrency,
        "off_tokens_per_s": round(statistics.median(speeds[False]), 1),
        "on_tokens_per_s": round(statistics.median(speeds[True]), 1),
        "on_over_off": round(float(np.median(ratios)), 4),
        "ci95": [round(float(np.quantile(medians, q)), 4) for q in (0.025, 0.975)],
        "software": describe_software(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("parts")
    one.add_argument("--model", default="deepseek-v3")
    one.add_argument("--tokens", type=int, nargs="+", default=[64, 8192])
    one.add_argument("--requests", type=int, nargs="+", default=[512, 8192])
    one.set_defaults(run=parts)
    two = verbs.add_parser("server")
    two.add_argument("--rounds", type=int, default=40)
    two.add_argument("--requests", type=int, default=8)
    two.add_argument("--concurrency", type=int, default=8)
    two.add_argument("--max-tokens", type=int, default=96)
    two.add_argument("--model", type=Path)
    two.set_defaults(run=server)
    options = parser.parse_args()
    print(json.dumps(options.run(options), indent=1))


if __name__ == "__main__":
    main()
