"""Linear: expert e in slot e, replicas of the first ones in the slots left over. The default of every engine.

It looks at nothing but the sizes, so it is right where the load is even or not known yet, and wrong where neighbouring
experts are hot together: they are all on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from coterie.placement.base import Load, Plan, planners
from coterie.placement.objective import PRICES_HINT, Objective
from coterie.placement.planning.packing import living_ranks, plan_for_living
from coterie.registry import needs
from coterie.types import Placement, Topology


@planners.register("linear")
@dataclass(frozen=True, slots=True)
class Linear:
    """Experts in order."""

    objective: Objective = needs(PRICES_HINT)

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        started = perf_counter()
        problem = self.objective.problem(load, topology, current, shares)
        slots = living_ranks(problem) * current.slots_per_rank
        row = np.arange(slots, dtype=np.int32) % current.num_experts
        return plan_for_living(problem, np.tile(row, (current.num_layers, 1)), started, "experts are in order already")
