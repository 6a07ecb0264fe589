"""How long a router takes for one decision, what fitting takes, and how fast the KV directory is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator

from coterie.answers.suites import Report
from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.routing import Calibration, Fleet, Request, Router, RouterFit, routers
from coterie.types import Placement
from coterie_lab.benches.kvindex import HOLDERS, kv_directory_rows
from coterie_lab.benches.timing import Row, median_us

SHAPE = "qwen3-30b-a3b"
LAYERS, EXPERTS, TOP_K = 48, 128, 8
"""Sizes of that shape."""
GROUPS = 12
"""Kinds of request; each prefers experts of its own."""
SIZES = (24, 1000)
IN_FLIGHT = 16
"""Requests of every worker; of a large fleet fewer, which makes no difference to a decision."""
FIT_REQUESTS, FIT_WORKERS = 1000, 16


def bench_routing(report: Report) -> list[Row]:
    """Time one decision of every router, the bookkeeping of the fleet, fitting, and the KV directory."""
    return [*_decision_rows(report, SIZES), *_fit_rows(report), *kv_directory_rows(report)]


def bench_scale(report: Report) -> list[Row]:
    """Time decisions over 1,000 workers, and a KV directory of 10 million blocks that 1,000 workers hold."""
    return [
        *_decision_rows(report, SIZES[-1:]),
        *kv_directory_rows(report, num_blocks=10**7 // HOLDERS, num_workers=1000),
    ]


def _counts(requests: int, rng: Generator, tokens: int = 400) -> np.ndarray:
    """Draw activations of requests of a few kinds: [request, layer, expert]."""
    liking = rng.gamma(0.3, size=(GROUPS, LAYERS, EXPERTS)) + 0.02
    liking /= liking.sum(axis=2, keepdims=True)
    return np.array([rng.multinomial(tokens * TOP_K, liking[rng.integers(GROUPS)]) for _ in range(requests)])


def _fitted(workers: int, rng: Generator) -> RouterFit:
    requests = max(64, workers)
    both = _counts(requests, rng, 200), _counts(requests, rng, 200)
    return RouterFit(workers).fit(_calibration(*both), rng)


def _calibration(prefill: np.ndarray, decode: np.ndarray) -> Calibration:
    return Calibration(
        prefill=prefill,
        decode=decode,
        gates=None,
        requests=np.arange(len(prefill)),
        halved=False,
        model="bench",
        top_k=TOP_K,
    )


def _busy_fleet(workers: int, fitted: RouterFit, counts: np.ndarray, rng: Generator) -> Fleet:
    """Make a fleet in which every worker runs the typical number of requests and may be chosen."""
    fleet = fitted.fleet(4 * IN_FLIGHT)
    profiles = [fitted.profile(footprint) for footprint in counts]
    for number in range(workers * IN_FLIGHT if workers <= 100 else 4 * workers):
        fleet.admit(f"resident-{number}", number % workers, 1000, profiles[rng.integers(len(profiles))])
    fleet.local = rng.integers(0, 2**63, (workers, LAYERS, EXPERTS // 64)).astype(np.uint64)
    return fleet


def _decision_rows(report: Report, workers: tuple[int, ...]) -> Iterator[Row]:
    cost = DecodeStepPrices.of(step_model(get_model(SHAPE), "h200"), IN_FLIGHT)
    rng = np.random.default_rng(0)
    counts = _counts(16, rng)
    for size in workers:
        report(f"fitting {size} workers", 0, len(routers.names()))
        fitted = _fitted(size, rng)
        fleet = _busy_fleet(size, fitted, counts, rng)
        cached = rng.integers(0, 900, size)
        labels = {"code": tuple(range(size))}
        placement = Placement.linear(LAYERS, EXPERTS, size, -(-EXPERTS // size) * size)
        context = {"fitted": fitted, "cost": cost, "labels": labels, "placement": placement, "seed": 0}
        asked = [Request(str(n), 1000, footprint, "code", cached) for n, footprint in enumerate(counts)]
        sizes = {"workers": size, "layers": LAYERS, "experts": EXPERTS}
        for done, name in enumerate(routers.names()):
            report(f"{name}, {size} workers", done, len(routers.names()))
            router = routers.make(name, context)
            spent = median_us(_turns(router, asked, fleet), 301 if size < 100 else 61)
            yield {"name": "decision", "router": name, **sizes, "median_us": spent}
        spent = median_us(_turnover(fleet, fitted.profile(counts[0])), 61)
        yield {"name": "admit and finish", "router": "", **sizes, "median_us": spent}


def _turns(router: Router, asked: list[Request], fleet: Fleet) -> Callable[[], object]:
    """Return a call that routes another request each time."""
    turns = itertools.cycle(asked)
    return lambda: router.route(next(turns), fleet)


def _turnover(fleet: Fleet, profile: np.ndarray) -> Callable[[], None]:
    """Return a call that does what the fleet's keeper does for a request besides the decision."""

    def call() -> None:
        fleet.admit("new", 3, 1000, profile)
        fleet.finish("new")

    return call


def _fit_rows(report: Report) -> Iterator[Row]:
    rng = np.random.default_rng(1)
    known = _calibration(_counts(FIT_REQUESTS, rng), _counts(FIT_REQUESTS, rng))
    RouterFit(4).fit(known.take(np.arange(64)), np.random.default_rng(0))  # compiles
    seconds: list[float] = []
    parts: dict[str, float] = {}
    for repeat in range(3):
        report("fitting", repeat, 3)
        start = time.perf_counter()
        RouterFit(FIT_WORKERS).fit(known, np.random.default_rng(0), parts.__setitem__)
        seconds.append(time.perf_counter() - start)
    yield {
        "name": "fit",
        "requests": FIT_REQUESTS,
        "workers": FIT_WORKERS,
        "layers": LAYERS,
        "experts": EXPERTS,
        "median_ms": round(1e3 * float(np.median(seconds)), 1),
        **{f"{part}_ms".replace(" ", "_"): round(1e3 * spent, 1) for part, spent in parts.items()},
    }
