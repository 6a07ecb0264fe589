"""Fits that the loop knows, and where each of them stands."""

from __future__ import annotations

from typing import NamedTuple

from coterie.control.base import FitJob
from coterie.control.traffic import TrafficSample
from coterie.routing import RouterFit


class Known(NamedTuple):
    """A fit and the requests it was made from."""

    fit: RouterFit
    newest: int
    """Serial of the newest of them; -1 for a fit from elsewhere."""
    sample: TrafficSample
    requests: int


class RunningJob(NamedTuple):
    """A re-fit under way."""

    job: FitJob
    sample: TrafficSample

    @property
    def requests(self) -> int:
        return len(self.job.calibration.requests)


class Candidate(NamedTuple):
    """A fit that waits to be scored."""

    known: Known
    since_s: float
    looked: bool = False
    """Whether it was scored on half of the requests already."""


class Watch(NamedTuple):
    """The fit before the one in force."""

    known: Known
    since: int
    """Serial of the newest request at the swap, or at the last check."""
    after: int
    """Requests until it is scored."""
    checks: int


class Swap(NamedTuple):
    """A fit handed out and not confirmed yet."""

    known: Known
    back: bool
    at_s: float
