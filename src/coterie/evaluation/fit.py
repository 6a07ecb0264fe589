"""Fit a router to some requests of a trace, and score it on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.footprints.signatures import MAX_PAIRS, WEIGHTINGS, Signature, rho, sample_pairs
from coterie.routing import Calibration, RouterFit, calibration
from coterie.routing.clustering import assign, capacities
from coterie.routing.union import expected_distinct_of, tangents
from coterie.traces import ActivationTrace

TEST_SHARE = 0.3
"""Share of the requests held out for testing."""
REQUESTS = 1400
"""Requests to read by default."""

Report = Callable[[str, int, int], None]


class ScoredFit(NamedTuple):
    """A fitted router and its scores on held-out requests."""

    fitted: RouterFit
    calibration_requests: int
    test_requests: int
    halved: bool
    """The trace has one phase: first and second halves of requests stand for prefill and decode."""
    rho: list[dict[str, Any]]
    """Per signature: rank correlation of similarity in prefill with that in decode. Empty if requests are too few."""
    distinct: list[dict[str, Any]]
    """Per clustering: expected distinct experts per step."""
    seconds: dict[str, float]
    """Seconds per part of the fit."""


def check_weighting(weighting: str) -> None:
    """Raise unless signatures of counts can be weighted so; gate weights do not come with requests."""
    allowed = tuple(name for name in WEIGHTINGS if name != "gate")
    if weighting not in allowed:
        raise ConfigError(f"weighting={weighting} must be one of {', '.join(allowed)}: requests come with counts")


def fit_and_score(
    trace: ActivationTrace,
    workers: int,
    rng: np.random.Generator,
    *,
    batch: int = 16,
    requests: int = REQUESTS,
    weighting: str = "count_idf",
    speeds: NDArray[np.float64] | None = None,
    report: Report = lambda *_: None,
) -> ScoredFit:
    """`requests` of the trace are drawn; 30% of them test what the others fit. `speeds` [worker], relative."""
    check_weighting(weighting)
    chosen = np.sort(rng.permutation(trace.num_requests)[:requests])
    known = calibration(trace, chosen, report)
    order = rng.permutation(len(known.prefill))
    test = np.sort(order[: int(TEST_SHARE * len(order))])
    fit = np.sort(order[len(test) :])
    seconds: dict[str, float] = {}

    def note(part: str, took: float) -> None:
        seconds[part] = took
        report(part, len(seconds), 5)

    made = RouterFit(workers, batch, weighting, speeds)  # type: ignore[arg-type]
    fitted = made.fit(known.take(fit), rng, note)
    report("Scoring other requests", 0, 1)
    scores = score(fitted, known.take(fit), known.take(test), speeds, rng)
    return ScoredFit(
        fitted=fitted,
        calibration_requests=len(fit),
        test_requests=len(test),
        halved=known.halved,
        rho=scores["rho"],
        distinct=scores["distinct"],
        seconds=seconds,
    )


def score(
    fitted: RouterFit, fit: Calibration, test: Calibration, speeds: NDArray[np.float64] | None, rng: np.random.Generator
) -> dict[str, list[dict[str, Any]]]:
    """Score on held-out requests: rho, and distinct experts compared with round robin."""
    requests, workers = len(test.prefill), fitted.workers
    if requests < max(3, workers):
        return {"rho": [], "distinct": []}
    pairs, decode = sample_pairs(requests, MAX_PAIRS, rng), test.decode.reshape(requests, -1)
    rhos = []
    for weighting in WEIGHTINGS:
        learn, seen = (fit.gates, test.gates) if weighting == "gate" else (fit.prefill, test.prefill)
        for mask in (False, True):
            row: dict[str, Any] = {"weighting": weighting, "mask": mask, "rho": None, "layers": None}
            try:
                if learn is not None and seen is not None:
                    made = Signature(weighting, mask).fit(learn, fit.decode, rng)
                    row |= {"rho": rho(made.transform_all(seen), decode, pairs), "layers": len(made.layers)}
            except ConfigError:
                pass  # count_idf where every request activates every expert
            rhos.append(row)
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
    distinct = [
        {"clusters": name, "experts_per_step": value, "saving_pct": 100 * (1 - value / alone)}
        for name, value in (
            ("one cluster", alone),
            *((name, expected_distinct_of(after, found, fitted.batch)) for name, found in labels.items()),
        )
    ]
    return {"rho": rhos, "distinct": distinct}
