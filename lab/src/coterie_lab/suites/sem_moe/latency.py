"""Latency with attention tensor parallel: tokens shuffled to their experts' ranks in place of an all-reduce.

One request a second, prompts of 256 to 1,024 tokens. All ranks compute a part of every token's attention; then tokens
are shared out by layer, in equal numbers. What is added to a layer besides the exchange depends on the collectives:

    replicated      all-reduce, every rank computes its experts for all tokens, all-reduce: nothing is exchanged
    all_reduce      all-reduce, each rank takes its share of the tokens, exchange, gather
    reduce_scatter  the share comes from a reduce-scatter; exchange, gather: one pass around the ring less

So a shuffled reduce-scatter gains twice over `all_reduce`: by the pass that it saves, which needs no prediction, and by
local tokens. Rows keep the two apart. The published table is of SGLang with DeepEP and includes host time; ours does
not, so that absolute times are far lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Report, SuiteOptions
from coterie.sim.group.serving import Collectives, GroupPrices, ServeSettings, ServingGroup
from coterie_lab.suites.sem_moe.contenders import (
    RANKS,
    Contender,
    ServingBench,
    bench_of,
    best_token_ranks,
    default_contenders,
)
from coterie_lab.suites.sem_moe.published import E2E_P50, TEXT_GAINS, TTFT_P99
from coterie_lab.suites.sem_moe.serving import LINKS, METRICS, TRACES, Contenders, ServingCell
from coterie_lab.suites.sem_moe.summaries import ServeSummary, summarise_served
from coterie_lab.suites.shared import distinct_values, mean_of, recorded_data, run_cells, spread

PART = "latency"
SEEDS = (2, 3, 4)
"""Seeds of the splits. 0 and 1 are not among them: the weights of `sem_moe` were chosen on those."""
PROMPTS = (256, 512, 1024)
OUTPUT_TOKENS = 128
RATE = 1.0
"""Requests a second, as published."""
REQUESTS, PLACES = 60, 16
MEDIANS = {"ttft": "ttft_p50_ms", "e2e": "e2e_p50_ms"}
"""Metrics for what the shuffle alone saves: a p99 of few requests depends on two that happen to meet."""
ORACLE = "known experts"
"""Contender with tokens on the rank with most of their experts, experts in order: an upper bound for predictors."""

Row = dict[str, Any]


class Served(NamedTuple):
    """Key of a run."""

    link: str
    prompt_tokens: int
    planner: str
    collectives: Collectives


def plans_of(bench: ServingBench, contenders: Sequence[Contender]) -> list[tuple[Contender, Collectives]]:
    """Pair contenders with collectives: baselines keep tokens in order, predictors of ranks shuffle the scatter."""
    vanilla = contenders[0]
    plans: list[tuple[Contender, Collectives]] = [(vanilla, "replicated"), (vanilla, "reduce_scatter")]
    plans += [(one, "all_reduce") for one in contenders if one.baseline and one.schedule == "rounds"]
    plans += [(one, "reduce_scatter") for one in contenders if one.token_ranks is not None]
    ranks = best_token_ranks(vanilla.placement, bench.test)
    known = Contender(ORACLE, vanilla.placement, token_ranks=ranks, baseline=False)
    return [*plans, (known, "reduce_scatter")]


def serve_cell(cell: ServingCell, data: Path, contenders: Contenders) -> dict[Served, ServeSummary]:
    bench = bench_of(data, cell.trace, cell.seed)
    return serve_bench(bench, contenders(bench, LINKS[0])[0])


def serve_bench(bench: ServingBench, contenders: Sequence[Contender]) -> dict[Served, ServeSummary]:
    plans, summaries = plans_of(bench, contenders), dict[Served, ServeSummary]()
    arrival_s = bench.arrivals(REQUESTS) / RATE
    for link in LINKS:
        for prompt in PROMPTS:
            requests = bench.requests(bench.test, REQUESTS, prompt, OUTPUT_TOKENS)
            for contender, collectives in plans:
                settings = ServeSettings(PLACES, prompt + PLACES, prompt, True, collectives)
                prices = GroupPrices.of(bench.model(link), settings)
                group = ServingGroup(prices, contender.placement, requests, contender.token_ranks)
                key = Served(link.name, prompt, contender.name, collectives)
                summaries[key] = summarise_served(group.serve(arrival_s))
    return summaries


def latency_rows(options: SuiteOptions, report: Report, contenders: Contenders = default_contenders) -> list[Row]:
    """Make one row per trace, link, length, planner and collective, over seeds; none without recorded routing."""
    data = recorded_data(options.data)
    if data is None:
        return []
    cells = [ServingCell(trace, seed) for seed in options.seeds or SEEDS for trace in TRACES]
    results = run_cells(partial(serve_cell, data=data, contenders=contenders), cells, report, "Latency")
    rows = []
    for trace in TRACES:
        runs = [result for cell, result in results.items() if cell.trace == trace]
        rows += [_row(trace, served, runs) for served in runs[0]]
    return rows


def _row(trace: str, served: Served, runs: Sequence[dict[Served, ServeSummary]]) -> Row:
    row: Row = {
        "part": PART,
        "attention": "tensor parallel",
        "trace": trace,
        "link": served.link,
        "dispatch": "deduplicated",
        "prompt_tokens": served.prompt_tokens,
        "output_tokens": OUTPUT_TOKENS,
        "planner": served.planner,
        "collectives": served.collectives,
        "ep": RANKS,
        "seeds": len(runs),
    }
    for key in ("local_rate", "ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "all_to_all_pct", "ring_pct"):
        row[key] = mean_of([run[served] for run in runs], key)
    in_order = served._replace(planner="vanilla", collectives="reduce_scatter")
    for name, metric in METRICS.items():
        row |= _saved(f"{name}_saved", metric, served, [_baselines(run, served) for run in runs], runs)
        row |= _saved(f"{name}_saved_by_shuffle", MEDIANS[name], served, [[in_order]] * len(runs), runs)
    row["published"] = _published(trace, served.prompt_tokens)
    return row


def _baselines(run: dict[Served, ServeSummary], served: Served) -> list[Served]:
    """Return runs of the same link and length that neither shuffle nor scatter."""
    return [key for key in run if key[:2] == served[:2] and key.collectives == "all_reduce"]


def _saved(
    key: str,
    metric: str,
    served: Served,
    others: Sequence[Sequence[Served]],
    runs: Sequence[dict[Served, ServeSummary]],
) -> Row:
    """Return percent saved of the latency of the best of `others`, paired by seed."""
    samples = []
    for run, candidates in zip(runs, others, strict=True):
        best = min(float(getattr(run[other], metric)) for other in candidates)
        samples.append(100.0 * (1.0 - float(getattr(run[served], metric)) / best))
    return spread(key, samples)


def _published(trace: str, prompt_tokens: int) -> Row | None:
    if (trace, prompt_tokens) not in TTFT_P99:
        return None
    key = trace, prompt_tokens
    return {"ttft_p99_ms": TTFT_P99[key].sem_moe, "e2e_p50_ms": E2E_P50[key].sem_moe}


def latency_notes(rows: Sequence[Row]) -> list[str]:
    notes = [_table_note()]
    if not rows:
        return notes
    notes.append(
        f"Latency, attention tensor parallel on {RANKS} ranks: {RATE:g} request a second, {OUTPUT_TOKENS} output "
        "tokens, one copy of a token per rank. Savings are of the best baseline with an all-reduce; `shuffle` leaves "
        "out what a reduce-scatter in order saves without any prediction."
    )
    for trace in distinct_values(rows, "trace"):
        for link in distinct_values(rows, "link"):
            mine = [row for row in rows if (row["trace"], row["link"]) == (trace, link)]
            notes += [_link_note(trace, link, prompt, mine) for prompt in PROMPTS]
    return notes


def _link_note(trace: str, link: str, prompt: int, rows: Sequence[Row]) -> str:
    mine = [row for row in rows if row["prompt_tokens"] == prompt]
    base = next(row for row in mine if (row["planner"], row["collectives"]) == ("vanilla", "all_reduce"))
    words = [_saved_words(row) for row in mine if row is not base]
    return (
        f"{trace} on {link}, {prompt} tokens: vanilla with an all-reduce has TTFT p99 {base['ttft_p99_ms']:.1f} ms and "
        f"E2E {base['e2e_p50_ms']:.0f} ms, {base['ring_pct']:.0f}% in rings and {base['all_to_all_pct']:.0f}% in the "
        f"exchange. Saved, TTFT and E2E: {'; '.join(words)}."
    )


def _saved_words(row: Row) -> str:
    ttft, e2e, shuffle = (
        with_ends(interval_of(row, key), unit="%") for key in ("ttft_saved", "e2e_saved", "ttft_saved_by_shuffle")
    )
    words = f"{row['planner']} with {row['collectives']} {ttft} and {e2e}"
    if row["collectives"] != "reduce_scatter" or row["planner"] == "vanilla":
        return words
    return f"{words}, by shuffle {shuffle} of median TTFT (local {100 * row['local_rate']:.0f}%)"


def _table_note() -> str:
    spans = {}
    for name, table in (("TTFT", TTFT_P99), ("E2E", E2E_P50)):
        spans[name] = [[latency.gain_pct(worse) for latency in table.values()] for worse in (False, True)]
    ratios = ", ".join(f"{table.ratio_pct:.1f}" for table in TTFT_P99.values())
    return (
        "Published table, attention tensor parallel, two readings of its own numbers: of the better baseline's time "
        f"{min(spans['TTFT'][0]):.1f} to {max(spans['TTFT'][0]):.1f}% of TTFT and {min(spans['E2E'][0]):.2f} to "
        f"{max(spans['E2E'][0]):.2f}% of E2E are saved; of the worse baseline's {min(spans['TTFT'][1]):.1f} to "
        f"{max(spans['TTFT'][1]):.1f}% and {min(spans['E2E'][1]):.2f} to {max(spans['E2E'][1]):.2f}%. The text, which "
        f"speaks of the best baseline, prints {', '.join(f'{gain:g}' for gain in TEXT_GAINS.values())}%: that is the "
        f"worse baseline ÷ Sem-MoE - 1 ({ratios}%)."
    )
