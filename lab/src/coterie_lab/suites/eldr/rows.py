"""Rows of the ELDR suite: runs of many seeds into means and intervals, each seed compared with itself.

Savings are per cent of round robin's number, or of the best load balancer's, which is chosen for each number apart, by
its mean over seeds: the strictest that it can be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.answers.fleet.bench import BASE
from coterie.answers.runs import interval
from coterie.routing import routers
from coterie.types import Interval
from coterie_lab.suites.eldr import published
from coterie_lab.suites.eldr.analysis import Analysis
from coterie_lab.suites.eldr.cells import (
    BANDS,
    DESIGN,
    LIMIT_BATCH,
    LIMIT_ROUTER,
    MODEL,
    VANILLA,
    WEIGHTINGS,
    Found,
    Limit,
    band_name,
    signature_name,
)
from coterie_lab.suites.eldr.fleets import BALANCERS, ROUTERS, Outcome
from coterie_lab.suites.eldr.synthetic import CACHE_DECODERS, CACHE_EACH, EXPERT_PARALLEL, CacheFound, SyntheticFound

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
    """A row with all the fields that every row has."""
    fields: Row = dict.fromkeys(
        ("router", "decoders", "in_flight", "active_experts", "saving_pct", "tpot_p50_ms", "tpot_p99_ms", "published")
    )
    return {"part": part, "trace": trace, "routing": "recorded"} | fields | values


def savings(runs: Runs, name: str, field: str, base: str = BASE) -> list[float]:
    """Percent, one per seed."""
    return [100.0 * (1.0 - getattr(run[name], field) / getattr(run[base], field)) for run in runs]


def spread(key: str, found: Interval) -> Row:
    return {f"{key}_pct": found.mean, f"{key}_low": found.low, f"{key}_high": found.high}


def fleet_row(part: str, trace: str, name: str, decoders: int, per_decoder: int, runs: Runs, **values: Any) -> Row:
    """One router at one load: means over seeds, savings against round robin, both with 95% intervals."""
    row = blank(part, trace, router=name, decoders=decoders, in_flight=per_decoder, seeds=len(runs), **values)
    for field in Outcome._fields:
        row[field] = float(np.mean([getattr(run[name], field) for run in runs]))
    for key, field in SAVINGS.items():
        row |= spread(key, interval(savings(runs, name, field)))
    return row


def best_balancer(runs: Runs, field: str) -> str:
    known = [name for name in BALANCERS if name in runs[0]]
    return min(known, key=lambda name: float(np.mean([getattr(run[name], field) for run in runs])))


def main_rows(trace: str, decoders: int, per_decoder: int, runs: Runs) -> list[Row]:
    rows = []
    for name in (name for name in dict.fromkeys((*ROUTERS, *runs[0])) if name in runs[0] and name in routers):
        beside = dict(published.MAIN.get(name, {})) if trace == MODEL else {}
        row = fleet_row("main", trace, name, decoders, per_decoder, runs)
        for key, field in SAVINGS.items():
            best = best_balancer(runs, field)
            row[f"{key}_best_balancer"] = best
            row |= spread(f"{key}_over_balancer", interval(savings(runs, name, field, best)))
        row |= spread("p99_over_shortest", interval(savings(runs, name, "tpot_p99_ms", SHORTEST)))
        if name == OURS and ELDR in runs[0]:
            for key, field in SAVINGS.items():
                row |= spread(f"{key}_ahead", interval(_ahead(runs, field)))
        if beside:
            row["published"] = published.plain(beside) | {"over": "best load balancer"}
        if name == ELDR and trace == MODEL:
            row["published"] |= {"active_experts": published.ACTIVE_EXPERTS}
            trial = published.TRIAL.get((decoders, per_decoder))
            row["trial_saving_pct"] = None if trial is None else published.plain(trial)
        rows.append(row)
    return rows


def _ahead(runs: Runs, field: str) -> list[float]:
    """Points by which ours saves more than the locality band, one for each seed."""
    return [ours - band for ours, band in zip(savings(runs, OURS, field), savings(runs, ELDR, field), strict=True)]


def overall_row(by_load: Sequence[Runs]) -> Row:
    """Advantage over the locality band: one value per split, the mean over all loads."""
    row = blank("ahead", MODEL, router=OURS, loads=len(by_load), seeds=len(by_load[0]))
    for key, field in SAVINGS.items():
        row |= spread(f"{key}_ahead", interval(np.mean([_ahead(runs, field) for runs in by_load], axis=0)))
    return row


def limit_rows(decoders: int, found: Sequence[Found]) -> list[Row]:
    """Expected savings of clusters, and what runs saved of what the limit's clusters do."""
    limits = [one.limit for one in found if one.limit is not None]
    runs = [one.outcomes for one in found if one.limit is not None]
    rows = []
    for name, field, router in (("limit", "limit", LIMIT_ROUTER), ("cosine", "cosine", ELDR), ("union", "union", OURS)):
        row = fleet_row("limit", MODEL, router, decoders, LIMIT_BATCH, runs, clusters=name)
        row |= spread("expected_saving", interval([100.0 * getattr(one, field) for one in limits]))
        share = interval([_share(one, field) for one in limits])
        row |= {"share": share.mean, "share_low": share.low, "share_high": share.high}
        own, most = savings(runs, router, "experts_at_rows"), [100.0 * one.limit for one in limits]
        reached = interval(np.divide(own, most))
        row |= {"run_share": reached.mean, "run_share_low": reached.low, "run_share_high": reached.high}
        if name != "limit":
            row["published"] = {"share": published.LIMIT_SHARES[name], "of": "a quick trial"}
        rows.append(row)
    return rows


