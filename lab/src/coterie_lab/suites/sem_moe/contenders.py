"""Recorded requests in two parts, and contenders that place experts and requests.

A fifth of the recorded requests is for fitting, the rest is served, as published. A request's affinity to a rank is the
share of its prompt's activations on that rank's experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.costs.step import StepModel
from coterie.dispatch.requests import schedule_requests
from coterie.errors import ConfigError
from coterie.footprints.counting import footprint, transitions
from coterie.models import get_model
from coterie.placement import Items, Load, Objective, planners
from coterie.placement.holdings import held_by
from coterie.routing import Decision, Fleet, Request
from coterie.sim.fleet.requests import FleetRequests, Recordings, order_apart, split_recordings
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import read_as
from coterie.types import Link, ModelSpec, Placement, Topology
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.shared import joined_by

RANKS = 8
FIT_SHARE = 0.2
BASELINES = ("popularity", "moetuner")
"""Planners whose experts are placed and whose requests go round robin."""
CO_SCHEDULED = ("sem_moe", "co_cluster")
"""Planners whose requests go to the rank of their experts."""
STEP_TOKENS = 2048 * RANKS
"""Tokens of a step for which planners price a placement: a full chunk on every rank."""

Schedule = Literal["rounds", "least_busy"]
"""rounds: every rank takes one request of a round (round robin without affinity), as published. least_busy: a rank with
the least prompt tokens left to compute when the request arrives (:class:`LeastBusy`)."""
MOST_AHEAD = 2
"""A rank with this many requests more than the rank with fewest gets no further ones while others are eligible."""


class Contender(NamedTuple):
    """A placement, and where requests or tokens go: by default, requests round robin and tokens in order."""

    name: str
    placement: Placement
    affinity: NDArray[np.float64] | None = None
    """[recording, rank] of the served requests: each goes to the rank of highest affinity that its schedule allows."""
    schedule: Schedule = "rounds"
    token_ranks: NDArray[np.integer] | None = None
    """[layer, row of the recordings] predicted rank of a token, or -1."""
    baseline: bool = True
    """Whether co-scheduling is compared with it."""


@dataclass(frozen=True, slots=True, eq=False)
class ServingBench:
    """Recorded requests of one model, split by one seed."""

    trace: str
    seed: int
    spec: ModelSpec
    fit: Recordings
    test: Recordings

    @property
    def linear(self) -> Placement:
        return Placement.linear(self.spec.num_moe_layers, self.spec.num_experts, RANKS)

    @property
    def load(self) -> Load:
        """Tokens per expert of the requests for fitting, as steps of STEP_TOKENS."""
        tokens = footprint(self.fit.expert_ids, self.spec.num_experts).astype(np.float64)
        return Load(tokens, steps=len(self.fit.expert_ids) / STEP_TOKENS)

    def model(self, link: Link) -> StepModel:
        return joined_by(step_model(self.spec, "h200", "bf16", Topology(RANKS)), link)

    def requests(self, recordings: Recordings, count: int, prompt_tokens: int, output_tokens: int) -> FleetRequests:
        """Use recordings in turn, with uses of one as far apart as half of them allows."""
        recorded = order_apart(len(recordings), count, np.random.default_rng([self.seed, 1]))
        return FleetRequests(recordings, recorded, np.full(count, prompt_tokens), np.full(count, output_tokens))

    def arrivals(self, count: int) -> NDArray[np.float64]:
        """Draw Poisson arrivals at one per second: [request]; other rates are the same arrivals, faster."""
        return np.cumsum(np.random.default_rng([self.seed, 2]).exponential(1.0, count))


@lru_cache(maxsize=4)
def bench_of(data: Path, trace: str, seed: int) -> ServingBench:
    recorded = read_as(ActivationTrace, data / "activations" / TRACES[trace])
    order = np.random.default_rng([seed, 0]).permutation(recorded.num_requests)
    cut = max(1, round(FIT_SHARE * len(order)))
    fit, test = (split_recordings(recorded, np.sort(part)) for part in (order[:cut], order[cut:]))
    return ServingBench(trace, seed, get_model(trace), fit, test)


def affinity_to(placement: Placement, recordings: Recordings) -> NDArray[np.float64]:
    """Return the share of a prompt's activations that a rank's experts serve: [recording, rank].

    The prompt's own experts are known only once it was computed: an upper bound for tables of tokens.
    """
    if recordings.footprint is None:
        raise ConfigError("recordings have no footprint; a request's affinity needs one")
    asked = np.asarray(recordings.footprint, np.float64).reshape(len(recordings), -1)
    held = held_by(placement).reshape(placement.num_ranks, -1).astype(np.float64)
    return np.asarray(asked @ held.T / asked.sum(axis=1, keepdims=True))


def best_token_ranks(placement: Placement, recordings: Recordings) -> NDArray[np.int64]:
    """Return the rank with most of a token's experts, as a perfect predictor would: [layer, row]."""
    ids, layers = recordings.expert_ids, placement.num_layers
    best = np.empty((layers, len(ids)), np.int64)
    for layer in range(layers):
        ranks = np.argsort(placement.slot_experts[layer])[ids[:, layer].astype(np.int64)] // placement.slots_per_rank
        counts = (ranks[:, :, None] == np.arange(placement.num_ranks)).sum(axis=1)
        best[layer] = counts.argmax(axis=1)
    return best


