"""Endpoints beside completions and chats: responses, single models, token ids, and paths that the config adds.

Events of responses are those of vLLM 0.32 and SGLang: names, and the usage in the last one, without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_pairs import params_of, vllm_pair
from canned_workers import STREAM, Act, Canned, canned_workers, says
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.exchange.relay import NAME_BYTES, Responses
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import config_of, gateway, run, settled, write_keys

RESPONSES = "/v1/responses"
USAGE = {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 32}, "output_tokens": 3, "total_tokens": 43}
ENDED = 'coterie_gateway_requests_total{{outcome="{}",path="/v1/responses"}}'


def response(worker: Canned, **more: Any) -> dict[str, Any]:
    text = {"type": "output_text", "text": f"from {worker.name}", "annotations": []}
    output = [{"type": "message", "role": "assistant", "content": [text]}]
    return {"id": "resp_1", "object": "response", "status": "completed", "output": output, "usage": USAGE, **more}


def event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def events_of(worker: Canned, last: str = "response.completed") -> list[bytes]:
    begun = response(worker, status="in_progress", usage=None)
    return [
        event("response.created", response=begun),
        event("response.in_progress", response=begun),
        *(event("response.output_text.delta", delta=f"{worker.name}{number}") for number in range(3)),
        event("response.output_text.done", text='an "event: response.completed" in a text ends nothing'),
        event(last, response=response(worker)),
    ]


async def responds(worker: Canned, request: HttpRequest, responder: Responder) -> None:
    if not msgspec.json.decode(request.body).get("stream"):
        responder.send(200, msgspec.json.encode(response(worker)))
        return
    await streams(b"".join(events_of(worker)))(worker, request, responder)


def streams(data: bytes, size: int = 1 << 20, ends: bool = True) -> Act:
    """Pieces of so many bytes; without its end the connection breaks."""

    async def act(_: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", STREAM)])
        for at in range(0, len(data), size):
            responder.write(data[at : at + size])
            await responder.drain()
            await asyncio.sleep(0)
        if ends:
            responder.end()
        else:
            responder.abort()

    return act


@pytest.mark.parametrize("stream", [False, True])
def test_responses_pass_through_and_count_like_completions(stream: bool, tmp_path: Path) -> None:
    """Keys, rates, salts, logs, tokens; what only the gateway may say is taken out."""
    keys = write_keys(tmp_path / "keys.yaml", "team", rate=2.0)

    async def test() -> None:
        async with (
            canned_workers("a", a=responds) as (worker,),
            gateway(config_of([worker], keys=str(tmp_path / "keys.yaml"), log_requests=True)) as found,
        ):
            ask = found.client.ask
            body = {"model": "canned", "input": "Hi", "instructions": "Be short", "store": True, "stream": stream}
            hostile = {"kv_transfer_params": {"remote_host": "evil"}, "request_id": "resp_x", "vllm_xargs": {"rid": 1}}
            assert (await ask("POST", RESPONSES, body)).status == 401
            got = await ask("POST", RESPONSES, {**body, **hostile}, key=keys["team"])
            assert got.status == 200
            if stream:
                assert got.body == b"".join(events_of(worker)), "byte for byte, and no [DONE] is missed"
            else:
                assert got.json == response(worker)
            (asked,) = worker.completions
            assert asked.path == RESPONSES
            assert len(asked.body.pop("cache_salt")) == 32
            assert asked.body == {**body, "vllm_xargs": {}}
            assert (await ask("POST", RESPONSES, body, key=keys["team"])).status == 200
            assert (await ask("POST", RESPONSES, body, key=keys["team"])).status == 429
            await settled(found)
            metrics = found.metrics
            assert metrics[ENDED.format("ok")] == 2
            assert metrics["coterie_gateway_prompt_tokens_total"] == 80
            assert metrics["coterie_gateway_output_tokens_total"] == 6
            assert metrics['coterie_gateway_cached_tokens_total{pool="decode",source="reported"}'] == 64
            logged = [msgspec.json.decode(line) for line in found.logged().splitlines() if '"event":"request"' in line]
            assert [(one["path"], one["outcome"], one["output_tokens"]) for one in logged] == [(RESPONSES, "ok", 3)] * 2

    run(test)


@pytest.mark.parametrize(("size", "ends"), [(1, True), (100, True), (1 << 20, True), (100, False), (1 << 20, False)])
def test_a_streamed_response_is_whole_with_its_last_event(size: int, ends: bool) -> None:
    """In pieces of any size, and also if the connection breaks after it."""

    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            data = b"".join(events_of(worker))
            worker.act = streams(data, size, ends)
            got = await found.client.ask("POST", RESPONSES, {"input": "x", "stream": True})
            assert got.body == data
            await settled(found)
            assert found.metrics[ENDED.format("ok")] == 1
            assert found.metrics["coterie_gateway_output_tokens_total"] == 3

    run(test)


@pytest.mark.parametrize("ends", [True, False])
def test_a_streamed_response_without_its_last_event_is_broken(ends: bool) -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            data = b"".join(events_of(worker)[:-1])
            worker.act = streams(data, ends=ends)
            got = await found.client.ask("POST", RESPONSES, {"input": "x", "stream": True})
            assert got.body.startswith(data)
            last = msgspec.json.decode(got.body[len(data) :].strip().removeprefix(b"data: "))
            assert last["error"]["code"] == "worker_failed"
            await settled(found)
            assert found.metrics[ENDED.format("broken")] == 1

    run(test)


@pytest.mark.parametrize("last", ["response.incomplete", "response.failed"])
def test_a_response_may_end_in_other_ways(last: str) -> None:
    read = Responses()
    for piece in events_of(Canned("a"), last):
        assert not read.whole
        read.read(piece)
    assert read.whole
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.cached_tokens) == (40, 3, 32)


def test_the_first_token_of_a_response_is_not_its_first_event() -> None:
    read = Responses()
    counts = [read.read(piece) for piece in events_of(Canned("a"))]
    assert counts == [0, 0, 1, 1, 1, 0, 0]
    for _ in range(100):
        read.read(b"x" * (1 << 20))
    assert len(read._last) <= 5 << 20, "an endless last event is not kept"
    assert len(read.tail) <= NAME_BYTES


@pytest.mark.parametrize("field", ["previous_response_id", "background"])
def test_what_would_need_one_workers_memory_is_refused(field: str) -> None:
    async def test() -> None:
        async with canned_workers("a", a=responds) as (worker,), gateway(config_of([worker])) as found:
            asked = {"input": "x", field: "resp_1" if field == "previous_response_id" else True}
            got = await found.client.ask("POST", RESPONSES, asked)
            assert (got.status, got.json["error"]["param"]) == (400, field)
            assert f"{field} is not served: " in got.json["error"]["message"]
            assert not worker.completions
            for empty in (None, False, ""):
                assert (await found.client.ask("POST", RESPONSES, {"input": "x", field: empty})).status == 200

    run(test)


def test_responses_are_retried_before_their_first_byte() -> None:
    async def test() -> None:
        async with canned_workers("a", "b", a=says(503), b=responds) as workers, gateway(config_of(workers)) as found:
            for stream in (True, False) * 3:
                assert (await found.client.ask("POST", RESPONSES, {"input": "x", "stream": stream})).status == 200
            assert found.metrics['coterie_gateway_retries_total{pool="decode"}'] >= 1

    run(test)


def test_a_pair_prefills_a_response() -> None:
    """The prefill worker is asked for one token by the endpoint's own field, and the decode worker gets its KV."""

    async def prefills(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        responder.send(200, msgspec.json.encode(response(worker, kv_transfer_params=params_of(request, grant=False))))

    async def test() -> None:
        async with vllm_pair("d", prefill=prefills) as (found, workers):
            workers["d"].act = responds
            body = {"model": "canned", "input": "x", "max_output_tokens": 64, "stream": True}
            got = await found.client.ask("POST", RESPONSES, body)
            assert got.body == b"".join(events_of(workers["d"]))
            (first,), (second,) = workers["p"].completions, workers["d"].completions
            assert (first.path, second.path) == (RESPONSES, RESPONSES)
            assert (first.body["max_output_tokens"], first.body["stream"], "max_tokens" in first.body) == (
                1,
                False,
                False,
            )
            params = second.body.pop("kv_transfer_params")
            assert params["do_remote_prefill"]
            assert second.body == body
            over = await found.client.ask("POST", RESPONSES, {**body, "max_output_tokens": 2000})
            assert (over.status, over.json["error"]["param"]) == (400, "max_output_tokens")
            await settled(found)

    run(test)


def test_single_models() -> None:
    async def test() -> None:
        cards = [{"id": "org/model", "object": "model", "max_model_len": 7}, {"id": "lora", "parent": "org/model"}]

        async def lists(_: Canned, __: HttpRequest, responder: Responder) -> None:
            responder.send(200, msgspec.json.encode({"object": "list", "data": cards}))

        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            ask = found.client.ask
            assert (await ask("GET", "/v1/models/canned")).json["id"] == "canned"
            missing = await ask("GET", "/v1/models/gpt")
            assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
            assert missing.json["error"]["message"] == "the model 'gpt' is not served here; known: canned"
            worker.models = lists
            for path in ("org/model", "org%2Fmodel"):
                assert (await ask("GET", f"/v1/models/{path}")).json == cards[0]
            assert (await ask("GET", "/v1/models/lora")).json == cards[1]
            assert (await ask("GET", "/v1/models/")).json["data"] == cards
            worker.models = says(401, b'{"error": "no key"}')
            refused = await ask("GET", "/v1/models/lora")
            assert (refused.status, refused.body) == (401, b'{"error": "no key"}')
            worker.models = says(200, b"<html>")
            assert (await ask("GET", "/v1/models/lora")).status == 502

    run(test)


def test_token_ids_are_callers_to_ask(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", "team", "admin")

    async def test() -> None:
        async with (
            canned_workers("a", a=says(200, b'{"count": 2, "tokens": [5, 6]}')) as (worker,),
            gateway(config_of([worker], keys=str(tmp_path / "keys.yaml"))) as found,
        ):
            for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [5, 6]})):
                assert (await found.client.ask("POST", path, body)).status == 401
                got = await found.client.ask("POST", path, body, key=keys["team"])
                assert (got.status, got.json["tokens"]) == (200, [5, 6])
                assert (worker.completions[-1].path, worker.completions[-1].body) == (path, body), (
                    "no salt: nothing is cached"
                )
                assert found.metrics[f'coterie_gateway_requests_total{{outcome="ok",path="{path}"}}'] == 1
                assert (await found.client.ask("GET", path, key=keys["team"])).status == 405
            await settled(found)

    run(test)


