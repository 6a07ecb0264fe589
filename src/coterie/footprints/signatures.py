"""Signatures: normalised footprints, such that requests with similar signatures decode with the same experts.

A request's prefill counts are weighted (experts that every request activates carry no information), cut to the most
informative layers, and scaled to length 1. Quality is measured by rho: over pairs of requests, Spearman's rank
correlation of the cosine distance of their signatures with that of their activation probabilities in decode. Layers are
chosen greedily, each time the one that raises rho of the calibration requests most; layers up to the peak are kept.

    count_idf   counts x log((C + 1) / (df + 1)), where df of the C calibration requests activate the expert
    count       counts
    gate        gate-probability mass, in place of counts
    binary      1 where the request activates the expert at all

`count_idf` fails where every request activates every expert (few experts, long prompts): all weights are 0, and `fit`
raises an error. rho on the requests that chose the layers is biased upwards: measure it on others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import helper, njit
from coterie.errors import ConfigError, check, check_one_of, require_fitted

Weighting = Literal["count_idf", "count", "gate", "binary"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
MAX_PAIRS = 20_000
"""Largest number of request pairs that rho is computed over; if there are more, this many are drawn."""
_BUCKETS = 4096
"""Number of buckets while layers are tried; values in a bucket share a rank. Exact ranks of 48 layers would sort 20,000
pairs 1,176 times."""

Counts = NDArray[np.integer] | NDArray[np.floating]


class KeptLayers(NamedTuple):
    """Fitted values of a signature."""

    weights: NDArray[np.float32]
    """[layer, expert] weight of each count."""
    layers: NDArray[np.int64]
    """Layers kept, rising."""


@dataclass(slots=True, eq=False)
class Signature:
    """Map from footprints to signatures. Construct it with its settings, then call :meth:`fit`."""

    weighting: str = "count_idf"
    """One of :data:`WEIGHTINGS`."""
    mask: bool = True
    """Keep only the layers that distinguish requests best; False keeps all."""
    kept_: KeptLayers | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_one_of(WEIGHTINGS, weighting=self.weighting)

    @classmethod
    def restored(cls, weighting: str, weights: NDArray[np.float32], layers: NDArray[np.int64]) -> Signature:
        """Make a fitted signature from saved values."""
        check(
            weights.ndim == 2 and np.isfinite(weights).all() and not (weights < 0).any(),
            f"weights {weights.shape} must be [layer, expert], finite and not negative",
        )
        check(
            len(layers) and layers[0] >= 0 and layers[-1] < len(weights) and not (np.diff(layers) < 1).any(),
            f"layers={layers.tolist()} must rise within 0 … {len(weights) - 1}",
        )
        signature = cls(weighting, mask=len(layers) < len(weights))
        signature.kept_ = KeptLayers(weights, layers)
        return signature

    @property
    def weights(self) -> NDArray[np.float32]:
        """[layer, expert] weight of each count."""
        return require_fitted(self.kept_, "the signature").weights

    @property
    def layers(self) -> NDArray[np.int64]:
        """Layers kept, rising."""
        return require_fitted(self.kept_, "the signature").layers

    def fit(self, prefill: Counts, decode: Counts, rng: Generator) -> Signature:
        """Learn from calibration requests: counts [request, layer, expert] of prefill and of decode.

        For `gate`, `prefill` holds gate-probability mass.
        """
        check(
            prefill.ndim == 3 and prefill.shape == decode.shape,
            f"prefill {prefill.shape}, decode {decode.shape}: both must be [request, layer, expert]",
        )
        requests, layers, experts = prefill.shape
        check(requests >= 3, f"{requests} calibration requests: rho needs at least 3")
        weights = np.ones((layers, experts), np.float32)
        if self.weighting == "count_idf":
            fired = np.count_nonzero(prefill, axis=0)  # [layer, expert]
            weights = np.log((requests + 1) / (fired + 1)).astype(np.float32)
            check(
                weights.any(),
                f"all {requests} calibration requests activate every expert: count_idf weighs all by 0; "
                "weighting='count' compares them",
            )
        kept = np.arange(layers)
        if self.mask:
            pairs = sample_pairs(requests, MAX_PAIRS, rng)
            rows = np.ascontiguousarray(_values(prefill, self.weighting) * weights)
            order, rhos = _greedy_layers(
                _layer_products(rows, pairs),
                np.einsum("rle,rle->lr", rows, rows),
                pairs,
                _centred_ranks(pair_cosines(decode.reshape(requests, -1), pairs)),
                np.int64(_BUCKETS),
            )
            kept = np.sort(order[: int(np.argmax(rhos)) + 1])
        self.kept_ = KeptLayers(weights, kept)
        return self

    @property
    def size(self) -> int:
        """Length of a signature."""
        return len(self.layers) * int(self.weights.shape[1])

    def transform(self, counts: Counts) -> NDArray[np.float32]:
        """Return the signature [index in kept layers] of counts [layer, expert]; all 0 if the weighted counts are."""
        weights, layers = require_fitted(self.kept_, "the signature")
        if counts.shape != weights.shape:  # no check: this is part of a decision
            raise ConfigError(f"footprint has shape {counts.shape}; the signature was fitted for {weights.shape}")
        out = np.empty(len(layers) * weights.shape[1], np.float32)
        _transform(counts, weights, layers, self.weighting == "binary", out)
        return out

    def transform_all(self, counts: Counts) -> NDArray[np.float32]:
        """Return the signatures [request, index in kept layers] of counts [request, layer, expert]."""
        out = np.empty((len(counts), self.size), np.float32)
        for request in range(len(counts)):
            out[request] = self.transform(counts[request])
        return out


def rho(
    signatures: NDArray[np.floating], decode_probabilities: Counts, pairs: NDArray[np.int64] | None = None
) -> float:
    """Return Spearman's correlation of cosine distances, over `pairs` [pair, 2] of requests; all pairs by default.

    Both arrays are [request, index]; only a row's direction matters, so counts serve as probabilities. The result is 0
    if all distances of one array are equal.
    """
    if pairs is None:
        pairs = np.argwhere(np.triu(np.ones((len(signatures),) * 2, np.bool_), 1))
    left = _centred_ranks(pair_cosines(signatures, pairs))
    right = _centred_ranks(pair_cosines(decode_probabilities, pairs))
    scale = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / scale if scale else 0.0


def sample_pairs(requests: int, limit: int, rng: Generator) -> NDArray[np.int64]:
    """Return [pair, 2] pairs of different requests: all pairs, or `limit` of them drawn without repeats."""
    total = requests * (requests - 1) // 2
    chosen = np.arange(total) if total <= limit else np.sort(rng.choice(total, limit, replace=False))
    second = ((1 + np.sqrt(1 + 8.0 * chosen)) / 2).astype(np.int64)
    second -= second * (second - 1) // 2 > chosen  # the root may round up
    second += (second + 1) * second // 2 <= chosen
    return np.stack([chosen - second * (second - 1) // 2, second], axis=1)


def pair_cosines(rows: Counts, pairs: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return [pair] the cosine of two rows; 0 if one of them is all 0."""
    flat = np.ascontiguousarray(rows.reshape(len(rows), 1, -1), np.float32)
    lengths = np.sqrt(np.einsum("rlc,rlc->r", flat, flat))
    scale = lengths[pairs[:, 0]] * lengths[pairs[:, 1]]
    return np.asarray(_layer_products(flat, pairs)[0] / np.where(scale > 0, scale, 1.0), np.float32)


