"""Decode batch: which requests decode in the next step of an expert-parallel worker, within a time budget.

A step of n requests is priced ``fixed + request x n + remote x their activations on other ranks``. Requests whose
experts are mostly local come first, since they lengthen the step least, until the next one would break the budget of
time between tokens or of tokens. That alone would starve requests with remote experts, so a request that was passed
over `max_skips` times goes before all others, the most skipped first. At least one request always runs.

Right where the all-to-all is a large part of a step. Wrong on one GPU, where no expert is remote: it then only caps the
batch, and every request left out waits a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DecodePrices(NamedTuple):
    """Prices of a step, in microseconds."""

    fixed_us: float
    request_us: float
    remote_us: float
    """Time per activation of an expert on another rank, for both directions of the exchange."""


@dataclass(frozen=True, slots=True)
class DecodeBatcher:
    prices: DecodePrices
    budget_us: float = 50_000.0
    """Limit of a step's predicted time in microseconds: the time between tokens."""
    max_tokens: int = 4096
    """Largest number of requests in a step, one token each."""
    max_skips: int = 4
    """Number of steps in which a request may be passed over before it goes first."""

    def select(self, remote: NDArray[np.floating], skipped: NDArray[np.integer]) -> NDArray[np.int64]:
        """Choose by `remote` [request], a token's activations on other ranks, and `skipped` [request] steps.

        Requests are returned in the order they were taken.
        """
        starved = skipped >= self.max_skips
        # Starved requests first, the most skipped before others; then the most local, ties by skips.
        order = np.lexsort((-skipped, np.where(starved, 0.0, remote), np.where(starved, -skipped, 0), ~starved))
        ends = np.cumsum(self.prices.request_us + self.prices.remote_us * np.asarray(remote, np.float64)[order])
        fitting = int(np.searchsorted(self.prices.fixed_us + ends, self.budget_us, side="right"))
        return order[: max(1, min(fitting, self.max_tokens))]
