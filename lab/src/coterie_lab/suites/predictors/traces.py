"""Traces prepared for the predictors suite: requests drawn, short ones left out, one phase split into two.

All traces are in memory, with requests in their original order. Requests that share a prompt are one group: a predictor
that calibrates on one of them would know the others.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from coterie.answers.suites import SuiteOptions
from coterie.footprints import footprint
from coterie.traces.activations import ActivationTrace, concat_requests
from coterie.types import DECODE, PREFILL

MAX_REQUESTS = 2000
"""Most requests of a trace, sampled by seed: they are held in memory."""
MIN_TOKENS = 4
"""Fewest recorded tokens of a request: halves of fewer say nothing."""


def drawn(trace: ActivationTrace, options: SuiteOptions, name: str, notes: list[str]) -> NDArray[np.int64]:
    """Draw as many requests as asked for, or all: [request] indices, ascending."""
    most = options.requests or MAX_REQUESTS
    if trace.num_requests <= most:
        return np.arange(trace.num_requests, dtype=np.int64)
    notes.append(f"{name}: {most:,} of {trace.num_requests:,} requests, drawn by seed.")
    return np.sort(np.random.default_rng(options.seed).permutation(trace.num_requests)[:most])


def taken(trace: ActivationTrace, rows: NDArray[np.int64]) -> ActivationTrace:
    """Return some requests of a trace, in memory."""
    tokens, offsets = trace.arrays()
    spans = [np.arange(offsets[r], offsets[r + 1]) for r in rows]
    at = np.concatenate(spans) if spans else np.empty(0, np.int64)
    ends = np.cumsum([0, *map(len, spans)])
    ids = None if tokens.token_ids is None else tokens.token_ids[at]
    return ActivationTrace.from_arrays(
        trace.meta, tokens.expert_ids[at], ends, trace.requests.take(rows), tokens.phase[at], ids
    )


def long_enough(trace: ActivationTrace, rows: NDArray[np.int64], name: str, notes: list[str]) -> ActivationTrace:
    """Leave out requests that are too short, or lack a phase in a trace of two phases."""
    tokens, offsets = trace.arrays()
    both = len(np.unique(tokens.phase)) == 2
    keep = []
    for row in rows:
        phase = tokens.phase[offsets[row] : offsets[row + 1]]
        if len(phase) >= MIN_TOKENS and (not both or len(np.unique(phase)) == 2):
            keep.append(int(row))
    if len(keep) < len(rows):
        notes.append(f"{name}: {len(rows) - len(keep)} of {len(rows)} requests are too short to score.")
    return taken(trace, np.array(keep, np.int64))


def joined(one: ActivationTrace, other: ActivationTrace) -> ActivationTrace:
    """Join the requests of two traces of the same model."""
    (first, ends), (second, more) = one.arrays(), other.arrays()
    assert first.token_ids is not None
    assert second.token_ids is not None
    return ActivationTrace.from_arrays(
        one.meta,
        np.concatenate([first.expert_ids, second.expert_ids]),
        np.concatenate([ends, ends[-1] + more[1:]]),
        concat_requests([one.requests, other.requests]),
        np.concatenate([first.phase, second.phase]),
        np.concatenate([first.token_ids, second.token_ids]),
    )


def halved(trace: ActivationTrace) -> ActivationTrace:
    """Relabel the first half of each request as prefill and the second as decode."""
    tokens, offsets = trace.arrays()
    phase = np.concatenate(
        [np.repeat(np.array([PREFILL, DECODE], np.uint8), [n // 2, n - n // 2]) for n in np.diff(offsets)]
    )
    return ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets, trace.requests, phase, tokens.token_ids)


def prompt_groups(trace: ActivationTrace) -> list[Hashable]:
    """Group requests with the same prompt tokens, or with the same first block of a prompt."""
    blocks = trace.requests.prefix_blocks
    groups: list[Hashable] = []
    for index in range(trace.num_requests):
        tokens = trace.request(index)
        if tokens.token_ids is not None and (tokens.phase == PREFILL).any():
            groups.append(tokens.token_ids[tokens.phase == PREFILL].tobytes())
        elif blocks is not None and len(blocks[index]):
            groups.append(int(blocks[index][0]))
        else:
            groups.append((index,))
    return groups


def footprint_of(trace: ActivationTrace, index: int, phase: int | None) -> NDArray[np.uint32]:
    """Return the footprint of one request, of a phase or all: [layer, expert]."""
    tokens = trace.request(index)
    return footprint(tokens.expert_ids if phase is None else tokens.only(phase), trace.meta.num_experts)


def token_ids_of(trace: ActivationTrace, index: int, phase: int | None) -> NDArray[np.int32]:
    """Return the token ids of one request, of a phase or all; the trace must have token ids."""
    tokens = trace.request(index)
    assert tokens.token_ids is not None
    return tokens.token_ids if phase is None else tokens.token_ids[tokens.phase == phase]
