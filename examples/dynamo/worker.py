"""A Dynamo worker around Coterie's reference worker on NumPy: it prefills, or it decodes.

    python examples/dynamo/worker.py --role decode --endpoint decoders.backend.generate

It stands in for ``python -m dynamo.vllm --disaggregation-mode …`` on a machine without a GPU, and answers as that does:
a prefill ends with ``disaggregated_params["kv_transfer_params"]``, the footprint among them. A decode worker registers
in a namespace that the frontend does not watch, unless requests are to reach it without Coterie.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import (
    HttpError,
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import Context, DistributedRuntime, Endpoint

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.embedded import EmbeddedEngine
from coterie.engines.worker.events import open_streams
from coterie.engines.worker.protocol import RequestError, check_max_tokens, parse_body
from coterie.engines.worker.server import Server, until_end
from coterie.net.processes import bind, free_port
from coterie.wire.handoff import REMOTE_DECODE

STOPS = ("stop", "stop_token_ids", "ignore_eos")
SERVED: list[asyncio.Future[None]] = []
SAMPLES = ("temperature", "top_p", "seed")


class Worker:
    def __init__(self, server: Server) -> None:
        self.server, self.engine = server, server.engine

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        """Answer a request of Dynamo's frontend, already tokenised; tokens are made text there."""
        stops, samples = request.get("stop_conditions") or {}, request.get("sampling_options") or {}
        body = {name: stops.get(name) for name in STOPS} | {name: samples.get(name) for name in SAMPLES}
        handed = ((request.get("prefill_result") or {}).get("disaggregated_params") or {}).get("kv_transfer_params")
        prefills = self.server.config.role == "prefill"
        most = 1 if prefills else stops.get("max_tokens")
        body |= {"prompt": request["token_ids"], "kv_transfer_params": REMOTE_DECODE if prefills else handed}
        if most is not None:
            body["max_tokens"] = most
        prompt, key = list(request["token_ids"]), context.id()
        try:
            asked = parse_body(body, False, self.engine.served_name, self.server.config.role)
            limit = check_max_tokens(prompt, asked.max_tokens, self.server.limit, self.server.model.vocab_size)
        except RequestError as error:
            raise HttpError(error.status, str(error)) from None
        outputs = await self.server.begin(asked, prompt, limit, key, key)
        ended = asyncio.ensure_future(context.async_killed_or_stopped())

        def abort(waiter: asyncio.Future[Any]) -> None:
            if not waiter.cancelled():  # the engine then emits the last output, and drops KV that is kept for a decode
                self.engine.abort(key)

        ended.add_done_callback(abort)
        try:
            async for output in until_end(outputs):
                answer: dict[str, Any] = {"token_ids": list(output.token_ids), "index": 0}
                if output.finish is not None:
                    # A prefill that ends with "stop" would end the request at the frontend.
                    answer["finish_reason"] = "length" if prefills else output.finish
                    answer["disaggregated_params"] = {"kv_transfer_params": output.kv_transfer_params}
                yield answer
        finally:
            ended.cancel()


async def serve(endpoint: Endpoint, server: Server, events: str) -> KvEventPublisher:
    """Serve an endpoint in the background, tell Dynamo of the model, and pass on the worker's KV events."""
    config = server.config
    prefills = config.role == "prefill"
    publisher = KvEventPublisher(endpoint, kv_block_size=config.block_size, zmq_endpoint=events)
    runtime = ModelRuntimeConfig()
    runtime.max_num_seqs, runtime.total_kv_blocks = config.max_batch, config.kv_blocks
    await register_model(
        ModelInput.Tokens,
        ModelType.Prefill if prefills else ModelType.Chat | ModelType.Completions,
        endpoint,
        str(config.model),
        TINY,
        worker_type=WorkerType.Prefill if prefills else WorkerType.Decode,
        needs=[[WorkerType.Decode if prefills else WorkerType.Prefill]],
        kv_cache_block_size=config.block_size,
        runtime_config=runtime,
        ignore_weights=True,
    )
    SERVED.append(asyncio.ensure_future(endpoint.serve_endpoint(Worker(server).generate, graceful_shutdown=False)))
    return publisher


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=["prefill", "decode"], default="decode")
    parser.add_argument("--endpoint", action="append", default=[], help="NAMESPACE.COMPONENT.ENDPOINT, maybe several")
    parser.add_argument("--http-port", type=int, default=0, help="Port for KV, metrics and the log of decode steps.")
    given = parser.parse_args()
    events, experts = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    planes = (os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"), os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    runtime = DistributedRuntime(asyncio.get_running_loop(), *planes)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind("127.0.0.1", given.http_port))
        config = WorkerConfig(
            model=tiny_model_path(),
            role=given.role,
            port=listener.getsockname()[1],
            served_model_name=TINY,
            kv_events=events,
            expert_events=experts,
        )
        kv, expert_stream = open_streams(config, stack)
        model = await asyncio.to_thread(EmbeddedEngine.load_model, config)
        server = Server(EmbeddedEngine(model, config, kv, expert_stream), config)
        serving = asyncio.create_task(server.run(listener, lambda _: None))
        publishers = [await serve(runtime.endpoint(name), server, events) for name in given.endpoint]
        await serving  # until SIGTERM
        for publisher in publishers:
            publisher.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
