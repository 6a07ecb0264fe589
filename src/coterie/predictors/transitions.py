"""Rank transitions: predict a token's rank in a layer from its ranks in the layers before.

Right where the experts of consecutive layers are correlated, whatever the token: then a token is likely to move from a
rank to the same next rank as other tokens. Wrong where a layer's experts do not depend on the layers before; the
prediction is then the popularity of the ranks in the layer, with a correspondingly low confidence.

A context is a token's ranks in the previous n layers. For large n most contexts are rare, and their counts are noisy.
Each distribution is therefore pulled towards that of the context shorter by one layer, as if `smoothing` further tokens
had followed it. The shortest context, of no layers, has the mean distribution of the layer. Contexts with fewer than
`min_tokens` tokens are left out and replaced by the next shorter context. :mod:`coterie.footprints.ranks` defines a
token's rank and the numbering of contexts.

The prediction is the share of a token's activations that each rank holds, as in the token table, so the confidences of
the two can be compared. If fitted without `local`, it is the probability of each rank instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, check, check_at_least, check_not_negative, require_fitted
from coterie.footprints.ranks import MAX_ORDER, context_keys, find_contexts, key_starts, shorter_contexts


class TransitionRows(NamedTuple):
    """Contexts of all layers; layer l has the rows offsets[l] … offsets[l + 1] - 1."""

    offsets: NDArray[np.int64]
    """[layer + 1] first row of each layer, then the number of rows."""
    keys: NDArray[np.int64]
    """[row] number of the context, ascending within a layer; the first is 0, the context of no layers."""
    tokens: NDArray[np.int64]
    """[row] tokens counted."""
    shares: NDArray[np.float32]
    """[row, rank] expected share of a token's activations that the rank holds, in 0 … 1."""
    ranks: NDArray[np.int64]
    """[row] rank with the largest share; the lowest rank if tied."""

    @property
    def num_ranks(self) -> int:
        return int(self.shares.shape[1])

    @property
    def num_layers(self) -> int:
        return len(self.offsets) - 1

    @property
    def confidence(self) -> NDArray[np.float32]:
        """[row] largest share, that of the row's rank in `ranks`."""
        return np.asarray(self.shares.max(axis=1))


