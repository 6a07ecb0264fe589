"""Contract check of routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator, default_rng

from coterie.errors import UnavailableError
from coterie.routing import Decision, Fleet, Request, Router
from coterie.testing._require import require, unchanged


def check_router(
    make: Callable[[], Router], layers: int = 3, experts: int = 8, workers: int = 6, seed: int = 0
) -> None:
    """Raise AssertionError if the router that `make()` returns breaks the contract of a router.

    It must choose a living worker, with a free place if any has one. The score of that worker must be finite, and those
    of workers that must not be chosen infinite. The same snapshot must give the same decision and not be changed. A
    fleet without a living worker must raise UnavailableError. The cases are empty and full fleets, dead workers, those
    full of other callers' requests, requests without any data, and cached prefixes, on a fleet of `workers` that tracks
    `layers` x `experts`; the router must be fitted for these numbers. A router that passes may still choose badly.
    """
    router = make()
    require(isinstance(router, Router), f"{router!r} has no route(request, fleet)")
    rng = default_rng(seed)
    for name, fleet in _fleets(rng, workers, layers * experts):
        for request in _route_requests(rng, layers, experts, workers):
            _check_route(make, router, f"{type(router).__name__}, {name}", request, fleet)
    nobody = Fleet([4] * workers, np.full((workers, layers * experts), 0.25, np.float32))
    nobody.alive[:] = False
    try:
        router.route(Request("r"), nobody)
    except UnavailableError:
        return
    require(False, f"{router!r} found a worker in a fleet of which none is alive")


def _fleets(rng: Generator, workers: int, size: int) -> Iterator[tuple[str, Fleet]]:
    for name, requests, dead, others in (
        ("an empty fleet", 0, 0, 0),
        ("a busy fleet", 3 * workers, 0, 0),
        ("a full fleet", 4 * workers, 0, 0),
        ("a fleet with a dead worker", 2 * workers, 1, 0),
        ("one living worker", workers, workers - 1, 0),
        ("a fleet that others use too", workers, 0, workers - 1),
    ):
        prior = rng.uniform(0, 0.5, (workers, size)).astype(np.float32)
        fleet = Fleet([4] * workers, prior, rng.uniform(0.5, 2.0, workers))
        for number in range(requests):
            profile = rng.uniform(0, 0.5, size).astype(np.float32)
            fleet.admit(f"resident-{number}", number % workers, int(rng.integers(2000)), profile)
        fleet.alive[:dead] = False
        for worker in range(others):  # full, although this caller has few requests there
            fleet.observe(worker, 9)
        fleet.kv_used[:] = rng.random(workers)
        fleet.prefill_tokens[:] = rng.integers(0, 9000, workers)
        yield name, fleet


def _route_requests(rng: Generator, layers: int, experts: int, workers: int) -> Iterator[Request]:
    yield Request("nothing known")
    for number in range(6):
        counts = rng.integers(0, 20, (layers, experts))
        cached = rng.integers(0, 500, workers) if number % 2 else None
        yield Request(f"r{number}", 500, counts, "code" if number % 3 else None, cached)
    yield Request("no token", 1, np.zeros((layers, experts), np.int64))


def _check_route(make: Callable[[], Router], router: Router, where: str, request: Request, fleet: Fleet) -> None:
    arrays = {f"fleet.{name}": value for name, value in vars(fleet).items() if isinstance(value, np.ndarray)}
    with unchanged(where, **arrays):
        decision = router.route(request, fleet)
    require(isinstance(decision, Decision), f"{where}: {decision!r} is no Decision")
    allowed = fleet.open
    require(0 <= decision.worker < len(fleet), f"{where}: worker {decision.worker} of {len(fleet)}")
    require(allowed[decision.worker], f"{where}: worker {decision.worker} must not be chosen: dead, or full")
    scores = decision.scores
    require(scores.shape == (len(fleet),), f"{where}: scores has shape {scores.shape}; expected ({len(fleet)},)")
    require(np.isfinite(scores[decision.worker]), f"{where}: the chosen worker's score is infinite")
    require((scores[~allowed] == np.inf).all(), f"{where}: a worker that must not be chosen has a finite score")
    require(decision.reason, f"{where} gives no reason")
    again = make().route(request, fleet)
    require(
        again.worker == decision.worker and np.array_equal(again.scores, scores) and again.reason == decision.reason,
        f"{where} gave another decision for the same snapshot",
    )
