"""Rows of the ELDR suite: runs of many seeds into means and intervals, each seed compared with itself.

Savings are per cent of round robin's number, or of the best load balancer's. The best balancer is chosen for each
number separately, by its mean over seeds: the strictest comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.answers.fleet.bench import BASE
from coterie.routing import routers
from coterie_lab.suites.eldr import cells, published
from coterie_lab.suites.eldr.analysis import Analysis
from coterie_lab.suites.eldr.cells import DESIGN, LIMIT_BATCH, MODEL, CellResult, band_name, signature_name
from coterie_lab.suites.eldr.fleets import BALANCERS, ROUTERS, Outcome
from coterie_lab.suites.eldr.synthetic import CACHE_DECODERS, CACHE_EACH, EXPERT_PARALLEL, CacheResult, SyntheticResult
from coterie_lab.suites.shared import mean_of, spread
from coterie_lab.suites.shared import savings as saved

OURS, ELDR, SHORTEST = "latency_aware", "locality_band", "join_shortest_queue"
SAVINGS = {
    "saving": "active_experts",
    "saving_by_token": "active_experts_by_token",
    "saving_by_time": "active_experts_by_time",
    "tpot_p50_saving": "tpot_p50_ms",
    "tpot_p99_saving": "tpot_p99_ms",
    "tpot_mean_saving": "tpot_mean_ms",
    "tpot_token_saving": "tpot_token_ms",
    "saving_at_rows": "experts_at_rows",
}
"""Key of a row → field of an outcome that it compares."""
Runs = Sequence[Mapping[str, Outcome]]
Row = dict[str, Any]


def blank(part: str, trace: str, **values: Any) -> Row:
    """Make a row with all the fields that every row has."""
    fields: Row = dict.fromkeys(
        ("router", "decoders", "in_flight", "active_experts", "saving_pct", "tpot_p50_ms", "tpot_p99_ms", "published")
    )
    return {"part": part, "trace": trace, "routing": "recorded"} | fields | values


def savings(runs: Runs, name: str, field: str, base: str = BASE) -> list[float]:
    """Return percent saved, one value per seed."""
    return saved([run[name] for run in runs], [run[base] for run in runs], field)


def fleet_row(part: str, trace: str, name: str, decoders: int, per_decoder: int, runs: Runs, **values: Any) -> Row:
    """Make the row of one router at one load: means over seeds, and savings against round robin with 95% intervals."""
    row = blank(part, trace, router=name, decoders=decoders, in_flight=per_decoder, seeds=len(runs), **values)
    for field in Outcome._fields:
        row[field] = mean_of([run[name] for run in runs], field)
    for key, field in SAVINGS.items():
        row |= spread(key, savings(runs, name, field))
    return row


def best_balancer(runs: Runs, field: str) -> str:
    known = [name for name in BALANCERS if name in runs[0]]
    return min(known, key=lambda name: mean_of([run[name] for run in runs], field))


def main_rows(trace: str, decoders: int, per_decoder: int, runs: Runs) -> list[Row]:
    rows = []
    for name in (name for name in dict.fromkeys((*ROUTERS, *runs[0])) if name in runs[0] and name in routers):
        beside = dict(published.MAIN.get(name, {})) if trace == MODEL else {}
        row = fleet_row("main", trace, name, decoders, per_decoder, runs)
        for key, field in SAVINGS.items():
            best = best_balancer(runs, field)
            row[f"{key}_best_balancer"] = best
            row |= spread(f"{key}_over_balancer", savings(runs, name, field, best))
        row |= spread("p99_over_shortest", savings(runs, name, "tpot_p99_ms", SHORTEST))
        if name == OURS and ELDR in runs[0]:
            for key, field in SAVINGS.items():
                row |= spread(f"{key}_ahead", _ahead(runs, field))
        if beside:
            row["published"] = published.plain(beside) | {"over": "best load balancer"}
        if name == ELDR and trace == MODEL:
            row["published"] |= {"active_experts": published.ACTIVE_EXPERTS}
            trial = published.TRIAL.get((decoders, per_decoder))
            row["trial_saving_pct"] = None if trial is None else published.plain(trial)
        rows.append(row)
    return rows


def _ahead(runs: Runs, field: str) -> list[float]:
    """Return the points by which ours saves more than the locality band, one value per seed."""
    return [ours - band for ours, band in zip(savings(runs, OURS, field), savings(runs, ELDR, field), strict=True)]


def overall_row(by_load: Sequence[Runs]) -> Row:
    """Make the row of our advantage over the locality band: one value per split, the mean over all loads."""
    row = blank("ahead", MODEL, router=OURS, loads=len(by_load), seeds=len(by_load[0]))
    for key, field in SAVINGS.items():
        row |= spread(f"{key}_ahead", np.mean([_ahead(runs, field) for runs in by_load], axis=0))
    return row


def limit_rows(decoders: int, results: Sequence[CellResult]) -> list[Row]:
    """Compare clusters with the limit: expected savings, and savings of runs as a share of those of the limit."""
    limits = [result.limit for result in results if result.limit is not None]
    runs = [result.outcomes for result in results if result.limit is not None]
    most = np.array([limit.limit for limit in limits])
    rows = []
    for name, router in (("limit", cells.LIMIT_ROUTER), ("cosine", ELDR), ("union", OURS)):
        row = fleet_row("limit", MODEL, router, decoders, LIMIT_BATCH, runs, clusters=name)
        expected = np.array([getattr(limit, name) for limit in limits])
        row |= spread("expected_saving", 100.0 * expected) | spread("share", expected / most, "")
        row |= spread("run_share", np.divide(savings(runs, router, "experts_at_rows"), 100.0 * most), "")
        if name != "limit":
            row["published"] = {"share": published.LIMIT_SHARES[name], "of": "a quick trial"}
        rows.append(row)
    return rows


def design_rows(runs: Runs) -> list[Row]:
    """Vary the locality band's width, its clusters and its signature, each alone."""

    def row_of(part: str, source: str, **values: Any) -> Row:
        named = [{BASE: run[BASE], ELDR: run[source]} for run in runs]
        return fleet_row(part, MODEL, ELDR, *DESIGN, named, **values)

    rows = [row_of("band", band_name(tau), tau=tau) for tau in cells.BANDS]
    for clusters, name in (("balanced", ELDR), ("vanilla", cells.VANILLA)):
        row = row_of("clusters", name, clusters=clusters)
        row["worst_p99_pct"] = -min(savings(runs, name, "tpot_p99_ms"))
        if clusters == "vanilla":
            row["published"] = {"tpot_p99": -published.VANILLA_P99, "of": "the worst case"}
        rows.append(row)
    for weighting in cells.WEIGHTINGS:
        row = row_of("signature", signature_name(weighting), weighting=weighting)
        if weighting == "gate":
            row["published"] = {"tpot_p50_points_below_count_idf": published.GATE_P50_POINTS}
        rows.append(row)
    return rows


