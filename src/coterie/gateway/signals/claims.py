"""Compare workers' KV events with their answers: a worker that claims prefixes it does not hold is believed less.

A router prefers the worker that holds most of a prompt, so a worker with false claims would draw all traffic. An answer
reports how many tokens of its prompt were cached. The share of claimed tokens that answers confirm, over about the last
sixteen, scales the cached tokens that routers see for the worker. Honest workers confirm nearly all: they lose a little
when blocks are evicted between the decision and the prefill. Answers without a report change nothing, and a worker
whose answers are false too is not detected.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW = 16.0
"""Window of the moving average of the confirmed share, in answers."""
PRIOR = 4.0
"""Number of fully confirmed answers that a new worker is credited with."""
FULL_TOKENS = 256.0
"""Claimed tokens for which an answer has full weight. Fewer weigh less, so that small true claims hide no big lie."""
NONE, ALL = 0.25, 0.75
"""Confirmed share up to which no claim is believed, and from which on all are; in between belief is linear."""


class Claims:
    """Belief in the claims of one pool's workers, by row."""

    def __init__(self) -> None:
        self._evidence: dict[int, tuple[float, float]] = {}
        self.beliefs: NDArray[np.float64] | None = None
        """Share of each worker's claimed tokens that is believed, [row]; None if all are. Replaced at each change."""

    def answered(self, row: int, claimed: int, cached: int) -> None:
        """Record an answer: the worker had claimed `claimed` tokens of the prompt and reports `cached` as found."""
        if claimed < 1:
            return
        confirmed, answers = self._evidence.get(row, (PRIOR, PRIOR))
        weight = min(1.0, claimed / FULL_TOKENS)
        kept = 1.0 - weight / WINDOW
        share = min(cached, claimed) / claimed
        self._evidence[row] = confirmed * kept + weight * share, answers * kept + weight
        self._refresh()

    def belief(self, row: int) -> float:
        confirmed, answers = self._evidence.get(row, (1.0, 1.0))
        return min(1.0, max(0.0, (confirmed / answers - NONE) / (ALL - NONE)))

    def discounted(self, claimed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Scale claimed tokens by the belief in each worker, [row]: the cached tokens that routers see."""
        if self.beliefs is None:
            return claimed
        believed = claimed.copy()
        rows = min(len(claimed), len(self.beliefs))
        believed[:rows] = (claimed[:rows] * self.beliefs[:rows]).astype(np.int64)
        return believed

    def forget(self, row: int) -> None:
        """Forget a worker that left, as its row may go to another."""
        if self._evidence.pop(row, None) is not None:
            self._refresh()

    def _refresh(self) -> None:
        doubted = {row: self.belief(row) for row in self._evidence if self.belief(row) < 1.0}
        self.beliefs = np.ones(max(doubted) + 1) if doubted else None
        for row, belief in doubted.items():
            self.beliefs[row] = belief  # type: ignore[index]
