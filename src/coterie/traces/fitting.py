"""Fit the settings of a synthetic trace to a recorded trace.

The fit matches, per domain and layer, how often each expert is among a token's top-k; per layer, how much requests vary
within their domain; the mix of domains; and each domain's lengths. So the skew of loads agrees, and so does the number
of distinct experts in a step of tokens from different requests. Properties that the generator lacks (see
coterie.traces.synthetic) are not matched: real routing repeats within a request, so a few tokens of *one* real request
activate fewer distinct experts than those of a synthetic request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie._numba import side_by_side
from coterie.errors import check
from coterie.footprints.counting import footprints
from coterie.traces._sampling import inclusion_moments
from coterie.traces.activations import ActivationTrace
from coterie.traces.arrivals import PoissonArrivals, RecordedLengths
from coterie.traces.synthetic import SyntheticSettings
from coterie.types import PREFILL

UNLABELLED = "all"
"""Domain of all requests if the trace names no domains."""
_MIN_TOKENS = 16
"""Fewest tokens of a request used to fit the concentration: shorter requests are too noisy."""
_STEPS = (1.0, 1.0, 0.7, 0.5, 0.35)
"""Share of the correction applied in each step: decreasing, so that the model's sampling noise averages out."""


def fit_synthetic(
    trace: ActivationTrace, rng: Generator, base: SyntheticSettings | None = None, samples: int = 400
) -> SyntheticSettings:
    """Fit settings to a trace; phase correlation, drift and arrivals are those of `base`.

    Without `base`, arrivals are Poisson at the recorded mean rate if the trace has arrival times. `samples` is the
    number of requests drawn per domain, layer and step to compare the model with the trace.
    """
    counts = _count(trace)
    arrivals = (base or SyntheticSettings()).arrivals
    if base is None and trace.requests.duration_s > 0:
        arrivals = PoissonArrivals((trace.num_requests - 1) / trace.requests.duration_s)
    preferences, concentration = _fit(counts, trace.meta.top_k, rng, samples)
    return replace(
        base or SyntheticSettings(),
        model=trace.meta.model,
        num_experts=trace.meta.num_experts,
        num_layers=trace.meta.num_layers,
        top_k=trace.meta.top_k,
        layer_ids=trace.meta.layer_ids,
        domains=counts.names,
        mix=tuple(np.bincount(counts.domain, minlength=len(counts.names)) / len(counts.domain)),
        concentration=tuple(concentration.tolist()),
        preferences=preferences,
        arrivals=arrivals,
        lengths=RecordedLengths(counts.prompt_tokens, counts.output_tokens, counts.domain),
    )


class _Counts(NamedTuple):
    names: tuple[str, ...]
    domain: NDArray[np.int64]  # [request]
    prompt_tokens: NDArray[np.int64]  # [request] recorded
    output_tokens: NDArray[np.int64]  # [request] recorded
    load: NDArray[np.float64]  # [domain, layer, expert] activations
    tokens: NDArray[np.float64]  # [domain]
    scatter: NDArray[np.float64]  # [layer] variance of requests' inclusion within their domain, summed over experts
    degrees: NDArray[np.float64]  # [domain] requests used to estimate the scatter, minus 1


@dataclass(slots=True)
class _Halves:
    """Running sums over a domain's requests, whose tokens are split into two disjoint halves.

    The covariance of the halves is free of sampling noise and of the repetition between neighbouring tokens, which a
    binomial correction would mistake for scatter between requests.
    """

    first: NDArray[np.float64]  # [domain, layer, expert]
    second: NDArray[np.float64]  # [domain, layer, expert]
    product: NDArray[np.float64]  # [domain, layer]
    count: NDArray[np.float64]  # [domain]

    def add(self, domain: NDArray[np.int64], first: NDArray[np.float64], second: NDArray[np.float64]) -> None:
        np.add.at(self.first, domain, first)
        np.add.at(self.second, domain, second)
        np.add.at(self.product, domain, np.einsum("rle,rle->rl", first, second))
        np.add.at(self.count, domain, 1.0)

    def scatter(self) -> NDArray[np.float64]:
        """Return the variance of requests within their domain, [layer]: summed over experts, pooled over domains."""
        several = self.count > 1
        if not several.any():
            return np.zeros(self.product.shape[1])
        means = np.einsum("dle,dle->dl", self.first[several], self.second[several]) / self.count[several, None]
        return np.asarray((self.product[several] - means).sum(axis=0) / (self.count[several] - 1).sum(), np.float64)


