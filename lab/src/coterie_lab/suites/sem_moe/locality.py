"""Local activation rate and load imbalance on unseen requests, by placement and by schedule.

Every placement is measured under several schedules of items to ranks, each with equal shares:

* round_robin: in turn. No placement is better than 1 ÷ ranks by more than chance.
* affinity: by what was learned: a token id by the fitted table (an unseen one as the average token), a request by the
  experts of its first tokens.
* follow (tokens): the rank with most of the token's experts in the layer before, as in MoETuner.
* surer (tokens): by the table, or by what follows the ranks of the two layers before, whichever peaks higher, as in
  Sem-MoE. added: by the sum of the two.
* oracle: by the item's own activations, an upper bound that no service reaches.

Imbalance is max ÷ median rank load of all test tokens, averaged over layers; the schedule does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from coterie.answers.runs import interval, with_ends
from coterie.answers.suites import Report, SuiteOptions
from coterie.dispatch.requests import schedule_requests
from coterie.placement import Load, Objective, planners
from coterie.placement.co_clustering import placed_ranks
from coterie.types import Placement, Topology
from coterie_lab.suites.predictors.cases import trace_cases
from coterie_lab.suites.sem_moe.homes import after_ranks, aligned, surer
from coterie_lab.suites.sem_moe.samples import (
    BATCHES,
    HEAD,
    Sample,
    read_tables,
    request_sample,
    table_sample,
    token_sample,
)
from coterie_lab.suites.shared import median_imbalance, run_cells, spread

Row = dict[str, Any]

EP = (2, 4, 8, 16)
SEEDS = (2, 3, 4)
"""Seeds of the splits. 0 and 1 are not among them: `load_slack` and `shrink` of co_cluster were chosen on those."""
TRACES = ("gpt-oss-20b", "deepseek-v2-lite")
TABLES = Path("olmoe-mixtral") / "eid2token_coo.npz"
EVEN_SLACK = 0.01
"""`load_slack` at which co_cluster is about as even as popularity."""
BASELINES = ("vanilla", "popularity", "moetuner")
LEARNED = ("affinity", "surer", "added")
"""Schedules by what was learned."""
PUBLISHED_EP = 8
PUBLISHED = {"over_best_baseline_pct": 15.4, "imbalance_better_pct": 36.7, "over_vanilla_pct": 37.0}
"""Sem-MoE on DeepSeek-V2-Lite at EP8; 43% over vanilla on Qwen3-30B-A3B. Whether in per cent or points is not said."""
NO_PRICES = Objective(row_s=1e-9, expert_bytes=1.0)
"""These planners decide without prices."""


class Contender(NamedTuple):
    """A planner with its settings."""

    planner: str
    name: str
    settings: dict[str, Any]
    setting: str = ""


CONTENDERS = (
    Contender("vanilla", "linear", {}),
    Contender("popularity", "popularity", {}),
    Contender("moetuner", "moetuner", {"time_limit_s": 1.0}),
    Contender("sem_moe", "sem_moe", {}),
    Contender("co_cluster", "co_cluster", {}),
    Contender("co_cluster", "co_cluster", {"load_slack": EVEN_SLACK}, f"load_slack {EVEN_SLACK:g}"),
)


class Case(NamedTuple):
    """A trace with one kind of items."""

    trace: str
    items: str
    experts: int
    sample: Callable[[Generator], Sample]


class Cell(NamedTuple):
    """One case on so many ranks, for one split."""

    case: int
    ep: int
    seed: int


Measured = dict[tuple[int, str], tuple[float, float]]
"""Contender and schedule → local activation rate, imbalance."""


def locality_rows(options: SuiteOptions, report: Report) -> list[Row]:
    """Make one row per trace, kind of items, planner, ranks and schedule."""
    seeds = options.seeds or SEEDS
    cases = locality_cases(options)
    work = [
        (number, ep)
        for number, case in enumerate(cases)
        for ep in reversed(EP)  # the longest first
        if case.experts % ep == 0 and case.experts > ep
    ]
    cells = [Cell(case, ep, seed) for case, ep in work for seed in seeds]
    results = run_cells(partial(_measure, options=options), cells, report, "Locality")
    return [
        _row(cases[case], ep, CONTENDERS[key[0]], key[1], samples, seeds)
        for case, ep in sorted(work)
        for key in results[Cell(case, ep, seeds[0])]
        for samples in [np.array([results[Cell(case, ep, seed)][key] for seed in seeds])]
    ]


@lru_cache(maxsize=1)
def locality_cases(options: SuiteOptions) -> list[Case]:
    """Return cases of the user's trace, else of the real data."""
    if options.trace is None and options.data is None:
        return []
    cases: list[Case] = []
    folder = Path() if options.data is None else options.data / "activations"
    for path in [options.trace] if options.trace is not None else [folder / name for name in TRACES]:
        if not path.exists():
            continue
        name, trace, _, groups, *_ = trace_cases(path, options, [])[0]
        if trace.arrays()[0].token_ids is not None:
            cases.append(Case(name, "tokens", trace.meta.num_experts, partial(token_sample, trace, groups)))
        cases.append(Case(name, "requests", trace.meta.num_experts, partial(request_sample, trace, groups)))
    if options.trace is None and (folder / TABLES).exists():
        for model in ("olmoe", "mixtral-8x7b"):
            counts, top_k = read_tables(folder / TABLES, model)
            cases.append(Case(model, "tokens", counts.shape[2], partial(table_sample, counts, top_k)))
    return cases


