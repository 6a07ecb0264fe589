"""Decode steps that routers formed, run in real vLLM on a GPU, decoder by decoder: GPU time and time between steps.

    python lab/benchmarks/gpu/vllm_steps.py CONFIG JOBS.npz OUT.jsonl [SECONDS]

CONFIG is a model's folder or its config.json; weights are random, routing is imposed. JOBS is what step_jobs.py wrote:
`ids` [token, layer, k], and a JSON `jobs`. In job N, step i has the requests `who_N`[i] [row] (-1 is none) with the
tokens `at_N`[i]; a request joins with its `context` as if its prompt had been computed elsewhere: vLLM's connector for
such benchmarks fills its KV cache. Routers take turns in random order. After SECONDS no further decoder starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.calibration.calibrate import model_config
from coterie.engines.calibration.imposed import ENVIRONMENT, Ids, ImposedEngine, TimedStep

CONTEXT = 24_576
"""Longest request."""
UNUSED = 512
"""A prompt size that no step has."""
PREFILLED = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


def replay(engine: ImposedEngine, who: Ids, at: Ids, contexts: dict[str, int]) -> list[TimedStep]:
    """Run a decoder's steps; requests join and leave as they did."""
    number, here = 0, set[str]()
    rows = engine.routing.tensor(np.maximum(at, 0))
    columns = [{str(name): column for column, name in enumerate(row) if name >= 0} for row in who]
    orders: dict[tuple[int, ...], Any] = {}  # on the device: a copy to it would wait for the step before

    def choose(tokens: dict[str, int]) -> Any:
        nonlocal number
        if number >= len(columns) or set(tokens.values()) != {1} or tokens.keys() != columns[number].keys():
            return None
        order = tuple(columns[number][name] for name in tokens)
        if order not in orders:
            orders[order] = engine.routing.tensor(np.array(order))
        number += 1
        return number - 1, rows[number - 1].index_select(0, orders[order])

    engine.routing.choose = choose
    while number < len(columns):
        wanted = columns[number].keys()
        if gone := here - wanted:
            engine.engine.abort_request(list(gone))
        for name in wanted - here:
            engine.add(contexts[name], name)
        here = set(wanted)
        engine.engine.step()
    engine.drop(list(here))
    return engine.routing.timed()


def main() -> None:
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    config_path, jobs_path, out_path = map(Path, sys.argv[1:4])
    limit = float(sys.argv[4]) if len(sys.argv) > 4 else 1e9
    began = time.perf_counter()
    with np.load(jobs_path) as file:
        arrays = {name: file[name] for name in file.files}
    jobs = json.loads(str(arrays["jobs"]))
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig  # after the environment is set

    config, spec = model_config(config_path)
    longest = min(CONTEXT, config["max_position_embeddings"])
    # vLLM has no graph for more rows than it admits requests: up to the next size.
    widest = -(-max(arrays[f"who_{number}"].shape[1] for number in range(len(jobs))) // 8) * 8
    engine = ImposedEngine(
        config, spec, arrays["ids"], (UNUSED,), longest, widest, kv_transfer_config=KVTransferConfig(**PREFILLED)
    )
    first = engine.add(16)
    engine.engine.step()  # makes the buffers
    engine.drop([first])
    header = {"model": spec.name, "dtype": spec.weight_dtype, "software": engine.version}
    with out_path.open("w") as out:
        out.write(json.dumps(header) + "\n")
        # The first decoder of every load and router, then the second: a run that is cut short has seen all loads.
        order = np.random.default_rng(0).permutation(len(jobs)).tolist()
        for number in sorted(order, key=lambda number: (jobs[number]["decoder"], jobs[number]["load"])):
            job = jobs[number]
            if time.perf_counter() - began > limit:
                print("out of time at job", number, flush=True)
                break
            steps = replay(engine, arrays[f"who_{number}"], arrays[f"at_{number}"], job["contexts"])
            rows = [
                {"step": s.number, "gpu_ms": s.us / 1e3, "period_ms": s.period_us and s.period_us / 1e3} for s in steps
            ]
            out.write(json.dumps({"job": number, "steps": rows}) + "\n")
            out.flush()
            print(f"{time.perf_counter() - began:6.1f} s", job["router"], job["load"], len(steps), flush=True)


if __name__ == "__main__":
    main()
