"""Memory over hundreds of thousands of requests: nothing is kept of a request that ended.

``python tests/gateway/attack/test_memory.py 1000000 none`` prints it for as many as you like, and for a handshake.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from canned_pairs import footprint_on, params_of
from canned_workers import Canned, completion, events
from coterie.engines.tiny import tiny_model_path
from coterie.gateway.config import GatewayConfig, Handshake, LimitSettings, Role, WorkerEntry
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.net.http1.upstream import UpstreamError
from gateway_runs import FAST, Run, gateway, settled

AT_ONCE = 16
PROMPTS = 500
EVERY = 25_000
LARGEST_GROWTH = 60
"""Bytes a request by which memory may grow in the second half: an id that is kept takes 80 and more."""


class Sample(NamedTuple):
    requests: int
    bytes: int
    objects: int


def now(requests: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(requests, pages * os.sysconf("SC_PAGESIZE"), len(gc.get_objects()))


async def prefill(worker: Canned, request: HttpRequest, responder: Responder) -> None:
    params = params_of(request, footprint=footprint_on((0, 1)))
    usage = {"prompt_tokens": 5}
    responder.send(200, msgspec.json.encode(completion(worker, usage=usage, kv_transfer_params=params)))
    worker.asked.clear()


async def decode(worker: Canned, request: HttpRequest, responder: Responder) -> None:
    worker.asked.clear()
    if b'"stream":true' in request.body:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        for event in events(worker):
            responder.write(event)
        responder.end()
    elif b'"seed":7' in request.body:
        responder.send(500)
    else:
        responder.send(200, b'{"choices":[]}')


async def one(found: Run, number: int) -> None:
    """Most are served; some fail at a worker, some are malformed, some clients leave."""
    body = {"prompt": f"prompt {number % PROMPTS}", "stream": number % 5 == 0, "seed": number % 50, "salt": number}
    headers = [(b"x-request-id", b"request %d" % number)]
    raw = b"{" if number % 101 == 0 else msgspec.json.encode(body)
    try:
        answer = await found.client.upstream.send("POST", "/v1/completions", headers, raw)
        if number % 97 == 0:
            answer.close()
        else:
            await answer.read()
    except UpstreamError as error:
        raise AssertionError(f"request {number}: {error}") from None


async def measure(count: int, handshake: Handshake, say: bool = False) -> list[Sample]:
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        pair = handshake != "none"
        workers = [*([Canned("p", prefill)] if pair else []), Canned("d", decode), Canned("e", decode)]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        roles: list[Role] = ["prefill", "decode", "decode"] if pair else ["both", "both"]
        config = GatewayConfig(
            listen="127.0.0.1:0",
            handshake=handshake,
            tokenizer=str(tiny_model_path()) if pair else None,
            workers=[WorkerEntry(id=x.name, url=x.url, role=role) for x, role in zip(workers, roles, strict=True)],
            health=msgspec.structs.replace(FAST, failures=1_000_000, retries=1),
            limits=LimitSettings(in_flight=64),
        )
        found = await stack.enter_async_context(gateway(config))
        numbers = iter(range(count))

        async def ask() -> None:
            for number in numbers:
                await one(found, number)
                if (number + 1) % EVERY == 0:
                    samples.append(now(number + 1))
                    if say:
                        sys.stdout.write("{}\t{}\t{}\n".format(*samples[-1]))
                        sys.stdout.flush()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(ask())
        await settled(found)
        assert found.running.server.counters.errors == 0
        assert found.running.parts.decisions.recorded >= count
    return samples


def measured(count: int, handshake: Handshake, say: bool = False) -> list[Sample]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(count, handshake, say))


@pytest.mark.long
@pytest.mark.parametrize("handshake", ["none", "vllm"])
def test_memory_is_flat(handshake: Handshake) -> None:
    samples = measured(200_000, handshake)
    middle, last = samples[len(samples) // 2 - 1], samples[-1]
    grown = (last.bytes - middle.bytes) / (last.requests - middle.requests)
    assert grown < LARGEST_GROWTH, samples
    assert last.objects < middle.objects * 1.1, samples


if __name__ == "__main__":
    sys.stdout.write("requests\tbytes resident\tobjects\n")
    measured(int(sys.argv[1]), "vllm" if sys.argv[2:] == ["vllm"] else "none", say=True)
