"""Samples to fit and to test: token ids or requests, a fifth of the requests to fit, the rest to test.

OLMoE and Mixtral have tables of counts, no requests: a drawn fifth of the occurrences of each token and expert is
fitted, and a token's test activations are its mean over the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.footprints.counting import footprint, transitions
from coterie.placement import Items
from coterie.predictors import TokenTable
from coterie.predictors.token_table import ONE
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers.npz import read_arrays

Array = NDArray[np.floating]

FIT_SHARE = 0.2
BATCH, BATCHES = 256, 20
"""Tokens of a step over all ranks (fewer if a trace is short), and steps. Tokens are drawn from all test tokens, as
those of a decode step come from many requests."""
HEAD = 16
"""First tokens of a request whose experts are known when it is given a rank."""


class Sample(NamedTuple):
    """One split."""

    items: Items
    load: Array
    """[layer, expert] fitted tokens."""
    test_load: Array
    """[layer, expert] of all test tokens."""
    truth: Array
    """[tested, layer, expert] activations of tested tokens or requests."""
    known: Array
    """[tested, layer, expert] expected activations per token."""
    transitions: NDArray[np.integer] | None = None
    """[layer - 1, expert, expert] fitted tokens; None if layers do not follow each other."""
    fitted: Array | None = None
    """[token, layer, expert] activations of fitted tokens, where layers follow each other and items are tokens."""


def split(groups: Sequence[Hashable], rng: Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw requests to fit and to test; those of one group stay together."""
    names = list(dict.fromkeys(groups))
    drawn = rng.permutation(len(names))[: max(1, round(FIT_SHARE * len(names)))]
    chosen = {names[i] for i in drawn}
    fits = np.array([group in chosen for group in groups])
    return np.flatnonzero(fits), np.flatnonzero(~fits)


def token_sample(trace: ActivationTrace, groups: Sequence[Hashable], rng: Generator) -> Sample:
    """Take token ids as items; an unseen token is expected to behave like the average token."""
    fit, test = split(groups, rng)
    rows = TokenTable().fit(trace, fit).rows
    tokens, offsets = trace.arrays()
    assert tokens.token_ids is not None
    experts = trace.meta.num_experts
    fitted, tested = _tokens_of(offsets, fit), _tokens_of(offsets, test)
    if len(tested) < BATCHES:
        raise ConfigError(f"{len(tested)} test tokens must be at least the {BATCHES} steps they are drawn for")
    drawn = rng.permutation(tested)[: BATCHES * min(BATCH, len(tested) // BATCHES)]
    load, test_load = (_load(tokens.expert_ids[at], experts) for at in (fitted, tested))
    expected = np.zeros((len(rows.counts) + 1, *load.shape), np.float32)
    np.put_along_axis(expected[:-1], rows.experts.astype(np.int64), (rows.weights / ONE).astype(np.float32), axis=2)
    expected[-1] = rows.popularity.per_token
    at = np.searchsorted(rows.token_ids, tokens.token_ids[drawn])
    at = np.where(rows.token_ids[np.minimum(at, len(rows.token_ids) - 1)] == tokens.token_ids[drawn], at, -1)
    return Sample(
        Items(rows.counts.astype(np.float64), rows.experts.astype(np.int32), rows.weights / ONE),
        load,
        test_load,
        _dense(tokens.expert_ids[drawn], experts),
        expected[at],
        transitions(tokens.expert_ids[fitted], experts),
        _dense(tokens.expert_ids[fitted], experts),
    )


def request_sample(trace: ActivationTrace, groups: Sequence[Hashable], rng: Generator) -> Sample:
    """Take requests as items, tested in a drawn order; the first HEAD tokens of each test request are known."""
    fit, test = split(groups, rng)
    test = rng.permutation(test)
    tokens, offsets = trace.arrays()
    experts = trace.meta.num_experts

    def footprints(requests: NDArray[np.int64], most: int | None = None) -> Array:
        spans = [tokens.expert_ids[offsets[r] : offsets[r + 1]][:most] for r in requests]
        return np.stack([_load(span, experts) for span in spans])

    counts, lengths = footprints(fit), np.diff(offsets)
    truth, heads = footprints(test), footprints(test, HEAD)
    return Sample(
        Items.of_counts(counts, lengths[fit], one_rank=True),
        counts.sum(axis=0),
        truth.sum(axis=0),
        truth,
        heads / np.minimum(lengths[test], HEAD)[:, None, None],
        transitions(tokens.expert_ids[_tokens_of(offsets, fit)], experts),
    )


def read_tables(path: Path, model: str) -> tuple[Array, int]:
    """Read the counts of a model over all its domains [seen token, layer, expert], and its experts per token."""
    rows = np.concatenate([array for name, array in read_arrays(path).items() if name.split("|")[0] == model])
    layer, expert, token, count = rows.T.astype(np.int64)
    _, at = np.unique(token, return_inverse=True)
    counts = np.zeros((int(at.max()) + 1, int(layer.max()) + 1, int(expert.max()) + 1), np.float32)
    np.add.at(counts, (at, layer, expert), count)
    return counts, {8: 2, 64: 8}[counts.shape[2]]


def table_sample(counts: Array, top_k: int, rng: Generator) -> Sample:
    """Take token ids as items, from counts [token, layer, expert]."""
    fit = rng.binomial(counts.astype(np.int64), FIT_SHARE).astype(np.float64)
    rest = counts - fit
    frequency = fit.sum(axis=2).mean(axis=1) / top_k
    seen = np.flatnonzero(frequency > 0)
    load, test_load = fit.sum(axis=0), rest.sum(axis=0)
    times = rest.sum(axis=2).mean(axis=1)
    drawn = rng.choice(len(times), BATCH * BATCHES, p=times / times.sum())
    popular = load / load.sum(axis=1, keepdims=True) * top_k
    known = fit[drawn] / np.maximum(frequency[drawn], 1e-9)[:, None, None]
    unseen = fit[drawn].sum(axis=2) == 0  # [token, layer]
    known[unseen] = np.broadcast_to(popular, known.shape)[unseen]
    truth = rest[drawn] / np.maximum(rest[drawn].sum(axis=2, keepdims=True), 1e-9) * top_k
    items = Items.of_counts(fit[seen], frequency[seen], kept=2 * top_k)
    return Sample(items, load, test_load, truth, known)


def _tokens_of(offsets: NDArray[np.integer], requests: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in requests])


def _load(ids: NDArray[np.integer], experts: int) -> NDArray[np.float64]:
    """Count tokens per expert of ids [token, layer, k]: [layer, expert]."""
    return footprint(ids, experts).astype(np.float64)


def _dense(ids: NDArray[np.integer], experts: int) -> NDArray[np.float32]:
    out = np.zeros((len(ids), ids.shape[1], experts), np.float32)
    np.put_along_axis(out, ids.astype(np.int64), 1.0, axis=2)
    return out
