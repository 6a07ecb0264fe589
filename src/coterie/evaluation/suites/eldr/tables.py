"""How the ELDR suite is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.evaluation.suites.base import Column, Row, SuiteTable
from coterie.evaluation.suites.eldr.cells import MODEL


def _gain(key: str) -> Callable[[Row], str]:
    def value(row: Row) -> str:
        return f"{row[f'{key}_pct']:+.1f} ± {(row[f'{key}_high'] - row[f'{key}_low']) / 2:.1f}"

    return value


def _number(key: str, digits: int = 2) -> Callable[[Row], Any]:
    return lambda row: None if row.get(key) is None else f"{row[key]:.{digits}f}"


def _plain(key: str) -> Callable[[Row], Any]:
    return lambda row: row.get(key)


def _beside(row: Row) -> str:
    found = row["published"]
    if found is None:
        return ""
    if not isinstance(found, dict):
        return _text(found)
    return ", ".join(
        f"{key.removeprefix('tpot_')} {_text(value)}" for key, value in found.items() if not isinstance(value, str)
    )


def _text(value: Any) -> str:
    return "-".join(f"{one:g}" for one in value) if isinstance(value, list) else f"{value:g}"


def _load(row: Row) -> str:
    return f"{row['decoders']} x {row['in_flight']}"


def _named_load(row: Row) -> str:
    return _load(row) if row["trace"] == MODEL else f"{row['trace']} {_load(row)}"


def _is(*parts: str) -> Callable[[Row], bool]:
    return lambda row: row["part"] in parts


_EXPERTS = (
    Column("experts a step", _number("active_experts")),
    Column("fewer %", _gain("saving")),
    Column("by time", _gain("saving_by_time")),
    Column("by token", _gain("saving_by_token")),
    Column("at equal rows", _gain("saving_at_rows")),
)
_TIMES = (
    Column("p50 ms", _number("tpot_p50_ms")),
    Column("p99 ms", _number("tpot_p99_ms")),
    Column("p50 cut %", _gain("tpot_p50_saving")),
    Column("p99", _gain("tpot_p99_saving")),
    Column("mean", _gain("tpot_mean_saving")),
    Column("by token", _gain("tpot_token_saving")),
)
_SHORT = (
    Column("by token %", _gain("saving_by_token")),
    Column("p50 ms", _number("tpot_p50_ms")),
    Column("p99 ms", _number("tpot_p99_ms")),
    Column("p50 cut %", _gain("tpot_p50_saving")),
    Column("p99 cut %", _gain("tpot_p99_saving")),
)

TABLES = (
    SuiteTable(
        "Experts: gpt-oss-20b unless named, decoders x in flight on each; fewer than round robin (± 95%)",
        (Column("load", _named_load), Column("router", _plain("router")), *_EXPERTS),
        _is("main"),
    ),
    SuiteTable(
        "TPOT of the same runs (± 95%)",
        (Column("load", _named_load), Column("router", _plain("router")), *_TIMES),
        _is("main"),
    ),
    SuiteTable(
        "Against the best load balancer of each number: cuts of TPOT, % (± 95%)",
        (
            Column("load", _named_load),
            Column("router", _plain("router")),
            Column("p50", _gain("tpot_p50_saving_over_balancer")),
            Column("best", _plain("tpot_p50_saving_best_balancer")),
            Column("p99", _gain("tpot_p99_saving_over_balancer")),
            Column("best", _plain("tpot_p99_saving_best_balancer")),
            Column("p99, shortest queue", _gain("p99_over_shortest")),
            Column("published", _beside),
        ),
        lambda row: bool(
            row["part"] == "main" and row["router"] in ("domain", "pressure", "locality_band", "latency_aware")
        ),
    ),
    SuiteTable(
        "The limit: clusters made on the served requests' own decode, B = 16",
        (
            Column("decoders", _plain("decoders")),
            Column("clusters", _plain("clusters")),
            Column("expected saving %", _gain("expected_saving")),
            Column("share of the limit", _number("share", 3)),
            Column("published", _beside),
            Column("router", _plain("router")),
            Column("run, at equal rows %", _gain("saving_at_rows")),
            Column("share of the limit", _number("run_share", 3)),
        ),
        _is("limit"),
    ),
    SuiteTable(
        "The published design, one part varied: gpt-oss-20b, 8 x 16, against round robin (± 95%)",
        (
            Column("part", _plain("part")),
            Column("is", lambda row: row.get("tau", row.get("clusters", row.get("weighting")))),
            Column("by token %", _gain("saving_by_token")),
            Column("p50 cut %", _gain("tpot_p50_saving")),
            Column("p99 cut %", _gain("tpot_p99_saving")),
            Column("uneven", _number("uneven")),
            Column("published", _beside),
        ),
        _is("band", "clusters", "signature"),
    ),
    SuiteTable(
        "What it rests on, recorded routing",
        (
            Column("trace", _plain("trace")),
            Column("part", _plain("part")),
            Column("weighting", lambda row: row.get("weighting", "")),
            Column("same-domain saving %", _number("saving_pct", 1)),
            Column("correlation", _number("correlation")),
            Column("rho", _number("rho", 3)),
            Column("layers chosen add", _number("mask_gain", 3)),
            Column("published", _beside),
        ),
        _is("unions", "correlation", "rho"),
    ),
    SuiteTable(
        "Prefix caching: Mooncake's arrivals, gpt-oss-20b's experts, 8 prefill and 8 decode workers (± 95%)",
        (Column("cached", _plain("cached")), Column("router", _plain("router")), *_SHORT),
        _is("prefix_cache"),
    ),
    SuiteTable(
        "Synthetic routing, languages: Qwen3-30B-A3B's shape, and Qwen3-235B-A22B's where EP is 4 (± 95%)",
        (
            Column("load", _load),
            Column("EP", lambda row: row.get("ranks", 1)),
            Column("router", _plain("router")),
            *_SHORT,
            Column("published", _beside),
        ),
        _is("topology", "expert_parallel"),
    ),
)
