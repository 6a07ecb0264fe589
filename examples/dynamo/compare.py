"""Routing behind Dynamo's frontend: Coterie beside Dynamo's power of two and round robin, on the same workers.

    python examples/dynamo/compare.py --rounds 10 --output dynamo.json

Needs coterie[dynamo] and Dynamo's frontend (docs/stacks/dynamo.md). In every round each contender serves the same
requests of three domains, in an order that turns from round to round; workers' prefix caches are emptied in between.
Distinct experts are compared at equal rows, requests a second by their ratio. Both are means over rounds with a 95%
interval (Student's t).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleet import run_fleet  # type: ignore[import-not-found]
from scipy.stats import t

from coterie.answers.demo.run import DOMAINS
from coterie.answers.load.client import Asking, LoadClient, RequestOutcome
from coterie.answers.load.run import LoadRun, Pace, StepTotals, experts_ratio, read_steps
from coterie.answers.load.workload import TEMPLATE_TOKENS, LoadRequest, Message, that_fit
from coterie.engines.tiny import TINY
from coterie.net.http_client import Client
from coterie.prompts import load_prompts, take_in_turn

OURS = "coterie"
CLIENTS = 24
MAX_TOKENS = 32
CONTEXT = 1024
"""Context of coterie-tiny, in tokens."""


class Run(NamedTuple):
    steps: StepTotals
    wall_s: float
    texts: list[str]


async def serve(url: str, workers: list[str], requests: list[LoadRequest]) -> Run:
    """Serve the requests through a frontend; raise if one fails."""
    clients = [Client(worker) for worker in workers]
    try:
        for client in clients:
            await client.__aenter__()
            await client.call("POST", "/reset_prefix_cache")
        before = [(await read_steps(client)).total for client in clients]
        run, started = LoadRun(), time.perf_counter()
        asking = Asking(TINY, keep_text=True, ignore_eos=True)
        async with LoadClient(url) as load:

            async def send(request: LoadRequest, planned: float | None) -> RequestOutcome:
                return await load.ask(request, asking, planned)

            await run.drive(requests, Pace(CLIENTS), send, lambda _: None)
        wall_s = time.perf_counter() - started
        failed = [outcome.problem for outcome in run.outcomes if outcome.failure is not None]
        if failed:
            raise RuntimeError(f"{url}: {len(failed)} requests failed: {failed[0]}")
        logs = [(await read_steps(client, after)).rows for client, after in zip(clients, before, strict=True)]
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)
    outcomes = sorted(run.outcomes, key=lambda outcome: outcome.request)
    return Run(StepTotals.of(logs), wall_s, [outcome.text for outcome in outcomes])


def summary(values: list[float]) -> dict[str, float]:
    """Return the mean and its 95% interval."""
    mean, count = float(np.mean(values)), len(values)
    half = float(t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.inf
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4), "rounds": count}


def report(rounds: list[dict[str, Run]]) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {"experts, coterie to power-of-two": [], "experts, coterie to round-robin": []}
    for runs in rounds:
        for mode in ("power-of-two", "round-robin"):
            ratio = experts_ratio(runs[mode].steps, runs[OURS].steps)
            ratios[f"experts, coterie to {mode}"].append(math.nan if ratio is None else ratio)
    ratios["requests a second, coterie to round-robin"] = [
        runs["round-robin"].wall_s / runs[OURS].wall_s for runs in rounds
    ]
    differing = sum(
        runs[OURS].texts[at] != text for runs in rounds for at, text in enumerate(runs["round-robin"].texts)
    )
    rows = {name: round(float(np.mean([runs[name].steps.rows_per_step for runs in rounds])), 2) for name in rounds[0]}
    return {
        **{name: summary(values) for name, values in ratios.items()},
        "rows a step": rows,
        "answers that differ": differing,
    }


async def measure(fleet: Any, count: int, requests: int, output: Path | None) -> None:
    workers = [worker.url for worker in fleet.decoders]
    contenders = {OURS: fleet.url, **fleet.plain}
    mixed = take_in_turn([prompt for prompt in load_prompts() if prompt.domain in DOMAINS], 162)
    prompts = that_fit(mixed, CONTEXT - MAX_TOKENS - TEMPLATE_TOKENS)
    rounds: list[dict[str, Run]] = []
    for number in range(-1, count):  # the first round compiles and warms up
        rng = np.random.default_rng(number + 1)
        chosen = [prompts[row] for row in rng.permutation(len(prompts))[:requests]]
        asked = [
            LoadRequest(at, at, prompt.domain, (Message("user", prompt.prompt),), MAX_TOKENS)
            for at, prompt in enumerate(chosen)
        ]
        names = list(np.roll(list(contenders), number))
        runs = {name: await serve(contenders[name], workers, asked) for name in names}
        if number >= 0:
            rounds.append(runs)
            printed = json.dumps(report(rounds), indent=1)
            print(printed, flush=True)
            if output is not None:
                output.write_text(printed + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=72, help="requests of a round")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with run_fleet(compare=True) as fleet:
        asyncio.run(measure(fleet, given.rounds, given.requests, given.output))


if __name__ == "__main__":
    main()
