"""Placement advice on GLM-5.2's loads: what a plan gains on the window after the one it was made from.

Windows mix the domains by weights that shift, each with other shards than the one before
(:mod:`coterie_lab.suites.latency_optimal.domains`). The advisor that a gateway runs sees the windows one after the
other; its plans are carried out after they were scored, as with `apply: true`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.control import AdviceSettings, LoadSeen, LoopShape, PlacementAdvisor
from coterie.types import Placement
from coterie_lab.suites.latency_optimal.domains import MODEL, DomainSetting, Fleet, domain_loads, shifting
from coterie_lab.suites.shared import spread

SETTING = DomainSetting(windows=40, steps=500)
WINDOW_S = 30.0


def advice_rows(path: Path, setting: DomainSetting = SETTING) -> list[dict[str, Any]]:
    """A row per phase."""
    shares = shifting(domain_loads(path), setting)
    return [advice_row(phase, tokens, shares, setting) for phase, tokens in setting.tokens]


def advice_row(phase: str, tokens: int, shares: NDArray[np.float64], setting: DomainSetting) -> dict[str, Any]:
    fleet = Fleet.of(phase, tokens, setting)
    layers, experts = shares.shape[1:]
    advisor = PlacementAdvisor(
        LoopShape(MODEL, layers, experts, fleet.model.spec.top_k, 1),
        fleet.model.topology,
        fleet.objective,
        Placement.linear(layers, experts, setting.ranks, setting.slots),
        AdviceSettings(window_s=WINDOW_S, min_steps=1),
    )
    advisor.tick(0.0)
    gains, planned, moves, kinds = [], [], 0, []
    for window, share in enumerate(shares, start=1):
        load = share * fleet.rows * setting.steps
        advisor.observe(LoadSeen(window * WINDOW_S, "fleet", load, setting.steps, WINDOW_S))
        standing = advisor.advice
        kinds += [event.kind for event in advisor.tick(window * WINDOW_S)]
        made = advisor.advice
        if standing is None or standing.plan is None or made is None:
            continue
        withdrawn = made.id != standing.id
        gains.append(0.0 if withdrawn else float(made.gain_next_pct or 0.0))
        planned.append(standing.gain_pct)
        if not withdrawn:
            moves += made.moves
            advisor.applied(made.id)
    return {
        "trace": MODEL,
        "advice": phase,
        "windows": len(shares),
        "plans": len(gains),
        "withdrawn": sum(gain <= 0 for gain in gains),
        "kept": kinds.count("plan_kept"),
        "moves": moves,
        "gain_planned_pct": float(np.mean(planned)) if planned else 0.0,
        **spread("gain_next", gains),
        "published": None,
    }
