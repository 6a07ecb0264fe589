"""Products of a vector with many rows.

Those of a fleet are kept in 8 bits: memory decides how long a product takes, and this is a quarter of it.
Such rows hold numbers in 0 … 1 as 0 … 255. Over thousands of cells a product is off by about a part in ten thousand,
far less than what workers differ by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit

SCALE = np.float32(255.0)
"""What 1 is in a row."""


@njit(fastmath=True)
def products(
    rows: NDArray[np.uint8] | NDArray[np.float32], vector: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """out[row] = row · vector as the rows are; four rows share each reading of the vector."""
    count, cells = rows.shape
    whole = count - count % 4
    for row in range(0, whole, 4):
        a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for cell in range(cells):
            value = vector[cell]
            a += np.float32(rows[row, cell]) * value
            b += np.float32(rows[row + 1, cell]) * value
            c += np.float32(rows[row + 2, cell]) * value
            d += np.float32(rows[row + 3, cell]) * value
        out[row], out[row + 1], out[row + 2], out[row + 3] = a, b, c, d
    for row in range(whole, count):
        a = np.float32(0.0)
        for cell in range(cells):
            a += np.float32(rows[row, cell]) * vector[cell]
        out[row] = a
