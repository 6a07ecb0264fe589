"""Fit a router to some requests of a trace, and score it on others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.suites import Report
from coterie.errors import ConfigError
from coterie.footprints.signatures import WEIGHTINGS, Signature, Weighting, rho, sample_pairs
from coterie.routing import Calibration, RouterFit, calibration
from coterie.routing.clustering import assign, capacities
from coterie.routing.union import expected_distinct_of, tangents
from coterie.traces import ActivationTrace

TEST_SHARE = 0.3
"""Share of the requests held out for testing."""
SPLITS = 3
"""Number of random halvings of the requests that rho is averaged over: a single split can be 0.07 off."""
SCORED_PAIRS = 32_000
"""Most pairs of requests that rho is computed on: every pair if half of the requests are at most 253."""
CHOICES: tuple[Weighting, ...] = ("count_idf", "count", "binary")
"""Weightings that a router can use. Gate weights are not among them: a live request has expert counts only."""
DEFAULT: Weighting = "count_idf"
"""Published weighting, used if the requests are too few to choose by score."""
FEWEST = 20
"""Fewest requests to choose a weighting by score: fewer than 10 requests in a half are fewer than 45 pairs."""
REQUESTS = 1400
"""Default number of requests to read from the trace."""


class ScoredFit(NamedTuple):
    """A fitted router and its scores on held-out requests."""

    fitted: RouterFit
    calibration_requests: int
    test_requests: int
    halved: bool
    """Whether the trace has one phase only: the halves of each request then stand for prefill and decode."""
    rho: list[RhoScore]
    """One score per signature (weighting and mask); empty if there are fewer than `FEWEST` requests."""
    weighting: Weighting
    chosen: str
    """Reason for the weighting, in words."""
    distinct: list[dict[str, Any]]
    """Expected distinct experts per step, one row per clustering."""


class RhoScore(NamedTuple):
    """Rank correlation between requests' similarity in prefill and their similarity in decode, mean over splits."""

    weighting: Weighting
    mask: bool
    """Whether the signature keeps only the most informative layers; False keeps all."""
    rho: float | None
    """Mean over splits; None if the weighting cannot be fitted in a split, or the trace has no gate weights for it."""
    per_split: list[float]
    layers: float | None
    """Number of layers that the signature keeps, mean over splits."""


def fit_and_score(
    trace: ActivationTrace,
    workers: int,
    rng: np.random.Generator,
    *,
    batch: int = 16,
    requests: int = REQUESTS,
    weighting: Weighting | None = None,
    speeds: NDArray[np.float64] | None = None,
    report: Report = lambda *_: None,
) -> ScoredFit:
    """Draw `requests` of the trace, fit a router on 70% of them and score it on the other 30%.

    `speeds` [worker] are relative. Without `weighting`, the best one on held-out requests is used.
    """
    known = calibration(trace, np.sort(rng.permutation(trace.num_requests)[:requests]), report)
    order = rng.permutation(len(known.prefill))
    test = np.sort(order[: int(TEST_SHARE * len(order))])
    fit = np.sort(order[len(test) :])
    report("Scoring signatures", 0, 1)
    scores = score_signatures(known) if len(known.prefill) >= FEWEST else []
    used, why = (weighting, "as asked") if weighting is not None else choose_weighting(scores, known.take(fit))
    fitted = RouterFit(workers, batch, used, speeds).fit(known.take(fit), rng)
    report("Scoring other requests", 0, 1)
    return ScoredFit(
        fitted=fitted,
        calibration_requests=len(fit),
        test_requests=len(test),
        halved=known.halved,
        rho=scores,
        weighting=used,
        chosen=why,
        distinct=score_clusters(fitted, known.take(test), speeds, rng),
    )


def choose_weighting(scores: list[RhoScore], fit: Calibration) -> tuple[Weighting, str]:
    """Return the weighting with the highest rho on held-out requests, and the reason in words."""
    ours = [score for score in scores if score.mask and score.weighting in CHOICES and score.rho is not None]
    if not ours:
        if (np.count_nonzero(fit.prefill, axis=0) == len(fit.prefill)).all():
            return "count", f"fewer than {FEWEST} requests, each of which activates every expert: none was scored"
        return DEFAULT, f"fewer than {FEWEST} requests, too few to score: the published weighting"
    best, *others = sorted(ours, key=lambda score: -(score.rho or 0.0))
    beside = ", ".join(f"{other.weighting} {other.rho:.2f}" for other in others)
    sure = all(a > b for other in others for a, b in zip(best.per_split, other.per_split, strict=True))
    said = f"the best on held-out requests, rho {best.rho:.2f} ({beside}), "
    return best.weighting, f"{said}{'' if sure else 'but not '}in each of {SPLITS} splits"


def score_signatures(known: Calibration, seeds: Sequence[int] = range(SPLITS)) -> list[RhoScore]:
    """Compute rho of every signature: fit it on one half of the requests, score it on the other, one split per seed."""
    found: dict[tuple[Weighting, bool], list[tuple[float, int]]] = {}
    for seed in seeds:
        rng = np.random.default_rng([seed, 5])
        order = np.random.default_rng([seed, 0]).permutation(len(known.prefill))
        fit, test = (known.take(np.sort(half)) for half in np.split(order, [len(order) // 2]))
        truth = test.decode.reshape(len(test.decode), -1)
        pairs = sample_pairs(len(test.prefill), SCORED_PAIRS, rng)
        for weighting in WEIGHTINGS:
            learn, seen = (fit.gates, test.gates) if weighting == "gate" else (fit.prefill, test.prefill)
            for mask in (True, False):
                try:
                    if learn is not None and seen is not None:
                        made = Signature(weighting, mask).fit(learn, fit.decode, rng)
                        score = rho(made.transform_all(seen), truth, pairs)
                        found.setdefault((weighting, mask), []).append((score, len(made.layers)))
                except ConfigError:
                    pass  # count_idf cannot be fitted if every request activates every expert
    rows = []
    for weighting, mask in product(WEIGHTINGS, (False, True)):
        values = found.get((weighting, mask), [])
        if len(values) < len(seeds):  # a weighting that failed in one split has no score
            rows.append(RhoScore(weighting, mask, None, [], None))
        else:
            scores, layers = zip(*values, strict=True)
            rows.append(RhoScore(weighting, mask, float(np.mean(scores)), list(scores), float(np.mean(layers))))
    return rows


def score_clusters(
    fitted: RouterFit, test: Calibration, speeds: NDArray[np.float64] | None, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Compute the expected distinct experts per step of held-out requests under each clustering and round robin.

    Empty if there are fewer requests than workers, or fewer than 3.
    """
    requests, workers = len(test.prefill), fitted.workers
    if requests < max(3, workers):
        return []
    _, after = test.probabilities
    limits = capacities(requests, workers, speeds)
    slopes, _ = tangents(fitted.profiles, fitted.batch)
    expected = np.stack([fitted.profile(counts) for counts in test.prefill])
    similar = np.stack([fitted.similarities(counts) for counts in test.prefill])
    labels = {
        "round robin": rng.permutation(np.repeat(np.arange(workers), limits))[:requests],
        "cosine clusters": assign(-similar, limits),
        "union clusters": assign(expected @ slopes.T, limits),
    }
    alone = expected_distinct_of(after, np.zeros(requests, np.int64), fitted.batch)
    return [
        {"clusters": name, "experts_per_step": value, "saving_pct": 100 * (1 - value / alone)}
        for name, value in (
            ("one cluster", alone),
            *((name, expected_distinct_of(after, found, fitted.batch)) for name, found in labels.items()),
        )
    ]
