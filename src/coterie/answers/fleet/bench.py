"""A simulated fleet on recorded requests: routers are fitted on half of the requests and serve the other half.

A closed loop keeps a fixed number of requests in flight, and no recorded request twice at a time. The measured part
begins when all requests of the start have been replaced once, and ends when too few requests are left to keep the loop
full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.batching import strategies
from coterie.costs.lines import DecodeStepPrices, StepCost
from coterie.costs.presets import step_model
from coterie.costs.step import StepModel
from coterie.errors import check
from coterie.models import get_model
from coterie.routing import Calibration, Router, RouterFit, routers, share_out
from coterie.sim import FleetConfig, FleetRequests, FleetRun, Recordings, draw_requests, run_fleet
from coterie.sim.fleet.batching import Batching
from coterie.traces.activations import ActivationTrace
from coterie.types import INFINIBAND_400G, Placement

BASE = "round_robin"
ROOM = 4
"""Capacity of a decoder, as a multiple of its mean requests; 4, since no published router has a limit near the mean."""
REQUESTS = 2000
"""Requests per run. About half of them are measured if nearly all recordings are in flight at once."""
STEADY_ARRIVALS = (0.15, 0.95)
"""Quantiles of the arrival times between which an open-loop run is measured."""
CONTEXT = 512
"""Tokens in the KV cache per request for which step prices are computed."""


class Source(NamedTuple):
    """A recorded trace and the footprints of the requests to use, by default all that have both phases."""

    trace: ActivationTrace
    counts: Calibration


class Halves(NamedTuple):
    """Indices into the trace, ascending: requests to fit routers on, and requests to serve."""

    fit: NDArray[np.int64]
    test: NDArray[np.int64]


def split(source: Source, seed: int) -> Halves:
    order = np.random.default_rng([seed, 0]).permutation(source.counts.requests)
    middle = len(order) // 2
    return Halves(np.sort(order[:middle]), np.sort(order[middle:]))


class MeasuredSpan(NamedTuple):
    since_s: float
    until_s: float


def steady(run: FleetRun, in_flight: int) -> MeasuredSpan:
    """Return the span from when the first requests have been replaced once until fewer than `in_flight` are running."""
    arrived, finished = (np.sort(times[np.isfinite(times)]) for times in (run.arrival_s, run.finish_s))
    check(len(arrived) >= 2 * in_flight, f"requests={len(arrived)} must be more than twice the {in_flight} in flight")
    left = np.searchsorted(arrived, finished, side="right") - np.arange(1, len(finished) + 1)
    low = np.flatnonzero(left < in_flight)
    until = float(finished[low[0]]) if len(low) else run.end_s
    since = float(arrived[2 * in_flight - 1])
    check(since < until, f"the {in_flight} in flight were not replaced once before requests ran out: serve more")
    return MeasuredSpan(since, until)


class ServedRun(NamedTuple):
    """Run of one router, and the part of the run that is measured."""

    router: str
    run: FleetRun
    window: MeasuredSpan


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """One fleet and its requests, served under any router."""

    model: StepModel
    fitted: RouterFit
    requests: FleetRequests
    config: FleetConfig
    in_flight: int | None
    """Requests in flight over all decoders (closed loop); None if requests have arrival times."""
    per_decoder: int
    """Mean requests per decoder, for which step prices are computed."""
    labels: dict[str, tuple[int, ...]]
    """Domain → its workers, shared out in proportion to the calibration requests; empty if the trace has no domains."""
    seed: int
    placement: Placement | None = None
    strategy: str | None = None
    """Strategy that chooses from the queues of the decoders; None serves them in order."""

    @property
    def prices(self) -> DecodeStepPrices:
        tokens, link = float(np.mean(self.requests.output_tokens)), self.config.link or INFINIBAND_400G
        return DecodeStepPrices.of(self.model, self.per_decoder, CONTEXT, tokens, self.placement, link)

    def router(self, name: str, **settings: Any) -> Router:
        labels = {"labels": self.labels} if self.labels else {}
        return routers.make(name, {"fitted": self.fitted, "cost": self.prices, "seed": self.seed, **labels}, **settings)

    def serve(self, router: Router, until_s: float = np.inf) -> FleetRun:
        return run_fleet(
            self.requests,
            self.model,
            router,
            self.config,
            in_flight=self.in_flight,
            fleet=self.fitted.fleet(self.config.places),
            until_s=until_s,
            placement=self.placement,
            duplicates="refuse" if self.in_flight else "postpone",
            batching=self.batching,
        )

    @property
    def batching(self) -> Batching | None:
        if self.strategy is None:
            return None
        cost = StepCost.for_phase(self.model, "decode", self.config.places, CONTEXT, self.placement)
        return Batching(strategies.make(self.strategy, {"cost": cost}), seed=self.seed)

    def runs(self, chosen: dict[str, Router]) -> Iterator[ServedRun]:
        """Serve the same requests under every router, round robin first.

        In a closed loop, the other runs end soon after the measured part of round robin. With arrival times, the
        measured part leaves out the first 15% of arrivals, which find an empty fleet, and the last 5%.
        """
        if self.in_flight is None:
            for name, router in ({BASE: self.router(BASE)} | chosen).items():
                run = self.serve(router)
                yield ServedRun(name, run, MeasuredSpan(*map(float, np.nanquantile(run.arrival_s, STEADY_ARRIVALS))))
            return
        base = self.serve(self.router(BASE))
        window = steady(base, self.in_flight)
        yield ServedRun(BASE, base, window)
        # Run past the end of the window until its requests finish: dropping unfinished ones would drop long requests.
        until_s = window.until_s + 2.0 * float(np.nanmax(base.finish_s - base.arrival_s))
        for name, router in chosen.items():
            if name != BASE:
                run = self.serve(router, until_s)
                own = steady(run, self.in_flight)
                yield ServedRun(name, run, MeasuredSpan(own.since_s, min(own.until_s, window.until_s)))


def bench_of(
    source: Source,
    halves: Halves,
    recordings: Recordings,
    decoders: int,
    per_decoder: int,
    seed: int,
    requests: int,
    model: StepModel | None = None,
    placement: Placement | None = None,
    fitted: RouterFit | None = None,
) -> Bench:
    """Build a closed loop of the recordings; routers use `fitted`, or a fit on `halves.fit` if None."""
    if fitted is None:
        known = source.counts.take(np.flatnonzero(np.isin(source.counts.requests, halves.fit)))
        fitted = RouterFit(decoders, batch=per_decoder).fit(known, np.random.default_rng([seed, 1]))
    return Bench(
        model=model or step_model(get_model(source.trace.meta.model), "h200", "bf16"),
        fitted=fitted,
        requests=draw_requests(recordings, requests, np.random.default_rng([seed, 2])),
        config=FleetConfig(decode_workers=decoders, places=ROOM * per_decoder),
        in_flight=decoders * per_decoder,
        per_decoder=per_decoder,
        labels=domain_workers(source, halves, decoders),
        seed=seed,
        placement=placement,
    )


def domain_workers(source: Source, halves: Halves, decoders: int) -> dict[str, tuple[int, ...]]:
    """Assign workers to domains in proportion to the calibration requests; empty without domains."""
    domains = source.trace.requests.domains
    if domains is None or not len(halves.fit):
        return {}
    return share_out(Counter(domains[int(request)] for request in halves.fit), decoders)
