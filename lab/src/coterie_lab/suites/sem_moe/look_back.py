"""Looking back: how well a token's ranks, or experts, in the layers before predict those of the next layer.

*Accuracy* is measured on requests that were not fitted on. *Confidence* is what the table claims: smoothed, or as a
plain share of the fitted tokens, which rises with every layer looked back at because long contexts are rare, even on
noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.dispatch.tables import RankTables
from coterie.footprints.ranks import MAX_ORDER, TokenRanks, token_ranks
from coterie.predictors import RankTransitions

Held = NDArray[np.bool_]
Ids = NDArray[np.integer]
"""[token, layer, k] expert ids."""


class LookBack(NamedTuple):
    """Mean over the layers that have MAX_ORDER layers before them."""

    layers_back: int
    """0 is the baseline: the most popular rank of the layer."""
    accuracy: float
    """Share of test tokens whose rank was predicted."""
    confidence: float
    """Mean probability of the predicted rank, as claimed."""
    fitted_confidence: float
    """Mean share of the most frequent next rank over the fitted tokens, not smoothed."""
    local: float
    """Share of the test tokens' activations that are local on the rank with the largest expected share."""
    expert_recall: float
    """Share of activations among the top_k experts predicted from the experts with the highest gate scores."""


def look_back(fit: Ids, test: Ids, held: Held) -> list[LookBack]:
    """Look back at 0 … MAX_ORDER layers, under a placement's `held` [rank, layer, expert]."""
    layers, experts, top_k = held.shape[1], held.shape[2], fit.shape[2]
    known, asked = token_ranks(fit, held), token_ranks(test, held)
    ranks = len(held)
    likely = RankTransitions(MAX_ORDER).fit(known.ranks, ranks)
    plain = RankTransitions(MAX_ORDER, smoothing=0.0, min_tokens=1).fit(known.ranks, ranks)
    shares = RankTransitions(MAX_ORDER).fit(known.ranks, ranks, known.local, top_k)
    # With every expert as its own rank, a token's rank is the expert listed first, which has the highest gate score.
    each = np.broadcast_to(np.eye(experts, dtype=np.bool_)[:, None], (experts, layers, experts))
    first, first_asked = token_ranks(fit, each), token_ranks(test, each)
    by_expert = RankTransitions(MAX_ORDER).fit(first.ranks, experts, first.local, top_k)
    expected = np.argpartition(-by_expert.rows.shares, top_k - 1, axis=1)[:, :top_k]  # [row, k]
    claimed, shared = likely.rows.confidence, plain.rows.confidence
    results = []
    for back in range(MAX_ORDER + 1):
        values = []
        for layer in range(MAX_ORDER, layers):
            before = slice(layer - back, layer)
            at = likely.find(layer, asked.ranks[:, before])
            right = likely.rows.ranks[at] == asked.ranks[:, layer]
            of_fit = plain.find(layer, known.ranks[:, before])
            home = shares.rows.ranks[shares.find(layer, asked.ranks[:, before])]
            chosen = expected[by_expert.find(layer, first_asked.ranks[:, before])]
            values.append(
                (
                    right.mean(),
                    claimed[at].mean(),
                    shared[of_fit].mean(),
                    _local(asked, layer, home).mean() / top_k,
                    np.take_along_axis(first_asked.local[:, layer], chosen, axis=1).sum(axis=1).mean() / top_k,
                )
            )
        results.append(LookBack(back, *map(float, np.mean(values, axis=0))))
    return results


class TableShares(NamedTuple):
    """Share of activations that are local on the rank that each table gives a token, mean over layers."""

    popular: float
    tokens: float
    """By the token's id; by popularity if it was never seen."""
    contexts: float
    """By its ranks in the layers before."""
    surer: float
    """By the surer of the two."""
    best: float
    """On the rank that holds most of its experts, an upper bound for tables."""


def table_shares(tables: RankTables, test: Ids, token_ids: NDArray[np.integer], held: Held) -> TableShares:
    """Return local shares of test tokens [token] with their recorded experts."""
    asked, top_k = token_ranks(test, held), test.shape[2]
    rows = tables.rows_of(token_ids)
    nothing = np.full(len(rows), -1, np.int64)
    values = []
    for layer in range(tables.num_layers):
        before = asked.ranks[:, :layer]
        popular = tables.ranks_at(nothing, layer).ranks
        own = np.where(rows >= 0, tables.token_ranks[layer][rows], popular).astype(np.int64)
        homes = (
            popular,
            own,
            tables.ranks_at(nothing, layer, before).ranks,
            tables.ranks_at(rows, layer, before).ranks,
            asked.ranks[:, layer],
        )
        values.append([_local(asked, layer, home).mean() / top_k for home in homes])
    return TableShares(*map(float, np.mean(values, axis=0)))


def _local(of: TokenRanks, layer: int, home: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Count activations that are local on the token's home: [token]."""
    return np.take_along_axis(of.local[:, layer], home[:, None], axis=1)[:, 0]
