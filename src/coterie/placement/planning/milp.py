"""Integer programs for HiGHS: constraint rows, and a run with limits that Ctrl-C or a callback ends."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from coterie.placement.objective._arrays import Array

Index = NDArray[np.int64]
INF = highspy.kHighsInf
TELL_EVERY_S = 0.5


class ConstraintRows:
    """Collected constraint rows of a program."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Index, Index, Array]] = []
        self._bounds: list[tuple[Array, Array]] = []

    def add(
        self, row: Index, column: Index, value: Array | float, low: Array | float, high: Array | float, rows: int
    ) -> None:
        """Add `rows` rows with entries (row, column, value) and bounds; `row` counts from 0 among the new rows."""
        self._parts.append((row + self.count, column, np.broadcast_to(value, column.shape)))
        self._bounds.append((np.broadcast_to(low, rows).astype(float), np.broadcast_to(high, rows).astype(float)))
        self.count += rows

    def lp(self, cost: Array, upper: Array) -> Any:
        """Return the HiGHS model that minimises cost x columns, with columns from 0 to `upper`."""
        from scipy.sparse import coo_array  # slow to import

        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = coo_array((value, (row, column)), (self.count, len(cost))).tocsc()
        lp = highspy.HighsLp()
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(len(cost)), upper
        lp.num_row_, lp.num_col_ = matrix.shape
        lp.row_lower_, lp.row_upper_ = (np.concatenate(side) for side in zip(*self._bounds, strict=True))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        return lp


class Solution(NamedTuple):
    """Best solution found for a program, and a lower bound on its objective."""

    values: Array | None
    """[column] values; None if the time was too short for any."""
    bound: float


def minimise(
    rows: ConstraintRows,
    cost: Array,
    upper: Array,
    whole: int,
    start: Array,
    *,
    gap: float,
    time_limit_s: float,
    tell: Callable[[float, float], bool] = lambda *_: True,
) -> Solution:
    """Minimise cost x columns with columns of at least 0, of which the first `whole` are integers.

    `start` [integer column] begins a feasible solution. The search ends at this `gap` between solution and bound, at
    the time limit, or once `tell`, which is given both about twice a second, returns False.
    """
    solver, began, reached = highspy.Highs(), perf_counter(), [INF, -INF]
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "primal_feasibility_tolerance": 1e-8,
        "mip_feasibility_tolerance": 1e-8,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": gap,
        "time_limit": time_limit_s,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(rows.lp(cost, upper))
    columns = np.arange(whole, dtype=np.int32)
    solver.changeColsIntegrality(whole, columns, np.full(whole, highspy.HighsVarType.kInteger))
    solver.setSolution(whole, columns, start)

    def note(event: Any) -> None:
        reached[:] = event.data_out.mip_primal_bound, event.data_out.mip_dual_bound
        if ending.is_set():
            event.interrupt()

    ending, ended, failures = Event(), Event(), list[BaseException]()

    def work() -> None:
        try:
            solver.run()
        finally:
            ended.set()

    solver.cbMipInterrupt.subscribe(note)
    Thread(target=work, name="highs").start()  # Ctrl-C goes to the main thread, which would not react inside HiGHS
    while not ended.is_set():  # whatever happens here: HiGHS must have ended before its objects go
        try:
            if not ended.wait(TELL_EVERY_S) and (perf_counter() - began > time_limit_s or not tell(*reached)):
                ending.set()  # HiGHS looks at its limit too rarely
        except BaseException as error:
            failures.append(error)
            ending.set()
    if failures:
        raise failures[0]
    info = solver.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Solution(np.array(solver.getSolution().col_value) if feasible else None, float(info.mip_dual_bound))
