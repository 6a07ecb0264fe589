"""One streaming pass over an activation trace: check every expert id, and count the loads per window and domain.

All tokens of a request count in the window of its arrival, so windows shorter than a request's duration are inexact.
Statistics that need footprints of single requests use a random sample of requests, copied during the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.answers.inspect.samples import Samples
from coterie.errors import TraceError
from coterie.traces.activations import ActivationTrace, Chunk
from coterie.types import DECODE

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
