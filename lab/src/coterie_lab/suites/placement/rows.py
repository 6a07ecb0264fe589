"""Rows of the placement suite: cells that differ only in their seed are a row's samples, compared in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from coterie_lab.suites.placement.cells import EPLB, MEAN, PREFILL, STEPS, Cell, Planned, dtype_of
from coterie_lab.suites.placement.mixtures import FOR_DOMAINS, TRAFFIC, Mixture, Traded, picked
from coterie_lab.suites.placement.shifts import RANKS, REQUESTS, Replanned, Shift
from coterie_lab.suites.placement.traffic import GLM, ONE_DOMAIN, spec_of
from coterie_lab.suites.shared import mean_of, spread

Row = dict[str, Any]
C = TypeVar("C")
R = TypeVar("R")

PLANS, SHIFTS, MIXTURES = "plans", "shifts", "mixtures"
"""Parts of the suite."""


def plan_rows(results: Mapping[Cell, Sequence[Planned]]) -> list[Row]:
    """Make one row per trace, traffic, ranks, slots, phase, planner and split."""
    groups = _grouped(results, lambda cell, one: (*cell[:3], one.slots, one.phase, one.split, one.planner))
    rows = []
    for (trace, traffic, ranks, slots, phase, split, planner), own in groups.items():
        eplb, mean = (groups[trace, traffic, ranks, slots, phase, split, name] for name in (EPLB, MEAN))
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
            "balancedness_fit": mean_of(own, "fit"),
            **spread("balancedness_unseen", [one.unseen for one in own], ""),
            **spread("vs_eplb", _points(own, eplb), "_points"),
            **spread("vs_mean", _points(own, mean), "_points"),
            **spread("layer_time_vs_eplb", _percent(own, eplb, "layer_s")),
            **_cost(trace, own),
            "layers": own[0].layers,
            "seeds": len(own),
            "published": None,
        }
        rows.append(row)
    _beside(rows)
    return rows


def _beside(rows: Sequence[Row]) -> None:
    """Add the other planners' results to rows of the plan for steps: printed tables have a column per planner."""
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


def shift_rows(results: Mapping[Shift, Sequence[Replanned]]) -> list[Row]:
    """Make one row per trace, slots, change, horizon and planner."""
    groups = _grouped(results, lambda shift, one: (*shift[:3], one.horizon, one.planner))
    rows = []
    for (trace, slots, change, horizon, planner), own in groups.items():
        theirs = groups[trace, slots, change, horizon, EPLB]
        share = [100.0 * a.moves / b.moves for a, b in zip(own, theirs, strict=True)]
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
                "balancedness_before": mean_of(own, "before"),
                **spread("balancedness_unseen", [one.after for one in own], ""),
                **spread("layer_time_vs_eplb", _percent(own, theirs, "layer_s")),
                **spread("total_vs_eplb", _percent(own, theirs, "total_s")),
                **spread("moves_of_eplb", share),
                **_cost(trace, own),
                "movement_s": mean_of(own, "movement_s"),
                "layers": own[0].layers,
                "seeds": len(own),
                "published": None,
            }
        )
    return rows


def mixture_rows(results: Mapping[Mixture, Sequence[Traded]]) -> list[Row]:
    """Make one row per ranks, slots and plan, and one per ranks, slots and kind of traffic: which plan is picked."""
    groups = _grouped(results, lambda mixture, one: (*mixture[:2], one.plan))
    shared = {"part": MIXTURES, "trace": GLM, "published": None}
    rows: list[Row] = []
    for (ranks, slots, plan), own in groups.items():
        row = {**shared, "ranks": ranks, "slots": slots, "plan": plan, "seeds": len(own)}
        for name in ("mix", "domains", "worst_domain"):
            row |= spread(name, [getattr(one, name) for one in own], "")
        rows.append(row)
    for ranks, slots in dict.fromkeys(key[:2] for key in groups):
        runs = [traded for mixture, traded in results.items() if mixture[:2] == (ranks, slots)]
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


def _grouped(cells: Mapping[C, Iterable[R]], key: Callable[[C, R], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[R]]:
    groups: dict[tuple[Any, ...], list[R]] = {}
    for cell, results in cells.items():
        for result in results:
            groups.setdefault(key(cell, result), []).append(result)
    return groups


def _points(own: Sequence[Planned], other: Sequence[Planned]) -> list[float]:
    return [100.0 * (a.unseen - b.unseen) for a, b in zip(own, other, strict=True)]


def _percent(own: Sequence[Any], other: Sequence[Any], field: str) -> list[float]:
    return [100.0 * (getattr(a, field) / getattr(b, field) - 1.0) for a, b in zip(own, other, strict=True)]


def _cost(trace: str, own: Sequence[Any]) -> Row:
    moves, planning_s = mean_of(own, "moves"), float(np.median([one.planning_s for one in own]))
    nbytes = moves * spec_of(trace).expert_bytes(dtype_of(trace))
    return {"moves": round(moves), "bytes": nbytes, "median_ms": 1e3 * planning_s}
