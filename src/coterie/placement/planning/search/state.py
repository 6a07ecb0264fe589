"""Where the search of a layer stands, and what changes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective.flows.chains import NONE

Array = NDArray[np.float64]
Ints = NDArray[np.int32]

EMPTY = NONE
"""Expert of a slot that holds a second copy of what its rank has: it is given something else before all else."""

FAR = 1.7
"""Moves that one over a slower link than the fastest counts as. It steers only: the objective charges the full time,
but a search steered by that (9 times as long across nodes) made a third more moves on drifted loads."""

TINY = 1e-9
"""Share of the target: excess below this is ignored."""


class MeanLayer(NamedTuple):
    """What the search of a layer is given."""

    unit: Array
    """[rank, expert] seconds of all of the expert's tokens."""
    share: Array
    """[replicas - 1, expert] of `unit` each replica takes."""
    load_in: Array
    """[rank, expert] seconds to load; 0 where the rank has it."""
    alive: NDArray[np.bool_]
    """[rank]"""
    uniform_ranks: bool
    """Whether every expert takes the same time on all living ranks."""


class MeanState(NamedTuple):
    """Where the search of a layer stands."""

    row: NDArray[np.int64]
    """[slot] expert."""
    held: NDArray[np.int16]
    """[rank, expert] slot that holds it, or -1."""
    home: NDArray[np.bool_]
    """[rank, expert] whether the rank had it at the start: it costs no move."""
    copies: NDArray[np.int64]
    """[expert] replicas on living ranks."""
    part: Array
    """[expert] of `unit` that each replica takes now."""
    busy: Array
    """[rank] seconds."""
    own: Array
    """[slot] seconds of what it holds."""
    fee: Array
    """[slot] moves that holding it costs, slow links counting for more; infinite on ranks that are gone."""


class Scratch(NamedTuple):
    """Working arrays, refilled for each rank that is examined."""

    back: Array
    """[slot] seconds of its expert on the rank that is looked at."""
    back_fee: Array
    """[slot] moves if its expert went there; infinite where it cannot."""
    relief: Array
    """[expert] excess that goes away with one replica more."""
    burden: Array
    """[expert] excess that comes with one replica less."""
    order: NDArray[np.int64]
    """[rank]"""
    worth: Array
    """[slot of a rank] excess that a swap with it takes away for each move."""
    stuck: NDArray[np.bool_]
    """[rank] whether nothing helps it."""


class Action(NamedTuple):
    """Slots `first` and `second` change places; or, `first` being -1, `second` is given to `expert`."""

    score: float
    first: int
    second: int
    expert: int


class MeanPrices(NamedTuple):
    """Prices of the objective for one layer."""

    floor: float
    """Seconds below which nothing is gained."""
    horizon: float
    exposed: float
    move_price: float
    fastest: float
    """Seconds of a load over the fastest link."""


class Best(NamedTuple):
    """What a layer's search found, each better than the one before; without a trail only the last is kept."""

    rows: NDArray[np.int16]
    """[step, slot]"""
    totals: Array
    seconds: Array
    moves: NDArray[np.int64]
    kept: NDArray[np.int64]
    """[1] steps."""
    trail: bool


@helper()
def slowest(busy: Array) -> float:
    most = busy[0]
    for rank in range(1, len(busy)):
        most = max(most, busy[rank])
    return float(most)


@helper()
def part_of(share: Array, expert: int, replicas: int) -> float:
    last = share.shape[0] - 1
    return float(share[replicas - 1 if replicas <= last else last, expert])


@helper()
def fee_of(load_in: Array, home: NDArray[np.bool_], rank: int, expert: int, fastest: float) -> float:
    if home[rank, expert]:
        return 0.0
    return FAR if load_in[rank, expert] > fastest else 1.0


@helper()
def start(layer: MeanLayer, state: MeanState, base: NDArray[np.int64], row: Ints) -> None:
    """Homes as they are, and a `base` in which second copies on a rank are EMPTY slots."""
    ranks, experts = layer.unit.shape
    per_rank = len(row) // ranks
    for rank in range(ranks):
        for expert in range(experts):
            state.home[rank, expert] = False
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            base[slot], state.own[slot], state.fee[slot] = expert, 0.0, np.inf
            if layer.alive[rank]:
                if state.home[rank, expert]:
                    base[slot] = EMPTY
                state.home[rank, expert] = True


@helper()
def refresh(layer: MeanLayer, state: MeanState, rank: int, fastest: float) -> None:
    """Recompute a rank's times and fees from its slots: rounding errors do not add up."""
    unit, load_in, row, home, part, own, fee = (
        layer.unit,
        layer.load_in,
        state.row,
        state.home,
        state.part,
        state.own,
        state.fee,
    )
    per_rank = len(row) // len(state.busy)
    total = 0.0
    if layer.alive[rank]:
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            if expert != EMPTY:
                own[slot] = unit[rank, expert] * part[expert]
                fee[slot] = fee_of(load_in, home, rank, expert, fastest)
                total += own[slot]
    state.busy[rank] = total


@helper()
def apply(layer: MeanLayer, state: MeanState, first: int, second: int, expert: int, fastest: float) -> None:
    per_rank = len(state.row) // len(state.busy)
    rank, was = second // per_rank, state.row[second]
    if first >= 0:
        other, expert = first // per_rank, state.row[first]
        state.held[other, expert] = -1
        state.held[other, was] = first
        state.row[first] = was
    if was != EMPTY:
        state.held[rank, was] = -1
    state.held[rank, expert] = second
    state.row[second] = expert
    if first >= 0:
        refresh(layer, state, rank, fastest)
        refresh(layer, state, other, fastest)
        return
    state.copies[expert] += 1
    state.part[expert] = part_of(layer.share, expert, state.copies[expert])
    if was != EMPTY:
        state.copies[was] -= 1
        state.part[was] = part_of(layer.share, was, state.copies[was])
    for other in range(len(state.busy)):
        if state.held[other, expert] >= 0 or (was != EMPTY and state.held[other, was] >= 0):
            refresh(layer, state, other, fastest)


@helper()
def restore(layer: MeanLayer, state: MeanState, row: NDArray[np.int64], fastest: float) -> None:
    """To a given state of the slots."""
    ranks, experts = layer.unit.shape
    per_rank = len(row) // ranks
    for expert in range(experts):
        state.copies[expert] = 0
    for rank in range(ranks):
        for expert in range(experts):
            state.held[rank, expert] = -1
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            state.row[slot] = expert
            if expert != EMPTY and layer.alive[rank]:
                state.copies[expert] += 1
                state.held[rank, expert] = slot
    for expert in range(experts):
        replicas = state.copies[expert]
        state.part[expert] = part_of(layer.share, expert, replicas) if replicas else 0.0
    for rank in range(ranks):
        refresh(layer, state, rank, fastest)


@helper()
def save(state: MeanState, row: NDArray[np.int64]) -> None:
    for slot in range(len(row)):
        row[slot] = state.row[slot]
