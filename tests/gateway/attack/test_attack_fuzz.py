"""Damaged requests, answers, footprints, events and configs: refused or ignored and counted, never a crash or a leak.

A sample of each kind runs with every `make test`; all 10,000 with `make test-long`. A failure names its seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from canned_pairs import footprint_on
from canned_workers import canned_workers
from coterie.errors import InputError
from coterie.gateway.access import Keys
from coterie.gateway.config import GatewayConfig, WorkerEntry, parse_config
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.saved import SavedState, load_state, save_state
from coterie.kvindex import Follower, KVDirectory
from coterie.net.http1.upstream import UpstreamError
from coterie.wire.footprints import attach_footprint, decode_footprint, encode_footprint
from coterie.wire.kv_events import BlockRemoved, BlockStored, KVEvents, encode_kv_events
from fuzz.mutations import damaged
from gateway_runs import Run, config_of, gateway, run, settled
from http1_peers import Clock, Raw, Spoken, scripted, until

LOTS = [pytest.param(40, 1, id="sample"), pytest.param(1700, 2, id="all", marks=pytest.mark.long)]
"""Cases of each of the six kinds, and the seed: 10,200 in all."""
AT_ONCE = 40


def batches(count: int) -> Sequence[range]:
    return [range(start, min(start + AT_ONCE, count)) for start in range(0, count, AT_ONCE)]


def http(line: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [line, b"Host: 127.0.0.1", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


BODY = b'{"model":"canned","prompt":"hello","stream":true,"kv_transfer_params":{"remote_host":"evil"},"n":1}'
CHAT = b'{"messages":[{"role":"user","content":"hello"}],"tools":[{"x":1}],"cache_salt":"s","max_tokens":5}'
JSON = b"Content-Type: application/json"
REQUESTS = [
    http(b"POST /v1/completions HTTP/1.1", BODY, JSON, b"X-Request-Id: mine", b"X-Coterie-Domain: code"),
    http(b"POST /v1/chat/completions HTTP/1.1", CHAT, JSON, b"Traceparent: 00-1-1-00", b"Accept: */*"),
    http(b"POST /v1/embeddings HTTP/1.1", b'{"input":["a","b"]}', b"Connection: keep-alive") * 2,
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'6\r\n{"a":1\r\n1\r\n}\r\n0\r\n\r\n',
    http(b"GET /decisions?last=3&pool=decode&worker=a HTTP/1.1", b""),
    http(b"GET /metrics HTTP/1.1", b"") + http(b"GET /v1/models HTTP/1.1", b""),
    http(b"POST /workers HTTP/1.1", b'{"id":"a","url":"http://127.0.0.1:9","places":4,"speed":1.5}', JSON),
    http(b"PUT /routers/decode HTTP/1.1", b'{"router":"join_shortest_queue","seed":1}', JSON),
    http(b"DELETE /workers/nobody%20here HTTP/1.1", b""),
]


async def all_well(found: Run) -> None:
    """Nothing crashed, nothing is left, and requests are served."""
    parts, server = found.running.parts, found.running.server
    found.client.upstream.retire()
    await until(lambda: not server.connections and not server.lingering and not server.tasks)
    await settled(found)
    assert server.counters.errors == 0
    assert all(not task.done() for task in parts._checks.values()), "health is still watched"
    for entry in parts.entries():  # a damaged request may have added one
        if entry.id != "good":
            parts.remove_worker(entry.id)
    assert (await found.client.complete()).status == 200


@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_requests(count: int, seed: int) -> None:
    async def test() -> None:
        async with canned_workers("good") as (worker,):
            for batch in batches(count):
                async with gateway(config_of([worker])) as found:
                    server = found.running.server
                    server.clock = clock = Clock()
                    many = []
                    for number in batch:
                        rng = random.Random(f"{seed} {number}")
                        raw = await Raw.open(found.port)
                        many.append(raw)
                        data = damaged(rng, rng.choice(REQUESTS))
                        cut = rng.randrange(len(data) + 1)
                        raw.send(data[:cut])
                        await asyncio.sleep(0)
                        raw.send(data[cut:])
                    reading = [asyncio.create_task(raw.rest()) for raw in many]
                    await until(lambda: server.counters.accepted == len(batch))  # noqa: B023
                    while not all(one.done() for one in reading):
                        await asyncio.sleep(0.01)
                        clock.now += 31.0
                        server.sweep()
                    for number, one in zip(batch, reading, strict=True):
                        said = one.result()
                        assert not said.startswith(b"HTTP/1.1 500"), (seed, number, said)
                    await all_well(found)

    run(test)


ANSWER = b'{"id":"c","choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":5}}'
EVENTS = b'data: {"choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n'
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER),
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENTS,
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(EVENTS), EVENTS),
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nX-Request-Id: other\r\nX-Request-Id: more\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://evil/\r\nContent-Length: 0\r\n\r\n",
]


@asynccontextmanager
async def hostile(answers: Sequence[bytes], seed: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A worker that is well, and whose answers are damaged; the list counts them."""
    told = [0]

    async def script(spoken: Spoken) -> None:
        head = await spoken.request()
        if head.startswith(b"GET"):
            spoken.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        rng = random.Random(f"{seed} {told[0]}")
        told[0] += 1
        spoken.say(damaged(rng, rng.choice(answers)))

    async with scripted(script) as url:
        yield url, told


NEVER = HealthSettings(backoff_s=0.0, every_s=3600.0, timeout_s=60.0, failures=1_000_000, retries=1)


