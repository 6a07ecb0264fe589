"""State of the search of a layer, and the functions that change it; prices that all searches of layers share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.placement.objective import Problem
from coterie.placement.objective._arrays import Array, copy_row
from coterie.placement.objective.flows.chains import NONE

Ints = NDArray[np.int32]

EMPTY = NONE
"""Mark of a slot that holds a duplicate of another slot on its rank; the repair fills such slots first."""

FAR = 1.7
"""Number of moves that a move over a link slower than the fastest counts as. It only steers the search; the objective
charges the full time. Steering by the full time (9 times as long between nodes) made a third more moves on drifted
loads."""

TINY = 1e-9
"""Excess that is ignored, as a share of the target."""


THOROUGH = 1024
"""Largest slots x ranks of a layer that is searched in several ways; a larger layer would take seconds."""


class Prices(NamedTuple):
    """Prices of the objective, for compiled loops."""

    horizon: float
    exposed: float
    move_price: float
    least: float
    """Least gain of an action, as a share of the objective."""
    fastest: float
    """Seconds to load an expert over the fastest link."""

    @classmethod
    def of(cls, problem: Problem, least: float = 0.0) -> Prices:
        goal = problem.objective
        return cls(*map(float, (goal.horizon, goal.exposed, goal.move_price, least, goal.link_s(problem.topology))))


@helper()
def movement(arrivals: Array, prices: Prices) -> float:
    """Return the movement cost of the objective; `arrivals` [rank] are the seconds of loading."""
    slowest = total = 0.0
    for seconds in arrivals:
        slowest = max(slowest, seconds)
        total += seconds
    return prices.exposed * (slowest + prices.move_price * total)


@helper()
def is_small(slots: int, ranks: int) -> bool:
    """Return whether a layer is small enough to be searched in several ways."""
    return slots * ranks <= THOROUGH


class MeanLayer(NamedTuple):
    """Input of the search of a layer."""

    unit: Array
    """[rank, expert] seconds of all of the expert's tokens."""
    share: Array
    """[replicas - 1, expert] part of `unit` that each replica takes."""
    load_in: Array
    """[rank, expert] seconds to load the expert; 0 if the rank holds it."""
    alive: NDArray[np.bool_]
    """[rank] whether the rank is alive."""
    uniform_ranks: bool
    """Whether every expert takes the same time on all living ranks."""
    floor: float
    """Seconds of a step below which a faster placement counts as no gain."""


class MeanState(NamedTuple):
    """State of the search of a layer."""

    row: NDArray[np.int64]
    """[slot] expert in the slot."""
    held: NDArray[np.int16]
    """[rank, expert] slot of the rank that holds the expert, or -1."""
    fees: Array
    """[rank, expert] moves that loading the expert counts as: 0 if the rank held it at the start, 1 or FAR."""
    copies: NDArray[np.int64]
    """[expert] replicas on living ranks."""
    part: Array
    """[expert] part of `unit` that each replica takes now."""
    busy: Array
    """[rank] seconds of the rank."""
    own: Array
    """[slot] seconds of the slot's expert."""
    fee: Array
    """[slot] `fees` of the slot's expert; infinite on dead ranks."""


class Scratch(NamedTuple):
    """Working arrays, refilled for each rank that is examined."""

    back: Array
    """[slot] seconds of the slot's expert on the examined rank."""
    back_fee: Array
    """[slot] change in moves if the slot's expert went to the examined rank; infinite if the rank already holds it."""
    relief: Array
    """[expert] excess removed by one more replica."""
    burden: Array
    """[expert] excess added by one replica less."""
    order: NDArray[np.int64]
    """[rank] ranks by ascending seconds."""
    worth: Array
    """[slot of a rank] excess removed per move by a swap with the slot."""
    stuck: NDArray[np.bool_]
    """[rank] whether no action helps the rank."""


class Action(NamedTuple):
    """A swap of the experts of slots `first` and `second`; if `first` is -1, slot `second` is given to `expert`."""

    score: float
    first: int
    second: int
    expert: int


