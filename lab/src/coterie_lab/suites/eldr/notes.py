"""Notes and tables of the ELDR suite: what agrees with the published figures and the bars, what does not, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from coterie.answers.fleet.bench import BASE
from coterie.answers.runs import interval_of, told_apart, with_ends
from coterie.answers.suites import Column, Row, SuiteTable
from coterie.types import Interval
from coterie_lab.suites.eldr import published
from coterie_lab.suites.eldr.cells import MODEL
from coterie_lab.suites.eldr.rows import ELDR, OURS
from coterie_lab.suites.shared import as_is, distinct_values, gain, number, plain

NO_DATA = "No recorded routing: only synthetic parts ran. Set COTERIE_DATA to the folder of real data (docs/data.md)."
LIMIT_BAR = 0.90
TAIL_BAR_PCT = -1.0
"""Lowest allowed cut of a router's p99 against the shortest queue, percent."""


def notes_of(rows: Sequence[Row]) -> list[str]:
    def of(part: str) -> list[Row]:
        return [row for row in rows if row["part"] == part]

    notes: list[str] = []
    if of("main"):
        notes += _main_notes(of("main"), of("ahead"))
        notes += _limit_notes(of("limit"))
        notes += _design_notes(of("band"), of("clusters"), of("signature"))
        notes += _analysis_notes(of("unions"), of("correlation"), of("rho"))
        notes += _cache_notes(of("prefix_cache"))
    return notes + _synthetic_notes(of("topology"), of("expert_parallel"))


def told(row: Row, key: str) -> str:
    return with_ends(interval_of(row, key))


def _share(row: Row, key: str) -> str:
    return with_ends(Interval(row[key], row[f"{key}_low"], row[f"{key}_high"]), digits=2, sign="")


COMPARED = (
    ("saving_by_time", "experts by time"),
    ("saving_by_token", "by token"),
    ("saving_at_rows", "at equal rows"),
    ("tpot_mean_saving", "mean TPOT"),
    ("tpot_token_saving", "mean by token"),
    ("tpot_p50_saving", "p50"),
    ("tpot_p99_saving", "p99"),
)


def _ahead_note(row: Row, where: str) -> str:
    ahead = ", ".join(
        f"{words} {told(row, f'{key}_ahead')} ({told_apart(interval_of(row, f'{key}_ahead'))})"
        for key, words in COMPARED
    )
    return f"{where}: latency_aware ahead of locality_band, in points of saving: {ahead}."


def _main_notes(rows: Sequence[Row], overall: Sequence[Row]) -> list[str]:
    notes = [
        f"Main: {rows[0]['seeds']} splits, half of the recorded requests to fit and half to serve; no recorded request "
        "twice in flight; 95% intervals by Student's t over splits, every router on the same requests.",
        "`saving` is of the mean over steps, which an uneven load flatters: an overloaded decoder makes few long steps "
        "and idle ones many short ones. `by token` weighs steps by their tokens, `at equal rows` compares each with "
        "round robin's of as many requests; TPOT is what a user waits for. The trial of the bar let all decoders step "
        "together: weighted by time, ours are comparable.",
    ]
    for row in rows:
        if row["router"] == ELDR and row.get("trial_saving_pct"):
            low, high = row["trial_saving_pct"]
            agrees = low - 1.0 <= row["saving_by_time_pct"] <= high + 1.0
            notes.append(
                f"{_named_load(row)}: locality_band touches {told(row, 'saving_by_time')}% fewer experts by time "
                f"({told(row, 'saving')} over steps); the trial had {low:g} to {high:g}: "
                f"{'within a point' if agrees else 'not within a point'}."
            )
    notes += [_ahead_note(row, _named_load(row)) for row in rows if row["router"] == OURS]
    notes += [_ahead_note(row, f"All {row['loads']} loads of {row['trace']}") for row in overall]
    for row in rows:
        if row["router"] in (OURS, ELDR) and row["p99_over_shortest_pct"] < TAIL_BAR_PCT:
            notes.append(
                f"{_named_load(row)}: {row['router']}'s p99 is {-row['p99_over_shortest_pct']:.1f}% above the shortest "
                "queue's, more than the 1% allowed."
            )
    return notes


def _limit_notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    for row in (row for row in rows if row["clusters"] != "limit"):
        met = ""
        if row["clusters"] == "union":
            met = f": {'meets' if row['run_share'] >= LIMIT_BAR else 'misses'} {LIMIT_BAR:.2f}"
        notes.append(
            f"Limit, {row['decoders']} decoders: {row['clusters']} clusters reach {_share(row, 'share')} "
            "of its expected saving (a quick trial: "
            f"{row['published']['share']:.2f}); {row['router']}, which sees who is running, in its run "
            f"{_share(row, 'run_share')} at equal rows{met}."
        )
    return notes


