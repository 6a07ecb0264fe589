"""Where each batch selection strategy helps, does nothing or hurts: real routing, real arrivals, a calibrated H200.

Requests take their experts from a recording (gpt-oss-20b, DeepSeek-V2-Lite) and their arrival times and prompt lengths
from a production trace (Azure, Mooncake), sped up or slowed down to a share of what the server can do in order of
arrival. Four regimes:

    prefill      8 prompts a step on one GPU
    decode       up to 32 requests on one GPU, continuous batching, every token's recorded experts replayed
    ep8-prefill  8 prompts a step on 8 expert-parallel ranks
    ep8-decode   up to 128 requests on 8 ranks

A strategy sees the first half of a recorded request, the profile; the second half is what runs. A prompt repeats the
recorded tokens up to its length.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.batching import LatencyAware, Strategy, strategies
from coterie.batching.costs import StepCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.errors import ConfigError, TraceError
from coterie.evaluation.statistics import interval
from coterie.evaluation.suites import Column, Report, Row, Suite, SuiteOptions, SuiteResult, SuiteTable, suites
from coterie.footprints.counting import footprint
from coterie.models import get_model
from coterie.sim.decode import DecodeRequests, run_decode
from coterie.sim.execution import PrefillExecution, StepTimer
from coterie.sim.metrics import Run, Summary, summarise
from coterie.sim.server import run_batches
from coterie.traces.activations import ActivationTrace
from coterie.traces.arrivals import ReplayedArrivals
from coterie.traces.readers import read_trace
from coterie.traces.requests import RequestTrace
from coterie.types import ModelSpec, Placement, Topology

NAME = "regimes"
ROUTING = {"gpt-oss-20b": "gpt-oss-20b/routing.npz", "deepseek-v2-lite": "deepseek-v2-lite/routing_tokens.npz"}
ARRIVALS = {
    "azure": "azure-2023/AzureLLMInferenceTrace_code.csv",
    "mooncake": "mooncake/conversation_trace.jsonl",
}
LOADS = (0.8, 1.3)
"""Rates, as shares of what the server can do in order of arrival: one it keeps up with, and an overload."""
SEEDS = (0, 1, 2, 3)
REQUESTS = 400
LONGEST_PROMPT = 8192
MIN_TOKENS = 16
"""Of a recorded request, to have a profile and something to replay."""


@dataclass(frozen=True, slots=True)
class Regime:
    phase: str
    ranks: int
    places: int
    """Requests of a batch, or that run at once."""


REGIMES = {
    "prefill": Regime("prefill", 1, 8),
    "decode": Regime("decode", 1, 32),
    "ep8-prefill": Regime("prefill", 8, 8),
    "ep8-decode": Regime("decode", 8, 128),
}


class Cell(NamedTuple):
    regime: str
    model: str
    arrivals: str
    load: float
    seed: int


class Recording(NamedTuple):
    """A recording cut in halves."""

    profiles: NDArray[np.float64]
    """[request, layer, expert] share of the first half's tokens that activate an expert."""
    expert_ids: NDArray[np.uint8]
    """[token, layer, k] of the second halves."""
    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """[request] of the second half."""
    counts: NDArray[np.int64]
    """[request, layer, expert] of the second half."""


@lru_cache(maxsize=4)
def load_recording(path: Path) -> Recording:
    trace = read_trace(path)
    if not isinstance(trace, ActivationTrace):
        raise TraceError(path, "kind", "expected activations")
    experts = trace.meta.num_experts
    profiles, ids, counts = [], [], []
    for number in range(trace.num_requests):
        tokens = np.asarray(trace.request(number).expert_ids)
        if len(tokens) < MIN_TOKENS:
            continue
        half = len(tokens) // 2
        profiles.append(footprint(tokens[:half], experts) / half)
        counts.append(footprint(tokens[half:], experts))
        ids.append(tokens[half:])
    lengths = np.array([len(one) for one in ids], np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Recording(np.array(profiles), np.concatenate(ids), first, lengths, np.array(counts, dtype=np.int64))


@lru_cache(maxsize=4)
def load_arrivals(path: Path) -> RequestTrace:
    trace = read_trace(path)
    if not isinstance(trace, RequestTrace):
        raise TraceError(path, "kind", "expected requests")
    return trace.in_order()


class Drawn(NamedTuple):
    """Requests of one run, at rate 1."""

    recorded: NDArray[np.int64]
    """[request] which recorded one it replays."""
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]


