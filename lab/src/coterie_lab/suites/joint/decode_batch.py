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

from coterie.errors import ConfigError, check, check_at_least, check_not_negative, check_positive


@dataclass(frozen=True, slots=True)
class DecodePrices:
    """Prices of a step, in microseconds."""

    fixed_us: float
    request_us: float
    remote_us: float
    """Time per activation of an expert on another rank, for both directions of the exchange."""

    def __post_init__(self) -> None:
        check_not_negative(fixed_us=self.fixed_us, request_us=self.request_us, remote_us=self.remote_us)


class DecodeBatch(NamedTuple):
    """Requests that decode in the next step."""

    chosen: NDArray[np.int64]
    """Requests, in the order they were taken."""
    step_us: float
    """Predicted time of the step in microseconds."""
    reason: str


@dataclass(frozen=True, slots=True)
class DecodeBatcher:
    prices: DecodePrices
    budget_us: float = 50_000.0
    """Limit of a step's predicted time in microseconds: the time between tokens."""
    max_tokens: int = 4096
    """Largest number of requests in a step, one token each."""
    max_skips: int = 4
    """Number of steps in which a request may be passed over before it goes first."""

    def __post_init__(self) -> None:
        check_positive(budget_us=self.budget_us)
        check_at_least(1, max_tokens=self.max_tokens, max_skips=self.max_skips)

    def select(self, remote: NDArray[np.floating], skipped: NDArray[np.integer]) -> DecodeBatch:
        """Choose by `remote` [request], a token's activations on other ranks, and `skipped` [request] steps."""
        check(
            len(remote) == len(skipped) > 0,
            f"remote has {len(remote)} requests, skipped {len(skipped)}; it must be the same, not 0",
        )
        bad = np.flatnonzero(~((remote >= 0) & (remote < np.inf)))
        if bad.size:
            raise ConfigError(f"remote[{bad[0]}] is {remote[bad[0]]}; it must be finite and not negative")
        starved = skipped >= self.max_skips
        # Starved requests first, the most skipped before others; then the most local, ties by skips.
        order = np.lexsort((-skipped, np.where(starved, 0.0, remote), np.where(starved, -skipped, 0), ~starved))
        ends = np.cumsum(self.prices.request_us + self.prices.remote_us * np.asarray(remote, np.float64)[order])
        fitting = int(np.searchsorted(self.prices.fixed_us + ends, self.budget_us, side="right"))
        count = max(1, min(fitting, self.max_tokens))
        limit = "all" if count == len(order) else "the budget" if count == fitting else "max_tokens"
        if not fitting:
            limit = "one, which breaks the budget"
        reason = f"{count} of {len(order)} ({limit}), {starved[order[:count]].sum()} of them long due"
        return DecodeBatch(order[:count], float(self.prices.fixed_us + ends[count - 1]), reason)
