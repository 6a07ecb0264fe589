"""HiGHS: how it is set up, run so that Ctrl-C and a look at its progress can stop it, and asked for a small program."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple

import highspy
import numpy as np

from coterie.placement.planning.milp.program import INF, Array, Index, Rows

TELL_EVERY_S = 0.5


class Search(NamedTuple):
    """When a search may end."""

    gap_s: float
    """Between what was found and the bound, in the unit of the objective."""
    time_limit_s: float
    threads: int


def make_solver(search: Search) -> Any:
    """A solver with these limits; the same every time."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", search.threads)
    solver.setOptionValue("random_seed", 0)
    for tolerance in ("primal_feasibility_tolerance", "mip_feasibility_tolerance"):
        solver.setOptionValue(tolerance, 1e-8)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("time_limit", search.time_limit_s)
    return solver


def run_watched(solver: Any, calls: Any, look: Callable[[Any], bool]) -> None:
    """Run it, with a look now and then at where it is; a look that says False stops it.

    What a look raises, and Ctrl-C, also stop it and are raised when it has ended: nothing may unwind through the
    solver. It runs in a thread of its own because Ctrl-C goes to the first one, which would not heed it inside HiGHS.
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
            ended.wait()  # not join: interrupted, it takes the thread for ended (Python 3.11)
        except BaseException as error:
            failures.append(error)
    running.join()
    calls.unsubscribe(watch)
    if failures:
        raise failures[0]


class Solution(NamedTuple):
    """The best that was found of a program, and what none goes below."""

    values: Array
    """[column]"""
    objective: float
    bound: float


def minimise(rows: Rows, cost: Array, upper: Array, whole: Index, search: Search, start: Array) -> Solution:
    """Minimise cost x columns of at least 0, some of them whole numbers; `start` [column] is feasible and known.

    What was found when the time is up is returned, at worst `start`.
    """
    lp = highspy.HighsLp()
    columns = len(cost)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(columns), upper
    rows.into(lp, columns)
    solver = make_solver(search)
    solver.setOptionValue("mip_abs_gap", search.gap_s)
    solver.passModel(lp)
    integers = whole.astype(np.int32)
    solver.changeColsIntegrality(len(integers), integers, np.full(len(integers), highspy.HighsVarType.kInteger))
    solver.setSolution(columns, np.arange(columns, dtype=np.int32), start)
    began = perf_counter()
    run_watched(solver, solver.cbMipInterrupt, lambda _: perf_counter() - began < search.time_limit_s)
    info = solver.getInfo()
    known = float(cost @ start)
    bound = float(info.mip_dual_bound) if np.isfinite(info.mip_dual_bound) else -INF
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = np.array(solver.getSolution().col_value)
        if float(cost @ values) < known:
            return Solution(values, float(cost @ values), min(bound, float(cost @ values)))
    return Solution(start, known, min(bound, known))
