"""Names from Ray Serve, imported in one place: a message says how to install it, and which versions were tested."""

from __future__ import annotations

import warnings

from coterie.errors import UnavailableError

TESTED = "2.60"
"""Version of Ray that the tests run with; the request router is an alpha interface there."""

try:
    import ray
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
    from ray.util import metrics
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
except ImportError as error:
    raise UnavailableError(f"Ray Serve {TESTED} is needed: pip install 'coterie[ray]' ({error})") from error

__all__ = [
    "DeploymentHandle",
    "HttpRequest",
    "JSONResponse",
    "PendingRequest",
    "ReplicaID",
    "RequestRouter",
    "Response",
    "RunningReplica",
    "StreamingResponse",
    "metrics",
]

FOLLOWED = ("_choose_replica_for_request", "_add_pending_request_to_indices")
"""Methods without a promise that the router needs."""
if not all(hasattr(RequestRouter, name) for name in FOLLOWED):
    raise UnavailableError(f"ray {ray.__version__} has another request router: pip install 'ray[serve]=={TESTED}.*'")
if not ray.__version__.startswith(f"{TESTED}."):
    warnings.warn(f"ray {ray.__version__} was not tested with Coterie; {TESTED} was", stacklevel=2)
