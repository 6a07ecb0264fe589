"""Throughput under latency limits of a group that serves, attention data parallel, by contender and regime.

A limit is 5 times vanilla's latency at the lightest load, of the p99 of TTFT or the median of E2E, one limit for all
contenders. The result of a contender is the highest arrival rate that stays below the limit; all contenders serve the
same requests at the same (scaled) times. Published are gains over SGLang and MoETuner, measured at 10 to 175 requests a
second. Ours are simulated (:mod:`coterie.sim.group.serving`) without host time between steps, so that limits are at
higher rates than published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Report, SuiteOptions
from coterie.sim.group.serving import GroupPrices, GroupServedRun, ServeSettings, ServingGroup
from coterie.types import INFINIBAND_400G, NVLINK4, Link
from coterie_lab.suites.sem_moe.choosing import CHOSEN, Trial, choose, halves
from coterie_lab.suites.sem_moe.contenders import (
    RANKS,
    Contender,
    ServingBench,
    bench_of,
    default_contenders,
    serving_of,
)
from coterie_lab.suites.sem_moe.published import THROUGHPUT_GAINS
from coterie_lab.suites.sem_moe.summaries import ServeSummary, summarise_served
from coterie_lab.suites.shared import distinct_values, mean_of, recorded_data, run_cells, spread

PART = "serving"
TRACES = ("deepseek-v2-lite", "gpt-oss-20b")
SEEDS = (2, 3, 4)
"""Seeds of the splits. 0 and 1 are not among them: the margins of `choosing` were chosen on those."""
LINKS = (NVLINK4, INFINIBAND_400G)
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 32
LIGHTEST = 10.0
"""Requests a second of the lightest load, as published."""
RATES = (LIGHTEST, 50.0, 100.0, 175.0)
"""Rates within the published range at which latencies are reported."""
SLO = 5.0
"""Limit of a latency, as a multiple of vanilla's at the lightest load."""
METRICS = {"ttft": "ttft_p99_ms", "e2e": "e2e_p50_ms"}
"""Name of a limit → latency that it bounds."""
MOST_POWER = 60
"""Steps of the grid that are tried above the first guess: 10 times its rate."""
SPAN_S, LEAST = 4.0, 200
"""Seconds of arrivals of a run, and fewest requests."""
GRID = 1.04
"""Ratio of neighbouring rates at which a limit is sought."""
MOST = 4000
"""Requests drawn; a run takes the first of them."""

Row = dict[str, Any]
Contenders = Callable[[ServingBench, Link], tuple[list[Contender], list[str]]]
"""Makes contenders from the requests for fitting, and notes on those left out; the first is named `vanilla`. It must be
a function of a module, since it runs in other processes."""


class Regime(NamedTuple):
    link: str
    deduplicate: bool

    @property
    def dispatch(self) -> str:
        return "deduplicated" if self.deduplicate else "per activation"


class Limit(NamedTuple):
    """The highest load within a latency limit."""

    rate: float
    """Requests a second."""
    tokens_per_s: float
    """Tokens of prompts and answers that arrive and are served."""
    duplicates_pct: float
    """Percent of requests that arrive while another use of their recording is in flight."""


class Served(NamedTuple):
    """One contender in one regime, for one seed."""

    curve: dict[float, ServeSummary]
    """Metrics by rate."""
    limits: dict[str, Limit]
    chosen: dict[str, str] | None = None
    """Limit → contender that was deployed for it; None if none was chosen."""


