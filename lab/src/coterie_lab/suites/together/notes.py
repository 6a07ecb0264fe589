"""Notes and tables of the suite: what the whole gains, where it is behind, and how decisions act together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Column, Row, SuiteTable
from coterie_lab.suites.shared import as_is, gain, number
from coterie_lab.suites.together.rows import LOSSES, word_of
from coterie_lab.suites.together.traffic import TRAFFICS

LOADS = (0.95, 1.15)
"""Offered rate, as a share of what the baseline serves when all requests wait: near saturation, and overload."""
WORSE_PCT = 2.0
"""The whole may lose at most this much of a 95th or 99th percentile against the baseline."""
MINORITY_PCT = 5.0
"""The minority tenant's p99 TPOT may be at most this much above that of the baseline."""
SETTING = (
    "Rates are shares of what the baseline serves when all requests wait. The first twentieth of the requests is not "
    "measured. Within limits: TTFT at most three times, TPOT at most 1.25 times the median of the baseline at half of "
    "the rate that it can serve."
)


def notes_of(rows: Sequence[Row]) -> list[str]:
    notes = [SETTING]
    against = [row for row in rows if row["kind"] == "against"]
    wholes = {row["fleet"]: row["config"] for row in against}
    for fleet, whole in wholes.items():
        mine = [row for row in rows if row["fleet"] == fleet]
        notes += [_against_note(fleet, whole, [row for row in mine if row["kind"] == "against"])]
        runs = [row for row in mine if row["kind"] == "run" and row["config"] == whole]
        notes += [_tail_note(fleet, whole, runs), _minority_note(fleet, whole, runs)]
    shifted = [row for row in rows if row["kind"] == "run" and row["recovers"] is not None]
    notes += [_recovery_note(fleet, [row for row in shifted if row["fleet"] == fleet]) for fleet in wholes]
    if any(row["seeds"] < 2 for row in rows if row["kind"] == "run"):
        notes.append("One seed: no difference above has an interval, and none is sure.")
    return [note for note in [*notes, *_pair_notes(rows)] if note]


def where(row: Row) -> str:
    return f"{row['load']:g} of capacity, {row['traffic']}"


def _against_note(fleet: str, whole: str, rows: Sequence[Row]) -> str:
    """Name the cells in which the goodput of the whole is surely lower than that of what it is compared with."""
    behind = [row for row in rows if (row["goodput_gain_high"] or row["goodput_gain_pct"]) < 0.0]
    words = [f"; against {row['against']} at {where(row)}: {_gain(row)}" for row in behind]
    return (
        f"Fleet {fleet}, {whole} against the best published system (chosen on other seeds) and the Gimbal-style pair: "
        f"goodput is surely lower in {len(behind)} of {len(rows)} comparisons{''.join(words)}."
    )


def _gain(row: Row) -> str:
    return with_ends(interval_of(row, "goodput_gain"), unit="%")


def _tail_note(fleet: str, whole: str, rows: Sequence[Row]) -> str:
    worse = [
        f"{key.removesuffix('_loss')} at {where(row)}: {with_ends(interval_of(row, key), unit='%')}"
        for row in rows
        for key in LOSSES
        if (row[f"{key}_low"] if row[f"{key}_low"] is not None else row[f"{key}_pct"]) > WORSE_PCT
    ]
    cells = f"in none of {len(rows)} cells" if not worse else "here: " + "; ".join(worse)
    return f"Fleet {fleet}, {whole}: p95 or p99 surely more than {WORSE_PCT:g}% above the baseline's {cells}."


def _minority_note(fleet: str, whole: str, rows: Sequence[Row]) -> str:
    worse = [
        f"{where(row)}: {with_ends(interval_of(row, 'minority_loss'), unit='%')}"
        for row in rows
        if (row["minority_loss_low"] if row["minority_loss_low"] is not None else row["minority_loss_pct"])
        > MINORITY_PCT
    ]
    cells = f"in none of {len(rows)} cells" if not worse else "here: " + "; ".join(worse)
    return f"Fleet {fleet}, {whole}: the minority's p99 TPOT surely more than {MINORITY_PCT:g}% above {cells}."


def _recovery_note(fleet: str, rows: Sequence[Row]) -> str:
    words = [
        f"{row['config']} {_recovery(row)} at {row['load']:g}"
        for row in rows
        if row["kind"] == "run" and row["config"] in RECOVERY
    ]
    return f"Fleet {fleet}, after an abrupt change TPOT is back within 5%: {'; '.join(words)}." if words else ""


RECOVERY = (
    "eplb, periodic, shortest queue",
    "ours, periodic, shortest queue",
    "ours, as it pays, shortest queue",
    "latency_aware + latency_aware",
)


def _recovery(row: Row) -> str:
    return f"after {row['recovered_s']:.1f} s" if row["recovers"] else "not in the run"


def _pair_notes(rows: Sequence[Row]) -> list[str]:
    pairs = [row for row in rows if row["kind"] == "pair"]
    notes = []
    for first, second in dict.fromkeys((row["first"], row["second"]) for row in pairs):
        mine = [row for row in pairs if (row["first"], row["second"]) == (first, second)]
        words = Counter(word_of(row) for row in mine)
        counted = ", ".join(f"{word} in {count}" for word, count in words.most_common())
        notes.append(f"{first.capitalize()} and {second}, by the median TPOT in {len(mine)} cells: {counted}.")
    return notes


def _cell(fleet: str, load: float, traffic: str) -> Callable[[Row], bool]:
    cell = ("run", fleet, load, traffic)
    return lambda row: (row["kind"], row["fleet"], row["load"], row["traffic"]) == cell


def _shows(kind: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["kind"] == kind)


_COLUMNS = (
    *as_is("config"),
    Column("goodput", number("goodput", 1)),
    Column("TTFT p99", number("ttft_p99_ms", 0)),
    Column("TPOT", number("tpot_p50_ms")),
    Column("p99", number("tpot_p99_ms")),
    Column("saved %", gain("tpot_p50_saving")),
)
_WHERE = as_is("fleet", "load", "traffic")
TABLES = (
    *(
        SuiteTable(
            f"Fleet {fleet}, {load:g} of capacity, {traffic}: requests within limits a second; ms, TPOT's median",
            _COLUMNS,
            _cell(fleet, load, traffic),
        )
        for fleet, load, traffic in product("ABC", LOADS, TRAFFICS)
    ),
    SuiteTable(
        "The whole against the best published system and the Gimbal-style pair",
        (*_WHERE, *as_is("against"), Column("goodput gained %", gain("goodput_gain"))),
        _shows("against"),
    ),
    SuiteTable(
        "Two decisions: saved of the median TPOT, %",
        (
            *_WHERE,
            Column("pair", lambda row: f"{row['first']}, {row['second']}"),
            Column("first", gain("tpot_p50_first")),
            Column("second", gain("tpot_p50_second")),
            Column("both", gain("tpot_p50_both")),
            Column("they", word_of),
        ),
        _shows("pair"),
    ),
)
