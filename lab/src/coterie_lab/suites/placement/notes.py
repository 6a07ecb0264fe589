"""Notes and tables of the placement suite: what plans for steps gain, where they gain nothing, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Column, Row, SuiteTable
from coterie_lab.suites.placement.cells import DECODE, EPLB, EQUAL, GREEDY, LINEAR, MEAN, OPTIMAL, PREFILL, ROWS, STEPS
from coterie_lab.suites.placement.mixtures import FOR_DOMAINS, FOR_MIX
from coterie_lab.suites.placement.rows import MIXTURES, PLANS, SHIFTS
from coterie_lab.suites.placement.shifts import FEW, FEW_PCT
from coterie_lab.suites.placement.traffic import GLM, LEFT_OUT, MIX, ONE_DOMAIN, spec_of
from coterie_lab.suites.shared import as_is, gain, number, plain

NEVER_WORSE = 0.5
"""Points of balancedness by which a plan for steps may fall behind EPLB's on steps of the same mix."""
ROUNDING = 0.05
"""Points below which balancedness is the same."""
SETTING = (
    "Balancedness is mean ÷ max rank load in tokens, mean over layers and steps that no plan has seen; intervals are "
    "over splits into steps to plan on and steps to score, 95%. First plans, moves free; layer times are the H200 "
    "model's, of the slowest rank."
)


def notes_of(rows: Sequence[Row]) -> list[str]:
    ours = [row for row in rows if row["part"] == PLANS and row["planner"] == STEPS]
    plans = [row for row in ours if row["split"] == EQUAL]
    shifts = [row for row in rows if row["part"] == SHIFTS]
    mixtures = [row for row in rows if row["part"] == MIXTURES]
    return [
        SETTING,
        _others_note(plans, GREEDY, "the greedy over the same steps"),
        *_never_worse_notes(plans),
        *_time_notes(plans),
        *_left_out_notes(plans),
        *(_split_note(row) for row in ours if row["split"] == OPTIMAL),
        *(_moves_note(row) for row in shifts if row["planner"] in (STEPS, FEW)),
        *_mixture_notes(mixtures),
        _verdict(plans, shifts),
    ]


def _others_note(plans: Sequence[Row], planner: str, called: str) -> str:
    counted = [row for row in plans if row["phase"] == ROWS and row["traffic"] != LEFT_OUT]
    gains = [100 * (row["balancedness_unseen"] - row["others"][planner]["balancedness_unseen"]) for row in counted]
    worst = min(zip(gains, counted, strict=True), key=lambda pair: pair[0])
    return (
        f"Against {called}: ahead in {sum(gain > 0 for gain in gains)} of {len(gains)} cells, by "
        f"{sum(gains) / len(gains):+.1f} points on average and {worst[0]:+.2f} at worst ({_where(worst[1])})."
    )


def _never_worse_notes(plans: Sequence[Row]) -> list[str]:
    mixed = [row for row in plans if row["phase"] == ROWS and row["traffic"] in (MIX, "requests")]
    seen = [row for row in plans if row["phase"] == ROWS and row["traffic"] != LEFT_OUT]
    return [
        _worst_note(mixed, "vs_eplb", "EPLB", NEVER_WORSE),
        _worst_note(seen, "vs_mean", "our own plan on the mean", ROUNDING),
    ]


def _worst_note(rows: Sequence[Row], key: str, called: str, most: float) -> str:
    worst = min(rows, key=lambda row: float(row[f"{key}_points"]))
    holds = "holds" if worst[f"{key}_points"] >= -most else "does NOT hold"
    return (
        f"Never worse than {called} by more than {most:g} points on unseen steps: {holds}; the least gain is "
        f"{worst[f'{key}_points']:+.2f} points [{_end(worst[f'{key}_low'])}, {_end(worst[f'{key}_high'])}] "
        f"({_where(worst)})."
    )


def _time_notes(plans: Sequence[Row]) -> list[str]:
    chosen = [
        row
        for row in plans
        if row["phase"] in (PREFILL, DECODE)
        and row["ranks"] in (8, 16)
        and row["slots"] == spec_of(row["trace"]).num_experts
        and (row["traffic"] == ONE_DOMAIN or row["requests_a_step"] in (4, 16))
    ]
    return [
        f"{_where(row)}, {row['phase']}: a layer takes {with_ends(interval_of(row, 'layer_time_vs_eplb'), unit='%')} "
        "against EPLB's plan."
        for row in chosen
    ]


def _left_out_notes(plans: Sequence[Row]) -> list[str]:
    return [
        f"A domain that was never seen, {row['ranks']} ranks: {row['balancedness_unseen']:.3f}, "
        + ", ".join(f"{name} {row['others'][name]['balancedness_unseen']:.3f}" for name in (EPLB, LINEAR))
        + "."
        for row in plans
        if row["traffic"] == LEFT_OUT
    ]


def _split_note(row: Row) -> str:
    return f"Split anew in every step, {_where(row)}: {row['balancedness_unseen']:.3f}; " + ", ".join(
        f"{name} {row['others'][name]['balancedness_unseen']:.3f}" for name in (EPLB, GREEDY, MEAN)
    )


