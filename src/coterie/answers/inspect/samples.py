"""Statistics of single requests: correlation of prefill with decode, and the distinct experts of a decode step.

Both use a random sample of requests, because the footprints of a long trace do not fit in memory. The sample is copied
while the trace is streamed, so that no page of the mapped file stays resident.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import rankdata

from coterie._numba import njit
from coterie.answers.inspect.loads import number
from coterie.costs.step import Batch, StepModel
from coterie.footprints.counting import footprint
from coterie.traces.activations import Chunk, TraceMeta
from coterie.types import DECODE, PREFILL

SAMPLED_REQUESTS = 4096
CORRELATED_REQUESTS = 1024
TOKENS_PER_REQUEST = 16
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
DRAWS = 256
PADDED_BATCHES, PADDED_DRAWS, PADDED_CONTEXT = (3, 5, 9, 13, 17, 25, 33, 49), 32, 1024
"""Batch sizes between two CUDA graphs, batches drawn of each, and the cached tokens of a request."""


@dataclass(frozen=True, slots=True)
class PhaseCorrelation:
    """Correlation over experts of a request's prefill counts with its decode counts, mean over requests."""

    requests: int
    """Number of sampled requests with tokens of both phases."""
    pearson: float | None
    """Pearson correlation, mean over layers; `spearman` likewise."""
    spearman: float | None
    pearson_per_layer: list[float | None]
    spearman_per_layer: list[float | None]


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Distinct experts of one layer in a decode step of `batch` requests, one token each."""

    batch: int
    uniform: float
    """Expected number under uniform random routing: experts x (1 - (1 - k / experts)^batch)."""
    mixed: float | None
    """Mean over draws and layers, with requests drawn from all domains; None with fewer than `batch` requests."""
    same_domain: float | None
    """Mean with all requests from one domain, a random one with at least `batch` requests; None if none has."""
    mixed_per_layer: list[float] | None
    same_domain_per_layer: list[float] | None
    domains: int
    """Number of domains with at least `batch` sampled requests."""

    @property
    def saved(self) -> float | None:
        """Share of the experts that requests of one domain save relative to mixed requests; None if unknown."""
        return None if not self.mixed or self.same_domain is None else 1 - self.same_domain / self.mixed


@dataclass(frozen=True, slots=True)
class PaddingCost:
    """Cost of padding rows in a decode step of `batch` requests if each holds another request's token, unmasked."""

    batch: int
    padded: int
    further: float
    """Experts of a layer that only padding rows touch, mean over layers and draws."""
    share: float
    """Time that they add, as a share of the step without them."""


@dataclass(slots=True)
class Samples:
    """Random sample of requests, chosen before the pass, and the data copied from each during the pass."""

    meta: TraceMeta
    chosen: NDArray[np.int64]
    """Indices of the sampled requests, ascending."""
    correlated: frozenset[int]
    """Smaller subset for the phase correlation, which takes longer."""
    requests: list[int] = field(default_factory=list)
    """Sampled requests with decode tokens, one per entry of `tokens`."""
    tokens: list[NDArray[np.unsignedinteger]] = field(default_factory=list)
    """Expert ids [token, layer, k] of up to 16 random decode tokens of each request."""
    pearson: list[NDArray[np.float64]] = field(default_factory=list)
    """Correlation [layer] of each request with both phases; NaN if the counts of a phase are constant."""
    spearman: list[NDArray[np.float64]] = field(default_factory=list)

    @classmethod
    def choose(cls, meta: TraceMeta, num_requests: int, rng: Generator) -> Samples:
        chosen = rng.choice(num_requests, min(num_requests, SAMPLED_REQUESTS), replace=False)
        return cls(meta, np.sort(chosen), frozenset(chosen[:CORRELATED_REQUESTS].tolist()))

    def take(self, chunk: Chunk, rng: Generator) -> None:
        """Copy the data of the chunk's sampled requests. The expert ids must have been checked."""
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
        """Return the mean correlations; None if no sampled request has both phases."""
        if not self.pearson:
            return None
        pearson, spearman = ([_mean(layer) for layer in np.stack(v).T] for v in (self.pearson, self.spearman))
        return PhaseCorrelation(len(self.pearson), _mean(pearson), _mean(spearman), pearson, spearman)

    def distinct(self, domain: NDArray[np.int64] | None, rng: Generator) -> list[DistinctExperts]:
        """Compute distinct experts for every batch size; `domain` [request] is None if the trace has no domains."""
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
                    mixed=None if mixed is None else number(np.mean(mixed)),
                    same_domain=None if same is None else number(np.mean(same)),
                    mixed_per_layer=mixed,
                    same_domain_per_layer=same,
                    domains=len(large),
                )
            )
        return out

    def padding(self, model: StepModel, rng: Generator) -> list[PaddingCost]:
        """Price padding rows that hold other requests' tokens, for batch sizes that the sample can fill."""
        out = []
        for batch in PADDED_BATCHES:
            size, full = model.options.padded(batch), Batch(batch, batch * PADDED_CONTEXT)
            if size > len(self.tokens):
                break
            costs = []
            for _ in range(PADDED_DRAWS):
                chosen = rng.choice(len(self.tokens), size, replace=False)
                rows = np.stack([rng.choice(self.tokens[request]) for request in chosen])  # [row, layer, k]
                real, whole = (footprint(part, self.meta.num_experts) for part in (rows[:batch], rows))
                further = (real == 0) & (whole > 0)
                alone, both = (model.step(load, full).total_s for load in (real, real + further))
                costs.append((further.sum() / len(real), both / alone - 1))
            out.append(PaddingCost(batch, size, *np.mean(costs, axis=0).tolist()))
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
        """Return the mean distinct experts [layer] of one token of each of `batch` requests, from one random group."""
        total = np.zeros(self.meta.num_layers, np.int64)
        seen = np.zeros((self.meta.num_layers, self.meta.num_experts), np.int64)  # last draw that used the expert
        for draw in range(1, DRAWS + 1):
            chosen = rng.choice(among[rng.integers(len(among))], batch, replace=False)
            _add_distinct(pool, first[chosen] + rng.integers(counts[chosen]), draw, seen, total)
        return [float(v) for v in total / DRAWS]


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    present = [float(v) for v in values if v is not None and math.isfinite(v)]
    return math.fsum(present) / len(present) if present else None


def _pearson(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation [layer] over experts of two [layer, expert] arrays; NaN if a row is constant."""
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
