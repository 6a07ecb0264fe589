"""Run HiGHS: on any small program; on a layer's program with root cuts, then branch and bound; on shares.

Ctrl-C and the progress callback can stop a run.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from coterie.placement.objective._arrays import Array
from coterie.placement.planning.milp.program import (
    INF,
    ConstraintRows,
    Index,
    LayerSolution,
    Mask,
    Program,
    ProgramLayer,
)

TELL_EVERY_S = 0.5


class Search(NamedTuple):
    """Limits of a search."""

    gap_s: float
    """Gap between solution and bound at which the search ends, in the unit of the objective."""
    time_limit_s: float
    threads: int


def make_solver(search: Search, lp: Any) -> Any:
    """Make a solver of a linear program with these limits and a fixed random seed."""
    solver = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": search.threads,
        "random_seed": 0,
        "primal_feasibility_tolerance": 1e-8,
        "mip_feasibility_tolerance": 1e-8,
        "mip_rel_gap": 0.0,
        "time_limit": search.time_limit_s,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    return solver


def run_watched(solver: Any, calls: Any, look: Callable[[Any], bool]) -> None:
    """Run the solver and call `look` from time to time; a result of False stops the solver.

    Exceptions of `look` and Ctrl-C also stop the solver, and are raised after it has ended, because no exception may
    unwind through HiGHS. The solver runs in its own thread: Ctrl-C goes to the main thread, which would not react to it
    inside HiGHS.
    """
    failures: list[BaseException] = []
    ended = Event()
    last = perf_counter()

    def watch(event: Any) -> None:
        nonlocal last
        going = not failures
        if going and perf_counter() - last < TELL_EVERY_S:
            return
        last = perf_counter()
        try:
            going = going and look(event.data_out)
        except BaseException as error:
            failures.append(error)
            going = False
        if not going:
            event.interrupt()

    def work() -> None:
        try:
            solver.run()
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    calls.subscribe(watch)
    running = Thread(target=work, name="highs")
    running.start()
    while not ended.is_set():
        try:
            ended.wait()  # not join(): if interrupted, it regards the thread as ended (Python 3.11)
        except BaseException as error:
            failures.append(error)
    running.join()
    calls.unsubscribe(watch)
    if failures:
        raise failures[0]


class Solution(NamedTuple):
    """Best solution found for a program, and a lower bound."""

    values: Array
    """[column] values."""
    bound: float


def minimise(rows: ConstraintRows, cost: Array, upper: Array, whole: Index, search: Search, start: Array) -> Solution:
    """Minimise cost x columns with columns of at least 0; columns `whole` are integers, and `start` is feasible.

    At the time limit the best solution so far is returned, at worst `start`.
    """
    solver = make_solver(search, rows.lp(cost, upper))
    _make_whole(solver, whole.astype(np.int32), search.gap_s)
    solver.setSolution(len(cost), np.arange(len(cost), dtype=np.int32), start)
    began = perf_counter()
    run_watched(solver, solver.cbMipInterrupt, lambda _: perf_counter() - began < search.time_limit_s)
    info = solver.getInfo()
    bound = float(info.mip_dual_bound) if np.isfinite(info.mip_dual_bound) else -INF
    best = start
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        best = min(start, np.array(solver.getSolution().col_value), key=lambda values: float(cost @ values))
    return Solution(best, min(bound, float(cost @ best)))


def _make_whole(solver: Any, columns: NDArray[np.int32], gap: float) -> None:
    """Make columns integers, and let the search end at this gap between solution and bound."""
    solver.changeColsIntegrality(len(columns), columns, np.full(len(columns), highspy.HighsVarType.kInteger))
    solver.setOptionValue("mip_abs_gap", gap)


Tell = Callable[[float, float], bool]
"""Callback that receives the best excess and its bound so far, in seconds; returning False stops the search."""

CUT_ROUNDS = 30


def solve(layer: ProgramLayer, split: str, start: LayerSolution, search: Search, tell: Tell) -> LayerSolution:
    """Return the best placement found, not worse than `start`, with a lower bound.

    If the solution has experts in lumped levels, these levels are split into single numbers of replicas and the program
    is solved again.
    """
    until = perf_counter() + search.time_limit_s
    going = True

    def tell_on(excess: float, bound: float) -> bool:
        nonlocal going
        going = going and tell(excess, bound)
        return going

    best, apart = start, np.zeros(layer.unit.shape[1], bool)
    while True:
        program = Program(layer, split, best.excess, apart)
        left = search._replace(time_limit_s=max(until - perf_counter(), 0.1))
        best, lumped = _solve_once(program, best, left, tell_on)
        closed = best.excess - best.bound <= search.gap_s
        if closed or not lumped.any() or not going or perf_counter() > until:
            return best
        apart = apart | lumped


def _solve_once(program: Program, start: LayerSolution, search: Search, tell: Tell) -> tuple[LayerSolution, Mask]:
    """Solve the program once; return the best placement and which experts [expert] are in lumped levels."""
    layer, began = program.layer, perf_counter()
    none = np.zeros(layer.unit.shape[1], bool)
    solver = make_solver(search, program.lp())

    def in_time(reached: float) -> bool:  # HiGHS checks its own time limit too rarely
        return perf_counter() - began < search.time_limit_s and tell(start.excess, reached)

    bound = _root(solver, program, start.excess - search.gap_s, in_time)
    best = start._replace(bound=min(max(bound, start.bound), start.excess))
    left = search.time_limit_s - (perf_counter() - began)
    if best.excess - best.bound <= search.gap_s or left <= 0 or not tell(best.excess, best.bound):
        return best, none
    whole = program.whole.astype(np.int32)
    _make_whole(solver, whole, search.gap_s / program.worth)
    solver.setOptionValue("time_limit", solver.getRunTime() + left)
    solver.setSolution(len(whole), whole, program.columns_of(start.holds)[whole])

    def look(data: Any) -> bool:
        return tell(data.mip_primal_bound * program.worth, max(data.mip_dual_bound * program.worth, best.bound))

    run_watched(solver, solver.cbMipInterrupt, look)
    info = solver.getInfo()
    bound = info.mip_dual_bound * program.worth
    if np.isfinite(bound):
        best = best._replace(bound=max(best.bound, bound - 1e-6 * abs(bound)))
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = np.array(solver.getSolution().col_value)
        none = program.lumped(values)
        holds = program.holds_of(values)
        shares = best_shares(layer, holds) if program.split == "optimal" else None
        excess = layer.excess(holds, shares)
        if excess < best.excess:
            best = LayerSolution(holds, shares, excess, best.bound)
    return best._replace(bound=min(best.bound, best.excess)), none


def _root(solver: Any, program: Program, target: float, tell: Callable[[float], bool]) -> float:
    """Return the bound of the relaxation in seconds, adding violated cuts while they help, up to `target`."""
    cuts = Cuts(program)
    bound = 0.0

    def look(_: Any) -> bool:
        return tell(bound)

    for _ in range(CUT_ROUNDS):
        run_watched(solver, solver.cbSimplexInterrupt, look)
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return bound
        reached = solver.getObjectiveValue() * program.worth
        bound = max(bound, reached - 1e-6 * abs(reached))
        rows = cuts.violated(np.array(solver.getSolution().col_value)) if len(cuts.must) else []
        if bound >= target or not rows:
            break
        for columns, values in rows:
            solver.addRow(1.0, INF, len(columns), columns.astype(np.int32), values)
    return bound


def best_shares(layer: ProgramLayer, holds: Mask) -> Array:
    """Return shares [rank, expert] that minimise the slowest rank of a placement, by a small linear program.

    It assumes that an expert's seconds are proportional to its share of tokens. This is wrong if replicas read weights;
    equal shares are returned if they are better.
    """
    rank, expert = np.nonzero(holds)
    ranks, experts = holds.shape
    scale = float(layer.work.sum() / layer.speeds.sum()) or 1.0
    rows, index = ConstraintRows(), np.arange(len(rank))
    rows.add(expert, index, 1.0, 1.0, 1.0, experts)
    rows.add(
        np.concatenate([rank, np.arange(ranks)]),
        np.concatenate([index, np.full(ranks, len(rank))]),
        np.concatenate([layer.unit[rank, expert] / scale, -np.ones(ranks)]),
        -INF,
        0.0,
        ranks,
    )
    lp = rows.lp(np.append(np.zeros(len(rank)), 1.0), np.append(np.ones(len(rank)), INF))
    solver = make_solver(Search(0.0, INF, 1), lp)
    solver.run()
    shares = np.zeros(holds.shape)
    shares[rank, expert] = np.clip(np.array(solver.getSolution().col_value)[:-1], 0.0, 1.0)
    return min(shares / shares.sum(axis=0), holds / holds.sum(axis=0), key=lambda split: layer.excess(holds, split))


# Cuts, rows that a relaxation violates: overloaded sets of ranks must give work away.

ALL_SETS = 10
"""Largest number of ranks for which all sets of ranks are considered for cuts; above, sets grown from single ranks."""
CUTS_A_ROUND, LEAST_VIOLATION = 24, 1e-3


class Cuts:
    """Sets of ranks that must give work away, and the rows that enforce it.

    If a set's own experts (held nowhere else) need more than the set's time, the excess can leave only through new
    replicas outside the set. The work of these replicas, each capped at the excess, adds up to at least the excess; and
    their number is at least the number of the largest replicas that would take the excess.
    """

    def __init__(self, program: Program) -> None:
        layer = program.layer
        self.program = program
        sets = _all_sets(len(layer.unit)) if len(layer.unit) <= ALL_SETS else _grown_sets(layer)
        own = np.asarray(~(layer.held.T[None, :, :] & ~sets[:, None, :]).any(axis=2))  # [set, expert] held nowhere else
        must = own @ program.work - program.slowest * (sets @ layer.speeds)
        useful = must > 1e-6 * program.scale
        self.sets, self.own, self.must = sets[useful], own[useful], must[useful]
        largest = np.zeros(layer.unit.shape)
        np.maximum.at(largest, (program.places.rank, program.places.expert), program.places.outward)
        self.fewest = np.array([self._fewest(which, largest) for which in range(len(self.must))])
        self._done: set[tuple[int, bool]] = set()

    def _fewest(self, which: int, largest: Array) -> int:
        """Return the least number of new replicas outside that the set needs."""
        outside, own = ~self.sets[which], self.own[which]
        leaving = -np.sort(-largest[np.ix_(outside, own)].ravel())
        if self.program.layer.share.shape[1] == 1:  # no replicas: as many whole experts come in as leave
            coming = np.sort(self.program.work[~own])
            pairs = min(len(leaving), len(coming))
            leaving = leaving[:pairs] - coming[:pairs]
        reached = np.cumsum(leaving) >= self.must[which] - 1e-9 * self.program.scale
        return int(np.argmax(reached)) + 1 if reached.any() else 1

    def violated(self, values: Array) -> list[tuple[Index, Array]]:
        """Return the most violated cuts as (columns, coefficients) of rows whose value must be at least 1."""
        program, places = self.program, self.program.places
        on = program.arriving[values[program.arriving] > 1e-9]
        leaving = self.own[:, places.expert[on]] & ~self.sets[:, places.rank[on]]
        capped = np.minimum(places.outward[on][None, :] / self.must[:, None], 1.0)
        short = np.array([1.0 - (capped * leaving) @ values[on], 1.0 - leaving @ values[on] / self.fewest])
        rows = []
        for which in np.argsort(-short, axis=None)[:CUTS_A_ROUND]:
            kind, member = divmod(int(which), len(self.must))
            if short[kind, member] < LEAST_VIOLATION:
                break
            if (member, bool(kind)) not in self._done:
                self._done.add((member, bool(kind)))
                rows.append(self._row(member, bool(kind)))
        return rows

    def _row(self, which: int, counted: bool) -> tuple[Index, Array]:
        arriving, places = self.program.arriving, self.program.places
        leaves = self.own[which, places.expert[arriving]] & ~self.sets[which, places.rank[arriving]]
        columns = arriving[leaves]
        capped = np.minimum(places.outward[columns] / self.must[which], 1.0)
        return columns, np.full(len(columns), 1.0 / self.fewest[which]) if counted else capped


def _all_sets(ranks: int) -> Mask:
    return (np.arange(1, 2**ranks - 1)[:, None] >> np.arange(ranks)[None, :] & 1).astype(bool)


def _grown_sets(layer: ProgramLayer) -> Mask:
    """Grow sets from each single rank, always adding the rank that raises the set's excess work most."""
    work, held = layer.work, layer.held
    even = work.sum() / layer.speeds.sum()
    sets: dict[bytes, Mask] = {}
    for start in range(len(held)):
        chosen = np.zeros(len(held), bool)
        chosen[start] = True
        while not chosen.all():
            sets[chosen.tobytes()] = chosen.copy()
            elsewhere = held[~chosen].sum(axis=0)  # [expert] ranks outside that hold it
            gain = (held & (elsewhere == 1)) @ work - even * layer.speeds
            chosen[int(np.argmax(np.where(chosen, -np.inf, gain)))] = True
    return np.array(list(sets.values()))
