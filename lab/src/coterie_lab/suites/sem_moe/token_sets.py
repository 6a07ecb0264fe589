"""How well a token's id predicts its experts: sets predicted from one part of a trace against the other part.

All measures need only how often each token activated each expert in the two parts, so tables of counts without
recorded requests can be scored too. Precision is the share of predicted experts that are right, recall the share of
right ones that were predicted; sums over all tokens of a layer are divided (micro averages), layers are averaged.

The numbers depend on the definition of the predicted and of the right set:

    occurrence    the token's k most frequent experts, against the k experts of each occurrence: sizes are equal, so
                  precision = recall
    static        the same, against the token's k most frequent experts of the other part: equal sizes again
    ever          the same, against every expert that the token ever activates in the other part, each token once
    ever_weighted the same, each token as often as it occurs
    often_50      experts that at least half of the token's occurrences activated (often_75, often_90: that share of
                  them), against the k experts of each occurrence
    all_ever      every expert the token ever activated, against every expert it ever activates in the other part
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.footprints.counting import footprints

OFTEN = (50, 75, 90)
"""Least per cent of a token's occurrences at which an expert is predicted by `often_…`."""
DEFINITIONS = ("occurrence", "static", "ever", "ever_weighted", *(f"often_{share}" for share in OFTEN), "all_ever")


class TokenCounts(NamedTuple):
    """How often tokens activated experts."""

    activations: NDArray[np.uint32]
    """[token, layer, expert]"""
    occurrences: NDArray[np.int64]
    """[token]"""

    @property
    def top_k(self) -> int:
        return round(int(self.activations[:, 0].sum()) / max(1, int(self.occurrences.sum())))


def count_tokens(
    expert_ids: NDArray[np.integer], token_ids: NDArray[np.integer], num_tokens: int, num_experts: int
) -> TokenCounts:
    """Count tokens 0 … num_tokens - 1 in expert_ids [occurrence, layer, k]."""
    order = np.argsort(token_ids, kind="stable")
    occurrences = np.bincount(token_ids, minlength=num_tokens).astype(np.int64)
    if len(occurrences) > num_tokens:
        raise ConfigError(f"token_ids holds {int(token_ids.max())}; it must be below num_tokens={num_tokens}")
    offsets = np.concatenate([[0], np.cumsum(occurrences)])
    return TokenCounts(footprints(expert_ids[order], offsets, num_experts), occurrences)


class SetScore(NamedTuple):
    """Scores of one definition, by layer."""

    precision: NDArray[np.float64]
    """[layer]; NaN if nothing was predicted."""
    recall: NDArray[np.float64]
    """[layer]"""

    @property
    def f1(self) -> NDArray[np.float64]:
        """[layer]"""
        return np.asarray(2 * self.precision * self.recall / np.maximum(self.precision + self.recall, 1e-300))


def set_scores(fit: TokenCounts, test: TokenCounts, top_k: int, popular: bool = False) -> dict[str, SetScore]:
    """Score every definition on tokens of the test part; those unseen in the fit are predicted by popularity.

    `ever`, `static` and `all_ever` take only tokens of both parts. With `popular`, the layer's most popular experts
    (and shares) stand for every token's own: the baseline.
    """
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in DEFINITIONS}
    everyone = fit.activations.sum(axis=0) / fit.occurrences.sum()  # [layer, expert]
    both = (fit.occurrences > 0) & (test.occurrences > 0)
    weight = test.occurrences.astype(np.float64)
    for layer in range(fit.activations.shape[1]):
        shares = fit.activations[:, layer] / np.maximum(fit.occurrences, 1)[:, None]  # [token, expert]
        shares[fit.occurrences == 0] = everyone[layer]
        if popular:
            shares[:] = everyone[layer]
        after = test.activations[:, layer].astype(np.float64)
        top, right_top = top_mask(shares, top_k), top_mask(after, top_k)
        ever = after > 0
        total = after.sum()
        hits = (top * after).sum()
        scores["occurrence"].append((hits / total, hits / total))
        scores["static"].append(_ratio(top & right_top, top, right_top, both))
        scores["ever"].append(_ratio(top & ever, top, ever, both))
        scores["ever_weighted"].append(_ratio(top & ever, top, ever, both * weight))
        for share in OFTEN:
            often = shares >= share / 100 - 1e-12
            predicted, hits = float((often.sum(axis=1) * weight).sum()), float((often * after).sum())
            scores[f"often_{share}"].append((hits / predicted if predicted else np.nan, hits / total))
        scores["all_ever"].append(_ratio((shares > 0) & ever, shares > 0, ever, both))
    return {name: SetScore(*np.array(values, np.float64).T) for name, values in scores.items()}


def _ratio(
    hits: NDArray[np.bool_], predicted: NDArray[np.bool_], right: NDArray[np.bool_], weight: NDArray[np.generic]
) -> tuple[float, float]:
    """Return precision and recall of sets [token, expert], each token with its weight."""
    sums = [float((mask.sum(axis=1) * weight).sum()) for mask in (hits, predicted, right)]
    return sums[0] / max(sums[1], 1e-300), sums[0] / max(sums[2], 1e-300)


def top_mask(values: NDArray[np.floating], k: int) -> NDArray[np.bool_]:
    """Mark the k largest values of each row [token, expert]; of ties, the lowest index. 0 is never taken."""
    least = np.partition(values, -k, axis=1)[:, -k, None]  # [token, 1] the k-th largest
    above, tied = values > least, values == least
    places = k - above.sum(axis=1, keepdims=True)
    return np.asarray((above | (tied & (np.cumsum(tied, axis=1) <= places))) & (values > 0))


def kurtosis(counts: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the fourth moment about the mean ÷ squared variance, over the last axis; 0 if all values are equal.

    A normal distribution has 3.
    """
    values = np.asarray(counts, np.float64)
    squared = np.square(values - values.mean(axis=-1, keepdims=True))
    variance = squared.mean(axis=-1)
    fourth = np.square(squared).mean(axis=-1)
    return np.asarray(np.divide(fourth, variance**2, out=np.zeros_like(variance), where=variance > 0))


def fixed_set_kurtosis(num_experts: int, top_k: int) -> float:
    """Return the kurtosis of a token that always activates the same k experts, and of every token seen once."""
    share = top_k / num_experts
    return 1 / (share * (1 - share)) - 3
