"""How the joint suite is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.evaluation.fleets import TRACES
from coterie.evaluation.suites.base import Column, Row, SuiteTable
from coterie.evaluation.suites.joint.cells import LOADS


def _plain(key: str) -> Callable[[Row], Any]:
    return lambda row: row.get(key)


def _number(key: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.{digits}f}"


def _beside(key: str, digits: int) -> Callable[[Row], str]:
    """Our value, with the published one in brackets."""

    def value(row: Row) -> str:
        ours = f"{row[key]:.{digits}f}"
        return ours if row["published"] is None else f"{ours} ({row['published'][key]:g})"

    return value


def _gain(key: str) -> Callable[[Row], str]:
    def value(row: Row) -> str:
        if row.get(f"{key}_pct") is None:
            return ""
        return f"{row[f'{key}_pct']:+.1f} ± {(row[f'{key}_high'] - row[f'{key}_low']) / 2:.1f}"

    return value


def _step(row: Row) -> str:
    ours = _gain("step_tbt_mean_saving")(row)
    return f"{ours} ({row['published']['step_tbt_mean_saving_pct']:.1f})" if ours and row["published"] else ours


def _varied(row: Row) -> str:
    """What differs from the chain."""
    if row["part"] == "budget":
        return f"budget {row['budget']}"
    if row["part"] == "replicas":
        return f"{row['extra_slots']} more slots, by {row['experts_placed_by']}"
    if row["part"] == "slow link":
        return "on InfiniBand"
    if row["part"] == "step size":
        return f"step of {row['in_flight']}, {row['extra_slots']} more, by {row['experts_placed_by']}"
    return f"{row['router']}, experts by {row['experts_placed_by']}"


def _shows(trace: str, main: bool) -> Callable[[Row], bool]:
    return lambda row: bool(row["trace"] == trace and (row["part"] == "main") == main)


_CHAIN = (
    Column("with", _plain("configuration")),
    Column("router", _plain("router")),
    Column("TBT ms", _beside("tbt_mean_ms", 2)),
    Column("p99", _beside("tbt_p99_ms", 2)),
    Column("all-to-all %", _beside("all_to_all_pct", 1)),
    Column("remote %", _number("remote_pct", 1)),
    Column("saved %", _step),
)
_VARIED = (
    Column("with", _plain("configuration")),
    Column("varied", _varied),
    Column("TBT ms", _number("tbt_mean_ms", 2)),
    Column("p99", _number("tbt_p99_ms", 2)),
    Column("all-to-all %", _number("all_to_all_pct", 1)),
    Column("remote %", _number("remote_pct", 1)),
    Column("decoding %", _number("decoding_pct", 0)),
    Column("saved %", _gain("tbt_mean_saving")),
)


def _tables(trace: str) -> tuple[SuiteTable, SuiteTable]:
    name = f"{trace}, {'recorded' if trace in TRACES else 'synthetic'} routing"
    return (
        SuiteTable(
            f"{name}: each step added to the one before, and what it saves of that one's mean TBT (published)",
            _CHAIN,
            _shows(trace, True),
        ),
        SuiteTable(f"{name}: one part varied, and what is saved of standard's mean TBT", _VARIED, _shows(trace, False)),
    )


TABLES = tuple(table for trace in sorted(LOADS, key=lambda trace: trace not in TRACES) for table in _tables(trace))