@dataclass(slots=True, eq=False)
class RankTransitions:
    """Distribution over ranks in a layer, given a token's ranks in the `order` layers before."""

    order: int = 2
    """Number of previous layers in a context, 1 … 5."""
    smoothing: float = 8.0
    """Weight, in tokens, of the next shorter context's distribution in a context's own."""
    min_tokens: int = 2
    """Fewest tokens of a context that is kept."""
    rows_: TransitionRows | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check(1 <= self.order <= MAX_ORDER, f"order={self.order} must be in 1 … {MAX_ORDER}")
        check_not_negative(smoothing=self.smoothing)
        check_at_least(1, min_tokens=self.min_tokens)

    @property
    def rows(self) -> TransitionRows:
        return require_fitted(self.rows_, "RankTransitions")

    def fit(
        self, ranks: NDArray[np.integer], num_ranks: int, local: NDArray[np.integer] | None = None, top_k: int = 1
    ) -> RankTransitions:
        """Learn from the tokens' ranks [token, layer].

        `local` [token, layer, rank] is the number of a token's `top_k` activations on each rank; None counts each
        token's rank once.
        """
        check(
            ranks.ndim == 2 and 0 not in ranks.shape, f"ranks has shape {ranks.shape}; expected [token, layer], none 0"
        )
        low, high = int(ranks.min()), int(ranks.max())
        check(
            low >= 0 and high < num_ranks, f"ranks holds {low if low < 0 else high}; it must be in 0 … {num_ranks - 1}"
        )
        if local is not None and local.shape != (*ranks.shape, num_ranks):
            raise ConfigError(f"local has shape {local.shape}; expected {(*ranks.shape, num_ranks)}")
        check_at_least(1, top_k=top_k)
        check(
            local is None or (int(local.min()) >= 0 and int(local.max()) <= top_k),
            f"local must be in 0 … top_k={top_k}",
        )
        starts = key_starts(num_ranks, self.order)
        keys, tokens, shares = zip(
            *[self._layer(ranks, layer, starts, num_ranks, local, top_k) for layer in range(ranks.shape[1])],
            strict=True,
        )
        self.rows_ = TransitionRows(
            offsets=np.cumsum([0, *map(len, keys)]),
            keys=np.concatenate(keys),
            tokens=np.concatenate(tokens),
            shares=np.concatenate(shares).astype(np.float32),
            ranks=np.concatenate([share.argmax(axis=1) for share in shares]).astype(np.int64),
        )
        return self

    def _layer(
        self,
        ranks: NDArray[np.integer],
        layer: int,
        starts: NDArray[np.int64],
        num_ranks: int,
        local: NDArray[np.integer] | None,
        top_k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the keys, tokens and shares of a layer's contexts."""
        depth = min(self.order, layer)
        longest = context_keys(ranks[:, :layer], num_ranks, depth)
        order = np.argsort(longest, kind="stable")
        # The latest rank is the leading digit, so tokens with the same shorter context are adjacent too: one sort
        # serves contexts of all lengths.
        by_order = [(longest[order] - starts[depth]) // num_ranks ** (depth - m) + starts[m] for m in range(depth + 1)]
        column = np.concatenate(by_order)  # sorted, since the keys of a shorter order are lower
        first = np.flatnonzero(np.diff(column, prepend=-1))
        keys, tokens = column[first], np.diff(first, append=len(column))
        kept = (tokens >= self.min_tokens) | (keys == 0)
        keys, tokens = keys[kept], tokens[kept]
        shares = np.zeros((len(keys), num_ranks))
        own = np.ascontiguousarray(ranks[:, layer], np.int64)
        counted = np.zeros((1, 1), np.uint16) if local is None else np.ascontiguousarray(local[:, layer], np.uint16)
        _count(keys, np.stack(by_order), order, own, counted, local is not None, shares)
        parents = find_contexts(keys, shorter_contexts(keys, num_ranks, starts), num_ranks, self.order)
        _smooth(shares, tokens, parents, float(top_k), self.smoothing)
        return keys, tokens, shares

    def find(self, layer: int, previous: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the row [token] of the longest known context; a negative rank in `previous` is unknown and ends it."""
        rows = self.rows
        check(0 <= layer < rows.num_layers, f"layer={layer} must be in 0 … {rows.num_layers - 1}")
        wanted = context_keys(previous, rows.num_ranks, self.order)
        start, stop = int(rows.offsets[layer]), int(rows.offsets[layer + 1])
        return find_contexts(rows.keys[start:stop], wanted, rows.num_ranks, self.order) + start


@njit()
def _count(
    keys: NDArray[Any],
    by_order: NDArray[Any],
    order: NDArray[Any],
    ranks: NDArray[Any],
    local: NDArray[Any],
    has_local: bool,
    counts: NDArray[Any],
) -> None:
    """Add each token's activations, or 1 for its rank, to its contexts' rows; by_order [order, token] is sorted."""
    for m in range(len(by_order)):
        row = 0
        for i in range(len(order)):
            key = by_order[m, i]
            while row < len(keys) and keys[row] < key:
                row += 1
            if row == len(keys):
                break
            if keys[row] != key:  # a context with fewer than min_tokens tokens
                continue
            token = order[i]
            if has_local:
                for rank in range(counts.shape[1]):
                    counts[row, rank] += local[token, rank]
            else:
                counts[row, ranks[token]] += 1.0


@njit()
def _smooth(shares: NDArray[Any], tokens: NDArray[Any], parents: NDArray[Any], top_k: float, smoothing: float) -> None:
    """Turn counts into shares, in place. Parents (shorter contexts) have lower keys, so they are smoothed first."""
    for row in range(len(shares)):
        total = tokens[row] * top_k
        if row > 0:
            total += smoothing * top_k
        for rank in range(shares.shape[1]):
            value = shares[row, rank]
            if row > 0:
                value += smoothing * top_k * shares[parents[row], rank]
            shares[row, rank] = value / total
