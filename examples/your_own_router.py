"""Your own router, by name: write it, check its contract, and compare it with the built-in ones."""

from dataclasses import dataclass, replace

import numpy as np

import coterie
from coterie.registry import needs
from coterie.routing import Decision, Fleet, Request, RouterFit, routers
from coterie.routing.picking import best
from coterie.testing import check_router
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import generate, presets


@routers.register("most_alike")  # in a package of yours: an entry point of the group coterie.routers
@dataclass(frozen=True, slots=True)
class MostAlike:
    """The worker whose centroid is the most alike, unless its queue is too long."""

    fitted: RouterFit = needs("what was learned from a trace")  # given by whoever makes the router
    most_ahead: int = 4  # requests that it may have beyond the idlest worker

    def route(self, request: Request, fleet: Fleet) -> Decision:
        ahead = fleet.running - fleet.running[fleet.alive].min(initial=int(fleet.running.max()))
        alike = np.zeros(len(fleet)) if request.footprint is None else self.fitted.similarities(request.footprint)
        scores = np.where(ahead > self.most_ahead, ahead, -alike.astype(np.float64))
        worker, scores = best(scores, fleet)  # of the living, with a place if any has one
        return Decision(worker, scores, f"likeness {alike[worker]:.2f}, {ahead[worker]} ahead of the idlest")


settings = replace(presets["bursty"], model="gpt-oss-20b", lengths=LognormalLengths(32, 0.3, 32, 0.3, 64))
trace = generate(settings, np.random.default_rng(0), requests=96)
model = coterie.step_model("gpt-oss-20b", device="h200")
fitted = coterie.fit_router(trace, workers=4)
check_router(lambda: fitted.router("most_alike", model), fitted.num_layers, fitted.num_experts, workers=4)

names = ("join_shortest_queue", "most_alike")
report = coterie.simulate(trace, model=model, decoders=4, in_flight=8, routers=names, splits=2, requests=160)
print("most_alike keeps the contract of a router.", report.verdict)