def _share(limit: Limit, field: str) -> float:
    return float(getattr(limit, field)) / limit.limit


def design_rows(runs: Runs) -> list[Row]:
    """The locality band's width, its clusters and its signature, each varied alone."""
    decoders, per_decoder = DESIGN
    rows = [
        fleet_row("band", MODEL, ELDR, decoders, per_decoder, [_as(run, ELDR, band_name(tau)) for run in runs], tau=tau)
        for tau in BANDS
    ]
    for clusters, name in (("balanced", ELDR), ("vanilla", VANILLA)):
        row = fleet_row(
            "clusters", MODEL, ELDR, decoders, per_decoder, [_as(run, ELDR, name) for run in runs], clusters=clusters
        )
        row["worst_p99_pct"] = -min(savings(runs, name, "tpot_p99_ms"))
        if clusters == "vanilla":
            row["published"] = {"tpot_p99": -published.VANILLA_P99, "of": "the worst case"}
        rows.append(row)
    for weighting in WEIGHTINGS:
        named = [_as(run, ELDR, signature_name(weighting)) for run in runs]
        row = fleet_row("signature", MODEL, ELDR, decoders, per_decoder, named, weighting=weighting)
        if weighting == "gate":
            row["published"] = {"tpot_p50_points_below_count_idf": published.GATE_P50_POINTS}
        rows.append(row)
    return rows


def _as(run: Mapping[str, Outcome], name: str, source: str) -> dict[str, Outcome]:
    return {BASE: run[BASE], name: run[source]}


def analysis_rows(trace: str, found: Sequence[Analysis]) -> list[Row]:
    unions = found[0].unions
    saving = interval([one.unions.saving_pct for one in found])
    rows = [
        blank(
            "unions",
            trace,
            in_flight=unions.batch,
            domains=unions.domains,
            saving_pct=saving.mean,
            saving_low=saving.low,
            saving_high=saving.high,
            published=published.plain(published.SAME_DOMAIN),
            active_experts=float(np.mean([one.unions.same for one in found])),
            mixed_experts=float(np.mean([one.unions.mixed for one in found])),
        ),
        blank(
            "correlation",
            trace,
            correlation=found[0].correlation,
            published=published.plain(published.PHASE_CORRELATION),
        ),
    ]
    for weighting in found[0].rho:
        masked, plain = ([getattr(one, key)[weighting] for one in found] for key in ("rho", "rho_unmasked"))
        gain = interval(np.subtract(masked, plain))
        beside = published.RHO.get(weighting)
        rows.append(
            blank(
                "rho",
                trace,
                weighting=weighting,
                rho=float(np.mean(masked)),
                rho_unmasked=float(np.mean(plain)),
                mask_gain=gain.mean,
                mask_gain_low=gain.low,
                mask_gain_high=gain.high,
                published=None if beside is None else {"rho": beside, "mask_gain": list(published.MASK_GAIN)},
                **({"layers": float(np.mean([one.layers for one in found]))} if weighting == "count_idf" else {}),
            )
        )
    return rows


def synthetic_rows(
    part: str, trace: str, decoders: int, per_decoder: int, found: Sequence[SyntheticFound]
) -> list[Row]:
    runs = [one.outcomes for one in found]
    same = float(np.mean([one.unions.saving_pct for one in found]))
    rows = []
    for name in runs[0]:
        row = fleet_row(
            part, trace, name, decoders, per_decoder, runs, routing="synthetic", same_domain_saving_pct=same
        )
        if part == "expert_parallel":
            row["ranks"] = EXPERT_PARALLEL
        if name == ELDR:
            beside: Any = published.EXPERT_PARALLEL if part == "expert_parallel" else published.TOPOLOGY.get(decoders)
            row["published"] = None if beside is None else published.plain(beside)
        rows.append(row)
    return rows


def cache_rows(found: Sequence[CacheFound]) -> list[Row]:
    rows = []
    for cached, runs in ((True, [one.cached for one in found]), (False, [one.uncached for one in found])):
        for name in runs[0]:
            row = fleet_row(
                "prefix_cache", MODEL, name, CACHE_DECODERS, CACHE_EACH, runs, cached=cached, arrivals="mooncake"
            )
            row["cached_share"] = float(np.mean([one.cached_share for one in found])) if cached else 0.0
            row["mean_batch"] = float(np.mean([one.in_flight for one in found]))
            row["prefill_ms"] = float(np.mean([one.prefill_ms[0 if cached else 1] for one in found]))
            rows.append(row)
    return rows
