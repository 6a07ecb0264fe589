"""Several front ends of one fleet, such as gateways behind one address: the fleet that each of their routers sees.

A router sees its own requests at once, and those of the others as of the last exchange. Exchanges are at whole
multiples of the interval, all front ends at once, and take no time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import numpy as np

from coterie.errors import check, check_at_least, check_not_negative, check_one_of
from coterie.routing.fleet import Fleet, WorkerLoads

LEAST_S = 1e-6
"""Shortest interval in seconds other than 0: a number of intervals must be an integer."""
Told = Literal["profiles", "counts", "reports", "nothing"]


@dataclass(frozen=True, slots=True)
class FrontEnds:
    """Number of front ends, and what each is told of the others' requests."""

    count: int = 1
    every_s: float = 0.0
    """Seconds between two exchanges; 0 exchanges before every decision and every end of a request."""
    told: Told = "profiles"
    """profiles: the number of requests and their expert profiles, by worker. counts: the number alone. reports: each
    worker says how many requests it has. nothing: no exchange."""
    seed: int = 0
    """Seed for the front end of each request, which is drawn at random, as by a hash of the conversation."""

    def __post_init__(self) -> None:
        check_at_least(1, count=self.count)
        check_not_negative(every_s=self.every_s)
        check(not 0 < self.every_s < LEAST_S, f"every_s={self.every_s} must be 0 or at least {LEAST_S}")
        check_one_of(get_args(Told), told=self.told)


ONE = FrontEnds()


class SeenFleets:
    """The fleets that the front ends' routers see."""

    def __init__(self, settings: FrontEnds, fleet: Fleet, requests: int) -> None:
        # Profiles exchanged at once leave nothing that front ends could know differently: they share a fleet.
        shared = settings.every_s == 0 and settings.told == "profiles"
        count = 1 if shared else settings.count
        self.fleets = [fleet, *(copy.deepcopy(fleet) for _ in range(count - 1))]
        self._front_ends: list[int] = np.random.default_rng([settings.seed, 3]).integers(count, size=requests).tolist()
        self._settings = settings
        self._exchanges = count > 1 and settings.told != "nothing"
        self._interval = -1

    def of(self, request: int, now_s: float) -> Fleet:
        """Return the fleet seen by the front end of a request, after the exchanges up to this moment."""
        if self._exchanges:
            every_s = self._settings.every_s
            interval = int(now_s / every_s) if every_s else self._interval + 1
            if interval > self._interval:
                self._exchange()
                self._interval = interval
        return self.fleets[self._front_ends[request]]

    def _exchange(self) -> None:
        parts = [fleet.own() for fleet in self.fleets]
        if self._settings.told == "reports":
            for worker, there in enumerate(np.sum([part.running for part in parts], axis=0).tolist()):
                for fleet in self.fleets:
                    fleet.observe(worker, there)
            return
        if self._settings.told == "counts":
            parts = [part.without_profiles() for part in parts]
        for number, fleet in enumerate(self.fleets):
            fleet.hear(reduce(WorkerLoads.plus, parts[:number] + parts[number + 1 :]))
