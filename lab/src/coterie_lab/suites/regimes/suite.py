"""Where each batch selection strategy helps, does nothing or hurts: real routing, real arrivals, a calibrated H200.

Requests take their experts from a recording (gpt-oss-20b, DeepSeek-V2-Lite) and their arrival times and prompt lengths
from a production trace (Azure, Mooncake), sped up or slowed down to a share of what the server can do in order of
arrival. They arrive in random order, or in bursts of requests that use like experts. Four regimes:

    prefill      8 prompts a step on one GPU
    decode       up to 32 requests on one GPU, continuous batching, every token's recorded experts replayed
    ep8-prefill  8 prompts a step on 8 expert-parallel ranks
    ep8-decode   up to 128 requests on 8 ranks

A strategy sees what the `prefix` predictor expects from the first half of a recorded request; the second half runs. The
predictor is fitted on other requests. A prompt repeats the recorded tokens up to its length.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2, vq

from coterie.answers.suites import Column, Report, Row, SuiteOptions, SuiteResult, SuiteTable
from coterie.batching import Strategy, strategies
from coterie.batching.latency_aware import measure_trust
from coterie.batching.scheduler import SchedulerConfig
from coterie.costs.lines import StepCost
from coterie.costs.presets import step_model
from coterie.errors import ConfigError, UnavailableError
from coterie.footprints.counting import footprint
from coterie.models import get_model
from coterie.predictors import PredictRequest, predictors
from coterie.registry import Offers
from coterie.sim import (
    DecodeRequests,
    PrefillExecution,
    Run,
    RunSummary,
    StepTimer,
    run_batches,
    run_decode,
    summarise_run,
)
from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.readers import read_as
from coterie.types import ModelSpec, Placement, Topology
from coterie_lab.suites.caps.suite import compared_strategies
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.eldr.synthetic import MOONCAKE, load_arrivals
from coterie_lab.suites.shared import (
    as_is,
    behind_best,
    distinct_values,
    gain,
    mean_of,
    plain,
    run_cells,
    savings,
    spread,
)

NAME = "regimes"
ARRIVALS = {"azure": "azure-2023/AzureLLMInferenceTrace_code.csv", "mooncake": MOONCAKE}
ORDERS = ("mixed", "bursts")
"""Orders of requests: random, or bursts of requests with similar experts."""
BURST, CLUSTERS = 32, 8
"""Requests per burst, and number of kinds: clusters of predictions, fitted on the calibration requests."""
LOADS = (0.8, 1.3)
"""Rates as shares of the fcfs capacity: one the server keeps up with, and an overload."""
SEEDS = (0, 1, 2, 3)
ALL = "all"
"""Value of a row's model, arrivals and load if the row is the mean over all of them."""
MOST_LOAD = 10.0
REDUCTIONS = {"p99_reduction": "p99_ms", "mean_reduction": "mean_ms", "step_reduction": "batch_ms"}
"""Key of a row → field of a run that it compares with that of fcfs."""
REQUESTS = 400
LONGEST_PROMPT = 8192
MIN_TOKENS = 16
"""Smallest number of tokens of a recorded request."""
TRUST_REQUESTS = 600
"""Calibration requests (with repeats) on which the trust in predictions is measured."""
CALIBRATION = 0.3
"""Share of the recorded requests that the predictor is fitted on; they are not replayed."""


@dataclass(frozen=True, slots=True)
class Regime:
    phase: str
    ranks: int
    places: int
    """Largest number of requests in a batch."""
    published: bool = False
    """Whether strategies run as CAPS does: a batch starts at 16 waiting requests or after 100 ms, predictions are
    normalised (a prompt's length is not in them), skips are not limited."""