async def ask_much(found: Run, count: int) -> list[int]:
    """Statuses; a connection that the gateway itself breaks is an error."""

    async def one(number: int) -> int:
        try:
            return (await found.client.complete(stream=bool(number % 2))).status
        except UpstreamError as error:
            raise AssertionError(f"request {number}: {error}") from None

    statuses: list[int] = []
    for batch in batches(count):
        statuses += await asyncio.gather(*(one(number) for number in batch))
    return statuses


@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_answers_of_workers(count: int, seed: int) -> None:
    async def test() -> None:
        async with canned_workers("good") as (good,), hostile(ANSWERS, seed) as (url, told):
            bad = WorkerEntry(id="bad", url=url)
            workers = [WorkerEntry(id="good", url=good.url), bad]
            config = GatewayConfig(listen="127.0.0.1:0", workers=workers, health=NEVER)
            async with gateway(config) as found:
                await until(lambda: found.open("decode") == {"good", "bad"})
                while told[0] < count:
                    await ask_much(found, AT_ONCE)
                await all_well(found)

    run(test)


def prefill_answers() -> list[bytes]:
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "remote_request_id": "x",
        "remote_port": 1,
        "coterie_grant": "g",
    }
    attach_footprint(params, footprint_on((0, 1)))
    bodies = [
        msgspec.json.encode({"usage": {"prompt_tokens": 5}, "kv_transfer_params": params}),
        b'{"usage":null,"kv_transfer_params":null}',
        b'{"usage":{"prompt_tokens":1%b},"kv_transfer_params":{}}' % (b"0" * 30),
    ]
    return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(one), one) for one in bodies]


@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_answers_of_prefill_workers(count: int, seed: int) -> None:
    """Each request is served all the same, or gets the refusal that the prefill worker gave."""

    async def test() -> None:
        async with canned_workers("good") as (good,), hostile(prefill_answers(), seed) as (url, told):
            workers = [
                WorkerEntry(id="bad", url=url, role="prefill"),
                WorkerEntry(id="good", url=good.url, role="decode"),
            ]
            config = GatewayConfig(listen="127.0.0.1:0", handshake="vllm", workers=workers, health=NEVER)
            async with gateway(config) as found:
                await until(lambda: found.open("prefill") == {"bad"} and found.open("decode") == {"good"})
                while told[0] < count:
                    assert all(status == 200 or 400 <= status < 500 for status in await ask_much(found, AT_ONCE))
                found.running.parts.remove_worker("bad")
                await settled(found)
                assert found.running.server.counters.errors == 0

    run(test)


@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_footprints_on_the_wire(count: int, seed: int) -> None:
    whole = encode_footprint(footprint_on((0, 1))).encode()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        try:
            found = decode_footprint(damaged(rng, whole))
        except InputError as error:
            assert "\n" not in str(error), (seed, number)  # noqa: PT017
        else:
            assert found.counts.ndim == 2, (seed, number)


@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_kv_events(count: int, seed: int) -> None:
    """Whatever a stream says, other workers' blocks stay, and lookups go on."""
    ids = np.arange(64)
    follower = Follower(KVDirectory(2, block_size=16))

    def stored(first: int) -> BlockStored:
        tokens = ids[first * 16 : (first + 1) * 16].tolist()
        return BlockStored(
            block_hashes=[first + 1], parent_block_hash=first or None, token_ids=tokens, block_size=16, lora_id=None
        )

    good = encode_kv_events(KVEvents(0.0, [stored(0), stored(1)], 0))
    payloads = [good, encode_kv_events(KVEvents(0.0, [BlockRemoved(block_hashes=[2])], 0))]
    follower.apply_payload(0, 0, good, ())
    before = follower.directory.match_tokens(ids)[0]
    assert before == 32
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        seq = rng.choice((number, 0, 2**62, number + 5))
        follower.apply_payload(1, seq, damaged(rng, rng.choice(payloads)), ())
        found = follower.directory.match_tokens(ids)
        assert found[0] == before, (seed, number)
        assert 0 <= found[1] <= 64, (seed, number)


CONFIG = b"""listen: 127.0.0.1:0
handshake: vllm
workers:
  - {id: p0, url: "http://127.0.0.1:1", role: prefill, kv_events: "tcp://127.0.0.1:2"}
  - {id: d0, url: "http://127.0.0.1:3", role: decode, places: 8, speed: 1.5}
decode: {router: "joint:kv=0.5", labels: {code: [d0]}}
limits: {body_bytes: 1000, queue_s: 1.5}
health: {every_s: 2.0, retries: 2}
drain_s: 3
"""
KEYS = b"- {name: a, sha256: %b, rate: 5, burst: 10}\n- {name: b, sha256: %b, admin: true}\n" % (b"0" * 64, b"1" * 64)


@pytest.mark.parametrize(("count", "seed"), LOTS)
def test_configs_keys_and_saved_states(count: int, seed: int, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    save_state(state, SavedState([WorkerEntry(id="a", url="http://x")], removed=["b"]))
    whole = state.read_bytes()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = number % 3
        try:
            if kind == 0:
                parse_config(damaged(rng, CONFIG).decode("utf-8", "replace"), tmp_path / "fleet.yaml")
            elif kind == 1:
                (tmp_path / "keys.yaml").write_bytes(damaged(rng, KEYS))
                Keys.load(tmp_path / "keys.yaml")
            else:
                state.write_bytes(damaged(rng, whole))
                problem = load_state(state).problem
                assert problem is None or "\n" not in problem, (seed, number)
                for aside in tmp_path.glob("*.damaged-*"):
                    aside.unlink()
        except InputError as error:
            assert "\n" not in str(error), (seed, number)  # noqa: PT017
