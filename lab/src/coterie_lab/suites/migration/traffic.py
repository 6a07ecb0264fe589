"""Demand for experts by rank and window when requests are routed by domain, from real routing.

A router that keeps domains together cuts the traffic, laid out domain after domain, into as many equal parts as there
are ranks. When the shares of the domains change, the cuts move, and a rank sees other requests than before. Routing is
real: every domain's distribution over experts is counted from recorded requests. Arrivals are made up: which requests
come in which window, and how the shares wander. A placement is never scored on requests it was planned on.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.suites import SuiteOptions
from coterie.errors import TraceError
from coterie.footprints import footprint
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import kind_of, read_trace

Array = NDArray[np.float64]

TRACES = ("glm-5.2", "deepseek-v2-lite", "gpt-oss-20b")
"""Folders under activations/ of the real data."""
MAX_LAYERS = 15
"""Most layers that are computed, taken evenly: actions are decided layer by layer, and layers differ little."""
MIN_REQUESTS = 4
"""Fewest requests of a domain, half to plan on and half to score on; smaller domains are left out."""

AREAS: dict[str, tuple[str, ...]] = {
    "maths": ("math", "algebra", "statistics", "logic", "econometrics"),
    "physics": ("physic", "mechanics", "astro", "electromagn", "optics", "photonics"),
    "chemistry": ("chem",),
    "life": ("bio", "medic", "anatomy", "genetic", "clinical", "health", "nutrition", "virology", "aging", "sexuality"),
    "computing": ("computer", "machine", "security", "engineering"),
    "law": ("law", "juris", "politic", "policy", "government", "foreign"),
    "business": ("business", "economic", "accounting", "marketing", "management", "public_relations"),
    "society": ("history", "philosophy", "moral", "religion", "psychology", "sociology", "geography", "fallacies"),
}
"""Areas of gpt-oss-20b's many small categories; the first match counts, the rest form one more area."""


class Domains(NamedTuple):
    """Recorded routing by domain."""

    model: str
    requests: Mapping[str, Array]
    """Domain → [request or shard, layer, expert] activations."""
    left_out: int
    """Requests in domains that were too small."""


class Windows(NamedTuple):
    """Demand before the first window [rank, layer, expert], and in each window; each rank's sums to 1 in a layer."""

    planned_on: Array
    scored_on: Array
    """[window, rank, layer, expert]"""


def read_domains(path: Path, options: SuiteOptions) -> Domains:
    trace = read_trace(path, options.trace_format)
    groups: dict[str, list[Array]] = {}
    if isinstance(trace, LoadTable):
        for label, counts in zip(trace.labels or (), trace.counts, strict=True):
            if "/" in label:  # the others are sums of these
                groups.setdefault(label.split("/")[0], []).append(counts.astype(np.float64))
        model = trace.model
    elif isinstance(trace, ActivationTrace):
        model, labels = trace.meta.model, trace.requests.domains
        if labels is None:
            raise TraceError(path, "domains", "found none; requests must say what they are about")
        for index, label in enumerate(labels):
            counts = footprint(trace.request(index).expert_ids, trace.meta.num_experts)
            groups.setdefault(area_of(label, len(set(labels))), []).append(counts.astype(np.float64))
    else:
        raise TraceError(path, "kind", f"found {kind_of(trace)!r}, expected 'activations' or 'load'")
    kept = {name: group for name, group in sorted(groups.items()) if len(group) >= MIN_REQUESTS}
    if len(kept) < 2:
        raise TraceError(path, "domains", f"found {len(kept)} of at least {MIN_REQUESTS} requests, expected 2 or more")
    left_out = sum(len(group) for name, group in groups.items() if name not in kept)
    return Domains(model, {name: _some_layers(np.stack(group)) for name, group in kept.items()}, left_out)


def area_of(label: str, labels: int) -> str:
    """Return the area of a category if there are many categories, else the category itself."""
    if labels <= 2 * len(AREAS):
        return label
    low = label.lower()
    return next((area for area, words in AREAS.items() if any(word in low for word in words)), "other")


def _some_layers(counts: Array) -> Array:
    layers = counts.shape[1]
    return counts[:, np.unique(np.linspace(0, layers - 1, min(layers, MAX_LAYERS)).round().astype(int))]


def make_windows(domains: Domains, ranks: int, windows: int, wander: float, seed: int) -> Windows:
    """Make windows; `wander` is the spread of the domains' shares in the last window, in natural logarithms."""
    rng = np.random.default_rng([seed, zlib.crc32(domains.model.encode())])
    names = list(domains.requests)
    even = np.ones(len(names))
    before = np.stack([_mean(domains.requests[name][0::2]) for name in names])
    walk = np.cumsum(rng.standard_normal((windows, len(names))), axis=0) * wander / np.sqrt(windows)
    scored = [by_rank(_drawn(domains, names, rng), np.exp(step), ranks) for step in walk]
    return Windows(by_rank(before, even, ranks), np.stack(scored))


def _drawn(domains: Domains, names: list[str], rng: Generator) -> Array:
    """Draw requests to score on with repetition, as many as there are: shares [domain, layer, expert]."""
    kept = [domains.requests[name][1::2] for name in names]
    return np.stack([_mean(requests[rng.integers(0, len(requests), len(requests))]) for requests in kept])


def _mean(requests: Array) -> Array:
    """Return shares of the tokens of all requests: [layer, expert]."""
    total = requests.sum(axis=0)
    return np.asarray(total / total.sum(axis=1, keepdims=True))


def by_rank(domains: Array, shares: Array, ranks: int) -> Array:
    """Give each rank an equal part of the traffic, in order: [rank, layer, expert] from [domain, layer, expert]."""
    edges = np.concatenate([[0.0], np.cumsum(shares) / shares.sum()])
    low, high = np.arange(ranks)[:, None] / ranks, np.arange(1, ranks + 1)[:, None] / ranks
    part = np.clip(np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1]), 0.0, None) * ranks  # [rank, domain]
    return np.asarray(np.tensordot(part, domains, 1))
