"""A client says where KV lies: the worker fetches from its peers alone, what their own fleet signed, and checks it.

Whatever is wrong with a fetch, the prompt is computed here: the tokens are those of a worker that never heard of it.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from attacked_worker import KEY, SECRET, Attacked, attacked, hostile, model, remote, whole
from books import check_blocks
from coterie.engines.worker.metrics import METRICS
from coterie.engines.worker.model import RequestRows
from coterie.engines.worker.transfer import Prefilled, numpy_codec

PROMPT = list(range(40, 58))
COUNT = 2
OUTCOMES = METRICS["kv_fetch_total"].values
Change = Callable[[Prefilled], Prefilled]


@cache
def right() -> list[int]:
    """Greedy tokens of the prompt, by the model alone."""
    alone, tokens, start, out = model(9), PROMPT, 0, list[int]()
    while len(out) < COUNT:
        step = alone.step([RequestRows(tokens, start, list(range(8)), True)])
        start, tokens = start + len(tokens), [int(step.logits[0].argmax())]
        out += tokens
    return out


@cache
def prefilled() -> Prefilled:
    """Right KV of the prompt, as a prefill worker would send it."""
    alone = model(9)
    ids = alone.step([RequestRows(PROMPT, 0, list(range(8)), True)]).expert_ids
    return Prefilled(alone.identity, np.asarray(PROMPT, np.int32), ids, alone.store.pack(list(range(8)), len(PROMPT)))


async def outputs_are_right(worker: Attacked, params: dict[str, Any]) -> str:
    """This answer, and that of the next user, who shares the prefix cache. Returns what became of the fetch."""
    assert (await worker.ask("POST", "/reset_prefix_cache", authorization=f"Bearer {KEY}")).status == 200
    before = {outcome: worker.counted("kv_fetch_total", outcome) for outcome in OUTCOMES}
    assert (await worker.complete(PROMPT, COUNT, kv_transfer_params=params)).tokens == right()
    assert (await worker.complete(PROMPT, COUNT)).tokens == right()
    check_blocks(worker.server.engine.blocks)
    (outcome,) = (outcome for outcome in OUTCOMES if worker.counted("kv_fetch_total", outcome) > before[outcome])
    return outcome


def poisoned() -> bytes:
    """KV of the right shape that is garbage."""
    sent = prefilled()
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=array.shape).astype(np.float32) for name, array in sent.tensors.items()}
    return numpy_codec().to_bytes(sent._replace(tensors=tensors))


@pytest.mark.parametrize("named", [False, True], ids=["no peer", "a peer's address, not signed"])
def test_poisoned_kv_of_a_strangers_server_is_never_fetched(named: bool) -> None:
    async def run() -> None:
        async with hostile(whole(poisoned())) as stranger:
            peers = (f"127.0.0.1:{stranger.port}",) if named else ()
            async with attacked(fleet_secret=SECRET, worker_key=KEY, peers=peers) as worker:
                assert await outputs_are_right(worker, remote(stranger.port)) == "refused"
                assert stranger.asked == []

    asyncio.run(run())


def test_only_addresses_of_this_machine_are_asked_where_no_secret_is_set() -> None:
    async def run() -> None:
        async with attacked() as worker:
            for host in ("10.0.0.1", "192.0.2.7", "0.0.0.0", "[::ffff:10.0.0.1]", "example.com", "::"):
                assert await outputs_are_right(worker, remote(80, host=host)) == "refused"

    asyncio.run(run())


def test_a_bad_host_name_costs_its_request_nothing() -> None:
    """It gave HTTP 500, on which a proxy takes the worker for dead: one body sent round a fleet ended all of it."""
    hosts = ["a..b", "." * 200, "x" * 64, "x" * 64 + ".com", "-", "_", "[", "]:", ":::::", "127.0.0.1.", "[::1]]"]

    async def run() -> None:
        async with attacked() as worker:
            for host in hosts:
                reply = await worker.complete(PROMPT, 1, kv_transfer_params=remote(1, host=host))
                assert (host, reply.tokens) == (host, right()[:1])

    asyncio.run(run())


def test_redirects_are_not_followed() -> None:
    async def run() -> None:
        async with hostile(whole(numpy_codec().to_bytes(prefilled()))) as inside:
            there = f"location: http://127.0.0.1:{inside.port}/latest/meta-data"
            for status in ("302 Found", "308 Permanent Redirect"):
                async with attacked() as worker, hostile(whole(b"", status, there)) as stranger:
                    assert await outputs_are_right(worker, remote(stranger.port)) == "missing"
                    assert len(stranger.asked) == 1
            assert inside.asked == []

    asyncio.run(run())


def test_more_than_the_prompts_own_size_is_not_read() -> None:
    """An endless body held the worker for 30 s and all its memory."""
    sent = 0

    async def endless(_: str, writer: Any) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        while sent < 256 << 20:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async def run() -> None:
        async with attacked() as worker:
            async with hostile(endless) as stranger:
                assert await outputs_are_right(worker, remote(stranger.port)) == "damaged"
            assert sent < 16 << 20, "sockets hold some"
            for lie in (1 << 40, 1 << 62):
                async with hostile(f"HTTP/1.1 200 OK\r\ncontent-length: {lie}\r\n\r\n".encode()) as stranger:
                    assert await outputs_are_right(worker, remote(stranger.port)) == "damaged"

    asyncio.run(run())


def test_compressed_kv_is_not_unpacked() -> None:
    async def run() -> None:
        bomb = gzip.compress(bytes(16 << 20))
        async with attacked() as worker, hostile(whole(bomb, "200 OK", "content-encoding: gzip")) as stranger:
            assert await outputs_are_right(worker, remote(stranger.port)) == "damaged"

    asyncio.run(run())


def _keys(value: Any) -> Change:
    """With some entries of the keys set to a value."""

    def change(sent: Prefilled) -> Prefilled:
        keys = sent.tensors["keys"].copy()
        keys[0, 3, 0] = value
        return sent._replace(tensors={**sent.tensors, "keys": keys})

    return change


WRONG: dict[str, Change] = {
    "not a number": _keys(np.nan),
    "infinite": _keys(-np.inf),
    "shape": lambda sent: sent._replace(tensors={name: array[:, 1:] for name, array in sent.tensors.items()}),
    "dtype": lambda sent: sent._replace(tensors={n: array.astype(np.float64) for n, array in sent.tensors.items()}),
    "a tensor more": lambda sent: sent._replace(tensors={**sent.tensors, "more": np.zeros(3)}),
    "expert past the last": lambda sent: sent._replace(expert_ids=np.full_like(sent.expert_ids, 200)),
    "experts that are no integers": lambda sent: sent._replace(
        expert_ids=np.full(sent.expert_ids.shape, np.nan, np.float32)
    ),
    "another prompt": lambda sent: sent._replace(token_ids=sent.token_ids[::-1].copy()),
    "tokens that are no integers": lambda sent: sent._replace(token_ids=sent.token_ids.astype(np.float32)),
    "another model": lambda sent: sent._replace(identity="numpy-another-float32"),
}


def test_kv_that_cannot_be_this_prompts_is_refused() -> None:
    async def run() -> None:
        async with attacked() as worker:
            for what, change in WRONG.items():
                async with hostile(whole(numpy_codec().to_bytes(change(prefilled())))) as stranger:
                    assert (what, await outputs_are_right(worker, remote(stranger.port))) == (what, "mismatch")
            async with hostile(whole(numpy_codec().to_bytes(prefilled()))) as friend:
                assert await outputs_are_right(worker, remote(friend.port)) == "ok", "and right KV is taken"

    asyncio.run(run())


def test_no_answer_of_a_peer_does_harm() -> None:
    answers = [
        b"",
        b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"garbage\r\n\r\n",
        *map(whole, (b"", b"\xff" * 99, b"{}" * 40)),
    ]

    async def run() -> None:
        async with attacked() as worker:
            for answer in answers:
                async with hostile(answer) as stranger:
                    assert await outputs_are_right(worker, remote(stranger.port)) in ("unreachable", "damaged")

    asyncio.run(run())