def _design_notes(bands: Sequence[Row], clusters: Sequence[Row], signatures: Sequence[Row]) -> list[str]:
    if not bands:
        return []
    best = max(bands, key=lambda row: row["tpot_p50_saving_pct"])
    by = {row["clusters"]: row for row in clusters}
    named = {row["weighting"]: row["tpot_p50_saving_pct"] for row in signatures}
    gap = named["count_idf"] - named["gate"]
    return [
        f"Band: the median is cut most at τ = {best['tau']:g}; top-1 (τ = 0) changes p99 by "
        f"{-bands[0]['tpot_p99_saving_pct']:+.1f}% and τ = 0.1 by {-bands[2]['tpot_p99_saving_pct']:+.1f}% (published: "
        "0.1 removes the tail regression of 0).",
        f"Clusters: vanilla K-means changes p99 by {-by['vanilla']['tpot_p99_saving_pct']:+.1f}%, at worst "
        f"{by['vanilla']['worst_p99_pct']:+.1f}% (published {published.VANILLA_P99:+g}% at worst), balanced by "
        f"{-by['balanced']['tpot_p99_saving_pct']:+.1f}%.",
        f"Signature: count_idf cuts the median {gap:+.1f} points more than gate mass (published "
        f"{published.GATE_P50_POINTS:+g}).",
    ]


def _analysis_notes(unions: Sequence[Row], correlations: Sequence[Row], rhos: Sequence[Row]) -> list[str]:
    notes = [
        f"{row['trace']}: steps of {row['in_flight']} requests of one domain touch {row['saving_pct']:.1f}% fewer "
        f"experts than mixed ones (published {published.SAME_DOMAIN}%)."
        for row in unions
    ]
    for row in correlations:
        inside = published.PHASE_CORRELATION.low <= row["correlation"] <= published.PHASE_CORRELATION.high
        notes.append(
            f"{row['trace']}: prefill and decode correlate by {row['correlation']:.2f} (published "
            f"{published.PHASE_CORRELATION}): {'inside' if inside else 'outside'}; halves of one phase stand for them."
        )
    for trace in distinct_values(rhos, "trace"):
        mine = {row["weighting"]: row for row in rhos if row["trace"] == trace}
        order = [name for name in published.RHO if name in mine]
        same = all(mine[a]["rho"] > mine[b]["rho"] for a, b in pairwise(order))
        values = ", ".join(f"{name} {row['rho']:.2f}" for name, row in mine.items())
        gain = mine["count_idf"]["mask_gain"]
        notes.append(
            f"{trace}: rho {values} (published .76 count_idf, .67 gate, .47 binary): "
            f"{'the same' if same else 'not the same'} order; choosing layers adds {gain:+.3f} (published "
            f"{published.MASK_GAIN})."
        )
    return notes


def _cache_notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    for name in (ELDR, OURS):
        mine = {row["cached"]: row for row in rows if row["router"] == name}
        if mine:
            notes.append(
                f"Prefix caching ({mine[True]['cached_share']:.0%} of prompt tokens hit): {name} cuts the median by "
                f"{told(mine[True], 'tpot_p50_saving')}% with it and {told(mine[False], 'tpot_p50_saving')}% without "
                "(published: preserved)."
            )
    return notes


def _synthetic_notes(pools: Sequence[Row], parallel: Sequence[Row]) -> list[str]:
    notes = []
    if pools:
        notes.append(
            f"Synthetic: steps of one language touch {pools[0]['same_domain_saving_pct']:.1f}% fewer experts than "
            f"mixed ones (published {published.SAME_LANGUAGE}%, which its settings were chosen for): trends are told, "
            "not heights."
        )
    for name in (ELDR, OURS):
        mine = [row for row in pools if row["router"] == name]
        for key, words in (
            ("tpot_p50_saving_pct", "p50"),
            ("tpot_mean_saving_pct", "mean TPOT"),
            ("saving_by_token_pct", "experts by token"),
        ):
            values = [row[key] for row in mine]
            if values:
                grows = all(a < b for a, b in pairwise(values))
                cuts = " / ".join(f"{value:.1f}" for value in values)
                sizes = "/".join(str(row["decoders"]) for row in mine)
                notes.append(
                    f"Pool of {sizes} decoders, {name}: {words} {cuts}% below {BASE}"
                    + (" (published 8 / 9.8 / 10.2)" if words == "p50" else "")
                    + (": grows." if grows else ": does not grow at every size.")
                )
    for row in parallel:
        if row["router"] in (ELDR, OURS):
            notes.append(
                f"Expert parallel, {row['ranks']} ranks a decoder, {row['router']}: p50 "
                f"{told(row, 'tpot_p50_saving')}%, p99 {told(row, 'tpot_p99_saving')}% below {BASE} (published "
                f"{published.EXPERT_PARALLEL['tpot_p50']} and {published.EXPERT_PARALLEL['tpot_p99']})."
            )
    return notes


