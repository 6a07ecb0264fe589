"""Routers that use only the workers' load, or a request's label: baselines for routers that use experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, UnavailableError, check
from coterie.registry import needs
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import NONE, any_free, best, chosen, mixed, next_living


@routers.register("random")
@dataclass(frozen=True, slots=True)
class RandomWorker:
    """Random: choose any open worker with equal probability. The simplest baseline of load balancing."""

    seed: int = 0

    def route(self, request: Request, fleet: Fleet) -> Decision:
        allowed = np.flatnonzero(fleet.open)
        if not len(allowed):
            raise UnavailableError(f"none of the {len(fleet)} workers is alive")
        worker = int(allowed[mixed(self.seed, fleet.routed) % len(allowed)])
        return Decision(worker, np.where(fleet.open, 0.0, np.inf), f"any of {len(allowed)}")


@routers.register("round_robin")
@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Round robin: choose workers in cyclic order. Each gets the same number of requests, whatever their durations."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        ahead = (np.arange(len(fleet)) - next_living(fleet.alive, fleet.routed)) % len(fleet)
        worker, scores = best(ahead.astype(np.float64), fleet)
        return Decision(worker, scores, f"number {fleet.routed} goes to the next")


@routers.register("join_shortest_queue")
@dataclass(frozen=True, slots=True)
class JoinShortestQueue:
    """Join the shortest queue: fewest requests in flight relative to speed. The best policy that uses load alone."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        worker, scores = best((fleet.in_flight + 1) / fleet.speeds, fleet)
        return Decision(worker, scores, ("{} in flight, the fewest for its speed", fleet.in_flight.item(worker)))


@routers.register("power_of_two")
@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Power of two choices: draw two workers at random, choose the one with fewer requests in flight for its speed.

    Balances nearly as well as the shortest queue without knowing every worker's load; worse with eight workers or
    fewer.
    """

    seed: int = 0

    def route(self, request: Request, fleet: Fleet) -> Decision:
        word, scores = mixed(self.seed, fleet.routed), np.empty(len(fleet))
        less_loaded, other = _less_loaded(
            word & 0xFFFFFFFF, word >> 32, fleet.alive, fleet.in_flight, fleet.places, fleet.speeds, scores
        )
        worker = chosen(less_loaded, fleet)
        return Decision(worker, scores, f"{fleet.in_flight.item(worker)} in flight, the fewer of {worker} and {other}")


@njit()
def _less_loaded(
    first_draw: int,
    second_draw: int,
    alive: NDArray[np.bool_],
    running: NDArray[np.int64],
    places: NDArray[np.int64],
    speeds: NDArray[np.float64],
    scores: NDArray[np.float64],
) -> tuple[np.int64, np.int64]:
    """Pick two open workers with two random numbers; return the less loaded, then the other.

    Both are -1 if no worker is open. Fills `scores` [worker].
    """
    free, allowed, count = any_free(alive, running, places), np.empty(len(alive), np.int64), 0
    for worker in range(len(alive)):
        scores[worker] = np.inf
        if alive[worker] and (running[worker] < places[worker] or not free):
            allowed[count] = worker
            count += 1
    if count == 0:
        return NONE, NONE
    place = first_draw % count
    first, second = allowed[place], allowed[(place + 1 + second_draw % max(1, count - 1)) % count]
    for worker in (first, second):
        scores[worker] = (running[worker] + 1) / speeds[worker]
    return (first, second) if scores[first] <= scores[second] else (second, first)


@routers.register("domain")
@dataclass(frozen=True, slots=True)
class Domain:
    """Domain: each label has its own workers, as an operator who knows every request's subject would assign them.

    A baseline for comparison: real traffic has no labels, and coarse labels are worse than footprints. Requests with
    an unknown label go to the shortest queue of all workers.
    """

    labels: Mapping[str, tuple[int, ...]] = needs("label → workers that take its requests; make it with share_out()")

    def route(self, request: Request, fleet: Fleet) -> Decision:
        load = (fleet.in_flight + 1) / fleet.speeds
        own = self.labels.get(request.domain or "")
        if own is None:
            worker, scores = best(load, fleet)
            return Decision(worker, scores, f"domain {request.domain!r} has no workers of its own: the shortest queue")
        if (last := max(own)) >= len(fleet):
            raise ConfigError(f"domain {request.domain!r} has worker {last}; the fleet has {len(fleet)}")
        elsewhere = np.ones(len(fleet), np.bool_)
        elsewhere[list(own)] = False
        # The penalty ranks the label's own workers first; others are chosen only if none of its own is open.
        worker, scores = best(load + elsewhere * (1.0 + load.max()), fleet)
        return Decision(worker, scores, f"the shortest queue of the {len(own)} workers of {request.domain!r}")


def share_out(requests: Mapping[str, int], workers: int) -> dict[str, tuple[int, ...]]:
    """Assign workers to labels in proportion to requests. Labels share workers if they outnumber them."""
    check(
        workers >= 1 and requests and min(requests.values()) >= 0,
        f"workers={workers} and {len(requests)} labels must be at least 1, requests not negative",
    )
    labels = sorted(requests, key=lambda label: (-requests[label], label))
    if len(labels) > workers:
        load = np.zeros(workers)
        chosen: dict[str, tuple[int, ...]] = {}
        for label in labels:  # most requests first, to the least loaded worker
            worker = int(np.argmin(load))
            load[worker] += requests[label]
            chosen[label] = (worker,)
        return chosen
    count = dict.fromkeys(labels, 1)
    for _ in range(workers - len(labels)):
        count[max(labels, key=lambda label: requests[label] / count[label])] += 1
    ends = np.cumsum([count[label] for label in labels])
    return {label: tuple(range(end - count[label], end)) for label, end in zip(labels, ends.tolist(), strict=True)}
