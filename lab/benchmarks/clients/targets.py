"""Gateways to try clients on: ``coterie serve`` in front of reference workers, of real vLLM, or of a recorder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))  # a canned worker
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support" / "engines"))  # real vLLM servers

from canned_workers import Canned
from clients.checks import Asked
from coterie.engines.tiny import TINY, tiny_model_path
from coterie.gateway.embedded import tiny_fit_path
from coterie.net.http1 import HttpRequest, Responder
from coterie.net.processes import ServerProcess, free_port

START_S = 900.0
"""Three vLLM servers that start together on two busy cores."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Without them vLLM refuses tools."""
WORDS = ["Nine", " ducks", " — 鴨", "."]
ARGUMENTS = '{"pond": "Größe 3"}'
USAGE = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}


async def _answer(_: Canned, request: HttpRequest, responder: Responder) -> None:
    """Fixed words in the form that was asked for, with what the reference worker has not got: tools and logprobs."""
    body, chat = msgspec.json.decode(request.body), request.path.endswith("/chat/completions")
    if isinstance(body.get("messages"), str):
        responder.send(400, b'{"error": {"message": "messages must be a list", "type": "invalid", "code": 400}}')
        return
    kind = "chat.completion" if chat else "text_completion"
    shared = {"id": "recorded", "created": 0, "model": "canned", "object": kind}
    if not body.get("stream"):
        responder.send(200, msgspec.json.encode({**shared, "choices": _choices(body, chat), "usage": USAGE}))
        return
    shared["object"] = "chat.completion.chunk" if chat else kind
    events: list[dict[str, Any]] = [{**shared, "choices": [piece], "usage": None} for piece in _pieces(body, chat)]
    if body.get("stream_options"):
        events.append({**shared, "choices": [], "usage": USAGE})
    responder.start(200, [(b"content-type", b"text/event-stream")])
    for event in events:
        responder.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await responder.drain()
        await asyncio.sleep(0.01)
    responder.write(b"data: [DONE]\n\n")
    responder.end()


def _choices(body: dict[str, Any], chat: bool) -> list[dict[str, Any]]:
    logprobs: dict[str, Any] | None = None
    if not chat:
        if body.get("logprobs"):
            logprobs = {"tokens": WORDS, "token_logprobs": [-0.5] * len(WORDS), "text_offset": [0] * len(WORDS)}
        shared = {"text": "".join(WORDS), "finish_reason": "stop", "logprobs": logprobs}
        return [{"index": at, **shared} for at in range(body.get("n", 1))]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(WORDS)}
    if body.get("tools"):
        message |= {"content": None, "tool_calls": [_call(ARGUMENTS)]}
    if body.get("logprobs"):
        logprobs = {"content": [*map(_logprob, WORDS)]}
    return [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}]


def _pieces(body: dict[str, Any], chat: bool) -> Iterator[dict[str, Any]]:
    """The same choice, a word at a time."""
    words = [ARGUMENTS[:5], ARGUMENTS[5:]] if body.get("tools") else WORDS
    for at, word in enumerate(words):
        piece: dict[str, Any] = {"index": 0, "finish_reason": "stop" if at == len(words) - 1 else None}
        if not chat:
            piece["text"] = word
        elif body.get("tools"):
            call = {"index": 0, **_call(word)} if at == 0 else {"index": 0, "function": {"arguments": word}}
            piece["delta"] = {"tool_calls": [call]}
        else:
            piece["delta"] = {"content": word, **({"role": "assistant"} if at == 0 else {})}
            piece["logprobs"] = {"content": [_logprob(word)]} if body.get("logprobs") else None
        yield piece


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": "count_ducks", "arguments": arguments}}


def _logprob(word: str) -> dict[str, Any]:
    tops = [{"token": other, "logprob": -0.25, "bytes": list(other.encode())} for other in WORDS[:2]]
    return {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": tops}


@contextlib.contextmanager
def run_recorder() -> Iterator[Asked]:
    """A worker that keeps what it gets, in a thread of its own, behind a gateway."""
    worker, loop = Canned("recorder", _answer), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(worker.start(), loop).result()
    try:
        with run_gateway({"workers": [{"id": "recorder", "url": worker.url}]}) as asked:
            yield asked._replace(model="canned", got=worker.asked)
    finally:
        asyncio.run_coroutine_threadsafe(worker.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def run_gateway(config: dict[str, Any]) -> Iterator[Asked]:
    """``coterie serve`` with this config."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.yaml"
        file.write_text(json.dumps({"listen": f"127.0.0.1:{port}", **config}))
        with _serving(port, Path(folder), "--config", str(file)) as asked:
            yield asked


@contextlib.contextmanager
def run_embedded() -> Iterator[Asked]:
    """``coterie serve --embedded``: one prefill and three decode workers of coterie-tiny."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        _serving(port, Path(folder), "--embedded", "--port", str(port)) as asked,
    ):
        yield asked


@contextlib.contextmanager
def _serving(port: int, folder: Path, *options: str) -> Iterator[Asked]:
    argv = [sys.executable, "-m", "coterie", "serve", *options]
    server = ServerProcess(argv, f"http://127.0.0.1:{port}", folder / "gateway.log")
    with server.launch():
        server.wait_ready(START_S)
        yield Asked(server.url, TINY)


@contextlib.contextmanager
def run_vllm() -> Iterator[Asked]:
    """One prefill and two decode servers of real vLLM, with KV events, behind a gateway."""
    from vllm_servers import BLOCK_SIZE, MODEL, Fleet, hand_over

    run = uuid.uuid4().hex[:8]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fleet(Path(folder), start_s=START_S)) as fleet:
        how: dict[str, Any] = {"settings": {}, "beside": hand_over(Path(folder) / "kv"), "kv_events": True}
        servers = fleet.start({f"clients-{run}-{number}": how | {"extra": TOOLS} for number in range(3)})
        workers = [
            {"id": one.name, "url": one.url, "role": role, "kv_events": one.kv_events, "kv_replay": one.kv_replay}
            for one, role in zip(servers, ("prefill", "decode", "decode"), strict=True)
        ]
        config = {
            "workers": workers,
            "handshake": "vllm",
            "prefill": {"router": "joint"},
            "decode": {"router": "latency_aware", "fit": str(tiny_fit_path())},
            "tokenizer": str(tiny_model_path()),
            "block_size": BLOCK_SIZE,
        }
        with run_gateway(config) as asked:
            yield asked._replace(model=MODEL)
