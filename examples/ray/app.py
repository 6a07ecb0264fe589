"""Ray Serve on this machine: one prefill and three decode replicas of coterie-tiny, chosen by their experts.

    pip install 'coterie[ray]'
    python examples/ray/app.py                    start, answer one request, serve until Ctrl-C
    serve run examples.ray.app:app                the same on a cluster that runs already

Every replica is an actor that holds a reference worker, a process with an OpenAI server; a server of vLLM can be held
in the same way. KV goes from worker to worker over the loopback. On several machines coterie-tiny's decode workers
compute the prompt instead, while an engine with a connector for networks needs nothing else.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig

from coterie.engines.worker.config import Role
from coterie.engines.worker.embedded import embedded_worker
from coterie.gateway.embedded import DECODERS, PLACES, tiny_fit_path
from coterie.net.access import FleetAccess
from coterie.net.http1 import Upstream
from coterie.stacks.ray.ingress import PrefillFirst

EXPERT_ROUTER = "coterie.stacks.ray.router.ExpertRouter"
ROUTER = {"router": "latency_aware", "fit": str(tiny_fit_path())}
SMALL = {"num_cpus": 0.1}


class Worker:
    """A replica: a worker process, and the method that the ingress calls."""

    def __init__(self, role: Role) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._worker = embedded_worker(role, Path(self._folder.name), role, FleetAccess())
        with ThreadPoolExecutor(1) as pool:  # Serve calls this in an event loop, and `start` needs one of its own
            pool.submit(self._worker.process.start).result()
        self._upstream = Upstream(self._worker.url)
        self._replica = serve.get_replica_context().replica_id.unique_id

    async def answer(
        self,
        path: str,
        body: dict[str, Any] | None,
        name: str,
        tried: Sequence[str] = (),  # noqa: ARG002
    ) -> AsyncIterator[Any]:
        data = b"" if body is None else msgspec.json.encode(body)
        headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
        answer = await self._upstream.send("GET" if body is None else "POST", path, headers, data)
        yield answer.status, dict(answer.headers).get(b"content-type", b"").decode(), self._replica
        async for piece in answer:
            yield piece

    def describe(self) -> dict[str, Any]:
        """Return where the worker can be reached and whose process it is: for measurements and tests."""
        process = self._worker.process
        events = self._worker.expert_events
        return {
            "replica": self._replica,
            "url": process.url,
            "expert_events": events,
            "pids": (os.getpid(), process.pid),
        }

    def check_health(self) -> None:
        if self._worker.process.returncode is not None:
            raise RuntimeError(f"the worker ended: {self._worker.process.log_text()[-1000:]}")


def make_app(router: str | None = EXPERT_ROUTER, settings: dict[str, Any] = ROUTER, decoders: int = DECODERS) -> Any:
    """Return the app; `router` chooses the decode replica, None: Serve's own, power of two choices."""
    chosen = RequestRouterConfig(request_router_class=router, request_router_kwargs=settings) if router else None
    replica = serve.deployment(Worker, max_ongoing_requests=PLACES, ray_actor_options=SMALL)
    prefill = replica.options(name="Prefill").bind("prefill")
    decode = replica.options(
        name="Decode", num_replicas=decoders, request_router_config=chosen or RequestRouterConfig()
    ).bind("decode")
    ingress = serve.deployment(PrefillFirst, name="Ingress", max_ongoing_requests=256, ray_actor_options=SMALL)
    return ingress.bind(prefill, decode)


app = make_app()


def main() -> None:
    import urllib.request

    serve.run(app)
    body = {"model": "coterie-tiny", "prompt": "def main", "max_tokens": 16, "temperature": 0}
    for path, data in (("/v1/completions", msgspec.json.encode(body)), ("/coterie/routers", None)):
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:8000{path}", data)) as answer:
            print(path, answer.read().decode())
    print("serving on http://127.0.0.1:8000 until Ctrl-C")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
