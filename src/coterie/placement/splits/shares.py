"""Shares of an expert's tokens for each of its replicas. New shares move no weights, so they are tried before moves.

* ``equal``: every replica computes the same share. This is the only split of vLLM (a hash of the token's index).
* ``weighted``: fixed weights, chosen by the planner and kept until the next plan. Works in any engine whose dispatch
  draws a replica by weight.
* ``optimal``: shares solved again for every window (or batch), as in DeepSeek's LPLB and SGLang's
  ``--ep-dispatch-algorithm lp``. If a load has scenarios, the shares are solved for each scenario
  (:mod:`~coterie.placement.objective.flows.splitting`), and a plan carries the shares of the mean step.

Weighted and optimal shares come from the same solver and differ in the window: weighted shares are optimal for the
window they were fitted on. On the next window they are worse than optimal, and can be worse than equal.

The solver minimises a cost that is affine in the share. If `touch_s` is 0, this is exactly the objective. If it is
above 0, a replica also reads the expert's weights in every step that uses the replica. A straight line through the cost
of a sole replica and of one of two equal replicas approximates this cost; it is close unless a step has few tokens for
the replica. The shares are then near the optimum, and never worse than equal shares.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import check
from coterie.placement.objective import Problem
from coterie.placement.objective._arrays import Array, copy_row
from coterie.placement.objective.flows.chains import Indices, new_split
from coterie.placement.objective.flows.splitting import MOST_FIXED, split_best


class Affine(NamedTuple):
    """Affine cost of a slot, in seconds: ``unit x (share + fixed)``."""

    unit: Array
    """[layer, rank, expert] seconds of the part that grows with the share, at a share of 1."""
    fixed: Array
    """[layer, expert] cost of a slot at a share of 0, as a multiple of `unit`."""


def optimal_shares(problem: Problem, slot_experts: NDArray[np.integer]) -> Array:
    """Return shares [layer, slot] that minimise the slowest rank of each layer; exact if the cost is affine.

    The solver starts from equal shares and shifts tokens along the shortest chains of replicas, so that few shares
    change. If a rank has several slots of an expert, the last of them computes all of the rank's share. Slots of dead
    ranks have share 0, even if the expert has no slot elsewhere.
    """
    rows = np.ascontiguousarray(slot_experts, np.int64)
    check(
        rows.shape == problem.current.slot_experts.shape,
        f"slot_experts has shape {rows.shape}; expected {problem.current.slot_experts.shape}",
    )
    shares = np.zeros(rows.shape)
    _optimal_shares(rows, problem.alive, problem.topology.rank_speeds, *affine(problem), shares)
    if problem.objective.touch_s:
        equal = problem.equal_shares(rows)
        worse = problem.rank_s(rows, shares).max(axis=1) >= problem.rank_s(rows, equal).max(axis=1)
        shares[worse] = equal[worse]
    return shares


def affine(problem: Problem) -> Affine:
    """Return the cost of a share as a straight line through a sole replica and one of two equal replicas."""
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
        copy_row(shares[layer], split.share)
