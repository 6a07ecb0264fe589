"""The fleet simulator against a real engine: 300 requests that vLLM served on one RTX PRO 6000 (Qwen3-30B-A3B, bf16).

What is known: when each request arrived, its lengths, its first and last token. What the timeline implies: at most 256
requests run, prompts are computed in steps of 2,048 tokens, and a request that comes during a step joins the one after
the next (asynchronous scheduling). What is not known: which experts were used. Prompts are taken to be spread (a few
hundred tokens touch nearly all experts, however they are spread). Decoded tokens are taken to follow one Zipf law,
whose exponent is **chosen on every other request** and tested on the others. Both halves were served together, so this
guards against luck in 150 requests, not against another load. No other number is fitted: kernel times are the shipped
preset's, and no overhead is added.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.routing.base import Decision, Request
from coterie.routing.fleet import Fleet
from coterie.sim.fleet.metrics import FleetRun, summarise_fleet
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie_lab.benches.timing import Row

TIMELINE = "kernels/qwen3-30b-a3b-rtx-pro-6000/vllm_timeline.jsonl"
MODEL, PRESET = "qwen3-30b-a3b", "rtx-pro-6000"
PLACES, STEP_TOKENS = 256, 2048
"""vLLM's max_num_seqs and max_num_batched_tokens: while requests wait, 256 run; a prompt of 4,570 tokens beside 255
running requests took three steps."""
SPREAD = 0.8
"""Zipf exponent of prompts, and of decoded tokens before anything is chosen."""
EXPONENTS = tuple(round(float(exponent), 1) for exponent in np.arange(1.6, 3.21, 0.2))
PROMPT_ROWS, DECODE_ROWS = 128, 64
"""Tokens drawn for every request; longer ones repeat them."""


class Timeline(NamedTuple):
    """[request] in order of arrival, seconds since the first."""

    arrival_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def read_timeline(path: Path) -> Timeline:
    """Arrivals are on another clock than tokens: the two are laid so that the request queued soonest waited 0 s."""
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    arrival, queued, first, last, prompt, output = np.array([[float(row[name]) for name in names] for row in rows]).T
    arrival = arrival + (queued - arrival).min()
    start = arrival.min()
    order = np.argsort(arrival, kind="stable")
    whole = [column[order].astype(np.int64) for column in (prompt, output)]
    return Timeline(*(column[order] - start for column in (arrival, first, last)), *whole)


class _OneWorker:
    """There is nothing to choose."""

    def route(self, request: Request, fleet: Fleet) -> Decision:  # noqa: ARG002  (the contract's)
        return Decision(0, np.zeros(1), "the only one")


@lru_cache(maxsize=2)
def _draw(exponent: float, tokens: int, seed: int) -> NDArray[np.integer]:
    """[token, layer, k] experts, every token from the same Zipf law, each layer in its own order."""
    settings = SyntheticSettings(
        domains=("any",), zipf_exponent=exponent, specialisation=0.0, concentration=float("inf")
    ).shaped_like(get_model(MODEL))
    return np.asarray(generate(settings, np.random.default_rng(seed), tokens=tokens).arrays()[0].expert_ids)


def simulate_timeline(timeline: Timeline, exponent: float, ahead: bool = True) -> FleetRun:
    """The same requests on one simulated worker of both roles; `exponent` is that of decoded tokens."""
    count = len(timeline.arrival_s)
    prompts, decoded = _draw(SPREAD, count * PROMPT_ROWS, 0), _draw(exponent, count * DECODE_ROWS, 1)
    numbers = np.arange(count)
    spec = get_model(MODEL)
    recordings = Recordings(
        np.concatenate([prompts, decoded]),
        spec.num_experts,
        numbers * PROMPT_ROWS,
        np.full(count, PROMPT_ROWS),
        len(prompts) + numbers * DECODE_ROWS,
        np.full(count, DECODE_ROWS),
    )
    requests = FleetRequests(recordings, numbers, timeline.prompt_tokens, timeline.output_tokens, timeline.arrival_s)
    config = FleetConfig(both=True, places=PLACES, chunk_tokens=STEP_TOKENS, schedule_ahead=ahead)
    model = step_model(spec, PRESET, "bf16")
    return run_fleet(requests, model, _OneWorker(), config, fleet=Fleet([PLACES]))


def choose_exponent(timeline: Timeline, rows: NDArray[np.int64]) -> float:
    """The exponent with the smallest worst error in p50 and p99 of TTFT and TPOT, on those requests."""
    errors: dict[float, float] = {}

    def error(exponent: float) -> float:
        if exponent not in errors:
            errors[exponent] = _worst(_errors(timeline, simulate_timeline(timeline, exponent), rows))
        return errors[exponent]

    best = min(EXPONENTS, key=error)
    return min((round(best + step, 1) for step in (-0.1, 0.0, 0.1)), key=error)


def vllm_timeline_rows(data: Path) -> list[Row]:
    """Percentiles of TTFT and TPOT, vLLM's and ours, on requests that nothing was chosen on; and what each part does.

    `spread routing` has chosen nothing, and is scored on the same requests; `no scheduling ahead` lets a request join
    the next step.
    """
    timeline = read_timeline(data / TIMELINE)
    numbers = np.arange(len(timeline.arrival_s))
    chosen_on, held_out = numbers[::2], numbers[1::2]
    exponent = choose_exponent(timeline, chosen_on)
    run = simulate_timeline(timeline, exponent)
    return [
        _row("chosen on the other half", timeline, run, exponent, held_out),
        _row("the half it was chosen on", timeline, run, exponent, chosen_on),
        _row("no scheduling ahead", timeline, simulate_timeline(timeline, exponent, ahead=False), exponent, held_out),
        _row("spread routing", timeline, simulate_timeline(timeline, SPREAD), SPREAD, held_out),
    ]


def _percentiles(first: NDArray[np.float64], tpot: NDArray[np.float64]) -> dict[str, float]:
    """Milliseconds."""
    columns = {"ttft": first, "tpot": tpot}
    return {
        f"{name}_p{share}": 1e3 * float(np.percentile(seconds, share))
        for name, seconds in columns.items()
        for share in (50, 99)
    }


def _errors(timeline: Timeline, run: FleetRun, rows: NDArray[np.int64]) -> dict[str, tuple[float, float, float]]:
    """Percentile → vLLM's, ours, and how far ours is off, in percent."""
    tpot = (timeline.finish_s - timeline.first_token_s) / np.maximum(1, timeline.output_tokens - 1)
    real = _percentiles((timeline.first_token_s - timeline.arrival_s)[rows], tpot[rows])
    ours = _percentiles((run.first_token_s - run.arrival_s)[rows], run.tpot_s[rows])
    return {name: (real[name], ours[name], 100.0 * (ours[name] / real[name] - 1.0)) for name in real}


def _worst(errors: dict[str, tuple[float, float, float]]) -> float:
    return max(abs(off) for _, _, off in errors.values())


def _row(name: str, timeline: Timeline, run: FleetRun, exponent: float, rows: NDArray[np.int64]) -> Row:
    errors = _errors(timeline, run, rows)
    row: Row = {"name": name, "requests": len(rows), "zipf_exponent": exponent}
    for key, values in errors.items():
        named = zip(("vllm_ms", "ms", "error_pct"), values, strict=True)
        row |= {f"{key}_{what}": round(value, 1) for what, value in named}
    return row | {"worst_error_pct": round(_worst(errors), 1), "distinct": round(summarise_fleet(run).distinct, 1)}
