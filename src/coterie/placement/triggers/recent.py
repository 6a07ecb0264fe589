"""The newest steps that windows brought, to plan for, and what a plan for them is worth on others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check_at_least
from coterie.placement.base import Load, Plan
from coterie.placement.scenarios import at_mean

Array = NDArray[np.float64]

MOST = 64
"""Scenarios that are kept: plans over more take longer and gain little."""


class RecentSteps:
    """Scenarios of the newest windows, in bounded memory; windows without scenarios change nothing."""

    def __init__(self, most: int = MOST) -> None:
        check_at_least(1, most=most)
        self.most = most
        self._steps: Array | None = None
        self._weights = np.zeros(0)
        self._whole = True

    def update(self, load: Load, weight: float) -> None:
        """The next window, and the weight that the forecast gave it."""
        if load.scenarios is None or load.weights is None:
            return
        count = load.num_scenarios
        some = np.linspace(0, count - 1, min(count, self.most)).round().astype(np.int64)
        new, new_weights = load.scenarios[some], load.weights[some]
        new_weights = weight * new_weights / max(float(new_weights.sum()), 1e-300)
        if self._steps is not None:
            room = self.most - len(new)
            keep = slice(max(0, len(self._steps) - room), None)
            new = np.concatenate([self._steps[keep], new])
            new_weights = np.concatenate([(1.0 - weight) * self._weights[keep], new_weights])
        self._steps, self._weights, self._whole = new, new_weights, self._whole and load.whole_steps

    def around(self, expected: Load) -> Load:
        """A load with these scenarios, brought to its mean step; without any, the load itself."""
        if self._steps is None:
            return expected
        steps = at_mean(self._steps, self._weights, expected.tokens / expected.steps)
        return replace(expected, scenarios=steps, weights=self._weights, whole_steps=self._whole)


def held_share(plan: Plan) -> float:
    """Share of the predicted saving that holds on scenarios the plan was not made for."""
    unseen = plan.unseen
    if unseen is None:
        return 1.0
    fitted = unseen.fitted - unseen.before
    return float(np.clip((unseen.after - unseen.before) / fitted, 0.0, 1.0)) if fitted > 0 else 0.0


def no_saving(plan: Plan) -> str:
    """Why a plan saves nothing."""
    unseen = plan.unseen
    if plan.skip_reason is not None or unseen is None or unseen.after > unseen.before:
        return plan.skip_reason or "the planner finds nothing"
    would, now = f"{unseen.after:.3f}", f"{unseen.before:.3f}"
    return f"on {unseen.scenarios} steps held out balancedness would be {would}; the map that serves has {now}"
