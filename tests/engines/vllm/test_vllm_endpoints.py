"""Endpoints beside completions and chats in front of real vLLM, asked by OpenAI's own client where it knows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

from coterie.gateway.config import GatewayConfig, WorkerEntry
from gateway_runs import FAST, Client, Run, gateway, run, settled
from http1_peers import until
from vllm_servers import MODEL, Fleet, Server, needs_vllm

openai: Any = pytest.importorskip("openai")
pytestmark = [pytest.mark.vllm, needs_vllm]

PATIENCE_S = 600.0
ASKED: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You count the birds of a pond.",
    "input": [{"role": "user", "content": "How many herons?"}],
    "max_output_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Server:
    (server,) = fleet.start({"plain": {}})
    return server


@asynccontextmanager
async def in_front_of(server: Server, **more: Any) -> AsyncIterator[tuple[Run, Client]]:
    """A gateway, and a client of the server without it."""
    config = GatewayConfig(listen="127.0.0.1:0", health=FAST, workers=[WorkerEntry(id="w", url=server.url)], **more)
    async with gateway(config) as found:
        await until(lambda: found.open("decode") == {"w"} and found.running.parts.context_tokens == 512)
        direct = Client(server.url)
        yield found, direct
        await direct.upstream.close()
        await settled(found)


def text_of(output: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for item in output for part in item.get("content") or [])


def test_responses_are_those_without_the_gateway(server: Server) -> None:
    async def test() -> None:
        async with in_front_of(server) as (found, direct):
            client = openai.AsyncOpenAI(base_url=f"{found.running.url}/v1", api_key="none", max_retries=0)
            right = (await direct.ask("POST", "/v1/responses", ASKED)).json
            whole = (await client.responses.create(**ASKED)).model_dump()
            assert text_of(whole["output"]) == text_of(right["output"]) != ""
            assert 2 < whole["usage"]["output_tokens"] == right["usage"]["output_tokens"]
            deltas, last = [], None
            async for event in await client.responses.create(**ASKED, stream=True):
                last = event
                if event.type.endswith(".delta"):
                    deltas.append(event.delta)
            assert last is not None
            assert last.type == "response.completed"
            assert "".join(deltas) == text_of(right["output"])
            await settled(found)
            metrics = found.metrics
            assert metrics['coterie_gateway_requests_total{outcome="ok",path="/v1/responses"}'] == 2
            assert metrics["coterie_gateway_prompt_tokens_total"] == 2 * right["usage"]["input_tokens"]
            assert metrics["coterie_gateway_output_tokens_total"] == 2 * right["usage"]["output_tokens"]
            assert metrics["coterie_gateway_ttft_seconds_count"] == 2
            with pytest.raises(openai.BadRequestError, match="previous_response_id is not served: "):
                await client.responses.create(**ASKED, previous_response_id=whole["id"])
            await client.close()

    run(test, PATIENCE_S)


def test_models_and_token_ids(server: Server) -> None:
    async def test() -> None:
        async with in_front_of(server) as (found, direct):
            client = openai.AsyncOpenAI(base_url=f"{found.running.url}/v1", api_key="none", max_retries=0)
            assert (await client.models.retrieve(MODEL)).id == MODEL
            with pytest.raises(openai.NotFoundError, match=f"known: {MODEL}"):
                await client.models.retrieve("gpt-5")
            await client.close()
            for body in ({"prompt": "How many herons?"}, {"messages": ASKED["input"]}):
                got = await found.client.ask("POST", "/tokenize", {"model": MODEL, **body})
                assert (got.status, got.json) == (
                    200,
                    (await direct.ask("POST", "/tokenize", {"model": MODEL, **body})).json,
                )
                assert got.json["count"] == len(got.json["tokens"]) > 0
            ids = {"model": MODEL, "tokens": got.json["tokens"]}
            assert "herons" in (await found.client.ask("POST", "/detokenize", ids)).json["prompt"]

    run(test, PATIENCE_S)


def test_a_prompt_over_the_context_gets_vllms_own_refusal(server: Server) -> None:
    async def test() -> None:
        async with in_front_of(server) as (found, direct):
            for path, body in (
                ("/v1/completions", {"prompt": [5] * 40_011}),
                ("/v1/completions", {"prompt": "word " * 40_011}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40_011}]}),
                ("/v1/responses", {"input": "word " * 40_011}),
            ):
                got = await found.client.ask("POST", path, {"model": MODEL, **body})
                right = await direct.ask("POST", path, {"model": MODEL, **body})
                assert (got.status, got.body) == (right.status, right.body)
                assert (got.status, "512" in got.json["error"]["message"]) == (400, True)

    run(test, PATIENCE_S)


def test_paths_of_the_config_are_forwarded(server: Server) -> None:
    """vLLM's endpoint of Anthropic's messages, whose streams end in their own way."""

    async def test() -> None:
        async with in_front_of(server, forward=["/v1/messages"]) as (found, _):
            body = {"model": MODEL, "messages": ASKED["input"], "max_tokens": 4, "stream": True}
            got = await found.client.ask("POST", "/v1/messages", body)
            assert got.status == 200
            assert b"event: message_stop" in got.body
            assert b'"error"' not in got.body
            assert (await found.client.ask("POST", "/v1/messages/count_tokens", body)).status == 404

    run(test, PATIENCE_S)
