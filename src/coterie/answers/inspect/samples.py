"""What needs single requests: prefill against decode, and the distinct experts of a decode step.

Both come from a random sample of requests, since a long trace holds more footprints than memory. The sample is taken
while the trace streams by, so no page of it stays behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import rankdata

from coterie._numba import njit
from coterie.answers.inspect.values import mean_or_none, number
from coterie.footprints.counting import footprint
from coterie.traces.activations import Chunk, TraceMeta
from coterie.types import DECODE, PREFILL

SAMPLED_REQUESTS = 4096
CORRELATED_REQUESTS = 1024
TOKENS_PER_REQUEST = 16
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
DRAWS = 256


@dataclass(frozen=True, slots=True)
class PhaseCorrelation:
    """How well a request's prefill foretells its decode: correlation of its per-expert counts, mean over requests."""

    requests: int
    """Requests with tokens of both phases that were looked at."""
    pearson: float | None
    """Mean over layers."""
    spearman: float | None
    pearson_per_layer: list[float | None]
    spearman_per_layer: list[float | None]


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Distinct experts of one decode step in one layer, if it holds `batch` tokens of as many requests."""

    batch: int
    uniform: float
    """Under even random routing: experts x (1 - (1 - k / experts)^batch)."""
    mixed: float | None
    """Requests drawn from all; mean over draws and layers."""
    same_domain: float | None
    """Requests of one domain, drawn at random among those large enough."""
    mixed_per_layer: list[float] | None
    same_domain_per_layer: list[float] | None
    domains: int
    """Domains with at least `batch` sampled requests."""


@dataclass(slots=True)
class Samples:
    """Requests chosen beforehand, and what is kept of each as it passes by."""

    meta: TraceMeta
    chosen: NDArray[np.int64]
    """Sorted indices of requests."""
    correlated: frozenset[int]
    """Subset whose phases are compared, which takes longer."""
    requests: list[int] = field(default_factory=list)
    """Requests with decode tokens, one entry per entry of `tokens`."""
    tokens: list[NDArray[np.unsignedinteger]] = field(default_factory=list)
    """[token, layer, k] a few decode tokens of each."""
    pearson: list[NDArray[np.float64]] = field(default_factory=list)
    """[layer] of each request with both phases; NaN where a side is constant."""
    spearman: list[NDArray[np.float64]] = field(default_factory=list)

    @classmethod
    def choose(cls, meta: TraceMeta, num_requests: int, rng: Generator) -> Samples:
        count = min(num_requests, SAMPLED_REQUESTS)
        chosen = rng.choice(num_requests, count, replace=False)
        return cls(meta, np.sort(chosen), frozenset(chosen[:CORRELATED_REQUESTS].tolist()))

    def take(self, chunk: Chunk, rng: Generator) -> None:
        """Copy what is needed of the chosen requests of a chunk; its ids are taken to be checked."""
        last = chunk.first_request + len(chunk.offsets) - 1
        first, stop = np.searchsorted(self.chosen, [chunk.first_request, last])
        for request in self.chosen[first:stop]:
            a, b = chunk.offsets[request - chunk.first_request :][:2]
            ids, phase = chunk.tokens.expert_ids[a:b], chunk.tokens.phase[a:b]
            at = np.flatnonzero(phase == DECODE)
            if not len(at):
                continue
            self.requests.append(int(request))
            self.tokens.append(ids[rng.choice(at, min(len(at), TOKENS_PER_REQUEST), replace=False)])
            if len(at) < len(phase) and int(request) in self.correlated:
                pair = [footprint(ids[phase == p], self.meta.num_experts) for p in (PREFILL, DECODE)]
                counts = np.stack(pair).astype(np.float64)  # [phase, layer, expert]
                self.pearson.append(_pearson(*counts))
                self.spearman.append(_pearson(*rankdata(counts, axis=2)))

    def correlation(self) -> PhaseCorrelation | None:
        """None if no sampled request has both phases."""
        if not self.pearson:
            return None
        pearson, spearman = ([mean_or_none(layer) for layer in np.stack(v).T] for v in (self.pearson, self.spearman))
        return PhaseCorrelation(len(self.pearson), mean_or_none(pearson), mean_or_none(spearman), pearson, spearman)

    def distinct(self, domain: NDArray[np.int64] | None, rng: Generator) -> list[DistinctExperts]:
        """Count distinct experts for every batch size that the sample allows; `domain` [request] may be unknown."""
        if not self.tokens:
            return []
        counts = np.array([len(t) for t in self.tokens])
        first = np.cumsum(counts) - counts
        pool = np.concatenate(self.tokens)  # [token, layer, k]
        members: list[NDArray[np.int64]] = []
        if domain is not None:
            own = domain[self.requests]
            members = [np.flatnonzero(own == d) for d in np.unique(own)]
        everyone = [np.arange(len(counts))]
        experts, k = self.meta.num_experts, self.meta.top_k
        out = []
        for batch in BATCH_SIZES:
            large = [m for m in members if len(m) >= batch]
            mixed, same = (
                self._union(pool, first, counts, among, batch, rng) if among and len(among[0]) >= batch else None
                for among in (everyone, large)
            )
            out.append(
                DistinctExperts(
                    batch=batch,
                    uniform=experts * (1 - (1 - k / experts) ** batch),
                    mixed=_mean(mixed),
                    same_domain=_mean(same),
                    mixed_per_layer=mixed,
                    same_domain_per_layer=same,
                    domains=len(large),
                )
            )
        return out

    def _union(
        self,
        pool: NDArray[np.unsignedinteger],
        first: NDArray[np.int64],
        counts: NDArray[np.int64],
        among: list[NDArray[np.int64]],
        batch: int,
        rng: Generator,
    ) -> list[float]:
        """[layer] mean distinct experts of a token each of `batch` requests, of one of the groups `among`."""
        total = np.zeros(self.meta.num_layers, np.int64)
        seen = np.zeros((self.meta.num_layers, self.meta.num_experts), np.int64)  # number of the draw that saw it last
        for draw in range(1, DRAWS + 1):
            members = among[rng.integers(len(among))]
            chosen = rng.choice(members, batch, replace=False)
            _add_distinct(pool, first[chosen] + rng.integers(counts[chosen]), draw, seen, total)
        return [float(v) for v in total / DRAWS]


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else number(np.mean(values))


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """[layer] correlation over experts of two [layer, expert] arrays; NaN where one of them is constant."""
    a, b = (v - v.mean(axis=1, keepdims=True) for v in (a, b))
    scale = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    out = np.full(len(a), np.nan)
    np.divide((a * b).sum(axis=1), scale, out=out, where=scale > 0)
    return out


@njit()
def _add_distinct(
    pool: NDArray[np.unsignedinteger],
    tokens: NDArray[np.int64],
    draw: int,
    seen: NDArray[np.int64],
    total: NDArray[np.int64],
) -> None:
    _, layers, k = pool.shape
    for token in tokens:
        for layer in range(layers):
            for j in range(k):
                expert = pool[token, layer, j]
                if seen[layer, expert] != draw:
                    seen[layer, expert] = draw
                    total[layer] += 1
