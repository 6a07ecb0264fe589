"""What became of a plan that was written: taken, not taken, or not known yet, by the maps that workers report.

Two maps are equal if every rank holds the same experts in every layer: engines order a rank's slots in their own way.
Some engines move layers one by one, so a map is on its way while each layer is as planned or as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.types import Placement

NAMED = 4
"""Most layers and ranks that a reason names."""


class ReportedMap(NamedTuple):
    """The map in force at a worker."""

    version: int
    """Number of the map, by its worker's count."""
    placement: Placement


class PlanOutcome(NamedTuple):
    taken: bool
    reason: str
    version: int = 0
    """Version of the map that decided; 0 without one."""


class WrittenPlan(NamedTuple):
    """A plan that waits for the maps of its workers."""

    placement: Placement
    reports: Mapping[str, ReportedMap]
    """Worker → the map that it had reported when the plan was written."""
    in_force: Placement
    """The placement before the plan."""
    at_s: float
    wait_s: float

    def outcome(self, reports: Mapping[str, ReportedMap], now_s: float) -> PlanOutcome | None:
        """Return what became of the plan; None while it may still come. `reports` are the newest maps, by worker."""
        differs = {worker: differing(seen.placement, self.placement) for worker, seen in reports.items()}
        named = ", ".join(f"version {seen.version} of worker {worker!r}" for worker, seen in reports.items())
        newest = max((seen.version for seen in reports.values()), default=0)
        if reports and not any(places.any() for places in differs.values()):
            return PlanOutcome(True, f"it is {named}", newest)
        for worker, seen in reports.items():
            before = self.reports.get(worker, ReportedMap(0, self.in_force))
            other = differs[worker].any(axis=1) & differing(seen.placement, before.placement).any(axis=1)
            if other.any():
                words = f"worker {worker!r} reports another map, version {seen.version}: {_words(differs[worker])}"
                return PlanOutcome(False, words, seen.version)
        if now_s < self.at_s + self.wait_s:
            return None
        late = [f"{_words(places)} at worker {worker!r}" for worker, places in differs.items() if places.any()]
        words = f"in {self.wait_s:g} s no map like it was reported"
        return PlanOutcome(False, f"{words}: {'; '.join(late[:NAMED])}" if late else words, newest)


def differing(a: Placement, b: Placement) -> NDArray[np.bool_]:
    """Return [layer, rank] whether the rank holds other experts of the layer in `a` than in `b`."""
    shape = a.num_layers, a.num_ranks, a.slots_per_rank
    if a.slot_experts.shape != b.slot_experts.shape or a.num_ranks != b.num_ranks:
        return np.ones(shape[:2], np.bool_)
    held = [np.sort(one.slot_experts.reshape(shape), axis=2) for one in (a, b)]
    return np.asarray((held[0] != held[1]).any(axis=2))


def _words(differs: NDArray[np.bool_]) -> str:
    """Return in words where two maps differ; `differs` is [layer, rank]."""
    sides = []
    for name, axis in (("layers", 1), ("ranks", 0)):
        numbers = np.flatnonzero(differs.any(axis=axis)).tolist()
        more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
        sides.append(f"{name} {', '.join(map(str, numbers[:NAMED]))}{more}")
    return f"{sides[0]} on {sides[1]} differ"
