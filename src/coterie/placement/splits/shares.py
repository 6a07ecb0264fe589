"""How an expert's replicas share its tokens: a decision that moves nothing, so it is the first to try.

* ``equal``: every replica takes as much. vLLM does this (a hash of the token's index), and it is all it can do.
* ``weighted``: fixed weights, chosen when planning and kept until the next plan. Any engine whose dispatch draws a
  replica by a weight can do this.
* ``optimal``: shares solved again for every window (or batch), as DeepSeek's LPLB and SGLang's
  ``--ep-dispatch-algorithm lp`` do. Where a load has scenarios, for each of them:
  :mod:`~coterie.placement.objective.flows.splitting`; the shares of a plan are then those of the mean step.

Weighted and optimal are the same numbers, from different windows: weights are what was best for the window they were
fitted on. On the next one they are worse than optimal, and may be worse than equal.

The optimum is of a price that is affine in the share. With `touch_s` at 0 that is the objective's own. Above 0 a
replica also streams the expert's weights in the steps that touch it; the line through what one and each of two replicas
take stands for that, which is close unless a step has few tokens for the replica. A split is then near the optimum, and
never worse than equal shares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError
from coterie.placement.objective import Problem
from coterie.placement.objective.flows.chains import Array, Indices, new_split
from coterie.placement.objective.flows.splitting import MOST_FIXED, split_best


class Affine(NamedTuple):
    """Seconds of slots: ``unit x (share + fixed)``."""

    unit: Array
    """[layer, rank, expert] seconds of all its tokens."""
    fixed: Array
    """[layer, expert] of that, for the slot itself."""


def optimal_shares(problem: Problem, slot_experts: NDArray[np.integer]) -> Array:
    """[layer, slot] shares with which the slowest rank of each layer is fastest; exact where the price is affine.

    They start from equal ones and differ as little as shortest chains of replicas allow. Of an expert's slots on one
    rank the last computes all; slots of ranks that are gone nothing, and neither does an expert that is only there.
    """
    rows = np.ascontiguousarray(slot_experts, np.int64)
    if rows.shape != problem.current.slot_experts.shape:
        raise ConfigError(f"slot_experts has shape {rows.shape}; expected {problem.current.slot_experts.shape}")
    shares = np.zeros(rows.shape)
    _optimal_shares(rows, problem.alive, problem.topology.rank_speeds, *affine(problem), shares)
    if problem.objective.touch_s:
        equal = problem.equal_shares(rows)
        worse = problem.rank_s(rows, shares).max(axis=1) >= problem.rank_s(rows, equal).max(axis=1)
        shares[worse] = equal[worse]
    return shares


def affine(problem: Problem) -> Affine:
    """The price of a share as a straight line: through one replica and each of two."""
    layers, replicas, experts = problem.share.shape
    if not problem.objective.touch_s or replicas < 2:
        return Affine(problem.unit, np.zeros((layers, experts)))
    still = np.clip(2.0 * problem.share[:, 1] - 1.0, 0.0, MOST_FIXED)
    return Affine(problem.unit * (1.0 - still)[:, None, :], still / (1.0 - still))


@njit()
def _optimal_shares(
    rows: Indices, alive: NDArray[np.bool_], speeds: Array, unit: Array, fixed: Array, shares: Array
) -> None:
    layers, slots = rows.shape
    ranks, experts = unit.shape[1:]
    for layer in range(layers):
        split, search = new_split(slots, experts, ranks), np.empty((4, ranks), np.int64)
        split_best(rows[layer], alive, speeds, unit[layer], fixed[layer], split, search)
        for slot in range(slots):  # a whole row at once would compile a shape check: 4 s
            shares[layer, slot] = split.share[slot]