REGIMES = {
    "prefill": Regime("prefill", 1, 8),
    "decode": Regime("decode", 1, 32),
    "ep8-prefill": Regime("prefill", 8, 8),
    "ep8-decode": Regime("decode", 8, 128),
}
AS_PUBLISHED = {"caps-prefill": Regime("prefill", 1, 8, True), "caps-ep8-prefill": Regime("prefill", 8, 8, True)}
"""Run where all loads are overloads, as the published ones are: 1.3 to 2.6 (150 to 300 requests per second over what
fcfs serves of bursty arrivals, 117)."""


class Cell(NamedTuple):
    regime: str
    model: str
    arrivals: str
    order: str
    load: float
    seed: int


class Calibration(NamedTuple):
    """Requests that are not replayed: [request, layer, expert] activations per token."""

    predicted: NDArray[np.float64]
    truth: NDArray[np.float64]
    kind: NDArray[np.int64]


class Recording(NamedTuple):
    """Requests of a recording that are replayed: their second halves, and the predictions for them."""

    predicted: NDArray[np.float64]
    """[request, layer, expert] activations per token."""
    expert_ids: NDArray[np.integer]
    """[token, layer, k]"""
    first: NDArray[np.int64]
    """[request] row of its first token."""
    tokens: NDArray[np.int64]
    """[request]"""
    counts: NDArray[np.int64]
    """[request, layer, expert]"""
    kind: NDArray[np.int64]
    """[request] cluster it belongs to."""
    calibration: Calibration


@lru_cache(maxsize=4)
def load_recording(path: Path) -> Recording:
    trace = read_as(ActivationTrace, path)
    experts = trace.meta.num_experts
    order = np.random.default_rng(0).permutation(trace.num_requests)
    apart = int(CALIBRATION * len(order))
    prefix = predictors.make("prefix").fit(trace, order[:apart])
    halves: tuple[list[Any], list[Any]] = ([], [])  # calibration, replayed
    for replayed, numbers in enumerate((order[:apart], order[apart:])):
        for number in np.sort(numbers):
            tokens = np.asarray(trace.request(int(number)).expert_ids)
            half = len(tokens) // 2
            if len(tokens) >= MIN_TOKENS:
                known = PredictRequest(footprint=footprint(tokens[:half], experts), num_tokens=1)
                halves[replayed].append((prefix.predict(known), tokens[half:]))
    expected, predicted = (np.array([load for load, _ in half]) for half in halves)
    centres, kind = kmeans2(expected.reshape(len(expected), -1), CLUSTERS, minit="++", rng=np.random.default_rng(0))
    truth = np.array([footprint(tokens, experts) / len(tokens) for _, tokens in halves[0]])
    calibration = Calibration(expected, truth, kind.astype(np.int64))
    ids = [tokens for _, tokens in halves[1]]
    lengths = np.array([len(tokens) for tokens in ids], np.int64)
    return Recording(
        predicted=predicted,
        expert_ids=np.concatenate(ids),
        first=np.concatenate([[0], np.cumsum(lengths)[:-1]]),
        tokens=lengths,
        counts=np.array([footprint(tokens, experts) for tokens in ids], dtype=np.int64),
        kind=vq(predicted.reshape(len(predicted), -1), centres)[0].astype(np.int64),
        calibration=calibration,
    )


class Drawn(NamedTuple):
    """Requests of one run, at rate 1."""

    recorded: NDArray[np.int64]
    """[request] index of the recorded request it replays."""
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]