def _measure(cell: Cell, options: SuiteOptions) -> Measured:
    """Measure every contender on one split, under every schedule."""
    sample = locality_cases(options)[cell.case].sample(default_rng(cell.seed))
    measured: Measured = {}
    for at, contender in enumerate(CONTENDERS):
        if contender.planner == "moetuner" and sample.transitions is None:
            continue
        placement = _plan(contender, sample, cell.ep, cell.seed)
        uneven = float(median_imbalance(placement.rank_load(sample.test_load)).mean())
        for schedule, rate in _rates(sample, placed_ranks(placement), cell.ep).items():
            measured[at, schedule] = rate, uneven
    return measured


def _row(
    case: Case, ep: int, contender: Contender, schedule: str, values: NDArray[np.float64], seeds: Sequence[int]
) -> Row:
    published = contender.planner == "sem_moe" and ep == PUBLISHED_EP and schedule == "affinity"
    return {
        "part": "locality",
        "trace": case.trace,
        "items": case.items,
        "planner": contender.planner,
        "setting": contender.setting,
        "ep": ep,
        "schedule": schedule,
        **spread("local_activation_rate", values[:, 0], ""),
        **spread("imbalance", values[:, 1], ""),
        "seeds": list(seeds),
        "rate_by_seed": values[:, 0].tolist(),
        "published": dict(PUBLISHED) if published else None,
    }


def _plan(contender: Contender, sample: Sample, ep: int, seed: int) -> Placement:
    offers = {"objective": NO_PRICES, "items": sample.items, "transitions": sample.transitions, "seed": seed}
    planner = planners.make(contender.name, offers, **contender.settings)
    layers, experts = sample.load.shape
    current = Placement.linear(layers, experts, ep)
    return planner.plan(Load(np.asarray(sample.load, np.float64)), Topology(ep), current).placement


def _rates(sample: Sample, expert_ranks: NDArray[np.int64], ranks: int) -> dict[str, float]:
    """Return the share of the tested activations that are local, by schedule."""
    by_rank, expected = (_on_ranks(side, expert_ranks, ranks) for side in (sample.truth, sample.known))
    total, count = float(by_rank.sum()), len(by_rank)
    if sample.items.one_rank:
        prior = _on_ranks(sample.load[None], expert_ranks, ranks).sum(axis=1)
        prior = prior / prior.sum() * ranks  # a rank with hot experts is no better for one request than for another
        scores = expected.sum(axis=1)
        homes = {
            "round_robin": np.arange(count) % ranks,
            "affinity": schedule_requests(scores / np.maximum(prior, 1e-9)),
            "oracle": schedule_requests(by_rank.sum(axis=1) / by_rank.sum(axis=(1, 2))[:, None]),
        }
        whole = by_rank.sum(axis=1)
        return {name: float(whole[np.arange(count), home].sum()) / total for name, home in homes.items()}
    local: dict[str, float] = {}
    fitted = None if sample.fitted is None else _on_ranks(sample.fitted, expert_ranks, ranks)
    token, turn = np.arange(count), np.arange(count) % ranks
    for layer in range(by_rank.shape[1]):
        own, table = by_rank[:, layer], expected[:, layer]
        homes = {"round_robin": turn, "affinity": aligned(table, BATCHES), "oracle": aligned(own, BATCHES)}
        if fitted is not None:
            after = after_ranks(fitted, by_rank, layer) if layer else table
            homes["follow"] = aligned(by_rank[:, layer - 1], BATCHES) if layer else turn
            homes["surer"] = aligned(surer(table, after), BATCHES)
            homes["added"] = aligned(table + after - fitted[:, layer].mean(axis=0), BATCHES)
        for name, home in homes.items():
            local[name] = local.get(name, 0.0) + float(own[token, home].sum())
    return {name: value / total for name, value in local.items()}