@dataclass(frozen=True, slots=True, eq=False)
class LeastBusy:
    """Router to the rank of highest affinity among the least busy ones; ties go to the rank with fewest requests.

    Least busy are ranks without a prompt left to compute or, if all have some, ranks with less than a prompt more than
    the least. Ranks MOST_AHEAD requests ahead of the rank with fewest are excluded, unless that excludes all.
    """

    affinity: NDArray[np.float64]
    """[request, rank]"""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        waiting, present = fleet.prefill_tokens, fleet.in_flight
        least = waiting.min()
        eligible = waiting < max(1, least + request.prompt_tokens * (least > 0))
        near = eligible & (present < present.min() + MOST_AHEAD)
        affinity = self.affinity[int(request.id)]
        scores = np.where(near if near.any() else eligible, -affinity, np.inf)
        rank = int(np.lexsort([present, scores])[0])
        return Decision(rank, scores, "highest affinity of the least busy")


class Serving(NamedTuple):
    """How a contender's requests get their ranks, as :meth:`ServingGroup.serve` takes it."""

    ranks: NDArray[np.int64] | None
    """[request] ranks known beforehand; None: decided when a request arrives."""
    router: LeastBusy | None


def serving_of(contender: Contender, requests: FleetRequests) -> Serving:
    recorded, ranks = requests.recorded, contender.placement.num_ranks
    affinity = contender.affinity
    if contender.schedule == "least_busy":
        scores = np.zeros((len(recorded), ranks)) if affinity is None else affinity[recorded]
        return Serving(None, LeastBusy(scores))
    if affinity is None:
        return Serving(np.arange(len(recorded)) % ranks, None)
    return Serving(schedule_requests(affinity[recorded]), None)


def fitted_counts(bench: ServingBench) -> NDArray[np.int64]:
    """Count the activations of each request for fitting, over all of its tokens: [recording, layer, expert]."""
    records = bench.fit
    spans = zip(records.prompt_row, records.decode_row + records.decode_rows, strict=True)
    requests = [footprint(records.expert_ids[first:end], bench.spec.num_experts) for first, end in spans]
    return np.stack(requests).astype(np.int64)


def planned(bench: ServingBench, name: str, link: Link, context: Mapping[str, Any]) -> Placement:
    """Plan by a registered planner for the load of the requests for fitting; moving is free before serving."""
    model = bench.model(link)
    objective = Objective.of(model, STEP_TOKENS, horizon=1e9)
    planner = planners.make(name, {"objective": objective, **context})
    return planner.plan(bench.load, model.topology, bench.linear).placement


def default_contenders(
    bench: ServingBench, link: Link, context: Mapping[str, Any] | None = None
) -> tuple[list[Contender], list[str]]:
    """Make vanilla, requests by queue or affinity alone, and every registered planner; notes name those left out.

    Planners are offered requests as `items`, and `transitions`; `context` replaces or adds to these.
    """
    counts = fitted_counts(bench)
    offered = {
        "items": Items.of_counts(counts, counts[:, 0].sum(axis=1) / bench.spec.top_k, one_rank=True),
        "transitions": transitions(bench.fit.expert_ids, bench.spec.num_experts),
        "seed": bench.seed,
        **(context or {}),
    }
    made = [
        Contender("vanilla", bench.linear),
        Contender("vanilla, least busy", bench.linear, schedule="least_busy"),
        Contender("affinity", bench.linear, affinity_to(bench.linear, bench.test), baseline=False),
    ]
    notes = []
    for name in (*BASELINES, *CO_SCHEDULED):
        if name not in planners:
            notes.append(f"{bench.trace}: planner {name!r} is not registered; it was not served.")
            continue
        try:
            placement = planned(bench, name, link, offered)
        except ConfigError as error:
            notes.append(f"{bench.trace}: planner {name!r} was not served: {error}")
            continue
        if name in CO_SCHEDULED:
            affinity, ranks = affinity_to(placement, bench.test), best_token_ranks(placement, bench.test)
            schedule: Schedule = "rounds" if name == "sem_moe" else "least_busy"
            made.append(Contender(name, placement, affinity, schedule, ranks, baseline=False))
        else:
            made.append(Contender(name, placement))
            if name == "popularity":
                made.append(Contender(f"{name}, least busy", placement, schedule="least_busy"))
    return made, notes
