"""Hold workers' KV events against their answers: one that claims prefixes it does not hold is believed less.

A router prefers the worker that holds most of a prompt, so a worker that claims what it does not hold would draw all
traffic. An answer says how many tokens of its prompt were cached: the share of the claimed ones that answers confirm,
over the last sixteen or so, scales what routers are told of the worker. Honest workers confirm nearly all, and lose a
little where blocks are evicted between the decision and the prefill. Answers that do not say teach nothing, and a
worker that lies in its answers too is not found out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WINDOW = 16.0
"""Answers over which the confirmed share is a mean."""
PRIOR = 4.0
"""Answers that a worker is trusted for before its first: so many, all confirmed."""
FULL_TOKENS = 256.0
"""Claimed tokens for which an answer counts in full; fewer count in proportion, so that small truths hide no lie."""
NONE, ALL = 0.25, 0.75
"""Confirmed shares up to which nothing and from which on all is believed; in between, in proportion."""


class Claims:
    """Belief in the workers of one pool, by row."""

    def __init__(self) -> None:
        self._evidence: dict[int, tuple[float, float]] = {}
        self.beliefs: NDArray[np.float64] | None = None
        """[row] share of the claimed tokens that is believed; None if all are. A new array at each change."""

    def answered(self, row: int, claimed: int, cached: int) -> None:
        """An answer came: the worker had claimed so many tokens of its prompt, and `cached` of them were there."""
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
        """[row] tokens that routers are told of."""
        if self.beliefs is None:
            return claimed
        believed = claimed.copy()
        rows = min(len(claimed), len(self.beliefs))
        believed[:rows] = (claimed[:rows] * self.beliefs[:rows]).astype(np.int64)
        return believed

    def forget(self, row: int) -> None:
        """A worker left; its row may become another's."""
        if self._evidence.pop(row, None) is not None:
            self._refresh()

    def _refresh(self) -> None:
        doubted = {row: self.belief(row) for row in self._evidence if self.belief(row) < 1.0}
        self.beliefs = np.ones(max(doubted) + 1) if doubted else None
        for row, belief in doubted.items():
            self.beliefs[row] = belief  # type: ignore[index]
