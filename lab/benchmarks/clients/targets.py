"""Gateways to try clients on: ``coterie serve`` in front of reference workers, of real vLLM, or of a recorder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from clients.checks import Asked
from coterie.engines.tiny import TINY, tiny_model_path
from coterie.gateway.embedded import tiny_fit_path
from coterie.net.http1 import HttpRequest, HttpServer, Responder
from coterie.net.processes import ServerProcess, free_port

START_S = 900.0
"""Three vLLM servers that start together on two busy cores."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Without them vLLM refuses tools."""


class Recorder:
    """A worker that keeps what it is asked, and answers with what the reference worker has not got.

    Tool calls and log-probabilities, whole and streamed: so a client shows whether they come through.
    """

    def __init__(self) -> None:
        self._got: Counter[tuple[str, bytes]] = Counter()
        self.url = ""

    def got(self, name: str, body: bytes) -> int:
        """Requests of this id with just this body."""
        return self._got[name, body]

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        if request.path == "/v1/models":
            card = {"id": TINY, "object": "model", "created": 0, "owned_by": "recorder", "max_model_len": 1 << 16}
            responder.send(200, msgspec.json.encode({"object": "list", "data": [card]}))
            return
        if request.method != "POST":
            responder.send(200)
            return
        self._got[(request.header(b"x-request-id") or b"").decode(), request.body] += 1
        body = msgspec.json.decode(request.body)
        if isinstance(body.get("messages", []), str):
            responder.send(400, b'{"error": {"message": "messages must be a list", "type": "invalid", "code": 400}}')
            return
        whole = _answer(request.path, body)
        if not body.get("stream"):
            responder.send(200, msgspec.json.encode(whole))
            return
        responder.start(200, [(b"content-type", b"text/event-stream")])
        for piece in _pieces(whole, bool(body.get("stream_options"))):
            responder.write(b"data: " + msgspec.json.encode(piece) + b"\n\n")
            await responder.drain()
            await asyncio.sleep(0.01)
        responder.write(b"data: [DONE]\n\n")
        responder.end()


WORDS = ["Nine", " ducks", " — 鴨", "."]
ARGUMENTS = '{"pond": "Größe 3"}'


def _answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Fixed words, in the form that was asked for."""
    usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}
    shared = {"id": "recorded", "created": 0, "model": TINY, "usage": usage}
    tops = [{"token": word, "logprob": -0.25 * at, "bytes": list(word.encode())} for at, word in enumerate(WORDS[:2])]
    if path.endswith("/chat/completions"):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(WORDS)}
        if body.get("tools"):
            function = {"name": "count_ducks", "arguments": ARGUMENTS}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            }
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("logprobs"):
            choice["logprobs"] = {
                "content": [
                    {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": tops}
                    for word in WORDS
                ]
            }
        return {**shared, "object": "chat.completion", "choices": [choice]}
    choices = [{"index": at, "text": "".join(WORDS), "finish_reason": "stop"} for at in range(body.get("n", 1))]
    if body.get("logprobs"):
        told = {"tokens": WORDS, "token_logprobs": [-0.5] * len(WORDS), "text_offset": [0] * len(WORDS)}
        choices = [{**choice, "logprobs": told} for choice in choices]
    return {**shared, "object": "text_completion", "choices": choices}


def _pieces(whole: dict[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """The same answer, a word at a time."""
    (choice, *_rest), chat = whole["choices"], "message" in whole["choices"][0]
    shared = {**whole, "object": "chat.completion.chunk" if chat else "text_completion", "usage": None}
    calls = choice["message"].get("tool_calls") if chat else None
    words = [ARGUMENTS[:5], ARGUMENTS[5:]] if calls else WORDS
    for at, word in enumerate(words):
        piece: dict[str, Any] = {"index": 0, "finish_reason": "stop" if at == len(words) - 1 else None}
        if calls:
            named = {"id": calls[0]["id"], "type": "function"} if at == 0 else {}
            function = {"name": "count_ducks", "arguments": word} if at == 0 else {"arguments": word}
            piece["delta"] = {"tool_calls": [{"index": 0, **named, "function": function}]}
        elif chat:
            piece["delta"] = {"content": word, **({"role": "assistant"} if at == 0 else {})}
            if "logprobs" in choice:
                piece["logprobs"] = {"content": [choice["logprobs"]["content"][at]]}
        else:
            piece["text"] = word
        yield {**shared, "choices": [piece]}
    if usage:
        yield {**shared, "choices": [], "usage": whole["usage"]}


@contextlib.contextmanager
def run_recorder() -> Iterator[tuple[Asked, Recorder]]:
    """A recorder in a thread of its own, behind a gateway."""
    recorder, listener = Recorder(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    recorder.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = HttpServer(recorder.handle)
        await server.start(listener)
        await ended.wait()
        await server.close(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        with run_gateway({"workers": [{"id": "recorder", "url": recorder.url}]}) as asked:
            yield asked, recorder
    finally:
        loop.call_soon_threadsafe(ended.set)
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
def run_vllm(report: Callable[[str], None], decoders: int = 2) -> Iterator[Asked]:
    """One prefill and some decode servers of real vLLM, with KV events, behind a gateway."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support" / "engines"))
    from vllm_servers import BLOCK_SIZE, MODEL, Fleet, hand_over

    run = uuid.uuid4().hex[:8]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fleet(Path(folder), start_s=START_S)) as fleet:
        how: dict[str, Any] = {"settings": {}, "beside": hand_over(Path(folder) / "kv"), "kv_events": True}
        names = [f"clients-{run}-{number}" for number in range(decoders + 1)]
        servers = fleet.start(dict.fromkeys(names, how | {"extra": TOOLS}))
        workers = [
            {"id": one.name, "url": one.url, "role": role, "kv_events": one.kv_events, "kv_replay": one.kv_replay}
            for one, role in zip(servers, ("prefill", *["decode"] * decoders), strict=True)
        ]
        report(f"{len(servers)} vLLM servers are ready")
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
