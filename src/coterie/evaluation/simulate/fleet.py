"""What a decode fleet would gain from a router, on a user's own routing.

Half of the recorded requests fit the routers, the other half is served, in a closed loop that keeps `in_flight`
requests on every decoder; no recorded request is in flight twice. Every split of the requests is one run of all
routers on the same work, so savings are compared run by run. Step times are the model's. Wrong to read as a
measurement, and as evidence for other traffic than the recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.evaluation.fleets import REQUESTS, Outcome, Source, bench_of, split
from coterie.evaluation.runs import interval
from coterie.routing.base import routers as known_routers
from coterie.routing.calibration import calibration
from coterie.sim.fleet.requests import phase_recordings, split_recordings
from coterie.traces.activations import ActivationTrace
from coterie.types import Interval


class FleetRow(NamedTuple):
    """One router: means over splits, and what it saves against the first router."""

    router: str
    experts_per_step: float
    """Distinct experts per layer in a token's step."""
    tpot_p50_ms: float
    tpot_p99_ms: float
    tpot_mean_ms: float
    saved_pct: Interval
    """Saving of the mean TPOT against the first router; 95% interval over splits."""
    saved_p99_pct: Interval
    """Saving of the 99th percentile."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Routers on the same requests."""

    model: str
    dtype: str
    decoders: int
    in_flight: int
    """Mean requests per decoder."""
    splits: int
    rows: list[FleetRow]

    @property
    def verdict(self) -> str:
        """One plain sentence: which router is best, and how sure that is."""
        base, best = self.rows[0], max(self.rows, key=lambda row: row.saved_pct.mean)
        if best is base:
            return f"{base.router}: no router compared takes less time per output token."
        saved, tail = best.saved_pct, best.saved_p99_pct
        if self.splits < 2:
            sure = "one split: nothing tells how sure that is"
        else:
            sure = f"95% {saved.low:.1f} to {saved.high:.1f}"
        worse = f"p99 {-tail.mean:.1f}% longer" if tail.mean < 0 else "p99 no longer"
        return f"{best.router}: {saved.mean:.1f}% less time per output token than {base.router}, {sure}; {worse}."


def simulate_fleet(
    trace: ActivationTrace,
    *,
    model: StepModel,
    routers: Sequence[str] = ("join_shortest_queue", "latency_aware"),
    decoders: int = 8,
    in_flight: int = 16,
    splits: int = 3,
    requests: int = REQUESTS,
) -> FleetReport:
    """Serve the trace's requests under each router; the first is what others are compared with.

    `in_flight` requests are on every decoder on average. `splits` are ways to halve the recorded requests, and
    `requests` is how many are served in each.
    """
    for name in routers:
        known_routers.check(name)
    if not routers or splits < 1:
        raise ConfigError(f"routers={list(routers)} and splits={splits} must be at least 1")
    source = Source(trace, calibration(trace))
    runs = [_run(source, model, routers, decoders, in_flight, seed, requests) for seed in range(splits)]
    rows = [_row(name, routers[0], runs) for name in routers]
    return FleetReport(
        model=model.spec.name, dtype=model.dtype, decoders=decoders, in_flight=in_flight, splits=splits, rows=rows
    )


def _run(
    source: Source, model: StepModel, names: Sequence[str], decoders: int, per_decoder: int, seed: int, requests: int
) -> dict[str, Outcome]:
    halves = split(source, seed)
    cut = split_recordings if source.counts.halved else phase_recordings
    recordings = cut(source.trace, halves.test)
    if decoders * per_decoder > len(recordings):
        raise ConfigError(
            f"decoders={decoders} x in_flight={per_decoder} need as many recorded requests to serve; half of the trace "
            f"has {len(recordings)}: record more, or ask for fewer in flight"
        )
    bench = bench_of(source, halves, recordings, decoders, per_decoder, seed, requests, model)
    return bench.compare({name: bench.router(name) for name in names})


def _row(name: str, base: str, runs: Sequence[dict[str, Outcome]]) -> FleetRow:
    def mean(field: str) -> float:
        return float(np.mean([getattr(run[name], field) for run in runs]))

    def saved(field: str) -> Interval:
        return interval([100.0 * (1.0 - getattr(run[name], field) / getattr(run[base], field)) for run in runs])

    return FleetRow(
        router=name,
        experts_per_step=mean("active_experts_by_token"),
        tpot_p50_ms=mean("tpot_p50_ms"),
        tpot_p99_ms=mean("tpot_p99_ms"),
        tpot_mean_ms=mean("tpot_mean_ms"),
        saved_pct=saved("tpot_mean_ms"),
        saved_p99_pct=saved("tpot_p99_ms"),
    )