class Best(NamedTuple):
    """Placements found by the search of a layer, each better than the one before."""

    rows: NDArray[np.int16]
    """[step, slot] expert in each slot."""
    totals: Array
    """[step] objective, in seconds."""
    seconds: Array
    """[step] load seconds of all moves."""
    moves: NDArray[np.int64]
    """[step] number of moves."""
    kept: NDArray[np.int64]
    """[1] number of steps."""
    trail: bool
    """Whether all steps are kept, rather than the best alone."""


@helper()
def part_of(share: Array, expert: int, replicas: int) -> float:
    last = share.shape[0] - 1
    return float(share[replicas - 1 if replicas <= last else last, expert])


@helper()
def start(layer: MeanLayer, state: MeanState, base: NDArray[np.int64], row: Ints, fastest: float) -> None:
    """Fill `fees` from a row [slot], and `base` [slot] with the row in which duplicates on a rank are EMPTY."""
    ranks, experts = layer.unit.shape
    per_rank = len(row) // ranks
    for rank in range(ranks):
        for expert in range(experts):
            state.fees[rank, expert] = FAR if layer.load_in[rank, expert] > fastest else 1.0
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = row[slot]
            base[slot], state.own[slot], state.fee[slot] = expert, 0.0, np.inf
            if layer.alive[rank]:
                if state.fees[rank, expert] == 0.0:
                    base[slot] = EMPTY
                state.fees[rank, expert] = 0.0


@helper()
def refresh(layer: MeanLayer, state: MeanState, rank: int) -> None:
    """Recompute a rank's times and fees from its slots, so that rounding errors do not accumulate."""
    per_rank = len(state.row) // len(state.busy)
    total = 0.0
    if layer.alive[rank]:
        for slot in range(rank * per_rank, (rank + 1) * per_rank):
            expert = state.row[slot]
            if expert != EMPTY:
                state.own[slot] = layer.unit[rank, expert] * state.part[expert]
                state.fee[slot] = state.fees[rank, expert]
                total += state.own[slot]
    state.busy[rank] = total


@helper()
def apply(layer: MeanLayer, state: MeanState, first: int, second: int, expert: int) -> None:
    """Swap the experts of slots `first` and `second`; if `first` is NONE, give slot `second` to `expert`."""
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
        refresh(layer, state, rank)
        refresh(layer, state, other)
        return
    state.copies[expert] += 1
    state.part[expert] = part_of(layer.share, expert, state.copies[expert])
    if was != EMPTY:
        state.copies[was] -= 1
        state.part[was] = part_of(layer.share, was, state.copies[was])
    for other in range(len(state.busy)):
        if state.held[other, expert] >= 0 or (was != EMPTY and state.held[other, was] >= 0):
            refresh(layer, state, other)


@helper()
def restore(layer: MeanLayer, state: MeanState, row: NDArray[np.int64]) -> None:
    """Set the state to a given row of experts [slot]."""
    hold(layer.alive, row, state.row, state.held, state.copies)
    for expert in range(len(state.part)):
        replicas = state.copies[expert]
        state.part[expert] = part_of(layer.share, expert, replicas) if replicas else 0.0
    for rank in range(len(state.busy)):
        refresh(layer, state, rank)


@helper()
def hold(
    alive: NDArray[np.bool_],
    row: NDArray[np.int64],
    to: NDArray[np.int64],
    held: NDArray[np.int16],
    copies: NDArray[np.int64],
) -> None:
    """Copy a row of experts [slot] `to` a state; fill its `held` [rank, expert] slots and `copies` [expert]."""
    copy_row(to, row)
    held[:] = -1
    copies[:] = 0
    for slot in range(len(row)):
        rank = slot // (len(row) // len(alive))
        if row[slot] != EMPTY and alive[rank]:
            copies[row[slot]] += 1
            held[rank, row[slot]] = slot
