"""Rows, tables and notes of the cells with shared prefixes: what each term of the joint router adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coterie.answers.runs import WORTH_PCT, interval_of
from coterie.answers.suites import Column, Row, SuiteTable
from coterie.types import Interval
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.joint import prefixes
from coterie_lab.suites.joint.notes import verdict
from coterie_lab.suites.joint.prefixes import (
    JOINT,
    KV_ONLY,
    VARIANTS,
    WORKERS,
    PrefixCell,
    PrefixOutcome,
    PrefixOutcomes,
)
from coterie_lab.suites.joint.published import COMMUNICATION_SAVING_PCT
from coterie_lab.suites.running import with_half
from coterie_lab.suites.shared import distinct_values, mean_of, number, savings, spread

PART = "shared prefixes"
TRACE_SHARE = "Mooncake's"
"""Value of a row's share if prefixes are those of the trace."""
TIMES = ("TTFT", "TTFT p99", "TPOT", "TPOT p99")
WITH_INTERVAL = ("ttft_mean_ms", "tpot_mean_ms", "hit_pct", "experts_per_step")
SAVED = {
    "ttft_saving": "ttft_mean_ms",
    "ttft_p99_saving": "ttft_p99_ms",
    "tpot_saving": "tpot_mean_ms",
    "tpot_p99_saving": "tpot_p99_ms",
    "experts_saving": "experts_per_step",
}
"""Key of a row → field of an outcome that it compares."""
SETTING = (
    f"Shared prefixes: {WORKERS} whole workers, each with all experts, a prefix cache and an H200's memory; prompts "
    "are routed at arrival. A worker's home experts, which the expert term counts as local, are those its cluster of "
    "calibration requests activates most; requests that share a prefix are alike, and the router sees their own "
    "footprints. Both flatter the expert term."
)

PUBLISHED = (
    f"The article claims up to {COMMUNICATION_SAVING_PCT:g}% less all-to-all communication than KV only, which whole "
    "workers do not have, and no saving of TTFT."
)


def prefix_rows(results: dict[PrefixCell, PrefixOutcomes]) -> list[dict[str, Any]]:
    """Make one row per variant; cells that differ only in their seed are its samples."""
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(cell._replace(seed=0) for cell in results):
        runs = [outcomes for cell, outcomes in results.items() if cell._replace(seed=0) == kind]
        rows += [_row(kind, name, runs) for name in runs[0]]
    return rows


def _row(kind: PrefixCell, name: str, runs: Sequence[PrefixOutcomes]) -> dict[str, Any]:
    variant, trace, share = VARIANTS[name], kind.trace, kind.share
    row: dict[str, Any] = {
        "part": PART,
        "trace": trace,
        "routing": "recorded" if trace in TRACES else "synthetic",
        "share": TRACE_SHARE if share is None else share,
        "configuration": name,
        "router": variant.router,
        "settings": variant.settings,
        "fleet": kind.fleet,
        "workers": prefixes.FLEETS[kind.fleet].workers,
        "seeds": len(runs),
    }
    own = [run[name] for run in runs]
    for field in PrefixOutcome._fields:
        with_ends = field in WITH_INTERVAL
        row |= spread(field, [getattr(run, field) for run in own], "") if with_ends else {field: mean_of(own, field)}
    row["against"] = None
    if variant.base is not None and variant.base in runs[0]:
        row["against"], base = variant.base, [run[variant.base] for run in runs]
        row["same_as_base"] = own == base
        for key, field in SAVED.items():
            row |= spread(key, savings(own, base, field))
    row["published"] = None
    return row


def prefix_notes(rows: Sequence[Row]) -> list[str]:
    rows = [row for row in rows if row["fleet"] == prefixes.WHOLE]
    notes = [SETTING] if rows else []
    for trace in distinct_values(rows, "trace"):
        own = [row for row in rows if row["trace"] == trace]
        name = f"{trace}, {own[0]['routing']} routing, shared prefixes"
        by_name = {variant: [row for row in own if row["configuration"] == variant] for variant in VARIANTS}
        notes.append(f"{name}: {_term('KV', by_name[KV_ONLY])}")
        notes.append(f"{name}: {_term('expert', by_name[JOINT])} {PUBLISHED}")
        notes.append(f"{name}, the KV term's weight / 100: {_term('expert', by_name[prefixes.LIGHT_JOINT])}")
        notes.append(f"{name}, without the KV term: {_term('expert', by_name[prefixes.EXPERT_ONLY])}")
        if all(row["same_as_base"] for row in by_name[prefixes.NO_HOMES]):
            notes.append(
                f"{name}: without home experts every worker is as local as any other, and joint gives the same times "
                "as KV only, to the last digit."
            )
        notes += _crowding(name, by_name)
    return notes


