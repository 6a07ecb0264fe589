"""A change of a simulated group's placement, the time that it takes, and a controller that makes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coterie.costs.movement import Contention, staged_exposed
from coterie.placement.migration.rounds import MigrationLimits, schedule_moves
from coterie.sim.group.serving import GroupLoads, Rebalance
from coterie.types import Placement, Topology


def change_to(
    current: Placement,
    placement: Placement,
    topology: Topology,
    expert_bytes: float,
    contention: Mapping[str, Contention] | None = None,
    reason: str = "",
) -> Rebalance:
    """Return the change from one placement to another, which may have other slots: its rounds of transfers in time.

    With `contention`, as measured, weights move beside steps; without, the engine stops.
    """
    wide = max(current.slots_per_rank, placement.slots_per_rank)
    limits = MigrationLimits(expert_bytes)
    schedule = schedule_moves(current.widened(wide), placement.widened(wide), topology, limits)
    return Rebalance(
        placement=schedule.placement if wide == placement.slots_per_rank else placement,
        layers=[switch.layer for switch in schedule.switches],
        moved_s=schedule.ready_s,
        exposed=1.0 if contention is None else staged_exposed(contention, topology),
        moved_bytes=schedule.moved_bytes,
        reason=reason,
    )


@dataclass(slots=True)
class Once:
    """Makes one change, at the first step that starts at `every_s` or later. Make a new one for each run."""

    change: Rebalance
    every_s: float
    late_s: float = 0.0

    def tick(self, _now_s: float, _loads: GroupLoads) -> Rebalance | None:
        self.every_s = np.inf
        return self.change

    def landed(self, _now_s: float, _placement: Placement) -> None:
        pass
