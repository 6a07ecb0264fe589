"""What routers share: the best of the workers that may be chosen, and numbers that look random and are not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import UnavailableError
from coterie.routing.fleet import Fleet


def best(scores: NDArray[np.float64], fleet: Fleet) -> tuple[int, NDArray[np.float64]]:
    """The open worker with the lowest score, and the scores with those that are not open at infinity.

    Of equals the next after the one a round robin would have taken, so that ties do not all go to the first.
    """
    allowed = np.where(fleet.open, scores, np.inf)
    start = fleet.routed % len(fleet)
    later = int(np.argmin(allowed[start:])) + start
    if start:
        early = int(np.argmin(allowed[:start]))
        if allowed[early] < allowed[later]:
            later = early
    if allowed[later] == np.inf:
        raise UnavailableError(f"none of the {len(fleet)} workers is alive")
    return later, allowed


def mixed(seed: int, number: int) -> int:
    """64 bits that depend on both and look random (splitmix64): a router keeps no generator between decisions."""
    word = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
