"""Rows of the suite: configurations with intervals over seeds, the whole beside published systems, and pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.answers.runs import interval
from coterie_lab.suites.shared import savings, spread
from coterie_lab.suites.together.outcomes import Outcome
from coterie_lab.suites.together.traffic import ABRUPT, SHIFT

Row = dict[str, Any]
Runs = Sequence[Mapping[str, Outcome]]
"""Outcomes by configuration, one per seed."""
LOSSES = {f"{name}_loss": f"{name}_ms" for name in ("ttft_p95", "ttft_p99", "tpot_p95", "tpot_p99")}
"""Key of a row → field of an outcome in which a configuration may be worse than the baseline."""


KEPT = ("tpot_windows_ms", "window_s")
"""Fields of an outcome of which rows have no mean."""
RECOVERED = 1.05


class Pair(NamedTuple):
    """Two decisions: configurations with neither, each, and both."""

    first: str
    second: str
    neither: str
    only_first: str
    only_second: str
    both: str


class Compared(NamedTuple):
    """What is compared on a fleet, by names of configurations."""

    baseline: str
    beside: str
    """Configuration of which TPOT is a multiple where it is said when it recovers: arrivals come in waves, which a run
    alone does not tell from a change."""
    whole: str
    published: Mapping[str, str]
    """Published system → its configuration; the best of them by goodput is chosen on the first seeds."""
    gimbal: str | None
    pairs: tuple[Pair, ...]


class Cell(NamedTuple):
    """A fleet, a load and a traffic."""

    fleet: str
    load: float
    traffic: str


CHOSEN_ON = 2
"""Seeds, the first, on which the best published system is chosen; the others score it."""


def run_rows(cell: Cell, runs: Runs, compared: Compared) -> list[Row]:
    """Make a row of every configuration."""
    rows = []
    base = [run[compared.baseline] for run in runs]
    for config in runs[0]:
        own = [run[config] for run in runs]
        row: Row = {"kind": "run", **cell._asdict(), "config": config, "seeds": len(runs)}
        row |= {name: _mean([getattr(one, name) for one in own]) for name in Outcome._fields if name not in KEPT}
        row |= spread("goodput", [one.goodput for one in own], "_mean")
        lost = {key: [-pct for pct in savings(own, base, field)] for key, field in LOSSES.items()}
        for key, values in lost.items():
            row |= spread(key, values)
        row["p99_vs_baseline_pct"] = row["tpot_p99_loss_pct"]
        row |= spread("tpot_p50_saving", savings(own, base, "tpot_p50_ms"))
        row |= spread("minority_loss", [-pct for pct in savings(own, base, "minority_tpot_p99_ms")])
        row["recovered_s"] = row["recovers"] = None
        if cell.traffic == ABRUPT:
            row["recovered_s"] = recovered_s(own, [run[compared.beside] for run in runs])
            row["recovers"] = row["recovered_s"] is not None
        rows.append(row | {"published": None})
    return rows


def recovered_s(own: Sequence[Outcome], beside: Sequence[Outcome]) -> float | None:
    """Return the seconds after an abrupt change from which on TPOT is within 5% of what it was before the change.

    TPOT is a multiple of the same windows' TPOT in the runs `beside`, mean over seeds, without the last tenth of the
    requests, whose TPOT depends on how the run empties. None if it is not within 5% in the last window that counts.
    """
    ratio = np.mean([np.divide(a.tpot_windows_ms, b.tpot_windows_ms) for a, b in zip(own, beside, strict=True)], axis=0)
    shift, end = round(SHIFT * len(ratio)), round(0.9 * len(ratio))
    late = np.flatnonzero(ratio[shift:end] > RECOVERED * ratio[1:shift].mean())
    windows = 0 if not len(late) else int(late[-1]) + 1
    return None if shift + windows == end else windows * float(np.mean([one.window_s for one in own]))


def against_rows(cell: Cell, runs: Runs, compared: Compared) -> list[Row]:
    """Compare the goodput of the whole with the best published system and with the Gimbal-style pair."""
    chosen_on, scored = (runs[:CHOSEN_ON], runs[CHOSEN_ON:]) if len(runs) > CHOSEN_ON else (runs, runs)
    best = max(
        compared.published,
        key=lambda name: float(np.mean([run[compared.published[name]].goodput for run in chosen_on])),
    )
    others = {best: compared.published[best]}
    if compared.gimbal is not None:
        others["Gimbal-style pair"] = compared.gimbal
    rows = []
    for name, config in others.items():
        gains = [100.0 * (run[compared.whole].goodput / run[config].goodput - 1.0) for run in scored]
        row: Row = {
            "kind": "against",
            **cell._asdict(),
            "config": compared.whole,
            "against": name,
            "seeds": len(scored),
        }
        rows.append(row | spread("goodput_gain", gains) | {"published": None})
    return rows


def pair_rows(cell: Cell, runs: Runs, pairs: Sequence[Pair]) -> list[Row]:
    """Say what two decisions save of the median TPOT and of TTFT's p99, each alone and both, and how they interact."""
    rows = []
    for pair in pairs:
        if not {pair.neither, pair.only_first, pair.only_second, pair.both} <= runs[0].keys():
            continue
        row: Row = {"kind": "pair", **cell._asdict(), "first": pair.first, "second": pair.second, "seeds": len(runs)}
        for metric in ("tpot_p50", "ttft_p50"):
            saved = {
                name: savings([run[config] for run in runs], [run[pair.neither] for run in runs], f"{metric}_ms")
                for name, config in (("first", pair.only_first), ("second", pair.only_second), ("both", pair.both))
            }
            for name, values in saved.items():
                row |= spread(f"{metric}_{name}", values)
            together = np.subtract(saved["both"], np.add(saved["first"], saved["second"]))
            row |= spread(f"{metric}_interaction", together)
        rows.append(row | {"published": None})
    return rows


def word_of(row: Mapping[str, Any]) -> str:
    """Say in a word how two decisions act together: from the interval of what both save of TPOT beyond the sum."""
    low, high = row["tpot_p50_interaction_low"], row["tpot_p50_interaction_high"]
    if low is None or low <= 0.0 <= high:
        return "add up"
    alone = max(row["tpot_p50_first_pct"], row["tpot_p50_second_pct"], 0.0)
    if low > 0.0:
        return "help each other"
    return "fight" if row["tpot_p50_both_pct"] < alone else "overlap"


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; None if there is no value."""
    known = [value for value in values if not math.isnan(value)]
    return interval(known).mean if known else None
