"""Token ids that the gateway's own tokenizer cannot make exactly: asked of a worker, or read in a prefill's answer."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from canned_pairs import params_of
from canned_workers import Act, Canned, canned_workers, completion, resets, says, stalls
from canned_workers import answer as completes
from coterie.engines.tiny import tiny_model_path
from coterie.gateway.config import GatewayConfig, LimitSettings
from coterie.gateway.signals.model_tokenizers import FolderTokenizer
from coterie.gateway.signals.tokens import MARGIN, RENDER, TOKENISE
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.wire.kv_events import BlockStored
from gateway_runs import Run, config_of, gateway, run
from http1_peers import until
from kv_publisher import Publisher, payload

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IDS = list(range(200_000, 200_100))
SAID = {"messages": [{"role": "user", "content": "How many ducks?"}]}
PATIENT = LimitSettings(tokenise_s=60.0)
"""No verdict depends on it."""


def ids_of(text: str) -> list[int]:
    return [*IDS, *text.encode()]


async def renders(worker: Canned, request: HttpRequest, responder: Responder) -> None:
    """A worker of vLLM with its render endpoint, and completions."""
    if request.path not in (RENDER, TOKENISE):
        await completes(worker, request, responder)
        return
    body = msgspec.json.decode(request.body)
    if request.path == TOKENISE:
        told: dict[str, Any] = {"tokens": ids_of(body["prompt"]), "count": 1}
    else:
        told = {"token_ids": ids_of(body["messages"][-1]["content"]), "features": None, "model": body["model"]}
    responder.send(200, msgspec.json.encode(told))


def renders_by(act: Act) -> Act:
    """As `renders`, but questions for ids are answered by `act`."""

    async def both(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        await (act if request.path in (RENDER, TOKENISE) else completes)(worker, request, responder)

    return both


def questions(worker: Canned) -> list[Any]:
    return [one.body for one in worker.asked if one.path in (RENDER, TOKENISE)]


def asks_ids(worker: Canned) -> list[bool]:
    """Of each completion: whether the worker is to answer with the prompt's ids."""
    paths = (COMPLETIONS, CHAT)
    return [one.body.get("return_token_ids", False) for one in worker.completions if one.path in paths]


@asynccontextmanager
async def followed(
    *names: str, acts: Mapping[str, Act], roles: list[str] | None = None, events: bool = True, **more: Any
) -> AsyncIterator[tuple[Run, dict[str, Canned], Publisher]]:
    """A gateway in front of canned workers, of which all send the same KV events."""
    publisher = Publisher(replays=False)
    async with canned_workers(*names, **acts) as workers:
        config: GatewayConfig = config_of(workers, roles, **{"limits": PATIENT, **more})
        if events:
            sending = [replace(entry, kv_events=publisher.endpoint) for entry in config.workers]
            config = replace(config, workers=sending)
        async with gateway(config) as found:
            pools = found.running.parts.pools
            await until(lambda: all(found.open(pool) == set(pools[pool].members) for pool in pools))
            yield found, {worker.name: worker for worker in workers}, publisher
    publisher.close()


