"""The gateway in front of real vLLM: the same tokens as without it, the prefix hits it predicted, failures of parts.

One file, so that one process of pytest starts the servers for all of these tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from coterie.engines.tiny import tiny_model_path
from coterie.engines.vllm.settings import ConnectorSettings
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig, LimitSettings, Role, WorkerEntry
from coterie.gateway.embedded import decode_router
from coterie.gateway.exchange.pool import DECODE, PREFILL
from coterie.gateway.fleet.spec import RouterSpec
from coterie.prompts import load_prompts, take_in_turn
from coterie.routing import RoundRobin
from coterie.routing.fleet import Fleet as Workers
from gateway_runs import FAST, Client, Run, gateway
from http1_peers import until
from routed_fleet import FleetCounts, RoutedFleet, Served
from vllm_checks import Listener, Truth, dense_model, event_of, sequence
from vllm_servers import BLOCK_SIZE, MODEL, TRIO, Fleet, Server, decisions_of, needs_vllm, start_trio

pytestmark = [pytest.mark.vllm, needs_vllm]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATIENCE_S = 600.0
"""No verdict depends on it: it ends a test that hangs."""
IN_FLIGHT = 4


@pytest.fixture(scope="module")
def trio(fleet: Fleet) -> Iterator[list[Server]]:
    """One prefill and two decode workers. Shared by all tests here, of which the last kills one."""
    yield start_trio(fleet)
    fleet.stop(*TRIO)


def config_of(
    trio: list[Server], roles: tuple[Role, Role, Role] = ("prefill", "decode", "decode"), **more: Any
) -> GatewayConfig:
    workers = [
        WorkerEntry(
            id=one.name,
            url=one.url,
            role=role,
            kv_events=one.kv_events,
            kv_replay=one.kv_replay,
            footprints=one.name == TRIO[-1],
        )
        for one, role in zip(trio, roles, strict=True)
    ]
    shared = {"tokenizer": str(tiny_model_path()), "block_size": BLOCK_SIZE, "health": FAST, "workers": workers}
    pair = {"handshake": "vllm", "prefill": RouterSpec("joint"), "decode": decode_router("latency_aware")}
    return GatewayConfig(**{"listen": "127.0.0.1:0", **shared, **pair, **more})


@asynccontextmanager
async def connected(config: GatewayConfig) -> AsyncIterator[Run]:
    """A gateway that follows the KV events of all its workers."""
    async with gateway(config) as found:
        parts = found.running.parts
        await until(
            lambda: all(parts.knowledge.streams[p.name].connected(id) for p in parts.pools.values() for id in p.members)
        )
        await until(lambda: all(found.open(pool.name) == set(pool.members) for pool in parts.pools.values()))
        yield found


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def ended() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(ended())


def bodies(prompts: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Each prompt as a completion and as a chat, whole and streamed."""
    shared = {"model": MODEL, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    asked: list[tuple[str, dict[str, Any]]] = []
    for prompt in prompts:
        for path, text in (
            (COMPLETIONS, {"prompt": prompt}),
            (CHAT, {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 2}),
        ):
            asked += [(path, {**shared, **text, "stream": stream}) for stream in (False, True)]
    return asked


def told(data: bytes, stream: bool) -> tuple[list[int], str, list[float]]:
    """Token ids, text and log-probabilities of an answer."""
    if stream:
        events = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
        assert events[-1] == b"[DONE]"
        choices = [choice for event in events[:-1] for choice in msgspec.json.decode(event)["choices"]]
    else:
        choices = msgspec.json.decode(data)["choices"]
    ids = [id for choice in choices for id in choice.get("token_ids") or []]
    said = [choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    chances = [one["logprob"] for choice in choices for one in (choice.get("logprobs") or {}).get("content") or []]
    return ids, "".join(one["content"] or "" for one in said), chances


def test_the_same_tokens_as_without_the_gateway(fleet: Fleet, trio: list[Server]) -> None:
    (plain,) = fleet.start({"plain": {}})
    asked = bodies([prompt.prompt for prompt in take_in_turn(load_prompts(), 5)])

    async def test() -> None:
        without, gate = Client(plain.url), asyncio.Semaphore(IN_FLIGHT)
        async with connected(config_of(trio)) as found:

            async def answer(client: Client, path: str, body: dict[str, Any]) -> tuple[list[int], str, list[float]]:
                async with gate:
                    got = await client.ask("POST", path, body)
                    assert got.status == 200, got.body
                    return told(got.body, body["stream"])

            through = await asyncio.gather(*(answer(found.client, *one) for one in asked))
            direct = await asyncio.gather(*(answer(without, *one) for one in asked))
            await without.upstream.close()
            for ours, theirs, (path, _) in zip(through, direct, asked, strict=True):
                assert ours[:2] == theirs[:2]
                assert len(ours[0]) > 0
                assert len(ours[2]) == (len(ours[0]) if path == CHAT else 0)
                np.testing.assert_allclose(ours[2], theirs[2], atol=1e-3)
            said = found.metrics
            assert said['coterie_gateway_handoffs_total{outcome="ok"}'] == len(asked)
            assert said['coterie_gateway_footprints_total{source="answer"}'] == len(asked)
            assert sum(value for name, value in said.items() if name.startswith("coterie_gateway_fallbacks_total")) == 0
            made = (await found.client.ask("GET", f"/decisions?pool=decode&last={len(asked)}")).json["decisions"]
            sent = {one["id"] for one in made if one["worker"] == TRIO[-1]}
            assert 0 < len(sent) < len(asked)
            # The scheduler there has no table: it selects only among requests whose footprint came with them.
            lines = decisions_of(fleet).read_text().splitlines()
            selected = {name for line in lines for name in msgspec.json.decode(line)["order"]}
            # A name holds its id, and shorter ids that its id begins with.
            assert {max((id for id in sent if id in name), key=len, default=name) for name in selected} == sent

    run(test)


SHARED = "You count the birds of a pond, and you answer with a number and the name of the bird, nothing else. " * 4
"""Beginning of several prompts: more than three blocks."""


class Hits:
    """What servers count of their own prefix caches: tokens looked up, and tokens found."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers = {server.name: server for server in servers}
        self.before = {name: self._read(name) for name in self.servers}

    def _read(self, name: str) -> tuple[int, int]:
        found = self.servers[name].metrics()
        return int(found["vllm:prefix_cache_queries_total"]), int(found["vllm:prefix_cache_hits_total"])

    def of(self, name: str, tokens: int) -> int:
        """Tokens that a server found for one request of so many, once it has counted it."""
        queries, hits = self.before[name]
        while (now := self._read(name))[0] < queries + tokens:
            time.sleep(0.01)
        assert now[0] == queries + tokens, "one request, looked up once"
        self.before[name] = now
        return now[1] - hits


async def asked_for(found: Run, text: str, chat: bool) -> tuple[Any, dict[str, Any]]:
    """The answer to a prompt, and the decisions on it by pool."""
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **prompt}
    got = await found.client.ask("POST", CHAT if chat else COMPLETIONS, body)
    assert got.status == 200, got.body
    pools = len(found.running.parts.pools)
    decisions = (await found.client.ask("GET", f"/decisions?last={pools}")).json["decisions"]
    assert {one["id"] for one in decisions} == {got.headers[b"x-request-id"].decode()}
    return got.json, {one["pool"]: one for one in decisions}


async def known(found: Run, decisions: dict[str, Any], ids: list[int]) -> None:
    """Wait until the workers' events of a request have come: all whole blocks but those of the last token."""
    held = (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for pool, decision in decisions.items():
        streams = found.running.parts.knowledge.streams[pool]
        row = found.running.parts.pools[pool].keeper.members[decision["worker"]].row
        await until(lambda: streams.cached(np.array(ids), row + 1)[row] == held)  # noqa: B023 (runs before the next)


def prompt_ids(answer: Any) -> list[int]:
    ids: list[int] = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return ids


@pytest.mark.parametrize("chat", [False, True])
def test_prefix_hits_are_those_that_the_directory_predicted(trio: list[Server], chat: bool) -> None:
    """In both pools; a worker that was not chosen looks nothing up."""

    async def test() -> None:
        async with connected(config_of(trio)) as found:
            hits, predicted, lengths = Hits(trio), {PREFILL: [], DECODE: []}, []  # type: ignore[var-annotated]
            for number in range(5):
                answer, decisions = await asked_for(found, f"{SHARED}{chat} Question {number}: how many herons?", chat)
                ids = prompt_ids(answer)
                assert set(decisions) == {PREFILL, DECODE}
                for pool, decision in decisions.items():
                    assert decision["prompt_tokens"] == len(ids)
                    counted = await asyncio.to_thread(hits.of, decision["worker"], len(ids))
                    assert decision["cached_tokens"] == counted
                    predicted[pool].append(counted)
                lengths.append(len(ids))
                await known(found, decisions, ids)
            for name in TRIO:
                assert await asyncio.to_thread(hits.of, name, 0) == 0
            shared = min(lengths) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
            assert shared >= 3 * BLOCK_SIZE
            assert min(predicted[PREFILL][1:]) >= shared, predicted
            assert sum(tokens >= shared for tokens in predicted[DECODE]) >= 3, "five requests on two workers"

    run(test)


def test_a_gateway_that_starts_late_knows_what_is_cached(trio: list[Server]) -> None:
    """It learns the blocks of earlier requests by replay; without a handshake usage tells the worker's own hits."""
    config = config_of(trio, ("both", "both", "both"), handshake="none", decode=RouterSpec("joint"))

    async def test() -> None:
        async with connected(config) as found:
            first, decisions = await asked_for(found, f"{SHARED} Late: how many geese?", False)
            await known(found, decisions, prompt_ids(first))
        async with connected(config) as found:
            await known(found, decisions, prompt_ids(first))
            for question in ("geese", "swans"):
                answer, decisions = await asked_for(found, f"{SHARED} Late: how many {question}?", False)
                reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert decisions[DECODE]["cached_tokens"] == reported
                assert reported >= 3 * BLOCK_SIZE
                await known(found, decisions, prompt_ids(answer))

    run(test)


@pytest.mark.parametrize("chat", [False, True])
def test_without_a_tokenizer_workers_tell_the_ids(trio: list[Server], chat: bool) -> None:
    """Texts by their tokenise endpoint; of chats, without the render endpoint, the prefill's answer tells them.

    The decode choice then expects what the worker counts, and so does the prefill choice where the prompt is known.
    """

    async def test() -> None:
        async with connected(config_of(trio, tokenizer=None, limits=LimitSettings(tokenise_s=60.0))) as found:
            hits, tokens = Hits(trio), found.running.parts.knowledge.tokens
            for number in range(4):
                # It begins as no earlier prompt: what earlier tests left in the caches is known by replay, later.
                text = f"Told, {chat}. {SHARED}{number // 2}: how many larks?"
                answer, decisions = await asked_for(found, text, chat)
                ids = prompt_ids(answer)
                for pool, decision in decisions.items():
                    counted = await asyncio.to_thread(hits.of, decision["worker"], len(ids))
                    if pool == DECODE or not chat or number % 2:
                        assert decision["prompt_tokens"] == len(ids)
                        assert decision["cached_tokens"] == counted
                await known(found, decisions, ids)
            told = "learned" if chat else "asked"
            assert (tokens.counters[told], tokens.counters["cached"]) == (2, 2)
            assert ("--enable-scale-out" in tokens.last_error) == chat

    run(test)


def test_a_response_is_prefilled_by_one_worker_and_decoded_by_another(trio: list[Server]) -> None:
    """Its footprint comes with the prefill's answer, and its text is that of a worker that does both."""
    asked = {"model": MODEL, "input": "How many herons stand in the pond?", "max_output_tokens": 12, "temperature": 0}

    def said(answer: Any) -> str:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])

    async def test() -> None:
        direct = Client(trio[0].url)
        right = said((await direct.ask("POST", RESPONSES, asked)).json)
        await direct.upstream.close()
        async with connected(config_of(trio)) as found:
            whole = await found.client.ask("POST", RESPONSES, asked)
            assert (whole.status, said(whole.json)) == (200, right)
            streamed = await found.client.ask("POST", RESPONSES, {**asked, "stream": True})
            name, _, data = streamed.body.rstrip().rpartition(b"\n\n")[2].partition(b"\n")
            assert name == b"event: response.completed"
            assert said(msgspec.json.decode(data.removeprefix(b"data: "))["response"]) == right
            metrics = found.metrics
            assert metrics['coterie_gateway_handoffs_total{outcome="ok"}'] == 2
            assert metrics['coterie_gateway_footprints_total{source="answer"}'] == 2
            assert metrics['coterie_gateway_requests_total{outcome="ok",path="/v1/responses"}'] == 2

    run(test)


# Handoffs through a driver of requests, and failures of parts.


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def body(prompt: str | list[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return {**asked, **more}


def through_proxy(
    trio: list[Server], bodies: list[dict[str, Any]], in_flight: int, kill_after: int | None = None
) -> tuple[list[Served], FleetCounts]:
    """Serve all, so many at a time; the prefill worker may be killed after so many, while it has all the others.

    It is stopped before it gets the others: however fast the machine, it answers none of them.
    """

    async def run() -> tuple[list[Served], FleetCounts]:
        gate, (first, *others) = asyncio.Semaphore(in_flight), [server.url for server in trio]
        async with RoutedFleet([first], others, RoundRobin(), Workers([16, 16])) as proxy:

            async def one(number: int) -> Served:
                async with gate:
                    return await proxy.serve(COMPLETIONS, bodies[number], name=f"r{number}r")

            if kill_after is None:
                return list(await asyncio.gather(*map(one, range(len(bodies))))), proxy.counts
            served = list(await asyncio.gather(*map(one, range(kill_after))))
            os.killpg(trio[0].process.pid, signal.SIGSTOP)
            late = [asyncio.create_task(one(number)) for number in range(kill_after, len(bodies))]
            await asyncio.sleep(0.5)  # until most are sent; one that is not fails just so
            trio[0].process.kill()
            return served + list(await asyncio.gather(*late)), proxy.counts

    return asyncio.run(run())


def received(trio: list[Server]) -> float:
    """Tokens whose KV the decode workers took from the prefill worker, until now."""
    return sum(server.metrics()["vllm:external_prefix_cache_hits_total"] for server in trio[1:])


def test_the_proxy_gives_the_same_tokens_and_every_handoff_a_footprint(
    fleet: Fleet, trio: list[Server], truth: Truth
) -> None:
    """60 prompts; those of one step (max_tokens=1 is what a prefill worker always gets) included."""
    (plain,) = fleet.start({"plain": {}})
    prompts = [prompt.prompt for prompt in take_in_turn(load_prompts(), 60)]
    listener, moved = Listener(trio[1].events), received(trio)
    served, counts = through_proxy(trio, [body(prompt) for prompt in prompts], in_flight=6)
    reference = plain.complete_all(prompts, 6, max_tokens=16)
    assert (counts.served, counts.handoffs, counts.footprints) == (60, 60, 60)
    assert (counts.damaged, counts.incomplete, counts.prefill_failures, counts.decode_failures) == (0, 0, 0, 0)
    assert {one.decoder for one in served} == {0, 1}
    for one, single in zip(served, reference, strict=True):
        assert one.problem is None
        assert one.tokens == single["choices"][0]["token_ids"]
        prompt = single["choices"][0]["prompt_token_ids"]
        assert one.footprint is not None
        assert (one.footprint.tokens, one.footprint.missing) == (len(prompt), 0)
        np.testing.assert_array_equal(one.footprint.counts, truth.footprint(prompt))
    assert received(trio) > moved, "no KV was handed over"
    # What a decoder did not compute it does not claim to know; what it did is right.
    found, foreign = listener.wait(sum(one.decoder == 0 for one in served)), 0
    for number, one in enumerate(served):
        if one.decoder == 0:
            event, tokens = event_of(found, one.name), sequence(reference[number])[:-1]
            known = event.seen()
            foreign += int((~known).sum())
            ours = truth.experts(tokens)[0]
            np.testing.assert_array_equal(np.sort(event.ids()[known], -1), np.sort(ours[known], -1))
            assert known[event.prompt_tokens :].all()
    assert foreign > 0


def test_a_prefill_worker_killed_in_the_middle(trio: list[Server]) -> None:
    """Requests whose prefill dies are decoded from scratch; the counter says how many.

    Prompts shorter than a block: of those ExampleConnector stores nothing. It takes a file that the killed worker left
    half written for whole KV, and the decoder would die of it.
    """
    prompts = [list(range(start, start + 30)) for start in range(100, 300)]

    bodies = [body(prompt, max_tokens=2) for prompt in prompts]
    served, counts = through_proxy(trio, bodies, in_flight=len(bodies), kill_after=20)
    assert (counts.handoffs, counts.prefill_failures) == (20, len(prompts) - 20)
    assert (counts.served, counts.decode_failures) == (len(prompts), 0)
    assert [len(one.tokens) for one in served] == [2] * len(prompts)
    for server in trio[1:]:
        assert server.counter("errors") == 0


@pytest.mark.long
def test_untested_version_and_unknown_model(fleet: Fleet, tmp_path: Path) -> None:
    """The first has all interfaces: it works, and is warned of. The second is served as if the plugin were absent."""
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(
        "import sys, types\n"
        "module = types.ModuleType('vllm._version')\n"
        "module.__version__ = module.version = '0.99.0'\n"
        "module.__version_tuple__ = module.version_tuple = (0, 99, 0)\n"
        "module.commit_id = module.__commit_id__ = None\n"
        "sys.modules['vllm._version'] = module\n"
    )
    dense = dense_model(tmp_path / "dense")
    settings = {"footprint": "always", "load_interval_s": 0.2}
    future, plain = fleet.start(
        {
            "future": {"settings": settings, "env": {"PYTHONPATH": str(patch)}},
            "dense": {"settings": settings, "model": dense},
        }
    )
    for server, words, footprints in (
        (future, "vLLM 0.99.0 was not tested with this version of Coterie", True),
        (plain, "experts are not captured", False),
    ):
        answers = server.complete_all(["Hello", "How many ducks"], 2, max_tokens=4)
        assert all(len(answer["choices"][0]["token_ids"]) >= 1 for answer in answers)
        assert all(bool(answer["kv_transfer_params"]) == footprints for answer in answers)
        assert words in server.log.read_text()
    deadline = time.monotonic() + 120
    # Counters leave with a later step than the request that they count.
    while plain.counter("footprints_missing") < 1 and time.monotonic() < deadline:
        plain.complete("again", max_tokens=2)
    assert plain.metrics()["coterie_capture_on"] == 0
    assert plain.counter("footprints_missing") >= 1
    fleet.stop("future", "dense")


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="footprints"):
        ConnectorSettings.parse({"footprints": "always"})
    with pytest.raises(ConfigError, match="load_interval_s"):
        ConnectorSettings.parse({"load_interval_s": 0})
    assert ConnectorSettings.parse({"events": "tcp://*:5602"}).endpoint(3) == "tcp://*:5605"
    assert ConnectorSettings(store="x").store_path("engine", 2).name == "coterie-x-2.slots"