def draw_order(kind: NDArray[np.int64], order: str, requests: int, rng: Generator) -> NDArray[np.int64]:
    """Draw recorded requests to replay: [request] indices."""
    if order == "mixed":
        return rng.integers(len(kind), size=requests)
    bursts = rng.choice(kind, size=-(-requests // BURST))  # a kind as often as it was recorded
    rows = [rng.choice(np.flatnonzero(kind == burst), size=BURST) for burst in bursts]
    return np.concatenate(rows)[:requests].astype(np.int64)


def draw(recording: Recording, arrivals: RequestTrace, order: str, requests: int, rng: Generator) -> Drawn:
    """Draw a stretch of the arrivals that starts at random, with a mean rate of one request a second."""
    assert arrivals.arrival_s is not None
    start = int(rng.integers(max(1, len(arrivals) - requests)))
    rows = (start + np.arange(requests)) % len(arrivals)
    gaps = np.diff(arrivals.arrival_s, append=arrivals.arrival_s[-1])[rows]
    times = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    return Drawn(
        draw_order(recording.kind, order, requests, rng),
        times / max(times[-1], 1e-9) * (requests - 1),
        np.clip(arrivals.prompt_tokens[rows], 1, LONGEST_PROMPT),
    )


@dataclass
class Bench:
    """One model in one regime: runs the same requests under any strategy."""

    regime: Regime
    name: str
    """Name of the model."""
    recording: Recording
    drawn: Drawn
    order: str
    prior_tokens: NDArray[np.int64]
    """Prompt lengths of other requests, which latency_aware sees along with `order`."""

    def __post_init__(self) -> None:
        spec, ranks = get_model(self.name), self.regime.ranks
        self.placement = Placement.linear(spec.num_moe_layers, spec.num_experts, ranks) if ranks > 1 else None
        self.model = step_model(spec, "h200", "bf16", Topology(ranks))
        self.timer = StepTimer(self.model, self.placement)
        self.predicted = self.recording.predicted[self.drawn.recorded]
        if self.regime.phase == "prefill":
            self.loads = self._prompt_loads(spec)
            if not self.regime.published:
                self.predicted = self.predicted * self.drawn.prompt_tokens[:, None, None]

    def _prompt_loads(self, spec: ModelSpec) -> NDArray[np.int64]:
        """Return loads [request, layer, expert]: the recorded tokens repeated, the last time in part."""
        recording, drawn = self.recording, self.drawn
        laps, rest = np.divmod(drawn.prompt_tokens, recording.tokens[drawn.recorded])
        loads = recording.counts[drawn.recorded] * laps[:, None, None]
        for row, (number, tokens) in enumerate(zip(drawn.recorded, rest, strict=True)):
            first = recording.first[number]
            loads[row] += footprint(recording.expert_ids[first : first + tokens], spec.num_experts)
        return loads

    def cost(self) -> StepCost:
        mean = round(float(self.prior_tokens.mean()))
        return StepCost.for_phase(self.model, self.regime.phase, self.regime.places, mean, self.placement)

    def strategy(self, name: str) -> Strategy:
        limits = {"max_skips": None} if self.regime.published else {}
        return strategies.make(name, Offers(cost=self.cost, trust=self.trust), **limits)

    def trust(self) -> float:
        """Measure the trust in predictions on calibration requests in the same kind of order and with such prompts."""
        calibration, regime, rng = self.recording.calibration, self.regime, np.random.default_rng(0)
        running = regime.places if regime.phase == "decode" else 0
        rows = draw_order(calibration.kind, self.order, running + TRUST_REQUESTS, rng)
        scale = np.ones((len(rows), 1, 1))
        if regime.phase == "prefill":
            scale = rng.choice(self.prior_tokens, len(rows))[:, None, None].astype(np.float64)
        predicted, truth = calibration.predicted[rows] * scale, calibration.truth[rows] * scale
        return measure_trust(self.cost(), predicted, truth, np.arange(len(rows)), running=running)

    def run(self, strategy: Strategy, rate: float, rng: Generator) -> Run:
        regime, drawn = self.regime, self.drawn
        arrival_s = drawn.arrival_s / rate
        if regime.phase == "prefill":
            execution = PrefillExecution(self.timer, self.loads, drawn.prompt_tokens, regime.ranks)
            trigger = SchedulerConfig().min_batch_trigger if regime.published else 1
            config = SchedulerConfig(max_batch_size=regime.places, min_batch_trigger=trigger)
            return run_batches(arrival_s, self.predicted, execution, config, strategy, rng)
        first, tokens = self.recording.first[drawn.recorded], self.recording.tokens[drawn.recorded]
        requests = DecodeRequests(arrival_s, drawn.prompt_tokens, first, tokens, self.recording.expert_ids)
        config = SchedulerConfig(min_batch_trigger=1)
        return run_decode(requests, self.predicted, self.timer, regime.places, config, strategy, rng, regime.ranks)


def run_cell(cell: Cell, names: tuple[str, ...], requests: int, data: Path) -> dict[str, RunSummary]:
    """Run every strategy on the same requests; the rate is a share of what first come, first served can do."""
    recording = load_recording(data / "activations" / TRACES[cell.model])
    arrivals = load_arrivals(data / "requests" / ARRIVALS[cell.arrivals])
    seed = [cell.seed, sorted(TRACES).index(cell.model), sorted(ARRIVALS).index(cell.arrivals)]
    drawn = draw(recording, arrivals, cell.order, requests, np.random.default_rng(seed))
    prior_tokens = draw(recording, arrivals, cell.order, requests, np.random.default_rng([*seed, 1])).prompt_tokens
    bench = Bench((REGIMES | AS_PUBLISHED)[cell.regime], cell.model, recording, drawn, cell.order, prior_tokens)
    at_once = summarise_run(bench.run(strategies.make("fcfs"), 1e9, np.random.default_rng(seed)))
    rate = cell.load * at_once.throughput
    return {name: summarise_run(bench.run(bench.strategy(name), rate, np.random.default_rng(seed))) for name in names}


def run(options: SuiteOptions, report: Report) -> SuiteResult:
    begun = time.perf_counter()
    data = options.data
    if data is None:
        raise UnavailableError("this suite needs recordings: set COTERIE_DATA to a folder of them (docs/data.md)")
    names = compared_strategies(options.strategies)
    seeds, loads = options.seeds or SEEDS, options.rates or LOADS
    if max(loads) > MOST_LOAD:
        raise ConfigError(f"rate={max(loads):g} must be at most {MOST_LOAD:g}: a share of what fcfs can serve")
    regimes = REGIMES | AS_PUBLISHED if min(loads) > 1.0 else REGIMES
    kinds = list(product(regimes, TRACES, ARRIVALS, ORDERS, loads))
    cells = [Cell(*kind, seed) for kind in kinds for seed in seeds]
    work = partial(run_cell, names=names, requests=options.requests or REQUESTS, data=data)
    runs = run_cells(work, cells, report, "Simulating")
    rows = [_row(kind, name, [runs[Cell(*kind, seed)] for seed in seeds]) for kind in kinds for name in names]
    overall = []
    for regime, order in product(regimes, ORDERS):
        chosen = [cell for cell in cells if (cell.regime, cell.order) == (regime, order)]
        by_seed = [[runs[cell] for cell in chosen if cell.seed == seed] for seed in seeds]
        overall += [_overall(regime, order, name, by_seed) for name in names]
    result = SuiteResult(NAME, overall + rows, _notes(rows, options.requests or REQUESTS, seeds))
    if options.out is not None:
        from coterie_lab.suites.regimes.figures import draw_figures

        report("Drawing", 0, 1)
        options.out.mkdir(parents=True, exist_ok=True)
        draw_figures(options.out, rows)
    result.notes.append(f"{len(cells) * len(names)} runs in {time.perf_counter() - begun:.0f} s.")
    return result


def _row(kind: tuple[Any, ...], name: str, runs: list[dict[str, RunSummary]]) -> dict[str, Any]:
    """Compare with fcfs seed by seed: both served the same requests."""
    row: dict[str, Any] = {**dict(zip(Cell._fields, kind, strict=False)), "strategy": name}
    own, base = [run[name] for run in runs], [run["fcfs"] for run in runs]
    for field in ("p50_ms", "p99_ms", "mean_ms", "throughput", "imbalance", "distinct", "batch_ms"):
        row[field] = mean_of(own, field)
    row["worst_skips"] = max(run.worst_skips for run in own)
    for key, field in REDUCTIONS.items():
        row |= spread(key, savings(own, base, field))
    row |= spread(
        "throughput_gain", [100.0 * (a.throughput / b.throughput - 1.0) for a, b in zip(own, base, strict=True)]
    )
    # By the mean of ratios, as runs of one row may differ in size.
    best = min(runs[0], key=lambda other: float(np.mean([run[other].p99_ms / run["fcfs"].p99_ms for run in runs])))
    row["best"] = best
    row |= spread("behind_best", [100.0 * (run[name].p99_ms / run[best].p99_ms - 1.0) for run in runs])
    row["published"] = None
    return row


def _overall(regime: str, order: str, name: str, by_seed: list[list[dict[str, RunSummary]]]) -> dict[str, Any]:
    """Average over models, arrivals and loads: the mean over cells for each seed, and the interval over seeds."""
    row: dict[str, Any] = {"regime": regime, "model": ALL, "arrivals": ALL, "order": order, "load": None}
    row |= {"strategy": name, "worst_skips": max(run[name].worst_skips for runs in by_seed for run in runs)}
    for key, field in REDUCTIONS.items():
        cells = [savings([run[name] for run in runs], [run["fcfs"] for run in runs], field) for runs in by_seed]
        row |= spread(key, [float(np.mean(gains)) for gains in cells])
    return row | {"published": None}


def verdict(row: Row) -> str:
    """Judge by the 95% interval of the P99 gain; less than 1% either way is nothing."""
    low, high = row["p99_reduction_low"], row["p99_reduction_high"]
    if low is None or high is None:
        return "one seed"
    if low > 0.0 and high > 1.0:
        return "helps"
    if high < 0.0 and low < -1.0:
        return "hurts"
    return "nothing" if low >= -1.0 and high <= 1.0 else "unclear"


def _notes(rows: list[dict[str, Any]], requests: int, seeds: tuple[int, ...]) -> list[str]:
    notes = [
        f"{requests} requests a run, {len(seeds)} seeds; gains against fcfs on the same requests, 95% by Student's t "
        "over seeds. Load is the arrival rate over what fcfs can serve. H200, bf16; NVLink, linear placement.",
        "Predictions: `prefix`, from a request's first half; the second half runs. Skips are capped at 64. In bursts, "
        f"{BURST} requests that use like experts follow each other.",
        "latency_aware is told more than the others: the cost model, prompt lengths of another stretch of the trace, "
        "and how far predictions came true on calibration requests in the same kind of order.",
    ]
    for regime in distinct_values(rows, "regime"):
        counts = []
        for name in distinct_values([row for row in rows if row["strategy"] != "fcfs"], "strategy"):
            verdicts = [verdict(row) for row in rows if row["regime"] == regime and row["strategy"] == name]
            counts.append(f"{name} " + "/".join(str(verdicts.count(kind)) for kind in ("helps", "nothing", "hurts")))
        notes.append(f"{regime}, cells where P99 is helped/untouched/hurt (the rest is unclear): {', '.join(counts)}.")
    kind = ("regime", "model", "arrivals", "order", "load")
    return notes + behind_best(
        rows, "is best or within noise of the best P99", lambda row: "in " + " ".join(str(row[key]) for key in kind)
    )


def _table(regime: str) -> SuiteTable:
    columns = (
        *as_is("order", "strategy"),
        Column("P99 gain %", gain("p99_reduction")),
        Column("mean gain %", gain("mean_reduction")),
        Column("faster steps %", gain("step_reduction")),
        Column("skips", plain("worst_skips")),
        Column("P99", verdict),
    )
    title = f"{regime}: against fcfs, over models, arrivals, loads and seeds (± 95%)"
    return SuiteTable(
        title, columns, lambda row: bool(row["regime"] == regime and row["model"] == ALL and row["strategy"] != "fcfs")
    )


TABLES = tuple(_table(regime) for regime in REGIMES | AS_PUBLISHED)