def draw(recording: Recording, arrivals: RequestTrace, requests: int, rng: Generator) -> Drawn:
    """A stretch of the arrivals that starts at random, with a mean rate of one request a second."""
    assert arrivals.arrival_s is not None
    start = int(rng.integers(max(1, len(arrivals) - requests)))
    rows = (start + np.arange(requests)) % len(arrivals)
    gaps = np.diff(arrivals.arrival_s, append=arrivals.arrival_s[-1])[rows]
    times = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    return Drawn(
        rng.integers(len(recording.tokens), size=requests),
        times / max(times[-1], 1e-9) * (requests - 1),
        np.clip(arrivals.prompt_tokens[rows], 1, LONGEST_PROMPT),
    )


class Bench:
    """One model in one regime: runs the same requests under any strategy."""

    def __init__(self, regime: Regime, model: str, recording: Recording, drawn: Drawn) -> None:
        self.regime, self.recording, self.drawn = regime, recording, drawn
        spec = get_model(model)
        ranks = regime.ranks
        topology = Topology(ranks)
        self.placement = Placement.linear(spec.num_moe_layers, spec.num_experts, ranks) if ranks > 1 else None
        self.model = step_model(spec, "h200", "bf16", topology)
        self.timer = StepTimer(self.model, self.placement)
        self.spec = spec
        if regime.phase == "prefill":
            self.loads = self._prompt_loads(spec)
            self.predicted = recording.profiles[drawn.recorded] * drawn.prompt_tokens[:, None, None]
        else:
            self.predicted = recording.profiles[drawn.recorded]

    def _prompt_loads(self, spec: ModelSpec) -> NDArray[np.int64]:
        """[request, layer, expert]: the recorded tokens again and again, the last time in part."""
        recording, drawn = self.recording, self.drawn
        laps, rest = np.divmod(drawn.prompt_tokens, recording.tokens[drawn.recorded])
        loads = recording.counts[drawn.recorded] * laps[:, None, None]
        for row, (number, tokens) in enumerate(zip(drawn.recorded, rest, strict=True)):
            first = recording.first[number]
            loads[row] += footprint(recording.expert_ids[first : first + tokens], spec.num_experts)
        return loads

    def cost(self) -> StepCost:
        regime, drawn = self.regime, self.drawn
        mean = int(drawn.prompt_tokens.mean())
        each = -(-regime.places // regime.ranks)
        if regime.phase == "prefill":
            batch = Batch(prefill_tokens=each * mean, prefill_requests=each)
        else:
            batch = Batch(decode_requests=each, decode_context=each * mean)
        rows = batch.tokens * regime.ranks * self.spec.top_k / self.spec.num_experts
        return StepCost.of(self.model, batch, self.placement, rows)

    def strategy(self, name: str) -> Strategy:
        return LatencyAware(cost=self.cost()) if name == "latency_aware" else strategies[name]()

    def run(self, strategy: Strategy, rate: float, rng: Generator, check: bool = False) -> Run:
        regime, drawn = self.regime, self.drawn
        arrival_s = drawn.arrival_s / rate
        if regime.phase == "prefill":
            execution = PrefillExecution(self.timer, self.loads, drawn.prompt_tokens, regime.ranks)
            config = SchedulerConfig(max_batch_size=regime.places, min_batch_trigger=1)
            return run_batches(arrival_s, self.predicted, execution, config, strategy, rng, check)
        requests = DecodeRequests(
            arrival_s, drawn.prompt_tokens, self.recording.first[drawn.recorded],
            self.recording.tokens[drawn.recorded], self.recording.expert_ids,
        )  # fmt: skip
        config = SchedulerConfig(min_batch_trigger=1)
        return run_decode(
            requests, self.predicted, self.timer, regime.places, config, strategy, rng, regime.ranks, check
        )


def run_cell(cell: Cell, names: tuple[str, ...], requests: int, data: Path) -> dict[str, Summary]:
    """Every strategy on the same requests; the rate is a share of what first come, first served can do."""
    recording = load_recording(data / "activations" / ROUTING[cell.model])
    arrivals = load_arrivals(data / "requests" / ARRIVALS[cell.arrivals])
    seed = [cell.seed, sorted(ROUTING).index(cell.model), sorted(ARRIVALS).index(cell.arrivals)]
    drawn = draw(recording, arrivals, requests, np.random.default_rng(seed))
    bench = Bench(REGIMES[cell.regime], cell.model, recording, drawn)
    at_once = summarise(bench.run(strategies["fcfs"](), 1e9, np.random.default_rng(seed)))
    rate = cell.load * at_once.throughput
    return {name: summarise(bench.run(bench.strategy(name), rate, np.random.default_rng(seed))) for name in names}