def _count(trace: ActivationTrace) -> _Counts:
    check(trace.num_tokens, "a trace without tokens cannot be fitted")
    labels = trace.requests.domains
    named = [UNLABELLED] * trace.num_requests if labels is None else labels
    names, domain = np.unique(np.array(named, np.str_), return_inverse=True)
    shape = (len(names), trace.meta.num_layers, trace.meta.num_experts)
    load, tokens = np.zeros(shape), np.zeros(len(names))
    halves = _Halves(np.zeros(shape), np.zeros(shape), np.zeros(shape[:2]), np.zeros(len(names)))
    prompts, outputs = [], []
    for chunk in trace.chunks(1 << 16):
        offsets, rows = chunk.offsets, domain[chunk.first_request : chunk.first_request + len(chunk.offsets) - 1]
        prefill = np.diff(np.concatenate([[0], np.cumsum(chunk.tokens.phase == PREFILL)])[offsets])
        decode = np.diff(offsets) - prefill
        # Four runs per request: each phase is split in two, so that both halves have the same share of each phase.
        runs = np.stack([prefill // 2, prefill - prefill // 2, decode // 2, decode - decode // 2], axis=1)
        per_run = footprints(chunk.tokens.expert_ids, np.concatenate([[0], np.cumsum(runs)]), shape[2]).reshape(
            len(rows), 4, *shape[1:]
        )
        first, second = (per_run[:, i] + per_run[:, i + 2] for i in (0, 1))  # [request, layer, expert]
        np.add.at(load, rows, (first + second).astype(np.float64))
        np.add.at(tokens, rows, np.diff(offsets))
        long = np.diff(offsets) >= _MIN_TOKENS
        sizes = [(runs[long, i] + runs[long, i + 2])[:, None, None] for i in (0, 1)]
        halves.add(rows[long], first[long] / sizes[0], second[long] / sizes[1])
        prompts.append(prefill)
        outputs.append(decode)
    return _Counts(
        tuple(names.tolist()),
        domain,
        np.concatenate(prompts),
        np.concatenate(outputs),
        load,
        tokens,
        halves.scatter(),
        np.maximum(halves.count - 1, 0.0),
    )


def _fit(counts: _Counts, k: int, rng: Generator, samples: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return preferences [domain, layer, expert] and concentration [layer]."""
    domains, layers, experts = counts.load.shape
    tokens = np.maximum(counts.tokens, 1.0)[:, None, None]
    # An unseen expert counts as a tenth of an activation, so that it is drawn rarely but not never.
    inclusion = np.clip(counts.load / tokens, 0.1 / tokens, 1.0 - 1e-4)
    # The top-k are the first k of exponential clocks with rates q to ring, so P(e in top-k) is about 1 - exp(-t q[e])
    # for some t; drawing the rates from a Dirichlet around q only changes t.
    hazard = -np.log1p(-inclusion)  # [domain, layer, expert]
    q = hazard / hazard.sum(axis=2, keepdims=True)
    if not (counts.scatter > 0).any():
        concentration = np.full(layers, np.inf)
    else:
        # First order: inclusion changes by t (1 - inclusion) per unit of q, whose variance is q (1 - q) / (c + 1).
        slope = hazard.sum(axis=2, keepdims=True) * (1 - inclusion)
        concentration = np.clip(
            _pool((slope**2 * q * (1 - q)).sum(axis=2), counts) / np.maximum(counts.scatter, 1e-9) - 1, 0.5, 1e6
        )
    mean, variance = np.empty((domains * layers, experts)), np.empty(domains * layers)
    for step in _STEPS:
        rows = np.tile(np.minimum(concentration, 1e6), domains)
        arguments = q.reshape(-1, experts), rows, k, samples, rng.integers(1 << 64, dtype=np.uint64), mean, variance
        side_by_side(inclusion_moments, len(rows), *arguments)
        modelled = -np.log1p(-np.clip(mean, 1e-12, 1.0 - 1e-9)).reshape(q.shape)
        q = q * np.clip(hazard / modelled, 0.2, 5.0) ** step
        q /= q.sum(axis=2, keepdims=True)
        if np.isfinite(concentration).all():
            ratio = _pool(variance.reshape(domains, layers), counts) / np.maximum(counts.scatter, 1e-9)
            concentration = np.clip((concentration + 1) * np.clip(ratio, 0.25, 4.0) ** step - 1, 0.5, 1e6)
    return q, concentration


def _pool(per_domain: NDArray[np.float64], counts: _Counts) -> NDArray[np.float64]:
    """Average [domain, layer] over domains to [layer], with the domain weights of the recorded scatter."""
    return np.asarray(counts.degrees @ per_domain / counts.degrees.sum(), np.float64)
