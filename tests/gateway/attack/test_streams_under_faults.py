"""Streams while workers fail at random: each is whole, refused before its first byte, or ends with an error event.

Four workers fail in every way that `FAULTS` lists; now and then one stops and comes back at its port, as after a crash.
A sample runs with every `make test`, 20,000 streams with `make test-long`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest

from canned_workers import STREAM, Canned, answer, canned_workers, cuts, events, head_only, resets, says
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.net.http1.upstream import UpstreamError
from gateway_runs import Client, config_of, gateway, run, settled
from http1_peers import until

LOTS = [pytest.param(400, 1, id="sample"), pytest.param(20_000, 2, id="all", marks=pytest.mark.long)]
"""Streams, and the seed."""
CLIENTS = 16
LONG_S = 1800.0
"""No verdict depends on it: it ends a test that hangs."""


async def ends_early(worker: Canned, _: HttpRequest, responder: Responder) -> None:
    """HTTP that is whole, of a stream that is not."""
    responder.start(200, [(b"content-type", STREAM)])
    responder.write(b"".join(events(worker)[:2]))
    responder.end()


FAULTS = (cuts, head_only, resets, ends_early, says(500), says(503), says(429))
"""What a worker may do in place of an answer."""
FAULTY = 0.4
"""Share of requests at a worker that meet a fault."""
RESTARTS = 100
"""One in so many streams sees a worker stop and come back."""


def ending(status: int, body: bytes) -> str:
    """Name the way an answer ended; "broken" if nothing tells the client that the rest is missing."""
    if status != 200:
        return "refused"
    last = body.rpartition(b"data: ")[2].strip()
    if last == b"[DONE]":
        return "whole"
    try:
        return "error event" if "error" in msgspec.json.decode(last) else "broken"
    except msgspec.DecodeError:
        return "broken"


# A server of asyncio that closes while it accepts drops the new socket unclosed (python/cpython#109564).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_no_stream_breaks_in_silence(count: int, seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        left = count
        endings: Counter[str] = Counter()
        restarting = asyncio.Lock()

        async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
            fault = rng.choice(FAULTS) if rng.random() < FAULTY else answer
            await fault(worker, request, responder)

        async def restart(worker: Canned) -> None:
            async with restarting:
                port = int(worker.url.rpartition(":")[2])
                await worker.stop()
                await worker.start(port)

        async def ask(client: Client) -> None:
            nonlocal left
            while left:
                left -= 1
                if rng.randrange(RESTARTS) == 0:
                    await restart(rng.choice(workers))
                body = {"model": "canned", "prompt": "Hello", "stream": True}
                try:
                    got = await client.ask("POST", "/v1/completions", body)
                    endings[ending(got.status, got.body)] += 1
                except UpstreamError as error:
                    endings[f"reset: {error.kind}"] += 1

        async with canned_workers("a", "b", "c", "d") as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b", "c", "d"})
            for worker in workers:
                worker.act = act
            clients = [Client(found.running.url) for _ in range(CLIENTS)]
            await asyncio.gather(*(ask(client) for client in clients))
            for client in clients:
                await client.upstream.close()
            await settled(found)
        assert sum(endings.values()) == count
        assert set(endings) <= {"whole", "error event", "refused"}, endings
        assert endings["whole"] > count / 4
        assert endings["error event"]

    run(test, LONG_S)
