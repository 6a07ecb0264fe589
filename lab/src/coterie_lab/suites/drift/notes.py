"""Notes and tables of the drift suite: what the loop gains, what it costs, and its bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Column, Row, SuiteTable
from coterie.types import Interval
from coterie_lab.suites.drift.cells import CHANCE, DECODERS, FRESH, LOOP, PER_DECODER
from coterie_lab.suites.shared import as_is, gain, number, plain

BAR_PCT = 0.5
"""The loop may cost at most this much of TPOT against never fitting anew."""
SETTING = (
    f"{DECODERS} decoders, closed loop; all turns after the first are measured, the time until the loop has noticed a "
    "change and scored its candidate included. Savings are against the fit of the first turn, paired by seed."
)


def notes_of(rows: Sequence[Row]) -> list[str]:
    notes = [SETTING]
    for row in rows:
        if row["variant"] == LOOP:
            same = {r["variant"]: r for r in rows if _cell(r) == _cell(row)}
            notes += [_gain_note(row, same[FRESH]), _bar_note(row, same[CHANCE])]
    return notes


def advice_notes(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['trace']}, placement advice in {row['advice']}: {row['plans']} plans in {row['windows']} windows, "
        f"predicted to save {row['gain_planned_pct']:.1f}% of a step's MoE time, save "
        f"{with_ends(interval_of(row, 'gain_next'), digits=1, unit='%')} on the next window, which they were not made "
        f"from; {row['withdrawn']} were withdrawn. {row['moves']:,} moves."
        for row in rows
    ]


def _cell(row: Row) -> tuple[str, str]:
    return row["trace"], row["router"]


def _gain_note(row: Row, fresh: Row) -> str:
    swap = row["requests_to_swap"]
    when = "no fit was taken" if swap is None else f"a fit was taken {swap:.0f} requests after a change"
    verdict = _verdict(interval_of(row, "tpot_ms_saving"))
    return (
        f"{row['trace']}, {row['router']}, {row['seeds']} seeds: the loop {verdict}: it saves "
        f"{_saving(row, 'tpot_ms')} of TPOT and {_saving(row, 'experts')} of the experts a step; a fresh fit at every "
        f"change saves {_saving(fresh, 'tpot_ms')} and {_saving(fresh, 'experts')}. Of {row['refit_started']:.1f} "
        f"re-fits in {row['changes']} changes {row['refit_taken']:.1f} were taken, {row['fall_back']:.1f} given back; "
        f"{when}. "
        f"In the second half of a turn its steps touch {row['late_experts_over_fresh_pct']:+.1f}% experts against the "
        "fresh fit's."
    )


def _bar_note(row: Row, chance: Row) -> str:
    holds = "holds" if row["within_bar"] else "does NOT hold"
    worst = "also in every seed" if row["all_seeds_within_bar"] else "not in every seed"
    return (
        f"{row['trace']}, {row['router']}: the loop is never worse than without it by more than {BAR_PCT}%: {holds} "
        f"({_saving(row, 'tpot_ms')}), {worst} (the worst {row['worst_seed_pct']:+.2f}%). "
        f"Sending one request elsewhere, and no more, changes TPOT by {chance['noise_pct']:.2f}% (root mean square)."
    )


def _verdict(saving: Interval) -> str:
    if saving.mean == 0.0 and saving.low == saving.high:
        return "does nothing"
    if saving.low is None or saving.high is None:
        return "ran with one seed, so without an interval"
    return "helps" if saving.low > 0 else "hurts" if saving.high < 0 else "is not told apart from doing nothing"


def _saving(row: Row, name: str) -> str:
    return with_ends(interval_of(row, f"{name}_saving"), digits=2, unit="%")


def _bar(row: Row) -> str:
    if row["variant"] != LOOP:
        return ""
    return "yes" if row["within_bar"] else "NO"


_COLUMNS = (
    *as_is("router"),
    Column("fitted", plain("variant")),
    Column("TPOT ms", number("tpot_ms")),
    Column("saved %", gain("tpot_ms_saving", 2)),
    Column("experts a step", number("experts")),
    Column("saved %", gain("experts_saving", 2)),
    Column("late TPOT saved %", gain("late_tpot_ms_saving", 2)),
    Column(f"within {BAR_PCT}%", _bar),
)


def _shows(trace: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["trace"] == trace and "router" in row)


TABLES = tuple(
    SuiteTable(f"{trace}: traffic that changes, by what the router is fitted on", _COLUMNS, _shows(trace))
    for trace in PER_DECODER
)