def _values(counts: Counts, weighting: str) -> NDArray[np.float32]:
    return np.asarray(counts > 0 if weighting == "binary" else counts, np.float32)


def _centred_ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the ranks minus their mean; equal values share a rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return np.asarray(ranks - ranks.mean(), np.float64)


@njit(fastmath=True)
def _transform(
    counts: NDArray[Any],
    weights: NDArray[np.float32],
    layers: NDArray[np.int64],
    binary: bool,
    out: NDArray[np.float32],
) -> None:
    """Fill `out` from counts of any dtype: most layers are not kept, and need no conversion."""
    experts = weights.shape[1]
    total = np.float32(0.0)
    for row in range(len(layers)):
        layer, at = layers[row], row * experts
        for expert in range(experts):
            count = np.float32(counts[layer, expert])
            if binary:
                count = np.float32(1.0) if count > 0 else np.float32(0.0)
            value = count * weights[layer, expert]
            out[at + expert] = value
            total += value * value
    if total > 0:
        scale = np.float32(1.0 / np.sqrt(total))
        for index in range(len(out)):
            out[index] *= scale


@njit(fastmath=True)
def _layer_products(rows: NDArray[np.float32], pairs: NDArray[np.int64]) -> Any:
    """Return [layer, pair] the inner product of two requests within a layer."""
    layers, experts = rows.shape[1:]
    out = np.empty((layers, len(pairs)), np.float32)
    for pair in range(len(pairs)):
        left, right = pairs[pair]
        for layer in range(layers):
            total = np.float32(0.0)
            for expert in range(experts):
                total += rows[left, layer, expert] * rows[right, layer, expert]
            out[layer, pair] = total
    return out


