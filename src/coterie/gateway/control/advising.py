"""Placement advice for a configured expert-parallel group: make the advisor, write its plans, show them.

Each worker of a fleet holds all experts, or is an expert-parallel group itself. The advice is for one such group, under
the load of the whole fleet.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.control import ControlEvent, ControlLoop, LoopShape
from coterie.control.advice import Advice, AdviceSettings, PlacementAdvisor
from coterie.costs.presets import step_model
from coterie.errors import CoterieError
from coterie.gateway.config import AdviseSection, ControlSection
from coterie.gateway.fleet.spec import RouterSpec
from coterie.models import get_model
from coterie.placement import Objective
from coterie.placement.maps.formats import read_map
from coterie.types import Placement, Topology

SHOWN_ACTIONS = 16
"""Most actions of an advice that are shown."""


def advisor_of(asked: AdviseSection, shape: LoopShape, spec: RouterSpec) -> PlacementAdvisor:
    """Make the advisor for a group. Raises CoterieError if the group does not fit the model or prices are unknown."""
    topology = Topology(asked.ranks, asked.ranks if asked.ranks_per_node is None else asked.ranks_per_node)
    name = asked.model or spec.model or shape.model
    model = replace(step_model(get_model(name), asked.device, spec.dtype), topology=topology)
    objective = Objective.of(model, asked.step_tokens, asked.movement, horizon=asked.horizon)
    slots = asked.slots_per_rank if asked.slots_per_rank is not None else -(-shape.num_experts // asked.ranks)
    placement = (
        Placement.linear(shape.num_layers, shape.num_experts, asked.ranks, slots * asked.ranks)
        if asked.placement is None
        else read_map(asked.placement, model=name, num_ranks=asked.ranks).placement
    )
    settings = AdviceSettings(window_s=asked.window_s, min_steps=asked.min_steps, cooldown_s=asked.cooldown_s)
    return PlacementAdvisor(shape, topology, objective, placement, settings)


class Applier:
    """Writes plans to the placement map, if the config has `apply`.

    A plan is written only after it has been evaluated on a window of loads that it was not made from.
    """

    def __init__(self, section: ControlSection) -> None:
        self._path = Path(section.map) if section.apply and section.map is not None else None
        self._refused = 0
        self.applied: Advice | None = None
        """The last advice whose plan was written; None before the first."""

    def carry_out(self, loop: ControlLoop, now_s: float) -> list[ControlEvent]:
        advice = loop.advice
        if self._path is None or advice is None or advice.plan is None or advice.id == self._refused:
            return []
        if advice.gain_next_pct is None:  # not yet evaluated on the next window
            return []
        try:
            advice.write(self._path)
        except (CoterieError, OSError) as error:
            self._refused = advice.id
            return [ControlEvent(now_s, "plan_kept", f"plan {advice.id} cannot be written to {self._path}: {error}")]
        loop.applied(advice.id)
        self.applied = advice
        words = f"plan {advice.id} was written to {self._path}"
        return [ControlEvent(now_s, "action", words, {"id": float(advice.id), "moves": float(advice.moves)})]

    def shown(self, loop: ControlLoop, epoch_s: float) -> dict[str, Any] | None:
        """Return the current advice as plain values, or the last one applied if the current one has no plan."""
        applied = self.applied is not None and (loop.advice is None or loop.advice.plan is None)
        advice = self.applied if applied else loop.advice
        return None if advice is None else _plain(advice, epoch_s, applied)


def _plain(advice: Advice, epoch_s: float, applied: bool) -> dict[str, Any]:
    return {
        "id": advice.id,
        "at_s": advice.at_s + epoch_s,
        "reason": advice.reason,
        "planned": advice.plan is not None,
        "gain_pct": advice.gain_pct,
        "gain_next_pct": advice.gain_next_pct,
        "steps": None if advice.steps is None else advice.steps._asdict(),
        "moves": advice.moves,
        "moved_bytes": advice.moved_bytes,
        "movement_s": advice.movement_s,
        "planning_s": advice.planning_s,
        "actions": [asdict(action) for action in advice.actions[:SHOWN_ACTIONS]],
        "applied": applied,
        "before": _ranks(advice.rank_s_before),
        "after": _ranks(advice.rank_s_after),
    }


def _ranks(rank_s: tuple[float, ...]) -> dict[str, Any] | None:
    """Return the balance and the seconds of each rank in a mean layer; None if there is no plan."""
    most = max(rank_s, default=0.0)
    return {"balance": float(np.mean(rank_s) / most), "rank_s": list(rank_s)} if most else None
