"""The current mix against single domains: what each plan gives up, and which one the traffic's own drift picks.

One plan is made for mixtures of all of GLM-5.2's domains, one for traffic of one domain at a time. Both are scored on
the mix and on every domain. To pick one, both are scored on past windows: of traffic that keeps its mix, and of traffic
that moves on from domain to domain. Future windows have chunks of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.placement import Load
from coterie.types import Placement
from coterie_lab.suites.latency_optimal.domains import DomainSetting, shifting
from coterie_lab.suites.placement.cells import EPLB, FREE, ROWS, STEPS, plan_first, score
from coterie_lab.suites.placement.traffic import MIX, ONE_DOMAIN, Chunks, glm_samples, read_chunks

Array = NDArray[np.float64]

FOR_MEAN, FOR_MIX, FOR_DOMAINS = "eplb, mean", "steps of the mix", "steps of one domain"
STEADY, MOVING = "keeps its mix", "moves on from domain to domain"
TRAFFIC = {STEADY: DomainSetting(base=1.0), MOVING: DomainSetting()}
"""Windows of each kind of traffic; a fifth of the moving one is drawn evenly from all domains."""


class Mixture(NamedTuple):
    """A run of the grid."""

    ranks: int
    slots: int
    seed: int


class Traded(NamedTuple):
    """Balancedness of one plan, on chunks it was not made from."""

    plan: str
    mix: float
    domains: float
    """Mean over domains."""
    worst_domain: float
    seen: dict[str, float]
    """By kind of traffic: past windows."""
    to_come: dict[str, float]
    """By kind of traffic: future windows."""


def mixtures_of(seeds: Sequence[int]) -> list[Mixture]:
    return [Mixture(ranks, slots, seed) for seed in seeds for ranks in (8, 16) for slots in (256, 288)]


def serve_mixture(mixture: Mixture, data: Path) -> list[Traded]:
    chunks = read_chunks(data)
    samples = {kind: glm_samples(chunks, kind, ROWS, mixture.seed)[0] for kind in (ONE_DOMAIN, MIX)}
    plans = {
        FOR_MEAN: plan_first(EPLB, samples[MIX], FREE, mixture.ranks, mixture.slots),
        FOR_MIX: plan_first(STEPS, samples[MIX], FREE, mixture.ranks, mixture.slots),
        FOR_DOMAINS: plan_first(STEPS, samples[ONE_DOMAIN], FREE, mixture.ranks, mixture.slots),
    }
    fit, unseen = chunks.halves(mixture.seed)
    windows = {kind: (_windows(chunks, fit, kind), _windows(chunks, unseen, kind)) for kind in TRAFFIC}
    results = []
    for name, placement in ((name, plan.placement) for name, plan in plans.items()):
        mix = _balance(unseen.mean(axis=(0, 1))[None], placement)
        by_domain = [_balance(half.mean(axis=0)[None], placement) for half in unseen]
        seen = {kind: _balance(past, placement) for kind, (past, _) in windows.items()}
        to_come = {kind: _balance(later, placement) for kind, (_, later) in windows.items()}
        results.append(Traded(name, mix, float(np.mean(by_domain)), min(by_domain), seen, to_come))
    return results


def picked(results: list[Traded], kind: str) -> Traded:
    """Return the plan that did best on past windows; of equal ones the one for the mix."""
    return max((traded for traded in results if traded.plan != FOR_MEAN), key=lambda traded: traded.seen[kind])


def _windows(chunks: Chunks, half: Array, kind: str) -> Array:
    return shifting(dict(zip(chunks.domains, half, strict=True)), TRAFFIC[kind])


def _balance(steps: Array, placement: Placement) -> float:
    return score(Load.of_scenarios(steps), placement, FREE).balancedness