def test_only_listed_paths_are_forwarded(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", "team", "admin")
    forward = ["/v1/rerank", "/v1/audio/transcriptions", "/v1/messages"]
    form = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--x--\r\n'

    async def test() -> None:
        async with (
            canned_workers("a", a=says(200, b'{"results": []}')) as (worker,),
            gateway(config_of([worker], keys=str(tmp_path / "keys.yaml"), forward=forward)) as found,
        ):
            ask = found.client.ask
            body = {"query": "x", "documents": ["y"]}
            got = await ask("POST", "/v1/rerank", {**body, "request_id": "r"}, key=keys["team"])
            assert (got.status, got.json) == (200, {"results": []})
            asked = worker.completions[-1]
            assert len(asked.body.pop("cache_salt")) == 32
            assert (asked.path, asked.body) == ("/v1/rerank", body)
            assert (await ask("POST", "/v1/rerank", body)).status == 401
            assert (await ask("GET", "/v1/rerank", key=keys["team"])).status == 405
            assert (await ask("POST", "/v1/rerank", b"--x--", key=keys["team"])).status == 400, "JSON, or a form"
            kind, bearer = (b"content-type", b"multipart/form-data; boundary=x"), b"Bearer " + keys["team"].encode()
            seen: list[bytes] = []

            async def hears(_: Canned, request: HttpRequest, responder: Responder) -> None:
                seen.append(request.body)
                assert kind in request.headers
                responder.send(200)

            worker.parses, worker.act = False, hears
            sent = await found.client.upstream.send(
                "POST", "/v1/audio/transcriptions", [kind, (b"authorization", bearer)], form
            )
            assert (sent.status, seen) == (200, [form])
            sent.close()
            refused = await found.client.upstream.send(
                "POST", "/v1/completions", [kind, (b"authorization", bearer)], form
            )
            assert refused.status == 400, "only where the config says so"
            refused.close()
            worker.act = streams(b"event: message_stop\ndata: {}\n\n")
            whole = await ask("POST", "/v1/messages", {"stream": True}, key=keys["team"])
            assert whole.body == b"event: message_stop\ndata: {}\n\n", "of other streams no last event is known"
            await settled(found)
            assert found.metrics['coterie_gateway_requests_total{outcome="ok",path="other"}'] == 3

    run(test)


def test_a_404_names_no_admin_endpoint() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            for path in ("/v1/rerank", "/v1/responses/resp_1", "/nowhere", "/metrics/x", "/v1/../workers"):
                got = await found.client.ask("POST", path, {})
                assert got.status == 404
                message = got.json["error"]["message"].removeprefix(f"{path} is not served here; known: ")
                assert set(message.split(", ")) == {
                    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models"),
                    *("/tokenize", "/detokenize", "/health", "/ready"),
                }
            assert not worker.completions

    run(test)


@pytest.mark.parametrize("path", ["/rerank", "/v1/", "/v1/../workers", "/v1/a?b", "/v1/a b", "v1/a", "/v1/a/"])
def test_paths_that_cannot_be_forwarded(path: str) -> None:
    with pytest.raises(ConfigError, match=r"forward: .* must be a path below /v1/"):
        GatewayConfig(forward=[path])