def _moves_note(row: Row) -> str:
    holds = "at most a quarter" if row["moves_of_eplb_pct"] <= FEW_PCT else "MORE than a quarter"
    held = ", held to a quarter of EPLB's moves" if row["planner"] == FEW else ""
    return (
        f"Other traffic ({row['change']}), {row['trace']}, {row['slots']} slots on {row['ranks']} ranks, for "
        f"{row['horizon']:,.0f} steps{held}: {row['moves']:,} moves, "
        f"{row['moves_of_eplb_pct']:.0f}% of EPLB's ({holds}); balancedness {row['balancedness_before']:.3f} → "
        f"{row['balancedness_unseen']:.3f}, a layer takes "
        f"{with_ends(interval_of(row, 'layer_time_vs_eplb'), unit='%')} against EPLB's new plan; with "
        f"movement, all steps take {with_ends(interval_of(row, 'total_vs_eplb'), unit='%')}."
    )


def _mixture_notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    for ranks, slots in dict.fromkeys((row["ranks"], row["slots"]) for row in rows):
        mine = [row for row in rows if (row["ranks"], row["slots"]) == (ranks, slots)]
        by_plan = {row["plan"]: row for row in mine if "plan" in row}
        mix, single = by_plan[FOR_MIX], by_plan[FOR_DOMAINS]
        picks = "; ".join(
            f"traffic that {row['traffic']}: the plan for single domains in {row['picked_for_domains']} of "
            f"{row['seeds']} splits, {row['to_come']:.3f} on windows to come"
            for row in mine
            if "picked_for_domains" in row
        )
        notes.append(
            f"{GLM}, {slots} slots on {ranks} ranks, planned for the mix and for single domains: on the mix "
            f"{mix['mix']:.3f} and {single['mix']:.3f}, on the worst domain {mix['worst_domain']:.3f} and "
            f"{single['worst_domain']:.3f}. Picked by windows seen, {picks}."
        )
    return notes


def _verdict(plans: Sequence[Row], shifts: Sequence[Row]) -> str:
    counted = [row for row in plans if row["phase"] == ROWS and row["traffic"] != LEFT_OUT]
    ahead = sum((row["vs_eplb_low"] or row["vs_eplb_points"]) > 0 for row in counted)
    few = sum(row["planner"] == STEPS and row["moves_of_eplb_pct"] <= FEW_PCT for row in shifts)
    several = sum(row["planner"] == STEPS for row in shifts)
    return (
        f"Verdict: planned for steps, placement is surely evener than EPLB's on unseen steps in {ahead} of "
        f"{len(counted)} cells, and re-plans with at most a quarter of its moves in {few} of {several}. Next: "
        "plan for steps as the service has them (docs/placement.md), and look at `Plan.unseen` before moving anything."
    )


def _where(row: Row) -> str:
    traffic = row["traffic"] if row["requests_a_step"] is None else f"{row['requests_a_step']} requests a step"
    return f"{row['trace']}, {traffic}, {row['slots']} slots on {row['ranks']} ranks"


def _end(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _other(planner: str, key: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row["others"][planner][key], form)


def _traffic(row: Row) -> Any:
    return row["traffic"] if row["requests_a_step"] is None else row["requests_a_step"]


def _unseen(row: Row) -> str:
    low, high = row["balancedness_unseen_low"], row["balancedness_unseen_high"]
    half = "" if low is None else f" ± {float(high - low) / 2:.3f}"
    return f"{row['balancedness_unseen']:.3f}{half}"


def _of_steps(*phases: str) -> Callable[[Row], bool]:
    return lambda row: row["part"] == PLANS and row["planner"] == STEPS and row["phase"] in phases


_CELL = (*as_is("trace"), Column("requests", _traffic), *as_is("ranks", "slots"))


def _others(names: Iterable[str], key: str, form: str) -> tuple[Column, ...]:
    return tuple(Column(name.removeprefix("latency_optimal, "), _other(name, key, form)) for name in names)


TABLES = (
    SuiteTable(
        "Balancedness in tokens on unseen steps",
        (
            *_CELL,
            *as_is("split"),
            *_others((LINEAR, EPLB, GREEDY, MEAN), "balancedness_unseen", ".3f"),
            Column("steps", _unseen),
            Column("fitted", number("balancedness_fit", 3)),
            *as_is("moves"),
            Column("ms", number("median_ms", 0)),
        ),
        _of_steps(ROWS),
    ),
    SuiteTable(
        "Predicted layer time on unseen steps against EPLB's plan, %",
        (
            *_CELL,
            *as_is("phase"),
            *_others((LINEAR, GREEDY, MEAN), "layer_time_vs_eplb_pct", "+.1f"),
            Column("steps", gain("layer_time_vs_eplb")),
        ),
        _of_steps(PREFILL, DECODE),
    ),
    SuiteTable(
        "Other traffic: re-planned from the plan that runs",
        (
            *as_is("trace", "slots", "change"),
            Column("for steps", number("horizon", 0)),
            *as_is("planner"),
            Column("before", number("balancedness_before", 3)),
            Column("after", _unseen),
            Column("layer time vs EPLB %", gain("layer_time_vs_eplb")),
            Column("with movement %", gain("total_vs_eplb")),
            *as_is("moves"),
            Column("% of EPLB's", number("moves_of_eplb_pct", 0)),
            Column("GB", lambda row: f"{row['bytes'] / 1e9:.2f}"),
            Column("ms", number("median_ms", 0)),
        ),
        lambda row: bool(row["part"] == SHIFTS),
    ),
    SuiteTable(
        f"{GLM}: the mix against single domains, balancedness",
        (
            *as_is("ranks", "slots"),
            Column("planned for", plain("plan")),
            *(Column(key.replace("_", " "), number(key, 3)) for key in ("mix", "domains", "worst_domain")),
        ),
        lambda row: bool(row["part"] == MIXTURES and "plan" in row),
    ),
)
