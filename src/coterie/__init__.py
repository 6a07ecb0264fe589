"""Coterie: expert-aware scheduling for Mixture-of-Experts serving.

One import is enough for the common path::

    trace = coterie.open_trace("traffic/")
    model = coterie.step_model("gpt-oss-20b", device="h200")
    fitted = coterie.fit_router(trace, workers=8)
    router = fitted.router("latency_aware", model)
    fleet = fitted.fleet(places=64)
    choice = router.route(coterie.Request(prompt_tokens=300, footprint=counts), fleet)
    plan = coterie.plan(load, topology, current, model=model, horizon=10_000)
    report = coterie.simulate(trace, decoders=8, model=model)

Names are imported when first used, so that ``import coterie`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie._front import fit_router, load_router, open_trace, plan, simulate, step_model
    from coterie.placement import Load
    from coterie.routing import Fleet, Request
    from coterie.types import ModelSpec, Placement, Topology

__version__ = "0.1.0"

__all__ = [
    "CoterieError",
    "Fleet",
    "Load",
    "ModelSpec",
    "Placement",
    "Request",
    "Topology",
    "__version__",
    "fit_router",
    "load_router",
    "open_trace",
    "plan",
    "simulate",
    "step_model",
]

_LAZY = {
    "Fleet": "coterie.routing",
    "Load": "coterie.placement",
    "ModelSpec": "coterie.types",
    "Placement": "coterie.types",
    "Request": "coterie.routing",
    "Topology": "coterie.types",
    "fit_router": "coterie._front",
    "load_router": "coterie._front",
    "open_trace": "coterie._front",
    "plan": "coterie._front",
    "simulate": "coterie._front",
    "step_model": "coterie._front",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
