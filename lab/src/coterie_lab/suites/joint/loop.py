"""A closed loop on an expert-parallel group: decode only, with a fixed number of requests always in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.placement.holdings import Demand
from coterie.routing import Decision, Fleet, Request, Router, RouterFit
from coterie.routing.joint import Joint
from coterie.sim.fleet.requests import FleetRequests
from coterie.sim.group import GroupStep, LockstepGroup
from coterie.types import Placement
from coterie_lab.suites.joint.decode_batch import DecodeBatcher
from coterie_lab.suites.joint.together import route_together


def admit_together(router: Router, requests: Sequence[Request], fleet: Fleet) -> list[Decision]:
    """Route and admit requests that arrive together: the joint router decides for all at once, others one by one."""
    decisions: Iterable[Decision] = (router.route(request, fleet) for request in requests)  # each after admissions
    if isinstance(router, Joint) and len(requests) > 1:
        decisions = route_together(router, requests, fleet)
    admitted = []
    for request, decision in zip(requests, decisions, strict=True):
        fleet.admit(request.id, decision.worker, request.prompt_tokens, decision.profile)
        admitted.append(decision)
    return admitted


class GroupRun(NamedTuple):
    """A closed loop, up to the step at which too few requests were left to fill it; arrays are [step] unless stated."""

    start_s: NDArray[np.float64]
    parts: list[GroupStep]
    tokens: NDArray[np.int64]
    busiest: NDArray[np.int64]
    """Number of requests on the busiest rank."""
    gaps: list[NDArray[np.float64]]
    """[token] seconds since the previous token of the same request; for a first token, since the request's arrival."""
    arrived: NDArray[np.int64]
    """Number of requests routed before the step."""
    ranks: NDArray[np.int64]
    """[request] rank that the request was routed to; -1 if it was not routed."""
    asked: Demand
    """[rank, layer, expert] activations of the rank's own tokens."""


