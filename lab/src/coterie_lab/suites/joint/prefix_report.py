"""Rows, tables and notes of the cells with shared prefixes: what each term of the joint router adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coterie.answers.runs import WORTH_PCT, interval, interval_of, with_half
from coterie.answers.suites import Column, Row, SuiteTable
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.joint.notes import verdict
from coterie_lab.suites.joint.prefixes import (
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
from coterie_lab.suites.joint.published import TTFT_SAVING_PCT

PART = "shared prefixes"
TRACE_SHARE = "Mooncake's"
"""Stands for a share where prefixes are those of the trace."""
WITH_INTERVAL = ("ttft_mean_ms", "tpot_mean_ms", "hit_pct", "experts_per_step")
SAVED = {"ttft_saving": "ttft_mean_ms", "tpot_saving": "tpot_mean_ms", "experts_saving": "experts_per_step"}
"""Key of a row → field of an outcome that it compares."""
SETTING = (
    f"Shared prefixes: {WORKERS} whole workers, each with all experts, a prefix cache and an H200's memory; prompts "
    "are routed at arrival. A worker's home experts, which the expert term counts as local, are those its cluster of "
    "calibration requests activates most; requests that share a prefix are alike, and the router sees their own "
    "footprints. Both flatter the expert term."
)

PUBLISHED = f"The article claims {TTFT_SAVING_PCT:g}% less TTFT than KV only."


def prefix_rows(found: dict[PrefixCell, PrefixFound]) -> list[dict[str, Any]]:
    """One row a variant; cells that differ in their seed alone are its samples."""
    rows: list[dict[str, Any]] = []
    for trace, share in dict.fromkeys((cell.trace, cell.share) for cell in found):
        runs = [one for cell, one in found.items() if (cell.trace, cell.share) == (trace, share)]
        rows += [_row(trace, share, name, runs) for name in VARIANTS]
    return rows


def _row(trace: str, share: float | None, name: str, runs: Sequence[PrefixFound]) -> dict[str, Any]:
    variant = VARIANTS[name]
    row: dict[str, Any] = {
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
        own = [row for row in rows if row["trace"] == trace]
        name = f"{trace}, {own[0]['routing']} routing, shared prefixes"
        by_name = {variant: [row for row in own if row["configuration"] == variant] for variant in VARIANTS}
        notes.append(f"{name}: {_term('KV', by_name[KV_ONLY])}")
        notes.append(f"{name}: {_term('expert', by_name[JOINT])} {PUBLISHED}")
        notes.append(f"{name}, the KV term's weight / 100: {_term('expert', by_name[LIGHT_JOINT])}")
        notes.append(f"{name}, without the KV term: {_term('expert', by_name[EXPERT_ONLY])}")
        if all(row["same_as_base"] for row in by_name[NO_HOMES]):
            notes.append(
                f"{name}: without home experts every worker is as local as any other, and joint gives the same times "
                "as KV only, to the last digit."
            )
        notes += _crowding(name, by_name)
    return notes


def _term(term: str, rows: Sequence[Row]) -> str:
    """What a term saves of the times of the same router without it, by share; and where it adds nothing."""
    saved = "; ".join(f"{_share_text(row)} {_savings(row)}" for row in rows)
    found = {row["share"]: _effect(row) for row in rows}
    told = []
    for effect in dict.fromkeys(found.values()):
        told.append(f"{effect}: {', '.join(_share_text(row) for row in rows if found[row['share']] == effect)}")
    first = rows[0]
    return (
        f"the {term} term ({first['configuration']} against {first['against']}) saves TTFT, TPOT of {saved}. "
        f"It {'; it '.join(told)}."
    )


def _savings(row: Row) -> str:
    if row["same_as_base"]:
        return "0, 0"
    return ", ".join(with_half(interval_of(row, key)) for key in ("ttft_saving", "tpot_saving")) + "%"


def _effect(row: Row) -> str:
    """Whether the mean TTFT or TPOT changes by more than chance."""
    if row["same_as_base"]:
        return "adds nothing"
    if row["seeds"] < 2:
        return "is not told apart from chance by one seed"
    verdicts = {key: verdict(row, key) for key in ("ttft_saving", "tpot_saving")}
    gains = [row[f"{key}_pct"] for key, found in verdicts.items() if found == "helps"]
    if gains and "hurts" in verdicts.values():
        return "helps one and hurts the other"
    if gains:
        return "helps" if max(gains) >= WORTH_PCT else f"helps by less than {WORTH_PCT:g}%"
    return "hurts" if "hurts" in verdicts.values() else "adds nothing"


def _share_text(row: Row) -> str:
    share = row["share"]
    return "Mooncake's prefixes" if share == TRACE_SHARE else f"{share:.0%} shared" if share else "nothing shared"


def _crowding(name: str, by_name: dict[str, list[Row]]) -> list[str]:
    """Where the KV term at its published weight sends too much to who holds a common prefix."""
    found = []
    for kv, light, queue in zip(by_name[KV_ONLY], by_name[LIGHT_KV], by_name[SHORTEST], strict=True):
        if verdict(kv, "tpot_saving").startswith("hurts"):
            tpot, ttft = (
                f"{kv[key]:.{digits}f}, {light[key]:.{digits}f}, {queue[key]:.{digits}f}"
                for key, digits in (("tpot_mean_ms", 1), ("ttft_mean_ms", 0))
            )
            found.append(f"{_share_text(kv)} TPOT {tpot}, TTFT {ttft}")
    if not found:
        return []
    return [
        f"{name}: at the published weights a full worker weighs as much as 30 uncached tokens, so requests crowd where "
        "a common prefix is cached and each token takes longer. In ms with KV only, its weight / 100, and the "
        f"shortest queue: {'; '.join(found)}."
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
    Column("TTFT p99", lambda row: f"{row['ttft_p99_ms']:.0f}"),
    Column("TPOT ms", _spread("tpot_mean_ms", 2)),
    Column("TPOT p99", lambda row: f"{row['tpot_p99_ms']:.1f}"),
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
        f"{trace}, {'recorded' if trace in TRACES else 'synthetic'} routing: shared prefixes on {WORKERS} whole "
        "workers, and what is saved of another router's mean",
        _COLUMNS,
        _shows(trace),
    )
    for trace in (RECORDED, SYNTHETIC)
)
