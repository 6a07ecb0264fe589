"""Dense projections of a step: attention's, shared and dense MLPs, and the output head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.costs.roofline import roofline_us


@helper()
def gemm_work(tokens: Any, n: Any, k: Any) -> Any:
    """Bytes and flops of [tokens, k] x [k, n] in 16 bits."""
    return 2.0 * (n * k + tokens * (n + k)), 2.0 * tokens * n * k


@njit()
def dense_table(law: NDArray[np.float64], shapes: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Add to out [tokens] the microseconds of projections; shapes [projection, 3] are n, k and layers that have it."""
    for tokens in range(len(out)):
        for at in range(len(shapes)):
            nbytes, flops = gemm_work(tokens, shapes[at, 0], shapes[at, 1])
            out[tokens] += shapes[at, 2] * roofline_us(law, nbytes, flops)
