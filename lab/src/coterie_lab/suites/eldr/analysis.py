"""What expert locality rests on, on recorded routing: domains, similarity of prefill and decode, signatures.

    unions       distinct experts of a step whose requests are of one domain, against a step of mixed requests
    correlation  activation probabilities of a request in prefill and in decode, over all layers' experts
    rho          how well distances of signatures predict distances in decode; fitted on one half, scored on the other

In recordings of one phase a request's first half stands for prefill, which makes the two more alike than in service.
Gate mass is that of the chosen experts only: the gate scores of the others were not recorded.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.fit import score_signatures
from coterie.answers.fleet.bench import Source
from coterie.footprints.counting import distinct_experts
from coterie_lab.suites.eldr.fleets import recorded_source

UNION_BATCH = {"gpt-oss-20b": 6, "deepseek-v2-lite": 16}
"""Requests of a step: no domain of gpt-oss-20b's recording has more than ten, few have more than six."""
UNION_STEPS = 1200


class Unions(NamedTuple):
    batch: int
    domains: int
    same: float
    """Distinct experts per layer in a step of one domain's requests; domains weighted by requests."""
    mixed: float
    """The same for requests mixed over those domains."""

    @property
    def saving_pct(self) -> float:
        return 100.0 * (1.0 - self.same / self.mixed)


class Analysis(NamedTuple):
    trace: str
    seed: int
    unions: Unions
    correlation: float
    rho: dict[str, float]
    """rho by weighting, with chosen layers."""
    rho_unmasked: dict[str, float]
    """rho by weighting, with all layers."""
    layers: float
    """Layers chosen for count_idf."""


def analyse(job: tuple[str, int], data: Path) -> Analysis:
    """Analyse one split of one trace."""
    name, seed = job
    source = recorded_source(data, name)
    rng = np.random.default_rng([seed, 5])
    masked: dict[str, float] = {}
    plain: dict[str, float] = {}
    layers = 0.0
    for score in score_signatures(source.counts, [seed]):
        if score.rho is not None:
            (masked if score.mask else plain)[score.weighting] = score.rho
        if score.mask and score.weighting == "count_idf":
            layers = score.layers or 0.0
    unions = domain_unions(source, UNION_BATCH[name], UNION_STEPS, rng)
    return Analysis(name, seed, unions, phase_correlation(source), masked, plain, layers)


def domain_unions(source: Source, batch: int, steps: int, rng: Generator) -> Unions:
    """Draw steps of different requests, each with one of its decoded tokens."""
    labels = source.trace.requests.domains
    assert labels is not None
    large = {domain for domain, count in Counter(labels).items() if count >= batch}
    pool = np.array([row for row, label in enumerate(labels) if label in large])
    members = {domain: np.array([row for row in pool if labels[row] == domain]) for domain in sorted(large)}
    starts = np.concatenate([[0], np.cumsum(source.trace.lengths)])
    ids = source.trace.arrays()[0].expert_ids
    experts = source.trace.meta.num_experts

    def touched(rows: NDArray[np.int64]) -> float:
        chosen = rng.choice(rows, batch, replace=False)
        half = source.trace.lengths[chosen] // 2
        at = starts[chosen] + half + (rng.random(batch) * (source.trace.lengths[chosen] - half)).astype(np.int64)
        return float(distinct_experts(np.asarray(ids[at]), experts).mean())

    same = [touched(members[labels[int(row)]]) for row in rng.choice(pool, steps)]
    mixed = [touched(pool) for _ in range(steps)]
    return Unions(batch, len(large), float(np.mean(same)), float(np.mean(mixed)))


def phase_correlation(source: Source) -> float:
    """Return the Pearson correlation over all layers' experts of a request, mean over requests."""
    before, after = (np.asarray(p, np.float64) for p in source.counts.probabilities)
    before, after = before - before.mean(axis=1, keepdims=True), after - after.mean(axis=1, keepdims=True)
    products = np.einsum("rc,rc->r", before, after)
    scales = np.sqrt(np.einsum("rc,rc->r", before, before) * np.einsum("rc,rc->r", after, after))
    return float((products / scales).mean())