@dataclass(slots=True)
class _Present:
    """Requests in flight; arrays are [place]."""

    request: NDArray[np.int64]
    """Index of the request; -1 if the place is free."""
    rank: NDArray[np.int64]
    decoded: NDArray[np.int64]
    last_s: NDArray[np.float64]
    skipped: NDArray[np.int64]
    """Consecutive steps in which the request was passed over."""
    remote: NDArray[np.float64]
    """Expected activations per token on other ranks."""

    @classmethod
    def none(cls, places: int) -> _Present:
        def empty() -> NDArray[np.int64]:
            return np.full(places, -1, np.int64)

        return cls(empty(), empty(), empty(), np.zeros(places), empty(), np.zeros(places))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoop:
    """Serves requests on a group, `in_flight` at a time. No two requests in flight replay the same recording."""

    requests: FleetRequests
    model: StepModel
    fitted: RouterFit
    in_flight: int
    places: int
    """Requests that a rank can run at once."""

    def serve(self, placement: Placement, router: Router, batcher: DecodeBatcher | None = None) -> GroupRun:
        """Serve the requests. Without a batcher all requests in flight decode in every step."""
        group = LockstepGroup(self.model, placement)
        fleet, size = self.fitted.fleet(self.places), self.in_flight
        fleet.local = group.local
        present = _Present.none(size)
        waiting, clock = list(range(len(self.requests))), 0.0
        starts, parts, tokens, busiest, gaps, arrived = [], [], [], [], [], []
        where = np.full(len(self.requests), -1, np.int64)
        records = self.requests.recordings
        while True:
            for place, request, decision in self._arrivals(waiting, present, router, fleet):
                present.request[place], present.rank[place], present.decoded[place] = request, decision.worker, 0
                present.last_s[place], present.skipped[place] = clock, 0
                if batcher is not None:
                    present.remote[place] = self.remote_of(request, group.held[decision.worker])
                where[request] = decision.worker
            if (present.request < 0).any():
                break
            run = np.arange(size) if batcher is None else self._chosen(present, batcher, group.ranks)
            asked = present.request[run]
            recorded = self.requests.recorded[asked]
            row = records.decode_row[recorded] + present.decoded[run] % records.decode_rows[recorded]
            context = self.requests.prompt_tokens[asked] + present.decoded[run]
            part = group.step(records.expert_ids[row], present.rank[run], context)
            starts.append(clock)
            arrived.append(fleet.routed)
            clock += part.total_s
            parts.append(part)
            tokens.append(len(run))
            busiest.append(int(fleet.running.max()))
            gaps.append(clock - present.last_s[run])
            present.last_s[run] = clock
            present.decoded[run] += 1
            present.skipped += 1
            present.skipped[run] = 0
            for place in run[present.decoded[run] >= self.requests.output_tokens[asked]]:
                fleet.finish(str(present.request[place]))
                present.request[place] = -1
        if not parts:
            raise ConfigError(f"{len(self.requests)} requests cannot keep {size} in flight: serve more")
        return GroupRun(
            np.array(starts), parts, np.array(tokens), np.array(busiest), gaps, np.array(arrived), where, group.asked
        )

    def _arrivals(
        self, waiting: list[int], present: _Present, router: Router, fleet: Fleet
    ) -> Iterator[tuple[int, int, Decision]]:
        """Return (place, request, decision) for each free place; requests whose recording is in flight wait."""
        free = np.flatnonzero(present.request < 0)
        recorded = self.requests.recorded
        busy = set(recorded[present.request[present.request >= 0]].tolist())
        taken: list[int] = []
        for at, request in enumerate(waiting):
            if len(taken) == len(free):
                break
            if int(recorded[request]) not in busy:
                busy.add(int(recorded[request]))
                taken.append(at)
        coming = [waiting[at] for at in taken]
        for at in reversed(taken):
            del waiting[at]
        asked = [self._asking(request) for request in coming]
        return zip(free.tolist(), coming, admit_together(router, asked, fleet), strict=False)

    def _asking(self, request: int) -> Request:
        records, recorded = self.requests.recordings, int(self.requests.recorded[request])
        shown = None if records.footprint is None else records.footprint[recorded]
        return Request(str(request), int(self.requests.prompt_tokens[request]), shown)

    def remote_of(self, request: int, held: NDArray[np.bool_]) -> float:
        """Return expected activations per token of experts that are not `held` [layer, expert], over all layers."""
        footprint = self._asking(request).footprint
        if footprint is None:
            raise ConfigError("recordings have no footprint; remote activations cannot be expected without one")
        return float(self.fitted.profile(footprint)[~held.ravel()].sum())

    @staticmethod
    def _chosen(present: _Present, batcher: DecodeBatcher, ranks: int) -> NDArray[np.int64]:
        """Return the places that decode in this step: the batcher selects on each rank separately."""
        chosen = []
        for rank in range(ranks):
            mine = np.flatnonzero(present.rank == rank)
            if len(mine):
                chosen.append(mine[batcher.select(present.remote[mine], present.skipped[mine])])
        return np.sort(np.concatenate(chosen))


class GroupOutcome(NamedTuple):
    """Metrics of the steady part of a run: steps after at least 2 x in_flight requests were routed."""

    tbt_mean_ms: float
    tbt_p99_ms: float
    tokens_per_s: float
    all_to_all_pct: float
    """All-to-all time, percent of the time of all steps."""
    experts_pct: float
    remote_pct: float
    """Activations whose expert was on another rank, percent of all."""
    uneven: float
    """Requests on the busiest rank ÷ mean per rank, mean over steps."""
    decoding_pct: float
    """Percent of the requests in flight that decode in a step, mean over steps."""
    steps: int


def summarise_group(run: GroupRun, in_flight: int, ranks: int) -> GroupOutcome:
    steady = np.flatnonzero(run.arrived >= 2 * in_flight)
    if not len(steady):
        raise ConfigError(f"the {in_flight} in flight were not replaced once before requests ran out: serve more")
    parts = [run.parts[step] for step in steady]
    total = float(sum(part.total_s for part in parts))
    gaps = np.concatenate([run.gaps[step] for step in steady])
    return GroupOutcome(
        1e3 * float(gaps.mean()),
        1e3 * float(np.quantile(gaps, 0.99)),
        len(gaps) / total,
        100.0 * sum(part.all_to_all_s for part in parts) / total,
        100.0 * sum(part.experts_s for part in parts) / total,
        100.0 * sum(part.remote for part in parts) / sum(part.activations for part in parts),
        float(run.busiest[steady].mean()) * ranks / in_flight,
        100.0 * float(run.tokens[steady].mean()) / in_flight,
        len(steady),
    )
