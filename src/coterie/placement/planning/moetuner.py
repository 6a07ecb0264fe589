"""MoETuner's planner: keep tokens on the rank of their expert in the previous layer, with balanced ranks.

For each layer, a 0-1 program puts every expert on the rank whose experts of the previous layer send it the most tokens.
Ranks hold equal numbers of experts and at most `balance` more load than an even share. The first layer is packed by
load alone; sweeps after the first consider the next layer as well. The dependencies between layers, the balance and the
integer programs are MoETuner's. MoETuner first groups experts and then assigns the groups; here one program does both.

Right if a token continues from the rank of its last expert: one expert per token, and no return to a home rank. Wrong
with data-parallel attention, where every token returns after each layer; there it is no better than `popularity`. Wrong
also at top-k above 1, since a token can stay on only one of its k ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_not_negative, check_positive
from coterie.placement.base import Load, planners
from coterie.placement.objective import PRICES_HINT, Objective, Problem
from coterie.placement.objective._arrays import Array
from coterie.placement.planning.milp import INF, ConstraintRows, Index, minimise
from coterie.placement.planning.packing import PlansAnew, Slots, fill_spare, living_ranks, pack_even, room_of
from coterie.registry import needs

GAP = 1e-3
"""Gap between solution and bound, as a share of a layer's tokens, at which the solver stops."""


TRANSITIONS_HINT = "tokens that go from expert to expert, [layer - 1, expert, expert]: see docs/placement.md"
"""Error hint for planners that are made without transitions."""


@planners.register("moetuner")
@dataclass(frozen=True, slots=True, eq=False)
class MoeTuner(PlansAnew):
    """Place experts on the ranks of the previous layer's experts that send them tokens, by integer programs."""

    objective: Objective = needs(PRICES_HINT)
    transitions: NDArray[np.float64] = needs(TRANSITIONS_HINT)
    balance: float = 0.05
    """Share by which a rank may exceed an even load; more if packing heaviest first exceeds it too."""
    sweeps: int = 2
    """Number of passes over all layers; the first pass considers only the previous layer."""
    time_limit_s: float = 2.0
    """Most seconds per layer and sweep; after that the best solution so far is used."""

    def __post_init__(self) -> None:
        check_not_negative(balance=self.balance)
        check_at_least(1, sweeps=self.sweeps)
        check_positive(time_limit_s=self.time_limit_s)

    same: ClassVar[str] = "tokens stay where they are as it is"

    def slots_for(self, problem: Problem, load: Load) -> Slots:
        ranks, speeds = living_ranks(problem), problem.topology.rank_speeds[problem.alive]
        flows = self._flows(load)
        placed = np.stack([pack_even(row, speeds) for row in load.tokens])
        for sweep in range(self.sweeps):
            for layer in range(load.num_layers):
                near = np.zeros((load.num_experts, ranks))  # tokens shared with the neighbouring layers' experts
                if layer:
                    np.add.at(near.T, placed[layer - 1], flows[layer - 1])
                if sweep and layer + 1 < load.num_layers:
                    np.add.at(near.T, placed[layer + 1], flows[layer].T)
                if near.any():
                    placed[layer] = self._layer(near, load.tokens[layer], speeds, placed[layer])
        return fill_spare(placed, load.tokens, problem.current.slots_per_rank, ranks)

    def _flows(self, load: Load) -> Array:
        flows = np.asarray(self.transitions, np.float64)
        expected = (load.num_layers - 1, load.num_experts, load.num_experts)
        check(
            flows.shape == expected and np.isfinite(flows).all() and not (flows < 0).any(),
            f"transitions has shape {flows.shape}; it must be {expected}, finite and not negative",
        )
        return flows

    def _layer(self, near: Array, tokens: Array, speeds: Array, start: Index) -> Index:
        """Return the ranks [expert] that keep the most tokens on their rank; `start` [expert] is a feasible choice."""
        experts, ranks = near.shape
        column = np.arange(experts * ranks)
        expert, rank = column // ranks, column % ranks
        rows = ConstraintRows()
        rows.add(expert, column, 1.0, 1.0, 1.0, experts)
        room = room_of(experts, ranks).astype(float)
        rows.add(rank, column, 1.0, room, room, ranks)
        total = max(float(tokens.sum()), 1e-300)
        even = speeds / speeds.sum()
        known = np.bincount(start, tokens, ranks) / total
        rows.add(rank, column, tokens[expert] / total, -INF, np.maximum((1 + self.balance) * even, known), ranks)
        scale = max(float(near.sum()), 1e-300)
        values = np.zeros(len(column))
        values[np.arange(experts) * ranks + start] = 1.0
        cost, upper = -near.ravel() / scale, np.ones(len(column))
        solution = minimise(rows, cost, upper, len(column), values, gap=GAP, time_limit_s=self.time_limit_s)
        if solution.values is None:
            return start
        return np.asarray(solution.values.reshape(experts, ranks).argmax(axis=1), np.int64)
