"""One pass over an activation trace, and statistics of single requests in a random sample.

The statistics are the correlation of prefill with decode and the distinct experts of a decode step. They use a sample,
because the footprints of a long trace do not fit in memory. The sample is copied while the trace is streamed, so that
no page of the mapped file stays resident.

The pass checks every expert id, and counts the loads per window and domain. All tokens of a request count in the window
of its arrival, so windows shorter than a request's duration are inexact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.answers.inspect.loads import number
from coterie.costs.step import Batch, StepModel
from coterie.errors import TraceError
from coterie.footprints.counting import footprint
from coterie.traces.activations import ActivationTrace, Chunk, TraceMeta
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
    """Pearson correlation, mean over layers."""
    pearson_per_layer: list[float | None]


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
                self.pearson.append(_pearson(*np.stack(pair).astype(np.float64)))

    def correlation(self) -> PhaseCorrelation | None:
        """Return the mean correlations; None if no sampled request has both phases."""
        if not self.pearson:
            return None
        per_layer = [_mean(layer) for layer in np.stack(self.pearson).T]
        return PhaseCorrelation(len(self.pearson), _mean(per_layer), per_layer)

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


Progress = Callable[[int, int], None]
"""Progress callback: tokens done, tokens in all."""

CHUNK_BYTES = 64 << 20
"""Bytes of expert ids read at a time; bounds the resident part of a mapped trace and the delay of an interruption."""
MAX_DOMAINS = 12
MAX_WINDOWS = 64
REQUESTS_PER_WINDOW = 16
"""Smallest mean number of requests per window: with fewer, the load of a window is mostly sampling noise."""
_THREADS = 2


class Windows(NamedTuple):
    """Assignment of requests to windows of equal duration by arrival time; one window without arrival times."""

    window: NDArray[np.int64]
    """[request] index of its window."""
    half: NDArray[np.int64]
    """[request] 0 or 1 at random, so that the two halves of a window differ by sampling noise only."""
    total: int
    width_s: float | None
    """Length of a window in seconds; None without arrival times."""


class PassResult(NamedTuple):
    half_windows: NDArray[np.int64]
    """[window, half, layer, expert] activations; their sum over windows and halves is the load of the trace."""
    domains: NDArray[np.int64]
    """[domain, layer, expert] activations of the domains with the most tokens."""
    decode_tokens: int
    samples: Samples


def cut_windows(trace: ActivationTrace, rng: Generator) -> Windows:
    """Cut the trace into windows, up to 64, with a mean of at least 16 requests each."""
    table, requests = trace.requests, trace.num_requests
    index, order, count, width = np.zeros(requests, np.int64), np.arange(requests), 1, None
    if table.arrival_s is not None and table.duration_s > 0:
        since_s = table.arrival_s - table.arrival_s.min()
        count = int(np.clip(requests // REQUESTS_PER_WINDOW, 1, MAX_WINDOWS))
        index = np.minimum((since_s / table.duration_s * count).astype(np.int64), count - 1)
        order, width = np.argsort(since_s, kind="stable"), table.duration_s / count
    # Consecutive arrivals go to different halves, in random order: halves are equally large and follow no pattern.
    half = np.empty(requests, np.int64)
    coin = np.repeat(rng.integers(2, size=-(-requests // 2)), 2)[:requests]
    half[order] = (np.arange(requests) + coin) % 2
    return Windows(index, half, count, width)


def run_pass(
    trace: ActivationTrace,
    name: str,
    windows: Windows,
    domain: NDArray[np.int64],
    num_domains: int,
    rng: Generator,
    progress: Progress | None = None,
) -> PassResult:
    """Count and check every activation. `domain` [request] is an index below `num_domains`, or -1 for no domain."""
    meta = trace.meta
    if (trace.lengths < 0).any():
        trace.validate()  # raises an error that names the file with the decreasing offset
    shape = (meta.num_layers, meta.num_experts)
    group = windows.window * 2 + windows.half
    # Counts of each thread, [window * 2 + half, layer, expert] and [domain, layer, expert], summed after the pass.
    parts = [
        tuple(np.zeros((rows, *shape), np.int64) for rows in (windows.total * 2, num_domains)) for _ in range(_THREADS)
    ]
    samples = Samples.choose(meta, trace.num_requests, rng)
    decode_tokens = done = 0
    token_bytes = meta.num_layers * meta.top_k * meta.specs(0, 0)["expert_ids"].dtype.itemsize
    with ThreadPoolExecutor(_THREADS) as pool:
        for chunk in trace.chunks(max(1, CHUNK_BYTES // token_bytes)):
            rows = slice(chunk.first_request, chunk.first_request + len(chunk.offsets) - 1)
            phase = chunk.tokens.phase
            if phase.max(initial=DECODE) > DECODE:
                raise TraceError(name, "phase", f"holds {int(phase.max())}; it must be 0 (prefill) or 1 (decode)")
            decode_tokens += int(phase.sum())
            if any(pool.map(lambda job: _count(*job), _jobs(chunk, group[rows], domain[rows], parts))):
                trace.validate()  # raises an error with the id and its file; reads the trace again up to it
                raise TraceError(name, "expert_ids", f"holds an id outside 0 … {meta.num_experts - 1}")
            samples.take(chunk, rng)
            done += len(phase)
            if progress is not None:
                progress(done, trace.num_tokens)
    groups, domains = (np.sum(counts, axis=0) for counts in zip(*parts, strict=True))
    return PassResult(groups.reshape(windows.total, 2, *shape), domains, decode_tokens, samples)


def _jobs(chunk: Chunk, group: NDArray[np.int64], domain: NDArray[np.int64], parts: list[Any]) -> list[Any]:
    """Split the requests of a chunk into one contiguous range per thread, with about equally many tokens."""
    offsets = chunk.offsets
    cuts = np.searchsorted(offsets, np.linspace(0, offsets[-1], len(parts) + 1)[1:-1])
    cuts = np.concatenate([[0], cuts, [len(offsets) - 1]])
    return [
        (chunk.tokens.expert_ids, offsets[a : b + 1], group[a:b], domain[a:b], *part)
        for a, b, part in zip(cuts[:-1], cuts[1:], parts, strict=True)
    ]


@njit()
def _count(
    ids: NDArray[Any],
    offsets: NDArray[np.int64],
    group: NDArray[np.int64],
    domain: NDArray[np.int64],
    groups: NDArray[np.int64],
    domains: NDArray[np.int64],
) -> bool:
    """Add the activations of requests to their group and domain; return True at the first id that is out of range."""
    _, layers, k = ids.shape
    experts = groups.shape[2]
    footprint = np.zeros((layers, experts), np.int64)
    for r in range(len(group)):
        start, stop = offsets[r], offsets[r + 1]
        # Count a long request in `footprint`, then add that to both arrays; a short one has fewer ids than experts.
        long = (stop - start) * k >= experts
        for token in range(start, stop):
            for layer in range(layers):
                for j in range(k):
                    expert = np.int64(ids[token, layer, j])
                    if expert < 0 or expert >= experts:
                        return True
                    if long:
                        footprint[layer, expert] += 1
                    else:
                        groups[group[r], layer, expert] += 1
                        if domain[r] >= 0:
                            domains[domain[r], layer, expert] += 1
        if long:
            for layer in range(layers):
                for e in range(experts):
                    groups[group[r], layer, e] += footprint[layer, e]
                    if domain[r] >= 0:
                        domains[domain[r], layer, e] += footprint[layer, e]
                    footprint[layer, e] = 0
    return False
