"""Rows, tables and notes of the cells with shared prefixes: what each term of the joint router adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coterie.evaluation.fleets import TRACES
from coterie.evaluation.runs import interval, interval_of, with_half
from coterie.evaluation.suites.base import Column, Row, SuiteTable
from coterie.evaluation.suites.joint.notes import told, verdict
from coterie.evaluation.suites.joint.prefixes import (
    EXPERT_ONLY,
    JOINT,
    KV_ONLY,
    LIGHT_JOINT,
    LIGHT_KV,
    NO_HOMES,
    RECORDED,
    SHORTEST,
    SYNTHETIC,
    VARIANTS,
    WORKERS,
    PrefixCell,
    PrefixFound,
    PrefixOutcome,
)
from coterie.evaluation.suites.joint.published import TTFT_SAVING_PCT

PART = "shared prefixes"
TRACE_SHARE = "Mooncake's"
"""Stands for a share where prefixes are those of the trace."""
WITH_INTERVAL = ("ttft_mean_ms", "tpot_mean_ms", "hit_pct", "experts_per_step")
SAVED = {"ttft_saving": "ttft_mean_ms", "tpot_saving": "tpot_mean_ms", "experts_saving": "experts_per_step"}
"""Key of a row → field of an outcome that it compares."""
SETTING = (
    f"Shared prefixes: {WORKERS} whole workers, each with all experts, a prefix cache and an H200's memory; prompts are "
    "routed at arrival. A worker's home experts, which the expert term counts as local, are those its cluster of "
    "calibration requests activates most; requests that share a prefix are alike, and the router sees their own "
    "footprints. Both flatter the expert term."
)


def prefix_rows(found: dict[PrefixCell, PrefixFound]) -> list[Row]:
    """One row a variant; cells that differ in their seed alone are its samples."""
    rows: list[Row] = []
    for trace, share in dict.fromkeys((cell.trace, cell.share) for cell in found):
        runs = [one for cell, one in found.items() if (cell.trace, cell.share) == (trace, share)]
        rows += [_row(trace, share, name, runs) for name in VARIANTS]
    return rows


def _row(trace: str, share: float | None, name: str, runs: Sequence[PrefixFound]) -> Row:
    variant = VARIANTS[name]
    row: Row = {
        "part": PART,
        "trace": trace,
        "routing": "recorded" if trace in TRACES else "synthetic",
        "share": TRACE_SHARE if share is None else share,
        "configuration": name,
        "router": variant.router,
        "settings": variant.settings,
        "workers": WORKERS,
        "seeds": len(runs),
    }
    for field in PrefixOutcome._fields:
        values = [getattr(run[name], field) for run in runs]
        row[field] = float(np.mean(values))
        if field in WITH_INTERVAL:
            _, row[f"{field}_low"], row[f"{field}_high"] = interval(values)
    row["against"] = variant.base
    if variant.base is not None:
        row["same_as_base"] = all(run[name] == run[variant.base] for run in runs)
        for key, field in SAVED.items():
            gains = [100.0 * (1.0 - getattr(run[name], field) / getattr(run[variant.base], field)) for run in runs]
            row[f"{key}_pct"], row[f"{key}_low"], row[f"{key}_high"] = interval(gains)
    row["published"] = {"ttft_saving_pct": TTFT_SAVING_PCT} if name == JOINT else None
    return row


def prefix_notes(rows: Sequence[Row]) -> list[str]:
    notes = [SETTING] if rows else []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        of_trace = [row for row in rows if row["trace"] == trace]
        name = f"{trace}, {of_trace[0]['routing']} routing, shared prefixes"
        shares = {share: _by_name(of_trace, share) for share in dict.fromkeys(row["share"] for row in of_trace)}
        notes += [f"{name}, {_share_text(share)}: {_terms(variants)}." for share, variants in shares.items()]
        notes.append(f"{name}: {_verdict_on_experts(shares)}")
        if all(variants[NO_HOMES]["same_as_base"] for variants in shares.values()):
            notes.append(
                f"{name}: without home experts every worker is as local as any other, and joint gives the same times "
                "as KV only, to the last digit."
            )
        notes += _herding(name, shares)
    return notes


Shares = dict[Any, dict[str, Row]]


def _by_name(rows: Sequence[Row], share: Any) -> dict[str, Row]:
    return {row["configuration"]: row for row in rows if row["share"] == share}


def _share_text(share: Any) -> str:
    if share == TRACE_SHARE:
        return "Mooncake's arrivals, lengths and prefixes"
    return f"{share:.0%} of a prompt shared" if share else "nothing shared"


def _terms(variants: dict[str, Row]) -> str:
    """What each term changes, against the same router without it."""
    parts = [
        f"{what} ({name} against {row['against']}) {_both(row)}"
        for what, name in (
            ("the KV term", KV_ONLY),
            ("the expert term alone", EXPERT_ONLY),
            ("the expert term beside it", JOINT),
            ("the expert term where load outweighs KV", LIGHT_JOINT),
        )
        if (row := variants[name])
    ]
    return "; ".join(parts)


def _both(row: Row) -> str:
    if row["same_as_base"]:
        return "does nothing"
    return ", ".join(
        f"{label} {told(row, key)} {verdict(row, key)}"
        for label, key in (("TTFT", "ttft_saving"), ("TPOT", "tpot_saving"))
    )


def _verdict_on_experts(shares: Shares) -> str:
    """Where the expert term adds something to KV and load, and where it does not."""
    rows = [(share, variants[name]) for share, variants in shares.items() for name in (JOINT, LIGHT_JOINT)]
    helped = {
        (share, row["configuration"]): [
            metric for metric, key in (("TTFT", "ttft_saving"), ("TPOT", "tpot_saving")) if _above_zero(row, key)
        ]
        for share, row in rows
    }
    nothing = [f"{_share_text(share)} ({name})" for (share, name), gains in helped.items() if not gains]
    some = [f"{_share_text(share)} ({name}: {' and '.join(gains)})" for (share, name), gains in helped.items() if gains]
    published = f"The article claims {TTFT_SAVING_PCT:g}% less TTFT than KV only."
    said = (
        f"the expert term adds nothing that can be told apart from chance with {'; '.join(nothing)}." if nothing else ""
    )
    if some:
        said += f"{' It' if nothing else 'the expert term'} helps with {'; '.join(some)}."
    return f"{said} {published}"


def _above_zero(row: Row, key: str) -> bool:
    low = row[f"{key}_low"]
    return bool(low is not None and low > 0)


def _herding(name: str, shares: Shares) -> list[str]:
    """Where the KV term at the published weight sends too much to who holds a common prefix."""
    found = []
    for share, variants in shares.items():
        kv, light, queue = (variants[one] for one in (KV_ONLY, LIGHT_KV, SHORTEST))
        if verdict(kv, "tpot_saving") == "hurts":
            found.append(
                f"{_share_text(share)}: TPOT {kv['tpot_mean_ms']:.1f} ms with KV only, {light['tpot_mean_ms']:.1f} with "
                f"its weight / 100, {queue['tpot_mean_ms']:.1f} with the shortest queue; TTFT {kv['ttft_mean_ms']:.0f}, "
                f"{light['ttft_mean_ms']:.0f} and {queue['ttft_mean_ms']:.0f}"
            )
    if not found:
        return []
    return [
        f"{name}: at the published weights a full worker weighs as much as 30 uncached tokens, so requests crowd where "
        f"a common prefix is cached, and a token takes longer. {'; '.join(found)}."
    ]


def _spread(key: str, digits: int) -> Callable[[Row], str]:
    def value(row: Row) -> str:
        low, high = row[f"{key}_low"], row[f"{key}_high"]
        half = "" if low is None or high is None else f" ± {(high - low) / 2:.{digits}f}"
        return f"{row[key]:.{digits}f}{half}"

    return value


def _saved(key: str) -> Callable[[Row], str]:
    def value(row: Row) -> str:
        if row["against"] is None:
            return ""
        return "same" if row["same_as_base"] else with_half(interval_of(row, key))

    return value


_COLUMNS = (
    Column("shared", lambda row: row["share"] if row["share"] == TRACE_SHARE else f"{row['share']:.0%}"),
    Column("router", lambda row: str(row["configuration"])),
    Column("TTFT ms", _spread("ttft_mean_ms", 0)),
    Column("p99", lambda row: f"{row['ttft_p99_ms']:.0f}"),
    Column("TPOT ms", _spread("tpot_mean_ms", 2)),
    Column("p99", lambda row: f"{row['tpot_p99_ms']:.1f}"),
    Column("hits %", _spread("hit_pct", 1)),
    Column("experts a step", _spread("experts_per_step", 1)),
    Column("against", lambda row: row["against"] or ""),
    Column("TTFT saved %", _saved("ttft_saving")),
    Column("TPOT saved %", _saved("tpot_saving")),
)


def _shows(trace: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["part"] == PART and row["trace"] == trace)


PREFIX_TABLES = tuple(
    SuiteTable(
        f"{trace}, {'recorded' if trace in TRACES else 'synthetic'} routing: shared prefixes on {WORKERS} whole workers, "
        "and what is saved of another router's mean",
        _COLUMNS,
        _shows(trace),
    )
    for trace in (RECORDED, SYNTHETIC)
)
