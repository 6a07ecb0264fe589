"""The contract of a router: which worker should take a request, given what each of them is doing now.

A router is a pure function of a snapshot: the request as far as it is known, and the fleet as it is. It changes
neither. Who asks it (a simulator, a gateway) admits the request where the decision says, and so changes the fleet for
the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.registry import PolicyRegistry
from coterie.routing.fleet import Fleet


class Request(NamedTuple):
    """What is known of a request when it is routed; all of it may be missing."""

    id: str = ""
    prompt_tokens: int = 0
    footprint: NDArray[np.integer] | NDArray[np.floating] | None = None
    """[layer, expert] activations of its prefill, or what a predictor expects of it."""
    domain: str | None = None
    cached_tokens: NDArray[np.int64] | None = None
    """[worker] tokens of its prompt, from the start, whose KV the worker holds."""


class Decision(NamedTuple):
    """Where a request goes, and why."""

    worker: int
    scores: NDArray[np.float64]
    """[worker] what the router compared, lower being better; infinite where the request must not go."""
    reason: str
    profile: NDArray[np.float32] | None = None
    """[expert index] probability that a token of the request activates it, where the router has an opinion: the fleet
    keeps it as long as the request runs. An expert index is a layer's expert, layers one after the other."""


@runtime_checkable
class Router(Protocol):
    """Anything that routes; settings are the fields of a frozen dataclass."""

    def route(self, request: Request, fleet: Fleet) -> Decision: ...


@runtime_checkable
class BatchRouter(Router, Protocol):
    """A router that can also decide for several requests together."""

    def route_batch(self, requests: Sequence[Request], fleet: Fleet) -> list[Decision]:
        """Decisions for requests that arrive together, in their order."""
        ...


def admit_together(router: Router, requests: Sequence[Request], fleet: Fleet) -> list[Decision]:
    """Route and admit requests that arrive together: in one decision where the router can, else one by one."""
    if isinstance(router, BatchRouter) and len(requests) > 1:
        found = router.route_batch(requests, fleet)
        for request, decision in zip(requests, found, strict=True):
            fleet.admit(request.id, decision.worker, request.prompt_tokens, decision.profile)
        return found
    decisions = []
    for request in requests:
        decisions.append(router.route(request, fleet))
        fleet.admit(request.id, decisions[-1].worker, request.prompt_tokens, decisions[-1].profile)
    return decisions


routers: PolicyRegistry[Router] = PolicyRegistry("router", group="coterie.routers")
"""Holds the built-in ones once :mod:`coterie.routing` is imported. Callers offer `fitted` (a
:class:`~coterie.routing.fitted.RouterFit`), `cost` (:class:`~coterie.costs.lines.StepPrices`), `labels` and `seed`."""