@njit(fastmath=True)
def _greedy_layers(
    products: NDArray[np.float32],
    squares: NDArray[np.float32],
    pairs: NDArray[np.int64],
    truth: NDArray[np.float64],
    buckets: Any,
) -> Any:
    """Return layers in the order chosen, and rho after each; sums of products give the cosine of any set of layers."""
    layers, count = products.shape
    requests = squares.shape[1]
    dots, lengths = np.zeros(count, np.float32), np.zeros(requests, np.float32)
    inverse, cosines = np.empty(requests, np.float32), np.empty(count, np.float32)
    sizes, sums = np.empty(buckets, np.int64), np.empty(buckets)
    order, rhos = np.empty(layers, np.int64), np.empty(layers)
    taken = np.zeros(layers, np.bool_)
    for turn in range(layers):
        best, best_rho = 0, -2.0
        for layer in range(layers):
            if taken[layer]:
                continue
            for request in range(requests):
                length = lengths[request] + squares[layer, request]
                inverse[request] = np.float32(1.0 / np.sqrt(length)) if length > 0 else np.float32(0.0)
            for pair in range(count):
                dot = dots[pair] + products[layer, pair]
                cosines[pair] = dot * inverse[pairs[pair, 0]] * inverse[pairs[pair, 1]]
            reached = _bucket_rho(cosines, truth, sizes, sums)
            if reached > best_rho:
                best, best_rho = layer, reached
        taken[best] = True
        order[turn], rhos[turn] = best, best_rho
        for pair in range(count):
            dots[pair] += products[best, pair]
        for request in range(requests):
            lengths[request] += squares[best, request]
    return order, rhos


@helper(fastmath=True)
def _bucket_rho(
    values: NDArray[np.float32], truth: NDArray[np.float64], sizes: NDArray[np.int64], sums: NDArray[np.float64]
) -> float:
    """Return the correlation of the centred ranks `truth` with the ranks of `values`; values in a bucket are tied."""
    low, high = values[0], values[0]
    for value in values:
        low, high = min(low, value), max(high, value)
    if not high > low:
        return 0.0
    scale = np.float32((len(sizes) - 1) / (high - low))
    for bucket in range(len(sizes)):
        sizes[bucket], sums[bucket] = 0, 0.0
    variance = 0.0
    for pair in range(len(values)):
        at = np.int64((values[pair] - low) * scale)
        sizes[at] += 1
        sums[at] += truth[pair]
        variance += truth[pair] * truth[pair]
    product, spread, before, middle = 0.0, 0.0, 0, (len(values) - 1) / 2
    for bucket in range(len(sizes)):
        rank = before + (sizes[bucket] - 1) / 2 - middle
        product += rank * sums[bucket]
        spread += sizes[bucket] * rank * rank
        before += sizes[bucket]
    return product / np.sqrt(spread * variance) if spread > 0 and variance > 0 else 0.0
