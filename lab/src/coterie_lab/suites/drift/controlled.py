"""The live loop on a simulated fleet: the same loop that a gateway drives, on the simulator's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.control import ControlEvent, ControlLoop, FitJob, RequestSeen
from coterie.routing import Decision, Fleet, Request, Router, RouterFit
from coterie.sim.fleet.requests import FinishedRequest, RouterSwap


class LoopController:
    """Drives a :class:`~coterie.control.ControlLoop` as a simulated fleet serves."""

    def __init__(self, loop: ControlLoop, make: Callable[[RouterFit], Router], places: int, fit_requests: int) -> None:
        """`make` makes the router of a fit; `places` is per worker. A re-fit takes as long as `fit_requests` requests
        take to finish, since a simulated fleet has no other measure of a fit's time.
        """
        self.loop, self.make, self.places, self.fit_requests = loop, make, places, fit_requests
        self.events: list[ControlEvent] = []
        self._ended = 0
        self._job: tuple[FitJob, int] | None = None

    def tick(self, now_s: float, ended: Sequence[FinishedRequest]) -> RouterSwap | None:
        for end in ended:
            seen = RequestSeen(end.at_s, str(end.request), f"decoder {end.worker}", end.prefill, end.decode)
            self.loop.observe(seen)
        self._ended += len(ended)
        if self._job is not None and self._ended >= self._job[1]:
            job, self._job = self._job[0], None
            self.loop.candidate(job.run(), 0.0)
        tick = self.loop.tick(now_s)
        self.events += tick.events
        if tick.job is not None:
            self._job = tick.job, self._ended + self.fit_requests
        if tick.use is None:
            return None
        self.loop.swapped(now_s)
        return RouterSwap(self.make(tick.use), tick.use.fleet(self.places))


class FitsAtChanges:
    """Puts the fit of each turn in force when its first request is routed: a loop that knows the changes beforehand."""

    def __init__(
        self, firsts: Sequence[int], fits: Sequence[RouterFit], make: Callable[[RouterFit], Router], places: int
    ) -> None:
        """`firsts` [turn] is the index of the first request of each turn after the first, in a closed loop."""
        self.make, self.places = make, places
        self._changes = list(zip(firsts, fits, strict=True))
        self._routed = 0

    def tick(self, now_s: float, ended: Sequence[FinishedRequest]) -> RouterSwap | None:  # noqa: ARG002  by request
        """Called before each decision, once per request in a closed loop."""
        request, self._routed = self._routed, self._routed + 1
        if not self._changes or request < self._changes[0][0]:
            return None
        _, fit = self._changes.pop(0)
        return RouterSwap(self.make(fit), fit.fleet(self.places))


class OneElsewhere:
    """Sends one request to the next worker and changes nothing else: what follows differs by chance alone."""

    def __init__(self, request: int, router: Router) -> None:
        """`request` is its index, in a closed loop."""
        self._swaps = {request: RouterSwap(_NextWorker(router)), request + 1: RouterSwap(router)}
        self._routed = 0

    def tick(self, now_s: float, ended: Sequence[FinishedRequest]) -> RouterSwap | None:  # noqa: ARG002  by request
        """Called before each decision, once per request in a closed loop."""
        request, self._routed = self._routed, self._routed + 1
        return self._swaps.get(request)


class _NextWorker:
    def __init__(self, router: Router) -> None:
        self._router = router

    def route(self, request: Request, fleet: Fleet) -> Decision:
        decision = self._router.route(request, fleet)
        return decision._replace(worker=(int(decision.worker) + 1) % len(fleet))
