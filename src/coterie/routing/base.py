"""The contract of a router: choose the worker for a request, given the state of the fleet.

A router is a pure function of the request and the state of the fleet, and changes neither. The caller (a simulator, a
gateway) admits the request to the chosen worker, which changes the fleet for the next request.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.registry import PolicyRegistry
from coterie.routing.fleet import Fleet


class Request(NamedTuple):
    """Data known about a request when it is routed; every field is optional."""

    id: str = ""
    prompt_tokens: int = 0
    footprint: NDArray[np.integer] | NDArray[np.floating] | None = None
    """[layer, expert] activation counts of the request's prefill, or a predictor's estimate of them."""
    domain: str | None = None
    cached_tokens: NDArray[np.int64] | None = None
    """[worker] number of leading prompt tokens whose KV is in the worker's cache."""
    prefilled: bool = False
    """Whether another worker has computed the prompt: KV that a worker lacks is transferred, not computed."""


class Decision(NamedTuple):
    """The worker chosen for a request, and the reason."""

    worker: int
    scores: NDArray[np.float64]
    """[worker] score, lower is better; infinite for a worker that must not be chosen."""
    told: str | tuple[Any, ...]
    """Reason for the choice: a text, or a format string and its values, formatted only when read: most never are."""
    profile: NDArray[np.float32] | None = None
    """[expert index] predicted probability that a token of the request activates the expert; None if the router does
    not predict it. The fleet keeps it while the request runs. Expert index = layer x num_experts + expert."""

    @property
    def reason(self) -> str:
        """Reason for the choice, as text."""
        try:
            return self.told if isinstance(self.told, str) else self.told[0].format(*self.told[1:])
        except Exception:  # a plugin's router may give a wrong format, which must not fail the caller
            return "a reason that cannot be read"


@runtime_checkable
class Router(Protocol):
    """Policy that chooses a worker for a request; its settings are the fields of a frozen dataclass."""

    def route(self, request: Request, fleet: Fleet) -> Decision: ...


routers: PolicyRegistry[Router] = PolicyRegistry("router", group="coterie.routers")
"""Registry of routers; importing :mod:`coterie.routing` registers those of the package. Callers offer `fitted` (a
:class:`~coterie.routing.fitted.RouterFit`), `cost` (:class:`~coterie.costs.lines.DecodeStepPrices`), `labels`,
`placement` (:class:`~coterie.types.Placement`) and `seed`."""
