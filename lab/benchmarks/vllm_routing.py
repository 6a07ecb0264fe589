"""Expert-aware routing on real vLLM: one prefill worker and several decoders, the same requests under every router.

    python lab/benchmarks/vllm_routing.py [--decoders 4] [--in-flight 8] [--requests 360] [--prompts FILE]

Starts the servers together, records and fits a router on some of the requests, and serves the others under round robin,
join-shortest-queue, locality band and latency-aware routing. Distinct experts are counted by the plugin inside the
servers, step by step. Prints one JSON object; exit code 1 if a router changed a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "engines"))  # a fleet driven from Python

ROUTERS = ("round_robin", "join_shortest_queue", "locality_band", "latency_aware")
START_S = 900.0
# With this the worker runs in its engine's process. Apart, the two wait for each other by spinning, and ten of those
# leave nobody a core: a step in fifty took seconds.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from coterie.answers.demo.runs import REFERENCE_SHAPE, predicted_step_ms
    from coterie.costs.presets import step_model
    from coterie.engines.calibration.timing import describe_software
    from coterie.engines.vllm.settings import ConnectorSettings
    from coterie.models import get_model
    from coterie.prompts import load_prompts, read_prompts, take_in_turn
    from routed_loop import DecodeWorker, LoopSettings, run_loop
    from vllm_servers import BLOCK_SIZE, Fleet, hand_over

    prompts = take_in_turn(read_prompts(options.prompts) if options.prompts else load_prompts(), options.requests)
    settings = LoopSettings(
        in_flight=options.in_flight,
        max_tokens=options.max_tokens,
        block_size=BLOCK_SIZE,
        tail_tokens=2,
        routers=ROUTERS,
        seed=options.seed,
    )
    run, started = uuid.uuid4().hex[:8], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fleet(Path(folder), start_s=START_S)) as fleet:
        how: dict[str, Any] = {"settings": {}, "beside": hand_over(Path(folder) / "kv"), "env": IN_PROCESS}
        how["extra"] = ("--distributed-executor-backend", "uni")
        prefill, *decoders = fleet.start({f"routing-{run}-{n}": how for n in range(options.decoders + 1)})
        workers = [
            DecodeWorker(one.url, one.events, ConnectorSettings(store=one.store).store_path("", 0)) for one in decoders
        ]
        print(f"{1 + len(decoders)} servers ready after {time.monotonic() - started:.0f} s", file=sys.stderr)
        last = ""

        def report(what: str, done: int, total: int) -> None:
            nonlocal last
            if what != last:
                print(f"{time.monotonic() - started:.0f} s: {what}, {done} of {total}", file=sys.stderr)
                last = what

        result = asyncio.run(run_loop([prefill.url], workers, prompts, settings, report))
    model = step_model(get_model(REFERENCE_SHAPE), "h200")
    rows = []
    for one in result.runs:
        rows.append(
            {
                "router": one.router,
                "requests": one.requests,
                "output_tokens": one.output_tokens,
                "steps": len(one.steps),
                "rows_per_step": round(one.rows_per_step, 3),
                "distinct_per_step": round(one.distinct_per_step, 3),
                "distinct_by_token": round(one.distinct_by_token, 3),
                "saving_pct": round(result.saving_pct(one), 2),
                "saving_by_token_pct": round(result.saving_by_token_pct(one), 2),
                "saving_at_equal_rows_pct": round(result.saving_at_equal_rows_pct(one), 2),
                "against_random": round(result.against_random(one), 4),
                "predicted_h200_step_ms": round(
                    predicted_step_ms(one.distinct_by_token, one.rows_by_token, result.context, model), 4
                ),
                "wall_s": round(one.wall_s, 2),
                "per_worker": one.per_worker,
                "footprints": one.counts.footprints,
                "incomplete": one.counts.incomplete,
            }
        )
    return {
        "decoders": options.decoders,
        "in_flight": options.in_flight,
        "calibrated": result.calibrated,
        "fit_s": round(result.fit_s, 3),
        "differing": result.differing(),
        "shape": REFERENCE_SHAPE,
        "rows": rows,
        "software": describe_software(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decoders", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=8, help="requests under way per decoder")
    parser.add_argument("--requests", type=int, default=404)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=Path, help="else the shipped ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a plain one would leave the servers
    found = measure(options)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["differing"] else 0)


if __name__ == "__main__":
    main()
