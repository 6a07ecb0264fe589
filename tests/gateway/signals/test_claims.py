"""Claims to cached prefixes are held against answers: a liar is found out, an honest worker is believed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canned_workers import Canned, completion
from control_cases import saved_fit
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.serve import RunningGateway
from coterie.gateway.signals.prefixes import Claims
from coterie.net.access import FleetAccess
from coterie.wire.kv_events import BlockStored
from gateway_runs import FAST, gateway
from kv_publisher import Publisher, payload

TOKENS = np.array([1000, 1000, 1000])


def test_a_liar_is_not_believed_and_comes_back_by_honest_answers() -> None:
    claims = Claims()
    assert claims.discounted(TOKENS) is TOKENS
    for _ in range(16):
        claims.answered(1, 1000, 0)
    assert claims.belief(1) == 0.0
    assert claims.discounted(TOKENS).tolist() == [1000, 0, 1000]
    assert claims.discounted(TOKENS[:1]).tolist() == [1000], "a pool that has shrunk"
    assert TOKENS.tolist() == [1000] * 3
    for _ in range(32):
        claims.answered(1, 1000, 1000)
    assert claims.belief(1) == 1.0
    assert claims.beliefs is None


def test_another_worker_of_the_row_begins_anew() -> None:
    claims = Claims()
    for _ in range(16):
        claims.answered(0, 1000, 0)
    claims.forget(0)
    assert claims.belief(0) == 1.0
    assert claims.beliefs is None


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=60))
def test_beliefs_are_shares_and_no_claim_is_no_evidence(answers: list[tuple[int, int]]) -> None:
    claims = Claims()
    for claimed, cached in answers:
        before = claims.belief(0)
        claims.answered(0, claimed, cached)
        assert 0.0 <= claims.belief(0) <= 1.0
        assert claims.belief(0) == before or claimed > 0
        if cached >= claimed > 0:
            assert claims.belief(0) >= before
    assert (claims.discounted(TOKENS) <= TOKENS).all()


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.1))
def test_rare_evictions_leave_a_worker_believed(seed: int, evicted: float) -> None:
    claims, rng = Claims(), np.random.default_rng(seed)
    beliefs = []
    for _ in range(200):
        claims.answered(0, 1000, 0 if rng.random() < evicted else 1000)
        beliefs.append(claims.belief(0))
    assert np.mean(beliefs) > 0.8


def test_small_truths_hide_no_large_lie() -> None:
    claims = Claims()
    for _ in range(30):
        for _ in range(4):
            claims.answered(0, 16, 16)
        claims.answered(0, 4096, 0)
    assert claims.belief(0) < 0.1


PROMPT = list(range(1000, 1512))


async def say_nothing_cached(worker: Canned, _: Any, responder: Any) -> None:
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    responder.send(200, msgspec.json.encode(completion(worker, usage=usage)))


@pytest.mark.parametrize("router", ["joint", "latency_aware"])
def test_a_worker_that_claims_what_it_does_not_hold_loses_the_traffic_it_drew(router: str, tmp_path: Path) -> None:
    async def test() -> None:
        workers = [Canned("honest", say_nothing_cached), Canned("liar", say_nothing_cached)]
        publisher = Publisher(replays=False)
        for worker in workers:
            await worker.start()
        entries = [WorkerEntry(id=worker.name, url=worker.url) for worker in workers]
        others = Publisher(replays=False)
        entries[0] = msgspec.structs.replace(entries[0], kv_events=others.endpoint)
        entries[1] = msgspec.structs.replace(entries[1], kv_events=publisher.endpoint)
        spec = RouterSpec(router, fit=saved_fit("low", tmp_path))
        config = GatewayConfig(workers=entries, listen="127.0.0.1:0", health=FAST, decode=spec)
        async with gateway(config) as run:
            streams = run.running.parts.knowledge.streams["decode"]
            await asyncio.to_thread(publisher.wait_for_subscriber)
            claim = BlockStored(block_hashes=list(range(32)), token_ids=PROMPT, block_size=16)
            ids = np.array(PROMPT)
            async with asyncio.timeout(60):
                while not streams.cached(ids, 2)[1]:
                    publisher.publish(payload(claim))
                    await asyncio.sleep(0.01)
            publisher.send([b"?"])
            async with asyncio.timeout(60):
                while "kv_events of decode" not in (
                    errors := (await run.client.ask("GET", "/workers")).json["last_errors"]
                ):
                    await asyncio.sleep(0.01)
            assert errors["kv_events of decode"].startswith("liar: ")
            went = []
            for _ in range(60):
                got = await run.client.ask("POST", "/v1/completions", {"model": "canned", "prompt": PROMPT})
                went.append(got.json["choices"][0]["text"])
            assert went[0] == "from liar", "its claim draws the first requests"
            told = (await run.client.ask("GET", "/decisions?last=1")).json["decisions"][0]
            assert told["claims_believed"] == {"honest": 1.0, "liar": 0.0}
            assert told["cached_tokens_by_worker"] == {"honest": 0, "liar": 0}
            assert run.metrics['coterie_gateway_kv_claims_believed{worker="liar"}'] == 0.0
            assert went[-30:].count("from honest") >= 10, "it has its share of the traffic, no more"
        for worker in workers:
            await worker.stop()
        publisher.close()
        others.close()

    asyncio.run(test())


def test_secure_events_without_a_secret_are_refused() -> None:
    entry = WorkerEntry(id="w7", url="http://127.0.0.1:1", kv_events="tcp://127.0.0.1:1", secure_events=True)
    config = GatewayConfig(workers=[entry], listen="127.0.0.1:0", health=FAST)

    async def test() -> None:
        running = RunningGateway(config, access=FleetAccess())
        with pytest.raises(ConfigError, match=r"w7.*secure_events.*COTERIE_FLEET_SECRET"):
            await running.parts.start()
        assert not running.parts.entries(), "nothing was joined"
        with pytest.raises(ConfigError, match=r"w7.*COTERIE_FLEET_SECRET"):
            running.parts.reconfigure(config, running.parts.changes)
        await running.parts.close()
        trusted = RunningGateway(config, access=FleetAccess("s" * 32))
        await trusted.parts.start()
        assert [one.id for one in trusted.parts.entries()] == ["w7"]
        await trusted.parts.close()

    asyncio.run(test())
