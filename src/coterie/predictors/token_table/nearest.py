"""Nearest tokens: for a token without a row, the seen token with the most similar embedding.

The embeddings of a whole vocabulary may be mapped from a checkpoint, and a copy may not fit in memory. So they are
compared in blocks and never copied as a whole. Results are cached by token id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check

BLOCK = 4096
"""Rows compared at a time: 64 MB of float32 at a width of 4,096."""
_SHORTEST, _LONGEST = 1e-30, 1e30
"""Range of embedding norms that float32 can compare; a shorter embedding counts as zero, a longer one is refused."""
_CLOSE = 1e-4
"""Difference of float32 cosines below which candidates are compared again in float64, so that the result does not
depend on how many tokens are searched at once."""


class Nearest(NamedTuple):
    """The nearest seen token of each of several tokens."""

    rows: NDArray[np.int64]
    """[token] index of the nearest among the seen tokens; -1 if the token has no embedding, or a zero one."""
    similarity: NDArray[np.float64]
    """[token] cosine of the two embeddings, in 0 … 1; negative cosines are set to 0."""


class NearestTokens:
    """Finds the nearest of the seen tokens; if tied, the one with the lowest id."""

    def __init__(self, embeddings: NDArray[np.floating], seen: NDArray[np.integer]) -> None:
        check(
            embeddings.ndim == 2 and 0 not in embeddings.shape and embeddings.dtype.kind == "f",
            f"embeddings is {embeddings.dtype} {embeddings.shape}; expected floating point [vocabulary, width], none 0",
        )
        self.embeddings = embeddings
        self._lengths = np.concatenate([_lengths(part) for part in _blocks(embeddings)])
        for token in np.flatnonzero(~(self._lengths <= _LONGEST)):
            raise ConfigError(f"the embedding of token {token} holds NaN, or is longer than {_LONGEST:g}")
        self._lengths[self._lengths < _SHORTEST] = 0
        inside = np.flatnonzero((seen >= 0) & (seen < len(embeddings)))
        self._rows = inside[self._lengths[seen[inside]] > 0]
        self._seen = np.asarray(seen)[self._rows]
        self._found: dict[int, tuple[int, float]] = {}

    def of(self, token_ids: NDArray[np.integer]) -> Nearest:
        """Find the nearest seen token of each id."""
        new = np.array(
            [token for token in np.unique(np.asarray(token_ids, np.int64)).tolist() if token not in self._found],
            np.int64,
        )
        if len(new):
            self._search(new)
        found = [self._found[token] for token in np.asarray(token_ids).tolist()]
        return Nearest(np.array([f[0] for f in found], np.int64), np.array([f[1] for f in found], np.float64))

    def _search(self, tokens: NDArray[np.int64]) -> None:
        self._found.update(dict.fromkeys(tokens.tolist(), (-1, 0.0)))
        if not len(self._seen):
            return
        inside = tokens[(tokens >= 0) & (tokens < len(self.embeddings))]
        inside = inside[self._lengths[inside] > 0]
        for asked in _blocks(inside, 256):
            queries = self._rows_of(asked) / self._lengths[asked, None].astype(np.float32)
            close: list[list[tuple[float, int]]] = [[] for _ in asked]
            best = np.full(len(asked), -np.inf)
            for start in range(0, len(self._seen), BLOCK):
                part = self._seen[start : start + BLOCK]
                cosine = queries @ self._rows_of(part).T / self._lengths[part]  # [asked, part]
                best = np.maximum(best, cosine.max(axis=1))
                for i, j in np.argwhere(cosine >= best[:, None] - _CLOSE).tolist():
                    close[i].append((float(cosine[i, j]), start + j))
            for i, token in enumerate(asked.tolist()):
                near = np.array([at for value, at in close[i] if value >= best[i] - _CLOSE])
                exact = self._cosines(token, self._seen[near])
                first = int(np.argmax(exact))
                self._found[token] = (int(self._rows[near[first]]), min(1.0, max(0.0, float(exact[first]))))

    def _rows_of(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        return np.asarray(self.embeddings[tokens], np.float32)

    def _cosines(self, token: int, others: NDArray[np.integer]) -> NDArray[np.float64]:
        products = self.embeddings[others].astype(np.float64) * self.embeddings[token].astype(np.float64)
        return np.asarray(products.sum(axis=1) / (self._lengths[others] * self._lengths[token]))


def _blocks(rows: NDArray[Any], size: int = BLOCK) -> list[NDArray[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _lengths(rows: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.square(rows.astype(np.float64)).sum(axis=1)))
