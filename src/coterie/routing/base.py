"""The contract of a router: choose the worker for a request, given the state of the fleet.

A router is a pure function of a snapshot: what is known of the request, and the fleet. It changes neither. The caller
(a simulator, a gateway) admits the request to the chosen worker, and so changes the fleet for the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.registry import PolicyRegistry
from coterie.routing.fleet import Fleet


class Request(NamedTuple):
    """What is known of a request when it is routed; every field is optional."""

    id: str = ""
    prompt_tokens: int = 0
    footprint: NDArray[np.integer] | NDArray[np.floating] | None = None
    """[layer, expert] activations of its prefill, or a predictor's estimate."""
    domain: str | None = None
    cached_tokens: NDArray[np.int64] | None = None
    """[worker] leading prompt tokens whose KV the worker holds."""


class Decision(NamedTuple):
    """The worker chosen for a request, and the reason."""

    worker: int
    scores: NDArray[np.float64]
    """[worker] scores compared, lower is better; infinite where the request must not go."""
    told: str | tuple[Any, ...]
    """The reason: a text, or a format and its values, as most are never read and formatting takes time."""
    profile: NDArray[np.float32] | None = None
    """[expert index] probability that a token of the request activates it, if the router predicts that: the fleet
    keeps it while the request runs. Expert index = layer x experts + expert."""

    @property
    def reason(self) -> str:
        """Why this worker, in words."""
        told = self.told
        try:
            return told if isinstance(told, str) else told[0].format(*told[1:])
        except Exception:  # of a plugin's router; whoever asks for a reason can do without
            return "a reason that cannot be read"


@runtime_checkable
class Router(Protocol):
    """Chooses a worker for a request; settings are the fields of a frozen dataclass."""

    def route(self, request: Request, fleet: Fleet) -> Decision: ...


@runtime_checkable
class BatchRouter(Router, Protocol):
    """A router that can also decide for several requests together."""

    def route_batch(self, requests: Sequence[Request], fleet: Fleet) -> list[Decision]:
        """Decisions for requests that arrive together, in their order."""
        ...


def admit_together(router: Router, requests: Sequence[Request], fleet: Fleet) -> list[Decision]:
    """Route and admit requests that arrive together: at once with a `BatchRouter`, else one by one."""
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
"""Routers by name; importing :mod:`coterie.routing` registers every module of that package. Contexts offer `fitted` (a
:class:`~coterie.routing.fitted.RouterFit`), `cost` (:class:`~coterie.costs.lines.DecodeStepPrices`), `labels`,
`placement` (:class:`~coterie.types.Placement`) and `seed`."""
