"""Rows of a program for HiGHS."""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np
from scipy.sparse import coo_array

from coterie.placement.planning.milp.layer import Array, Index

INF = highspy.kHighsInf


class Rows:
    """Rows of the program as they are collected."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Index, Index, Array]] = []
        self._bounds: list[tuple[Array, Array]] = []

    def add(self, row: Index, column: Index, value: Array, low: Array | float, high: Array | float, rows: int) -> None:
        """`rows` rows at once; `row` counts from 0 among them."""
        self._parts.append((row + self.count, column, np.broadcast_to(value, column.shape)))
        self._bounds.append((np.broadcast_to(low, rows).astype(float), np.broadcast_to(high, rows).astype(float)))
        self.count += rows

    def into(self, lp: Any, columns: int) -> None:
        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = coo_array((value, (row, column)), (self.count, columns)).tocsc()
        lp.num_row_, lp.num_col_ = self.count, columns
        lp.row_lower_, lp.row_upper_ = (np.concatenate(side) for side in zip(*self._bounds, strict=True))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = matrix.indptr
        lp.a_matrix_.index_ = matrix.indices
        lp.a_matrix_.value_ = matrix.data
