"""The heuristic published with latency-optimal load balancing: swaps of two experts, each paid for by itself.

In each layer the busiest and the idlest rank swap the two experts that bring both nearest to their mean. The swap is
kept if it lowers the objective, movement included; otherwise it is rolled back and the layer is done. The description
leaves ties and this choice open. All layers are scored together, one swap each.

Right where few moves are wanted and one swap after the other lowers the busiest rank. Wrong where that takes several at
once, or a third rank, and where replicas would help: `latency_optimal` looks for these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check
from coterie.placement.base import Load, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.planning.packing import PlansAnew, Slots
from coterie.registry import needs


@planners.register("swaps")
@dataclass(frozen=True, slots=True)
class Swaps(PlansAnew):
    """Swap experts of the busiest and the idlest rank while that pays; replicas stay as many as they are."""

    objective: Objective = needs(PRICES_HINT)
    same: ClassVar[str] = "no swap of the busiest and the idlest rank pays for its moves"

    def slots_for(self, problem: Problem, load: Load) -> Slots:  # noqa: ARG002
        check(problem.alive.all(), "a rank is gone, and swaps cannot replace the experts that it held")
        slots, replicas = problem.current.slot_experts.copy(), problem.current.replicas
        cost, improving = problem.score(slots).total_s, np.ones(len(slots), bool)
        while improving.any():
            swapped, busy_s = slots.copy(), problem.rank_s(slots)
            for layer in np.flatnonzero(improving):
                unit = problem.unit[layer, busy_s[layer].argmax()] / replicas[layer]
                _swap(swapped[layer].reshape(problem.current.num_ranks, -1), busy_s[layer], unit)
            after = problem.score(swapped).total_s
            improving &= after < cost
            slots[improving], cost[improving] = swapped[improving], after[improving]
        return slots


def _swap(held: NDArray[np.int32], busy_s: NDArray[np.float64], unit: NDArray[np.float64]) -> None:
    """Swap two experts of the busiest and the idlest rank in `held` [rank, slot]; `unit` [expert] is seconds of a slot.

    Neither rank gets an expert that it has: if no pair is left, nothing is swapped.
    """
    busiest, idlest = held[busy_s.argmax()], held[busy_s.argmin()]
    off = np.abs(unit[busiest][:, None] - unit[idlest] - np.ptp(busy_s) / 2)
    off[np.isin(busiest, idlest)[:, None] | np.isin(idlest, busiest)] = np.inf
    give, take = np.unravel_index(off.argmin(), off.shape)
    if np.isfinite(off[give, take]):
        busiest[give], idlest[take] = idlest[take], busiest[give]
