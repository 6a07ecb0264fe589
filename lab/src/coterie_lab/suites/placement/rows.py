"""Rows of the placement suite: cells that differ in their seed alone are a row's samples, compared in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from coterie.answers.runs import interval
from coterie_lab.suites.placement.cells import EPLB, MEAN, PREFILL, STEPS, Cell, Found, dtype_of
from coterie_lab.suites.placement.mixtures import FOR_DOMAINS, TRAFFIC, Mixture, Traded, picked
from coterie_lab.suites.placement.shifts import RANKS, REQUESTS, Replanned, Shift
from coterie_lab.suites.placement.traffic import GLM, ONE_DOMAIN, spec_of

Row = dict[str, Any]
C = TypeVar("C")
F = TypeVar("F")

PLANS, SHIFTS, MIXTURES = "plans", "shifts", "mixtures"
"""Parts of the suite."""


def plan_rows(found: Mapping[Cell, Sequence[Found]]) -> list[Row]:
    """One row per trace, traffic, ranks, slots, phase, planner and split."""
    groups = _grouped(found, lambda cell, one: (*cell[:3], one.slots, one.phase, one.split, one.planner))
    rows = []
    for (trace, traffic, ranks, slots, phase, split, planner), own in groups.items():
        beside = {name: groups[trace, traffic, ranks, slots, phase, split, name] for name in (EPLB, MEAN)}
        unseen = [one.unseen for one in own]
        row: Row = {
            "part": PLANS,
            "trace": trace,
            "traffic": traffic if isinstance(traffic, str) else "requests",
            "requests_a_step": None if isinstance(traffic, str) else traffic,
            "planner": planner,
            "split": split,
            "phase": phase,
            "ranks": ranks,
            "slots": slots,
            "balancedness_fit": float(np.mean([one.fit for one in own])),
            **_spread("balancedness_unseen", unseen, ""),
            **_spread("vs_eplb", _points(own, beside[EPLB]), "_points"),
            **_spread("vs_mean", _points(own, beside[MEAN]), "_points"),
            **_spread("layer_time_vs_eplb", _percent(own, beside[EPLB])),
            **_cost(trace, [one.moves for one in own], [one.planning_s for one in own]),
            "layers": own[0].layers,
            "seeds": len(own),
            "published": None,
        }
        rows.append(row)
    _beside(rows)
    return rows


def _beside(rows: Sequence[Row]) -> None:
    """Give rows of the plan for steps what the other planners reach there: printed tables have a planner a column."""
    keys = ("trace", "traffic", "requests_a_step", "phase", "ranks", "slots", "split")
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), {})[row["planner"]] = row
    for group in groups.values():
        group[STEPS]["others"] = {
            name: {key: row[key] for key in ("balancedness_unseen", "layer_time_vs_eplb_pct")}
            for name, row in group.items()
            if name != STEPS
        }


def shift_rows(found: Mapping[Shift, Sequence[Replanned]]) -> list[Row]:
    """One row per trace, slots, change, horizon and planner."""
    groups = _grouped(found, lambda shift, one: (*shift[:3], one.horizon, one.planner))
    rows = []
    for (trace, slots, change, horizon, planner), own in groups.items():
        theirs = groups[trace, slots, change, horizon, EPLB]
        share = [100.0 * a.moves / b.moves for a, b in zip(own, theirs, strict=True)]
        total = [100.0 * (a.total_s / b.total_s - 1.0) for a, b in zip(own, theirs, strict=True)]
        rows.append(
            {
                "part": SHIFTS,
                "trace": trace,
                "traffic": ONE_DOMAIN if trace == GLM else "requests",
                "requests_a_step": None if trace == GLM else REQUESTS,
                "change": change,
                "planner": planner,
                "split": "equal",
                "phase": PREFILL,
                "ranks": RANKS,
                "slots": slots,
                "horizon": horizon,
                "balancedness_before": float(np.mean([one.before for one in own])),
                **_spread("balancedness_unseen", [one.after for one in own], ""),
                **_spread("layer_time_vs_eplb", _percent(own, theirs)),
                **_spread("total_vs_eplb", total),
                **_spread("moves_of_eplb", share),
                **_cost(trace, [one.moves for one in own], [one.planning_s for one in own]),
                "movement_s": float(np.mean([one.movement_s for one in own])),
                "layers": own[0].layers,
                "seeds": len(own),
                "published": None,
            }
        )
    return rows


def mixture_rows(found: Mapping[Mixture, Sequence[Traded]]) -> list[Row]:
    """One row per ranks, slots and plan, and one per ranks, slots and kind of traffic: what is picked."""
    groups = _grouped(found, lambda mixture, one: (*mixture[:2], one.plan))
    shared = {"part": MIXTURES, "trace": GLM, "published": None}
    rows: list[Row] = []
    for (ranks, slots, plan), own in groups.items():
        row = {**shared, "ranks": ranks, "slots": slots, "plan": plan, "seeds": len(own)}
        for name in ("mix", "domains", "worst_domain"):
            row |= _spread(name, [getattr(one, name) for one in own], "")
        rows.append(row)
    for ranks, slots in dict.fromkeys(key[:2] for key in groups):
        runs = [traded for mixture, traded in found.items() if (mixture.ranks, mixture.slots) == (ranks, slots)]
        for kind in TRAFFIC:
            chosen = [picked(list(run), kind) for run in runs]
            best = [max(one.to_come[kind] for one in run) for run in runs]
            row = {**shared, "ranks": ranks, "slots": slots, "traffic": kind, "seeds": len(runs)}
            row["picked_for_domains"] = sum(one.plan == FOR_DOMAINS for one in chosen)
            row["to_come"] = float(np.mean([one.to_come[kind] for one in chosen]))
            row["best_to_come"] = float(np.mean(best))
            row["plans"] = {
                plan: float(np.mean([one.to_come[kind] for run in runs for one in run if one.plan == plan]))
                for plan in dict.fromkeys(one.plan for one in runs[0])
            }
            rows.append(row)
    return rows


def _grouped(found: Mapping[C, Iterable[F]], key: Callable[[C, F], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[F]]:
    groups: dict[tuple[Any, ...], list[F]] = {}
    for cell, results in found.items():
        for one in results:
            groups.setdefault(key(cell, one), []).append(one)
    return groups


def _points(own: Sequence[Found], other: Sequence[Found]) -> list[float]:
    return [100.0 * (a.unseen - b.unseen) for a, b in zip(own, other, strict=True)]


def _percent(own: Sequence[Any], other: Sequence[Any]) -> list[float]:
    return [100.0 * (a.layer_s / b.layer_s - 1.0) for a, b in zip(own, other, strict=True)]


def _spread(name: str, samples: Sequence[float], unit: str = "_pct") -> Row:
    found = interval(samples)
    return {f"{name}{unit}": found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _cost(trace: str, moves: Sequence[float], planning_s: Sequence[float]) -> Row:
    mean = float(np.mean(moves))
    return {
        "moves": round(mean),
        "bytes": mean * spec_of(trace).expert_bytes(dtype_of(trace)),
        "median_ms": 1e3 * float(np.median(planning_s)),
    }
