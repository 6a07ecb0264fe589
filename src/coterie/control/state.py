"""The fits that the loop tracks: running job, candidate, swap under way, fit in force, previous fit."""

from __future__ import annotations

from typing import NamedTuple

from coterie.control.base import FitJob
from coterie.control.traffic import TrafficSample
from coterie.routing import RouterFit


class Known(NamedTuple):
    """A fit and the requests that it was made from."""

    fit: RouterFit
    newest: int
    """Serial number of the newest of these requests; -1 for the fit that the loop started with."""
    sample: TrafficSample


class RunningJob(NamedTuple):
    """A re-fit that the driver is running."""

    job: FitJob
    sample: TrafficSample


class Candidate(NamedTuple):
    """A fit that waits to be scored."""

    known: Known
    since_s: float
    looked: bool = False
    """Whether the candidate was already scored on half of the requests."""


class Watch(NamedTuple):
    """The fit that was in force before the last swap, scored for some time in case it is better."""

    known: Known
    since: int
    """Serial number of the newest request at the swap."""
    after: int
    """Number of requests since the swap at which the fit is next scored."""
    checks: int


class Swap(NamedTuple):
    """A fit handed to the driver, which has not confirmed the swap yet."""

    known: Known
    back: bool
    at_s: float