class Curve:
    """Metrics of a contender by rate of arrivals; runs are kept."""

    def __init__(self, bench: ServingBench, contender: Contender, prices: GroupPrices) -> None:
        self.requests = bench.requests(bench.test, MOST, PROMPT_TOKENS, OUTPUT_TOKENS)
        self.group = ServingGroup(prices, contender.placement, self.requests)
        self.ranks, self.router = serving_of(contender, self.requests)
        self.unit_s = bench.arrivals(MOST)
        self._runs: dict[tuple[float, int], tuple[ServeSummary, float]] = {}

    def serve(self, arrival_s: NDArray[np.float64]) -> GroupServedRun:
        ranks = None if self.ranks is None else self.ranks[: len(arrival_s)]
        return self.group.serve(arrival_s, ranks=ranks, router=self.router)

    def at(self, rate: float, count: int | None = None) -> ServeSummary:
        return self._run(rate, count)[0]

    def duplicates_pct(self, rate: float, count: int) -> float:
        return self._run(rate, count)[1]

    def _run(self, rate: float, count: int | None) -> tuple[ServeSummary, float]:
        size = requests_at(rate) if count is None else count
        if (rate, size) not in self._runs:
            run = self.serve(self.unit_s[:size] / rate)
            self._runs[rate, size] = summarise_served(run), duplicates_pct(run, self.requests.recorded[:size])
        return self._runs[rate, size]

    def limit(self, metric: str, slo_ms: float, guess: float, count: int) -> Limit:
        """Find the highest rate with that latency within `slo_ms`, in runs of `count` requests.

        From `guess` rates rise or fall by GRID until the latency crosses the limit; between the two rates on either
        side its logarithm is interpolated.
        """

        def latency(power: int) -> float:
            return float(getattr(self.at(guess * GRID**power, count), metric))

        low = 0
        while latency(low) > slo_ms and guess * GRID**low > LIGHTEST:
            low -= 1
        while latency(low + 1) <= slo_ms and low < MOST_POWER:  # so few requests may never cross it
            low += 1
        ends = np.log([latency(low), latency(low + 1)])
        part = float(np.clip((np.log(slo_ms) - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0))
        rate = float(guess * GRID ** (low + part))
        return Limit(rate, rate * (PROMPT_TOKENS + OUTPUT_TOKENS), self.duplicates_pct(guess * GRID**low, count))


def requests_at(rate: float) -> int:
    return int(np.clip(rate * SPAN_S, LEAST, MOST))


def duplicates_pct(run: GroupServedRun, recorded: NDArray[np.int64]) -> float:
    """Return percent of requests that arrive while another use of their recording is in flight."""
    order = np.lexsort((run.arrival_s, recorded))
    same = recorded[order[1:]] == recorded[order[:-1]]
    busy = run.finish_s[order[:-1]] > run.arrival_s[order[1:]]
    return 100.0 * float((same & busy).sum()) / len(recorded)


class ServingCell(NamedTuple):
    trace: str
    seed: int


class CellResult(NamedTuple):
    served: dict[tuple[Regime, str], Served]
    """By regime and contender's name."""
    baselines: dict[str, bool]
    """Contender → whether it is a baseline."""
    notes: list[str]


def serve_cell(cell: ServingCell, data: Path, contenders: Contenders, rates: Sequence[float] = RATES) -> CellResult:
    return serve_bench(bench_of(data, cell.trace, cell.seed), contenders, rates)


def serve_bench(bench: ServingBench, contenders: Contenders, rates: Sequence[float] = RATES) -> CellResult:
    """Serve every contender in every regime; contenders are planned once, for the faster link."""
    made, notes = contenders(bench, LINKS[0])
    trials = [Trial(half, contenders(half, LINKS[0])[0]) for half in halves(bench)]
    served: dict[tuple[Regime, str], Served] = {}
    for link in LINKS:
        for deduplicate in (False, True):
            prices = GroupPrices.of(bench.model(link), ServeSettings(deduplicate=deduplicate))
            results = _regime(bench, made, prices, rates)
            chosen = choose(trials, prices, PROMPT_TOKENS, OUTPUT_TOKENS)
            limits = {limit: results[name].limits[limit] for limit, name in chosen.items()}
            results[CHOSEN] = Served(results[chosen["ttft"]].curve, limits, chosen)
            served |= {(Regime(link.name, deduplicate), name): result for name, result in results.items()}
    return CellResult(served, {contender.name: contender.baseline for contender in made} | {CHOSEN: False}, notes)


def _regime(
    bench: ServingBench, contenders: Sequence[Contender], prices: GroupPrices, rates: Sequence[float]
) -> dict[str, Served]:
    """Serve all contenders; the first is vanilla: its lightest load sets the limits, its limits start the searches."""
    curves = {contender.name: Curve(bench, contender, prices) for contender in contenders}
    vanilla = next(iter(curves.values()))
    light = vanilla.at(LIGHTEST)
    most = MOST // 2
    guess = float(most / vanilla.serve(np.zeros(most)).end_s)
    count = requests_at(guess)
    starts = dict.fromkeys(METRICS, 0.9 * guess)
    served: dict[str, Served] = {}
    for name, curve in curves.items():
        limits = {
            limit: curve.limit(metric, SLO * float(getattr(light, metric)), starts[limit], count)
            for limit, metric in METRICS.items()
        }
        if name == contenders[0].name:
            starts = {name: limit.rate for name, limit in limits.items()}
        served[name] = Served({rate: curve.at(rate) for rate in (LIGHTEST, *rates)}, limits)
    return served


def serving_rows(options: SuiteOptions, report: Report, contenders: Contenders = default_contenders) -> list[Row]:
    """Make one row per trace, regime and contender, over seeds; none without recorded routing."""
    data = recorded_data(options.data)
    if data is None:
        return []
    cells = [ServingCell(trace, seed) for seed in options.seeds or SEEDS for trace in TRACES]
    work = partial(serve_cell, data=data, contenders=contenders, rates=options.rates or RATES)
    results = run_cells(work, cells, report, "Serving")
    return [row for trace in TRACES for row in rows_of(trace, [results[cell] for cell in cells if cell.trace == trace])]


def rows_of(trace: str, results: Sequence[CellResult]) -> list[Row]:
    """Make rows; cells that differ only in their seed are samples of a row."""
    rows = []
    for regime, name in results[0].served:
        runs = [result.served[regime, name] for result in results]
        row: Row = {
            "part": PART,
            "attention": "data parallel",
            "trace": trace,
            "link": regime.link,
            "dispatch": regime.dispatch,
            "planner": name,
            "ep": RANKS,
            "baseline": results[0].baselines[name],
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "seeds": len(results),
            "local_activation_rate": mean_of([_last(run) for run in runs], "local_rate"),
            "all_to_all_pct": mean_of([_last(run) for run in runs], "all_to_all_pct"),
        }
        row["curve"] = []
        for rate in runs[0].curve:
            points, keys = [run.curve[rate] for run in runs], ("ttft_p99_ms", "e2e_p50_ms", "tokens_per_s")
            row["curve"].append({"rate": rate} | {key: mean_of(points, key) for key in keys})
        for limit in METRICS:
            mine = [run.limits[limit] for run in runs]
            row |= {f"{limit}_{field}": mean_of(mine, field) for field in Limit._fields}
            row |= _gains(limit, "vanilla", mine, [_of(result, regime, "vanilla", limit) for result in results])
            best = _best_baseline(results, regime, limit)
            row |= _gains(limit, "best", mine, [_of(result, regime, best, limit) for result in results])
        row["chosen"] = [run.chosen for run in runs] if runs[0].chosen else None
        row["left_out"] = list(dict.fromkeys(note for result in results for note in result.notes))
        row["published"] = None if row["baseline"] else THROUGHPUT_GAINS.get(trace)
        rows.append(row)
    return rows


def _last(run: Served) -> ServeSummary:
    return run.curve[max(run.curve)]


def _of(result: CellResult, regime: Regime, name: str, limit: str) -> Limit:
    return result.served[regime, name].limits[limit]


def _best_baseline(results: Sequence[CellResult], regime: Regime, limit: str) -> str:
    """Return the baseline of the highest mean rate; the best of each seed would be the luckiest."""

    def mean_rate(name: str) -> float:
        return float(np.mean([_of(result, regime, name, limit).rate for result in results]))

    return max((name for name, baseline in results[0].baselines.items() if baseline), key=mean_rate)


def _gains(limit: str, against: str, mine: Sequence[Limit], others: Sequence[Limit]) -> Row:
    """Return the gain in rate within a limit, percent, paired by seed."""
    gains = [100.0 * (own.rate / other.rate - 1.0) for own, other in zip(mine, others, strict=True)]
    return spread(f"{limit}_over_{against}", gains)


def serving_notes(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["Serving: no recorded routing. Set COTERIE_DATA to the folder of real data (docs/data.md)."]
    notes = [
        *dict.fromkeys(note for row in rows for note in row["left_out"]),
        f"Serving, attention data parallel: {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, limits of "
        f"{SLO:g} x vanilla's latency at {LIGHTEST:g} requests a second; no time of the host between steps. "
        "A prompt repeats the first half of a recorded request, its answer the second. DeepSeek-V2-Lite's recordings "
        "have no token ids and gpt-oss-20b's are of decode alone: both stand for prompts too.",
        "Requests go by the experts of their own prompts, which nobody knows before it runs: a bound for tables.",
    ]
    for trace in distinct_values(rows, "trace"):
        for key in dict.fromkeys((row["link"], row["dispatch"]) for row in rows if row["trace"] == trace):
            mine = [row for row in rows if (row["trace"], row["link"], row["dispatch"]) == (trace, *key)]
            notes.append(_regime_note(trace, key, mine))
    return [*notes, _range_note(rows), _published_note(rows)]


def _regime_note(trace: str, key: tuple[str, str], rows: Sequence[Row]) -> str:
    vanilla = next(row for row in rows if row["planner"] == "vanilla")
    gains = [
        f"{row['planner']} {with_ends(interval_of(row, 'ttft_over_vanilla'), unit='%')} and "
        f"{with_ends(interval_of(row, 'e2e_over_vanilla'), unit='%')} (local {100 * row['local_activation_rate']:.1f}%)"
        for row in rows
        if row is not vanilla
    ]
    return (
        f"{trace} on {key[0]}, {key[1]}: vanilla holds {vanilla['ttft_rate']:.0f} requests a second within the limit "
        f"of TTFT and {vanilla['e2e_rate']:.0f} within that of E2E, {vanilla['all_to_all_pct']:.0f}% of its time in "
        f"the exchange. Gains over it, TTFT and E2E: {'; '.join(gains)}."
    )


def _range_note(rows: Sequence[Row]) -> str:
    lowest = min(min(row["ttft_rate"], row["e2e_rate"]) for row in rows)
    most = max(RATES)
    where = "all limits lie above" if lowest > most else f"limits begin at {lowest:.0f} requests a second, within"
    duplicates = max(row["e2e_duplicates_pct"] for row in rows)
    return (
        f"Published rates end at {most:g} requests a second; {where} them here. At a limit up to {duplicates:.0f}% of "
        "requests arrive while another use of their recording is in flight: there are too few recordings to avoid it."
    )


def _published_note(rows: Sequence[Row]) -> str:
    known = THROUGHPUT_GAINS["deepseek-v2-lite"]
    ours = [row for row in rows if row["planner"] == CHOSEN]
    spans = [
        f"{min(row[f'{limit}_over_best_pct'] for row in ours):+.1f} to "
        f"{max(row[f'{limit}_over_best_pct'] for row in ours):+.1f}% ({limit.upper()})"
        for limit in METRICS
    ]
    return (
        f"Published gains under limits, DeepSeek-V2-Lite: {known['ttft_over_sglang_pct']}% (TTFT) and "
        f"{known['e2e_over_sglang_pct']}% (E2E) over SGLang, {known['ttft_over_moetuner_pct']} and "
        f"{known['e2e_over_moetuner_pct']}% over MoETuner. Ours (`{CHOSEN}`) over the best baseline, all regimes: "
        f"{' and '.join(spans)}. A gain of 221% needs a baseline that is past its capacity where ours is not: here "
        "capacities differ by what the exchange and the slowest rank take."
    )