async def ask(found: Run, path: str = CHAT, text: str = "How many ducks?", **more: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    got = await found.client.ask("POST", path, {"model": "canned", **prompt, **more})
    assert got.status == 200, got.body
    return got.json


async def decided(found: Run, pool: str = "decode") -> Any:
    return (await found.client.ask("GET", f"/decisions?pool={pool}&last=1")).json["decisions"][0]


def counted(found: Run) -> Counter[str]:
    return found.running.parts.knowledge.tokens.counters


async def last_error(found: Run) -> str:
    errors = (await found.client.ask("GET", "/workers")).json["last_errors"]
    return str(errors.get("token ids", ""))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_worker_is_asked_once_for_what_decides_the_ids(path: str) -> None:
    async def test() -> None:
        async with followed("w", acts={"w": renders}) as (found, workers, _):
            for number in range(3):
                await ask(found, path, temperature=number / 2, max_tokens=5)
                assert (await decided(found))["prompt_tokens"] == len(ids_of("How many ducks?"))
            only = {"messages": SAID["messages"]} if path == CHAT else {"prompt": "How many ducks?"}
            more = {} if path == CHAT else {"add_special_tokens": True}
            assert questions(workers["w"]) == [{"model": "canned", **only, **more}]
            assert counted(found) == {"asked": 1, "cached": 2}
            assert asks_ids(workers["w"]) == [False] * 3
            await ask(found, path, model="canned-2")
            assert len(questions(workers["w"])) == 2, "another model may have another tokenizer"
            assert await last_error(found) == ""

    run(test)


def test_cached_blocks_are_known_by_the_ids_of_the_worker() -> None:
    async def test() -> None:
        async with followed("w", acts={"w": renders}, block_size=16) as (found, _, publisher):
            streams = found.running.parts.knowledge.streams["decode"]
            held = BlockStored(block_hashes=list(range(6)), token_ids=IDS[:96], block_size=16)
            await asyncio.to_thread(publisher.wait_for_subscriber)
            while not streams.cached(np.array(IDS), 1)[0]:
                publisher.publish(payload(held))
                await asyncio.sleep(0.01)
            await ask(found)
            assert (await decided(found))["cached_tokens"] == 96

    run(test)


def test_nobody_is_asked_where_nothing_needs_ids() -> None:
    async def test() -> None:
        async with followed("w", acts={"w": renders}, events=False) as (found, workers, _):
            await ask(found)
            await ask(found, COMPLETIONS)
            assert questions(workers["w"]) == []
            assert (await decided(found))["cached_tokens"] == 0, "guessed by text"

    run(test)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose texts the gateway's own tokenizer makes exactly, and whose chats vLLM renders in its own code."""
    made = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(tiny_model_path(), made, ignore=shutil.ignore_patterns("*.safetensors"))
    about = msgspec.json.decode((made / "config.json").read_bytes())
    (made / "config.json").write_bytes(msgspec.json.encode({**about, "model_type": "deepseek_v32"}))
    return made


@pytest.mark.parametrize("events", [True, False])
def test_texts_are_made_here_and_chats_by_the_worker_or_not_at_all(folder: Path, events: bool) -> None:
    async def test() -> None:
        settings: dict[str, Any] = {"acts": {"w": renders}, "events": events, "tokenizer": str(folder)}
        async with followed("w", **settings) as (found, workers, _):
            await ask(found, COMPLETIONS)
            ids = FolderTokenizer(folder).encode("How many ducks?")
            assert (await decided(found))["prompt_tokens"] == len(ids)
            assert questions(workers["w"]) == []
            known = await ask(found), await decided(found)
            assert len(questions(workers["w"])) == events
            if events:
                assert known[1]["prompt_tokens"] == len(ids_of("How many ducks?"))
                assert counted(found) == {"exact": 1, "asked": 1}
            else:
                assert counted(found) == {"exact": 1, "none": 1}, "ids of another template would be worse than none"

    run(test)


def one_of(raw: bytes) -> Act:
    return says(200, b'{"token_ids":' + raw + b',"tokens":' + raw + b"}")


HOSTILE: dict[str, tuple[Act, str]] = {
    "no endpoint": (says(404, b'{"detail":"Not Found"}'), "HTTP 404"),
    "an error": (says(500, b'{"error":{}}'), "HTTP 500"),
    "not JSON": (says(200, b"[[[["), "cannot be read"),
    "deep": (says(200, b"[" * 100_000), "cannot be read"),
    "not UTF-8": (says(200, b'{"token_ids":["\xff"]}'), "cannot be read"),
    "nothing": (says(200, b"{}"), "0 token ids"),
    "empty": (one_of(b"[]"), "0 token ids"),
    "floats": (one_of(b"[1.5]"), "cannot be read"),
    "bools": (one_of(b"[true]"), "cannot be read"),
    "texts": (one_of(b'["1"]'), "cannot be read"),
    "nested": (one_of(b"[[1]]"), "cannot be read"),
    "an object": (one_of(b'{"1":2}'), "cannot be read"),
    "null": (one_of(b"null"), "cannot be read"),
    "negative": (one_of(b"[1,-1]"), "from -1 to 1"),
    "too large": (one_of(b"[1,2147483648]"), "to 2147483648"),
    "over 64 bits": (one_of(b"[1" + b"0" * 30 + b"]"), "cannot be read"),
    "too many": (one_of(b"[" + b"1," * (2 * MARGIN) + b"1]"), f"{2 * MARGIN + 1} token ids"),
    "ten millions": (one_of(b"[" + b"1," * 10_000_000 + b"1]"), "more than"),
    "resets": (resets, ""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_worker_that_lies_is_named_counted_and_left_alone(case: str) -> None:
    act, reason = HOSTILE[case]

    async def test() -> None:
        async with followed("w", acts={"w": renders_by(act)}) as (found, workers, _):
            await ask(found, COMPLETIONS)
            await ask(found)
            assert counted(found) == {"unanswered": 2}, "of two endpoints"
            error = await last_error(found)
            assert error.startswith("worker 'w', /v1/chat/completions/render: ")
            assert reason in error
            asked = len(questions(workers["w"]))
            await ask(found, text="another question")
            await ask(found, COMPLETIONS, text="another question")
            assert len(questions(workers["w"])) == asked, "it rests"
            assert counted(found) == {"unanswered": 2, "none": 2}
            assert (await decided(found))["cached_tokens"] == 0
            assert found.metrics['coterie_gateway_tokenised_total{outcome="unanswered"}'] == 2
            breaker = found.running.parts.pools["decode"].members["w"].breaker
            assert breaker.state(0.0) == "closed", "its requests are served as before"

    run(test)


def test_a_worker_that_is_silent_holds_up_one_request_until_the_deadline() -> None:
    async def test() -> None:
        limits = LimitSettings(tokenise_s=0.05)
        async with followed("w", acts={"w": renders_by(stalls)}, limits=limits) as (found, workers, _):
            await ask(found)
            await until(lambda: counted(found)["unanswered"] == 1)
            assert "no answer within" in await last_error(found)
            for number in range(5):
                await ask(found, text=f"question {number}")
            assert len(questions(workers["w"])) == 1
            assert counted(found)["none"] == 5
            await until(lambda: workers["w"].cancelled == 1)

    run(test)


def test_a_prompt_that_the_worker_refuses_is_not_its_fault() -> None:
    for status, body in ((400, b"{}"), (404, b'{"error":{"message":"no such model"}}'), (422, b"{}")):

        async def test(status: int = status, body: bytes = body) -> None:
            async with followed("w", acts={"w": renders_by(says(status, body))}) as (found, workers, _):
                for number in range(3):
                    await ask(found, text=f"question {number}")
                assert len(questions(workers["w"])) == 3
                assert counted(found) == {"none": 3}
                assert await last_error(found) == ""

        run(test)


def test_open_workers_are_asked_in_turn() -> None:
    async def test() -> None:
        names = ("a", "b", "closed")
        async with followed(*names, acts=dict.fromkeys(names, renders)) as (found, workers, _):
            pool = found.running.parts.pools["decode"]
            while "closed" in found.open("decode"):
                pool.checked(pool.members["closed"], False)
            for number in range(6):
                await ask(found, text=f"question {number}")
            assert [len(questions(workers[name])) for name in names] == [3, 3, 0]
            await workers["a"].stop()
            before = counted(found)["asked"]
            for number in range(6):
                await ask(found, text=f"later {number}")
            assert counted(found)["unanswered"] == 1
            assert counted(found)["asked"] - before == 5
            assert (await last_error(found)).startswith("worker 'a', ")

    run(test)


def test_images_have_no_ids() -> None:
    async def test() -> None:
        async with followed("w", acts={"w": renders}) as (found, workers, _):
            picture = {"type": "image_url", "image_url": {"url": "data:,"}}
            await ask(found, messages=[{"role": "user", "content": [picture]}])
            assert questions(workers["w"]) == []
            assert counted(found) == {"none": 1}

    run(test)


def prefills_with(raw: bytes | None) -> Act:
    """A prefill worker without a render endpoint, whose answer holds these ids if it is asked for them."""

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        if request.path in (RENDER, TOKENISE):
            responder.send(404, b'{"detail":"Not Found"}')
            return
        body, chat = msgspec.json.decode(request.body), request.path == CHAT
        ids = msgspec.Raw(b"null" if raw is None or not body.get("return_token_ids") else raw)
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        said = completion(worker, usage=usage, kv_transfer_params=params_of(request, grant=False))
        (said if chat else said["choices"][0])["prompt_token_ids"] = ids
        responder.send(200, msgspec.json.encode(said))

    return act


PAIR: dict[str, Any] = {"roles": ["prefill", "decode"], "handshake": "vllm", "block_size": 16}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_prefill_tells_the_ids_to_the_decode_choice_and_the_next_request(path: str) -> None:
    async def test() -> None:
        prefill = prefills_with(msgspec.json.encode(IDS))
        async with followed("p", "d", acts={"p": prefill, "d": renders_by(says(404))}, **PAIR) as (
            found,
            workers,
            feed,
        ):
            streams = found.running.parts.knowledge.streams["decode"]
            held = BlockStored(block_hashes=list(range(6)), token_ids=IDS[:96], block_size=16)
            while not streams.cached(np.array(IDS), 1)[0]:
                feed.publish(payload(held))
                await asyncio.sleep(0.01)
            answers = [await ask(found, path)]
            first = await decided(found)
            assert (first["prompt_tokens"], first["cached_tokens"]) == (len(IDS), 96)
            assert counted(found)["learned"] == 1
            answers.append(await ask(found, path))
            assert counted(found)["cached"] == 1
            assert (await decided(found, "prefill"))["prompt_tokens"] == len(IDS)
            assert asks_ids(workers["p"]) == [True, False]
            assert asks_ids(workers["d"]) == [False, False]
            assert answers[0] == answers[1], "the client sees nothing of it"

    run(test)


@pytest.mark.parametrize("case", ["floats", "texts", "negative", "too large", "too many", "over 64 bits", "empty"])
def test_a_prefill_that_lies_about_the_ids_is_named_and_the_request_goes_on(case: str) -> None:
    raw = {
        **{"floats": b"[1.5]", "texts": b'["a"]', "negative": b"[-1]", "too large": b"[2147483648]"},
        **{"too many": b"[" + b"1," * 2 * MARGIN + b"1]", "over 64 bits": b"[1" + b"0" * 30 + b"]", "empty": b"[]"},
    }[case]

    async def test() -> None:
        async with followed("p", "d", acts={"p": prefills_with(raw)}, **PAIR) as (found, workers, _):
            await ask(found)
            assert (await last_error(found)).startswith("worker 'p', prefill: ")
            assert counted(found)["learned"] == 0
            await ask(found)
            assert asks_ids(workers["p"]) == [True, True]

    run(test)


def test_a_prefill_without_ids_is_no_fault() -> None:
    async def test() -> None:
        async with followed("p", "d", acts={"p": prefills_with(None)}, **PAIR) as (found, workers, _):
            await ask(found)
            assert "prefill" not in await last_error(found)
            picture = {"type": "image_url", "image_url": {"url": "data:,"}}
            await ask(found, messages=[{"role": "user", "content": [picture]}])
            assert asks_ids(workers["p"]) == [True, False], "ids of images are not taken"

    run(test)