def _on_ranks(activations: NDArray[np.floating], expert_ranks: NDArray[np.int64], ranks: int) -> NDArray[np.float64]:
    """Sum activations [tested, layer, expert] over the experts of each rank: [tested, layer, rank]."""
    out = np.empty((*activations.shape[:2], ranks))
    for layer, placed in enumerate(expert_ranks):
        out[:, layer] = activations[:, layer] @ (placed[:, None] == np.arange(ranks))
    return out


def locality_notes(rows: Sequence[Row]) -> list[str]:
    """Say what was compared, and per trace at EP8 what co-clustering gains over the best baseline."""
    if not rows:
        return ["No local activation rates: give --trace, or set COTERIE_DATA to the real data (docs/data.md)."]
    notes = [
        "Local activation rates are of unseen requests: a fifth of the requests fits, the rest tests (of OLMoE and "
        "Mixtral, counts of token ids: a fifth of the occurrences). Intervals are 95%, over splits.",
        "With items dealt in turn every placement has a rate of 1 ÷ ranks: placement alone gains nothing, only "
        "placement and schedule together. Sem-MoE's baselines are published with round robin; `affinity` gives them "
        "its schedule too, `follow` is MoETuner's own, `surer` Sem-MoE's, `added` Coterie's.",
        f"A request's rank comes from the experts of its first {HEAD} tokens, a token's from its id; `oracle` knows "
        "the item's own experts and is an upper bound.",
    ]
    for trace, items in dict.fromkeys((row["trace"], row["items"]) for row in rows):
        part = [row for row in rows if (row["trace"], row["items"], row["ep"]) == (trace, items, PUBLISHED_EP)]
        if part:
            notes.append(_gain_note(f"{trace}, {items} as items, EP{PUBLISHED_EP}", part))
    return notes


def _gain_note(what: str, rows: Sequence[Row]) -> str:
    def best(*names: str, schedules: tuple[str, ...] = LEARNED, setting: bool = False) -> Row:
        chosen = [row for row in rows if row["planner"] in names and row["schedule"] in schedules]
        return max((row for row in chosen if bool(row["setting"]) == setting), key=_rate)

    ours, even, packed = best("co_cluster"), best("co_cluster", setting=True), best("popularity")
    paper = best("sem_moe", schedules=("affinity", "surer"))
    own, given = best(*BASELINES, schedules=("round_robin", "follow")), best(*BASELINES)
    return (
        f"{what}: co_cluster keeps {_rate(ours):.1%} of activations local ({ours['schedule']}), {_over(ours, own)} "
        f"over the best baseline with its own schedule ({own['planner']}, {own['schedule']}, imbalance "
        f"{own['imbalance']:.2f}) and {_over(ours, given)} over the best with Coterie's schedules "
        f"({given['planner']}, {given['schedule']}, {given['imbalance']:.2f}), at an imbalance of "
        f"{ours['imbalance']:.2f}; sem_moe {_rate(paper):.1%} at {paper['imbalance']:.2f}. About as even as popularity "
        f"({_rate(packed):.1%} at {packed['imbalance']:.2f}), with {even['setting']}: {_rate(even):.1%} at "
        f"{even['imbalance']:.2f}."
    )


def _rate(row: Row) -> float:
    return float(row["local_activation_rate"])


def _over(row: Row, other: Row) -> str:
    """Show the gain as a ratio, paired by seed."""
    ratio = np.array(row["rate_by_seed"]) / np.array(other["rate_by_seed"])
    return with_ends(interval(100 * (ratio - 1)), 1, "+", "%")
