"""A protocol peer of SGLang's HTTP server: real sockets, the documented bytes, and made-up routing.

SGLang itself needs CUDA and cannot run where these tests do. What is sent and answered here follows its documentation
and sources (0.5); what a peer cannot show is that a given release still does so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from coterie.models import get_model
from routed_experts_payloads import encode_sglang

SPEC = get_model("deepseek-v2-lite")
"""27 layers, the first one dense; 6 of 64 experts."""


def tokens_of(text: str) -> list[int]:
    return [ord(letter) % 1000 for letter in text]


def routing(token_ids: list[int]) -> np.ndarray:
    """[token, MoE layer, k] six different experts, by token, position and layer."""
    position = np.arange(len(token_ids))[:, None, None]
    token = np.array(token_ids)[:, None, None]
    layer = np.arange(SPEC.num_moe_layers)[None, :, None]
    start = (token * 7 + position * 3 + layer * 5) % SPEC.num_experts
    return (start + 10 * np.arange(SPEC.top_k)) % SPEC.num_experts


def with_dense_layers(expert_ids: np.ndarray) -> np.ndarray:
    """[token, layer, k] as SGLang returns it: all hidden layers, zeros where there is no router."""
    out = np.zeros((len(expert_ids), SPEC.num_layers, SPEC.top_k), np.int64)
    out[:, list(SPEC.moe_layer_ids)] = expert_ids
    return out


@dataclass
class Peer:
    """What the server is like, and what it has seen."""

    info: dict[str, Any] = field(default_factory=dict)
    info_path: str | None = "/server_info"
    form: str = "sglext"
    """Where an OpenAI answer carries its experts: sglext or sgl_ext of the answer, sgl_ext of the choice."""
    lists_tokens: bool = True
    layers: str = "all"
    delay: Callable[[str], float] = lambda _: 0.0
    """Seconds an answer to this text takes."""
    may_answer: Callable[[Peer, str], bool] = lambda _peer, _text: True
    """Whether this text may be answered now; asked again until it may. For orders that must not hang on a clock."""
    special: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Texts that are answered otherwise."""
    on_dump: Callable[[], None] = lambda: None
    recorder_status: int = 200

    url: str = ""
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    gone: int = 0
    """Requests whose client went away."""

    def __post_init__(self) -> None:
        self.info = {
            "model_path": "deepseek-ai/DeepSeek-V2-Lite",
            "served_model_name": "lite",
            "version": "0.5.23",
            "enable_return_routed_experts": True,
            "expert_distribution_recorder_mode": None,
            "tp_size": 1,
            "dp_size": 1,
            "enable_dp_attention": False,
            **self.info,
        }

    async def answer_info(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        if request.path != self.info_path:
            raise web.HTTPNotFound(text='{"detail":"Not Found"}')
        return web.json_response(self.info)

    async def answer_control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        if request.path.startswith("/dump"):
            self.on_dump()
        return web.Response(text="Start recording the expert distribution.\n", status=self.recorder_status)

    async def answer_prompt(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(request.path)
        self.bodies.append(body)
        chat = request.path == "/v1/chat/completions"
        text = body["messages"][0]["content"] if chat else body["text"]
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay(text))
            while not self.may_answer(self, text):
                await asyncio.sleep(0.002)
            if text in self.special:
                found = self.special[text]()
                if found == "reset":
                    assert request.transport is not None
                    request.transport.abort()
                    found = web.Response()
                return found if isinstance(found, web.Response) else web.json_response(found)
            return web.json_response(self.openai(body, text) if chat else self.generate(body, text))
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.in_flight -= 1

    def sequence(self, text: str, limit: int) -> tuple[list[int], list[int]]:
        return tokens_of(text), [500 + n for n in range(min(limit, 1 + len(text) % 5))]

    def payload(self, prompt: list[int], output: list[int]) -> str:
        ids = routing([*prompt, *output[:-1]])
        return encode_sglang(with_dense_layers(ids) if self.layers == "all" else ids)

    def generate(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        prompt, output = self.sequence(text, body["sampling_params"]["max_new_tokens"])
        meta = {"id": "x", "prompt_tokens": len(prompt), "completion_tokens": len(output), "cached_tokens": 0}
        if body.get("return_routed_experts") and self.info["enable_return_routed_experts"]:
            meta["routed_experts"] = self.payload(prompt, output)
        answer: dict[str, Any] = {"text": "…", "output_ids": output, "meta_info": meta}
        if body.get("return_prompt_token_ids") and self.lists_tokens:
            answer["prompt_token_ids"] = prompt
        return answer

    def openai(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        prompt, output = self.sequence(text, body["max_tokens"])
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": "…"}, "finish_reason": "stop"}
        if body.get("return_token_ids") and self.lists_tokens:
            choice |= {"prompt_token_ids": prompt, "token_ids": output}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output)}
        answer: dict[str, Any] = {"id": "x", "model": body["model"], "choices": [choice], "usage": usage}
        if body.get("return_routed_experts") and self.info["enable_return_routed_experts"]:
            place = choice if self.form == "choice" else answer
            name = "sglext" if self.form == "sglext" else "sgl_ext"
            place[name] = {"routed_experts": self.payload(prompt, output)}
        return answer

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/server_info", self.answer_info)
        app.router.add_get("/get_server_info", self.answer_info)
        for action in ("start", "stop", "dump"):
            app.router.add_post(f"/{action}_expert_distribution_record", self.answer_control)
        app.router.add_post("/generate", self.answer_prompt)
        app.router.add_post("/v1/chat/completions", self.answer_prompt)
        return app


class Running:
    """A peer that listens on a port of its own, in a thread of its own."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        self.ready.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        self.runner = web.AppRunner(self.peer.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        host, port = self.runner.addresses[0][:2]
        self.peer.url = f"http://{host}:{port}"

    def __enter__(self) -> Peer:
        self.thread.start()
        assert self.ready.wait(120)
        return self.peer

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(120)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(120)
        self.loop.close()