def analysis_rows(trace: str, analyses: Sequence[Analysis]) -> list[Row]:
    unions = [analysis.unions for analysis in analyses]
    same_domain = {
        "in_flight": unions[0].batch,
        "domains": unions[0].domains,
        **spread("saving", [union.saving_pct for union in unions]),
        "published": published.plain(published.SAME_DOMAIN),
        "active_experts": mean_of(unions, "same"),
        "mixed_experts": mean_of(unions, "mixed"),
    }
    beside = published.plain(published.PHASE_CORRELATION)
    rows = [
        blank("unions", trace, **same_domain),
        blank("correlation", trace, correlation=analyses[0].correlation, published=beside),
    ]
    for weighting in analyses[0].rho:
        masked, plain = ([getattr(one, key)[weighting] for one in analyses] for key in ("rho", "rho_unmasked"))
        row = blank("rho", trace, weighting=weighting, rho=float(np.mean(masked)), rho_unmasked=float(np.mean(plain)))
        row |= spread("mask_gain", np.subtract(masked, plain), "")
        if weighting in published.RHO:
            row["published"] = {"rho": published.RHO[weighting], "mask_gain": list(published.MASK_GAIN)}
        rows.append(row | ({"layers": mean_of(analyses, "layers")} if weighting == "count_idf" else {}))
    return rows


def synthetic_rows(
    part: str, trace: str, decoders: int, per_decoder: int, results: Sequence[SyntheticResult]
) -> list[Row]:
    runs = [result.outcomes for result in results]
    values = {"routing": "synthetic", "same_domain_saving_pct": mean_of([one.unions for one in results], "saving_pct")}
    rows = []
    for name in runs[0]:
        row = fleet_row(part, trace, name, decoders, per_decoder, runs, **values)
        if part == "expert_parallel":
            row["ranks"] = EXPERT_PARALLEL
        if name == ELDR:
            beside: Any = published.EXPERT_PARALLEL if part == "expert_parallel" else published.TOPOLOGY.get(decoders)
            row["published"] = None if beside is None else published.plain(beside)
        rows.append(row)
    return rows


def cache_rows(results: Sequence[CacheResult]) -> list[Row]:
    rows = []
    for cached, key in ((True, "cached"), (False, "uncached")):
        runs: Runs = [getattr(result, key) for result in results]
        values = {"cached": cached, "arrivals": "mooncake"}
        for name in runs[0]:
            row = fleet_row("prefix_cache", MODEL, name, CACHE_DECODERS, CACHE_EACH, runs, **values)
            row["cached_share"] = mean_of(results, "cached_share") if cached else 0.0
            row["mean_batch"] = mean_of(results, "in_flight")
            row["prefill_ms"] = float(np.mean([result.prefill_ms[0 if cached else 1] for result in results]))
            rows.append(row)
    return rows
