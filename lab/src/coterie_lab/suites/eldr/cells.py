"""One split of a recorded trace at one load: all routers, the limit, and at one load the published design's parts.

The limit is the saving of clusters made from the served requests' own decode: local search for the fewest expected
distinct experts of a step of B requests of one cluster, sum of 1 - (1 - p)^B. Clusters fitted on other requests, to
which the served ones are assigned by what a router sees of them (as many to each), reach a share of that saving. A run
in which requests go to their cluster of the limit shows what a *router* could save, with its uneven load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.fleet.bench import Bench, Halves, Source, split
from coterie.footprints.signatures import Weighting
from coterie.routing import Decision, Fleet, Request, Router
from coterie.routing.calibration import activation_probabilities
from coterie.routing.clustering import Labels, assign, capacities
from coterie.routing.union import expected_distinct_saving, tangents, union_clusters
from coterie_lab.suites.eldr import fleets
from coterie_lab.suites.eldr.fleets import ROUTERS, Outcome, compare_routers, with_clusters

MODEL = "gpt-oss-20b"
LIMIT_BATCH = 16
LIMIT_STARTS = 12
LIMIT_EFFORT = 1e9
"""Five times what a fit may spend on swaps."""
LIMIT_ROUTER = "limit clusters"
DESIGN = (8, 16)
"""Decoders and requests in flight on each, at which the parts of the published design are tried."""
BANDS = (0.0, 0.05, 0.1, 0.2, 1.0)
WEIGHTINGS: tuple[Weighting, ...] = ("count_idf", "count", "gate", "binary")
VANILLA = "vanilla clusters"


class Cell(NamedTuple):
    trace: str
    decoders: int
    per_decoder: int
    """Requests in flight per decoder, on average."""
    seed: int
    """Seed for the split and the order of requests."""


class Limit(NamedTuple):
    """Expected savings against mixed steps, as fractions."""

    limit: float
    cosine: float
    union: float


class CellResult(NamedTuple):
    outcomes: dict[str, Outcome]
    limit: Limit | None


def band_name(tau: float) -> str:
    return f"band {tau:g}"


def signature_name(weighting: str) -> str:
    return f"signature {weighting}"


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """Routes every request to a worker assigned before the run, regardless of load."""

    workers: NDArray[np.int64]
    """[request] worker; a request's id is its index."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        return Decision(int(self.workers[int(request.id)]), np.zeros(len(fleet)), "assigned before the run")


def serve_cell(cell: Cell, data: Path, requests: int, names: tuple[str, ...] = ROUTERS) -> CellResult:
    """Serve the same requests under every router, and the extra comparisons of this cell."""
    source = fleets.recorded_source(data, cell.trace)
    bench = fleets.closed_bench(source, cell.decoders, cell.per_decoder, cell.seed, requests)
    halves, limit = split(source, cell.seed), None
    chosen: dict[str, Router] = {name: bench.router(name) for name in names}
    if cell.trace == MODEL and cell.per_decoder == LIMIT_BATCH:
        limit, labels = find_limit(source, halves, bench)
        chosen[LIMIT_ROUTER] = Assigned(labels[bench.requests.recorded])
    varied = cell[:3] == (MODEL, *DESIGN)
    if varied:
        chosen |= {band_name(tau): bench.router("locality_band", band=tau) for tau in BANDS}
        vanilla = with_clusters(bench, source.counts, halves, "count_idf", balanced=False)
        chosen[VANILLA] = vanilla.router("locality_band")
    outcomes = compare_routers(bench, chosen)
    for weighting in WEIGHTINGS if varied else ():
        other = with_clusters(bench, source.counts, halves, weighting)
        name = signature_name(weighting)
        outcomes[name] = compare_routers(other, {name: other.router("locality_band")})[name]
    return CellResult(outcomes, limit)


def find_limit(source: Source, halves: Halves, bench: Bench) -> tuple[Limit, Labels]:
    """Return the savings, and the limit's cluster of every served recording."""
    counts, fitted, batch = source.counts, bench.fitted, LIMIT_BATCH
    rows = np.flatnonzero(np.isin(counts.requests, halves.test))
    decode = activation_probabilities(counts.decode[rows], counts.top_k)
    room = capacities(len(rows), fitted.workers)
    similarity = np.array([fitted.similarities(footprint) for footprint in counts.prefill[rows]])
    slopes, offsets = tangents(fitted.profiles, batch)
    expected = np.array([fitted.profile(footprint) for footprint in counts.prefill[rows]])
    cosine, union = assign(-similarity, room), assign(expected @ slopes.T + offsets, room)
    best = union_clusters(
        decode,
        fitted.workers,
        batch,
        np.random.default_rng([bench.seed, 4]),
        starts=(cosine, union),
        restarts=LIMIT_STARTS,
        effort=LIMIT_EFFORT,
    )
    limit, *others = (expected_distinct_saving(decode, labels, batch) for labels in (best.labels, cosine, union))
    return Limit(limit, *others), best.labels
