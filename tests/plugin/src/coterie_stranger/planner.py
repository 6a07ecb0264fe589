"""In each layer, one expert of the busiest rank changes places with one of the idlest, where that pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie import Load, Placement, Topology
from coterie.errors import ConfigError
from coterie.placement import Objective, Plan
from coterie.registry import needs


@dataclass(frozen=True, slots=True)
class OneSwap:
    objective: Objective = needs("the prices to plan by")

    def plan(
        self, load: Load, topology: Topology, current: Placement, shares: NDArray[np.floating] | None = None
    ) -> Plan:
        problem = self.objective.problem(load, topology, current, shares)
        if not problem.alive.all():
            raise ConfigError("a rank is gone, and stranger_one_swap does not know how to plan without it")
        if shares is not None:
            return problem.keep("the shares in force are not equal")
        slots, per_rank = current.slot_experts.copy(), current.slots_per_rank
        before = problem.score(slots).total_s
        busy = problem.rank_s(slots)
        for layer in range(len(slots)):
            hot, cold = int(busy[layer].argmax()), int(busy[layer].argmin())
            mine = slice(hot * per_rank, (hot + 1) * per_rank)
            theirs = slice(cold * per_rank, (cold + 1) * per_rank)
            gives = mine.start + int(load.tokens[layer, slots[layer, mine]].argmax())
            takes = theirs.start + int(load.tokens[layer, slots[layer, theirs]].argmin())
            one, other = slots[layer, gives], slots[layer, takes]
            if one in slots[layer, theirs] or other in slots[layer, mine]:
                continue
            slots[layer, gives], slots[layer, takes] = other, one
        worse = problem.score(slots).total_s >= before
        slots[worse] = current.slot_experts[worse]
        plan = problem.plan(slots)
        return plan if len(plan.moves) else problem.keep("no swap of two experts pays")