def _beside(row: Row) -> str:
    known = row["published"]
    if known is None:
        return ""
    if not isinstance(known, dict):
        return _text(known)
    return ", ".join(
        f"{key.removeprefix('tpot_')} {_text(value)}" for key, value in known.items() if not isinstance(value, str)
    )


def _text(value: Any) -> str:
    return "-".join(f"{end:g}" for end in value) if isinstance(value, list) else f"{value:g}"


def _load_cell(row: Row) -> str:
    return f"{row['decoders']} x {row['in_flight']}"


def _named_load(row: Row) -> str:
    return _load_cell(row) if row["trace"] == MODEL else f"{row['trace']} {_load_cell(row)}"


def _is(*parts: str) -> Callable[[Row], bool]:
    return lambda row: row["part"] in parts


_EXPERTS = (
    Column("experts a step", number("active_experts")),
    Column("fewer %", gain("saving")),
    Column("by time", gain("saving_by_time")),
    Column("by token", gain("saving_by_token")),
    Column("at equal rows", gain("saving_at_rows")),
)
_TIMES = (
    Column("p50 ms", number("tpot_p50_ms")),
    Column("p99 ms", number("tpot_p99_ms")),
    Column("p50 cut %", gain("tpot_p50_saving")),
    Column("p99", gain("tpot_p99_saving")),
    Column("mean", gain("tpot_mean_saving")),
    Column("by token", gain("tpot_token_saving")),
)
_SHORT = (
    Column("by token %", gain("saving_by_token")),
    Column("p50 ms", number("tpot_p50_ms")),
    Column("p99 ms", number("tpot_p99_ms")),
    Column("p50 cut %", gain("tpot_p50_saving")),
    Column("p99 cut %", gain("tpot_p99_saving")),
)

TABLES = (
    SuiteTable(
        "Experts: gpt-oss-20b unless named, decoders x in flight on each; fewer than round robin (± 95%)",
        (Column("load", _named_load), *as_is("router"), *_EXPERTS),
        _is("main"),
    ),
    SuiteTable("TPOT of the same runs (± 95%)", (Column("load", _named_load), *as_is("router"), *_TIMES), _is("main")),
    SuiteTable(
        "Against the best load balancer of each number: cuts of TPOT, % (± 95%)",
        (
            Column("load", _named_load),
            *as_is("router"),
            Column("p50", gain("tpot_p50_saving_over_balancer")),
            Column("best", plain("tpot_p50_saving_best_balancer")),
            Column("p99", gain("tpot_p99_saving_over_balancer")),
            Column("best", plain("tpot_p99_saving_best_balancer")),
            Column("p99, shortest queue", gain("p99_over_shortest")),
            Column("published", _beside),
        ),
        lambda row: bool(
            row["part"] == "main" and row["router"] in ("domain", "pressure", "locality_band", "latency_aware")
        ),
    ),
    SuiteTable(
        "The limit: clusters made on the served requests' own decode, B = 16",
        (
            *as_is("decoders", "clusters"),
            Column("expected saving %", gain("expected_saving")),
            Column("share of the limit", number("share", 3)),
            Column("published", _beside),
            *as_is("router"),
            Column("run, at equal rows %", gain("saving_at_rows")),
            Column("share of the limit", number("run_share", 3)),
        ),
        _is("limit"),
    ),
    SuiteTable(
        "The published design, one part varied: gpt-oss-20b, 8 x 16, against round robin (± 95%)",
        (
            *as_is("part"),
            Column("is", lambda row: row.get("tau", row.get("clusters", row.get("weighting")))),
            Column("by token %", gain("saving_by_token")),
            Column("p50 cut %", gain("tpot_p50_saving")),
            Column("p99 cut %", gain("tpot_p99_saving")),
            Column("uneven", number("uneven")),
            Column("published", _beside),
        ),
        _is("band", "clusters", "signature"),
    ),
    SuiteTable(
        "What it rests on, recorded routing",
        (
            *as_is("trace", "part"),
            Column("weighting", lambda row: row.get("weighting", "")),
            Column("same-domain saving %", number("saving_pct", 1)),
            Column("correlation", number("correlation")),
            Column("rho", number("rho", 3)),
            Column("layers chosen add", number("mask_gain", 3)),
            Column("published", _beside),
        ),
        _is("unions", "correlation", "rho"),
    ),
    SuiteTable(
        "Prefix caching: Mooncake's arrivals, gpt-oss-20b's experts, 8 prefill and 8 decode workers (± 95%)",
        (*as_is("cached", "router"), *_SHORT),
        _is("prefix_cache"),
    ),
    SuiteTable(
        "Synthetic routing, languages: Qwen3-30B-A3B's shape, and Qwen3-235B-A22B's where EP is 4 (± 95%)",
        (
            Column("load", _load_cell),
            Column("EP", lambda row: row.get("ranks", 1)),
            *as_is("router"),
            *_SHORT,
            Column("published", _beside),
        ),
        _is("topology", "expert_parallel"),
    ),
)
