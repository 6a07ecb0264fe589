"""Apps on one Serve: those of the example with coterie-tiny, and others of replicas without a model."""

from __future__ import annotations

from typing import Any

SMALL = {"num_cpus": 0.1}


class Serving:
    """A running Serve. Ray is imported on use: tests are collected without it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def start(self, *names: str) -> None:
        """Start apps at once: starting them one by one takes several times as long."""
        from app import make_app  # type: ignore[import-not-found]
        from compare import APPS  # type: ignore[import-not-found]
        from ray.serve import RunTarget, run_many

        from canned_replicas import Several

        apps = {
            "canned": lambda: canned_app("join_shortest_queue", replicas=2),
            "raising": lambda: canned_app("raising"),
            "several": lambda: canned_app("join_shortest_queue", ingress=Several),
        } | {name: lambda router=router: make_app(router) for name, router in APPS.items()}
        run_many([RunTarget(apps[name](), name, f"/{name}") for name in names])

    def broadcast(self, app: str, method: str, deployment: str = "Decode") -> list[Any]:
        from ray import serve

        return list(serve.get_deployment_handle(deployment, app).broadcast(method).results())


def canned_app(router: str, replicas: int = 1, ingress: Any = None) -> Any:
    """An app of replicas without a model, with a router of Coterie."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from canned_replicas import Canned
    from coterie.stacks.ray.ingress import PrefillFirst

    config = RequestRouterConfig(
        request_router_class="coterie.stacks.ray.router.ExpertRouter", request_router_kwargs={"router": router}
    )
    replica = serve.deployment(Canned, max_ongoing_requests=4, ray_actor_options=SMALL)
    decode = replica.options(name="Decode", num_replicas=replicas, request_router_config=config).bind()
    if ingress is not None:
        return serve.deployment(ingress, ray_actor_options=SMALL).bind(decode)
    prefill = replica.options(name="Prefill", max_ongoing_requests=64).bind()
    return serve.deployment(PrefillFirst, max_ongoing_requests=64, ray_actor_options=SMALL).bind(prefill, decode)