def _term(term: str, rows: Sequence[Row]) -> str:
    """Say what a term saves of the times of the same router without it, by share, and where it adds nothing."""
    saved = "; ".join(f"{_share_text(row)} {_savings(row)}" for row in rows)
    effects: dict[str, list[str]] = {}
    for row in rows:
        effects.setdefault(_effect(row), []).append(_share_text(row))
    first, words = rows[0], [f"{effect}: {', '.join(shares)}" for effect, shares in effects.items()]
    return (
        f"the {term} term ({first['configuration']} against {first['against']}) saves TTFT, TPOT of {saved}. "
        f"It {'; it '.join(words)}."
    )


def _savings(row: Row) -> str:
    if row["same_as_base"]:
        return "0, 0"
    return ", ".join(with_half(interval_of(row, key)) for key in ("ttft_saving", "tpot_saving")) + "%"


def _effect(row: Row) -> str:
    """Say whether the mean TTFT or TPOT changes by more than chance."""
    if row["same_as_base"]:
        return "adds nothing"
    if row["seeds"] < 2:
        return "is not told apart from chance by one seed"
    verdicts = {key: verdict(row, key) for key in ("ttft_saving", "tpot_saving")}
    gains = [row[f"{key}_pct"] for key, word in verdicts.items() if word == "helps"]
    if gains and "hurts" in verdicts.values():
        return "helps one and hurts the other"
    if gains:
        return "helps" if max(gains) >= WORTH_PCT else f"helps by less than {WORTH_PCT:g}%"
    return "hurts" if "hurts" in verdicts.values() else "adds nothing"


def _share_text(row: Row) -> str:
    share = row["share"]
    return "Mooncake's prefixes" if share == TRACE_SHARE else f"{share:.0%} shared" if share else "nothing shared"


def _crowding(name: str, by_name: dict[str, list[Row]]) -> list[str]:
    """Name the shares at which the KV term at its published weight overloads the holders of a common prefix."""
    crowded = []
    for kv, light, queue in zip(by_name[KV_ONLY], by_name[prefixes.LIGHT_KV], by_name[prefixes.SHORTEST], strict=True):
        if verdict(kv, "tpot_saving").startswith("hurts"):
            tpot, ttft = (
                f"{kv[key]:.{digits}f}, {light[key]:.{digits}f}, {queue[key]:.{digits}f}"
                for key, digits in (("tpot_mean_ms", 1), ("ttft_mean_ms", 0))
            )
            crowded.append(f"{_share_text(kv)} TPOT {tpot}, TTFT {ttft}")
    if not crowded:
        return []
    return [
        f"{name}: at the published weights a full worker weighs as much as 30 uncached tokens, so requests crowd where "
        "a common prefix is cached and each token takes longer. In ms with KV only, its weight / 100, and the "
        f"shortest queue: {'; '.join(crowded)}."
    ]


def _with_half(key: str, digits: int) -> Callable[[Row], str]:
    def value(row: Row) -> str:
        mean = Interval(row[key], row[f"{key}_low"], row[f"{key}_high"])
        return with_half(mean, digits).removeprefix("+")

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
    Column("TTFT ms", _with_half("ttft_mean_ms", 0)),
    Column("TTFT p99", number("ttft_p99_ms", 0)),
    Column("TPOT ms", _with_half("tpot_mean_ms", 2)),
    Column("TPOT p99", number("tpot_p99_ms", 1)),
    Column("hits %", _with_half("hit_pct", 1)),
    Column("experts a step", _with_half("experts_per_step", 1)),
    Column("against", lambda row: row["against"] or ""),
    Column("TTFT saved %", _saved("ttft_saving")),
    Column("TPOT saved %", _saved("tpot_saving")),
)


def _shows(trace: str, fleet: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["part"] == PART and (row["trace"], row["fleet"]) == (trace, fleet))


_PRICED = (
    *_COLUMNS[:2],
    *(Column(f"{time} saved %", _saved(f"{time.lower().replace(' ', '_')}_saving")) for time in TIMES),
    Column("experts a step", _with_half("experts_per_step", 1)),
    Column("correlation", number("correlation", 2)),
)
PREFIX_TABLES = (
    *(
        SuiteTable(
            f"{trace}, {'recorded' if trace in TRACES else 'synthetic'} routing: shared prefixes on {WORKERS} whole "
            "workers, and what is saved of another router's mean",
            _COLUMNS,
            _shows(trace, prefixes.WHOLE),
        )
        for trace in (prefixes.RECORDED, prefixes.SYNTHETIC)
    ),
    *(
        SuiteTable(
            f"{trace}, {fleet}: saved of the shortest queue's times; correlation of a decision's price with the time "
            "that the request then took",
            _PRICED,
            _shows(trace, fleet),
        )
        for trace in prefixes.PRICED
        for fleet in (prefixes.PAIRS, prefixes.GROUPS)
    ),
)
