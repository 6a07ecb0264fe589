"""HTTP: OpenAI's endpoints, health, metrics, and the KV that one worker hands to another.

The event loop owns sockets and clients, the engine's thread owns requests; they meet in :meth:`Engine.submit` and in
the outputs sent back. A client that goes away cancels its handler, and that aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.events import EventStream
from coterie.engines.worker.metrics import CONTENT_TYPE
from coterie.engines.worker.model import PackedModel
from coterie.engines.worker.protocol import (
    Answer,
    Asked,
    Remote,
    RequestError,
    check_length,
    error_body,
    parse_body,
    parse_json,
)
from coterie.engines.worker.requests import Output, Request, Text
from coterie.engines.worker.transfer import Prefilled
from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.wire.handoff import REQUEST_ID_HEADER

MAX_BODY = 64 << 20
CONNECT_S = 2.0
MAX_NAME = 256
WILDCARDS = ("0.0.0.0", "::", "")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run_worker(
    config: WorkerConfig,
    listener: socket.socket,
    ready: Callable[[str], None],
    kv_stream: EventStream | None = None,
    expert_stream: EventStream | None = None,
) -> None:
    """Load, serve, drain."""
    model = PackedModel(config.model, config.dtype, config.device, config.kv_blocks, config.block_size)
    engine = Engine(model, config, kv_stream, expert_stream)
    asyncio.run(Server(engine, config).run(listener, ready))


class Server:
    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self.engine, self.config, self.model = engine, config, engine.model
        self.limit = min(engine.model.max_positions, config.max_tokens)
        self.port = config.port
        self.draining = False
        self._session: aiohttp.ClientSession | None = None
        self._drops: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket, ready: Callable[[str], None]) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, stop)
        host, port = listener.getsockname()[:2]
        self.port = port

        def engine_ended() -> None:
            loop.call_soon_threadsafe(stop.set)

        self.engine.start(engine_ended)
        timeout = aiohttp.ClientTimeout(total=self.config.fetch_timeout_s, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)
        runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        try:
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
            except OSError as error:
                raise UnavailableError(f"{host}:{port}: {error.strerror}") from None
            shown = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            ready(f"http://{shown}:{port}")
            await stop.wait()
            if self.engine.failure is not None:
                raise UnavailableError(f"the engine failed: {self.engine.failure}")
            await self._drain()
        finally:
            await runner.cleanup()
            await asyncio.gather(*self._drops, return_exceptions=True)
            await self._session.close()
            await asyncio.to_thread(self.engine.close)

    def _on_signal(self, stop: asyncio.Event) -> None:
        if self.draining:  # asked twice: end now
            self.config = dataclasses.replace(self.config, drain_s=1e-9)
        self.draining = True
        stop.set()

    async def _drain(self) -> None:
        started = time.monotonic()
        while not self.engine.idle and time.monotonic() - started < self.config.drain_s:
            await asyncio.sleep(0.02)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/steps", self.steps),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/kv/{key}", self.send_kv),
                web.delete("/kv/{key}", self.drop_kv),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
            ]
        )
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every refusal has OpenAI's error body."""
        try:
            return await handler(request)
        except RequestError as error:
            self.engine.metrics.add("rejected_total")
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return _json(error_body(str(error), error.param, error.code, kind), error.status)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            self.engine.metrics.add("rejected_total")
            known = ", ".join(
                sorted({route.resource.canonical for route in request.app.router.routes() if route.resource})
            )
            hint = f"; known: {known}" if error.status == 404 else ""
            return _json(error_body(f"{request.method} {request.path}: {error.reason}{hint}"), error.status)
        except Exception as error:  # a bug here: the client hears of it, and the log shows where
            traceback.print_exc()
            return _json(error_body(f"{type(error).__name__}: {error}", kind="server_error"), 500)

    # ----------------------------------------------------------------------------------------------------- small ones

    async def health(self, _: web.Request) -> web.Response:
        if self.draining:
            return _json(error_body("draining: no new requests", kind="server_error"), 503)
        if not self.engine.alive:
            return _json(error_body("the engine has ended", kind="server_error"), 503)
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        self.engine.refresh_gauges()
        return web.Response(body=self.engine.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def steps(self, request: web.Request) -> web.Response:
        """Steps that decoded: all but the first `after` since the start, or the last ones."""
        after = request.query.get("after")
        if after is not None and not (after.isascii() and after.isdigit()):
            raise RequestError(f"after={after!r} must be a number of steps", "after")
        try:
            found = self.engine.log.read(None if after is None else int(after))
        except (InputError, ValueError) as error:  # or more digits than Python takes
            raise RequestError(str(error), "after") from None
        columns = ["ended_s", "rows", "distinct", "seconds"]
        return _json({"total": found.total, "columns": columns, "steps": found.rows.tolist()})

    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self.engine.served_name,
            "object": "model",
            "owned_by": "coterie",
            "root": self.model.name,
            "max_model_len": self.limit,
        }
        return _json({"object": "list", "data": [card]})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        try:
            await asyncio.wrap_future(self.engine.call(self.engine.clear_cache))
        except ConfigError as error:
            raise RequestError(str(error), status=409) from None
        return web.Response()

    # --------------------------------------------------------------------------------------------------------- KV

    async def send_kv(self, request: web.Request) -> web.StreamResponse:
        """Send staged KV, and release it once it was sent completely."""
        key = request.match_info["key"]
        data = await asyncio.wrap_future(self.engine.call(lambda: self.engine.export(key)))
        if data is None:
            raise RequestError(f"no KV of request {key!r} is here: fetched, dropped or expired", status=404)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(data)
        with contextlib.suppress(ConnectionResetError):  # it went away half way: it, or another, may ask again
            await response.prepare(request)
            await response.write(data)
            await response.write_eof()
            await asyncio.wrap_future(self.engine.call(lambda: self.engine.release(key, "fetched")))
        return response

    async def drop_kv(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if not await asyncio.wrap_future(self.engine.call(lambda: self.engine.release(key, "dropped"))):
            raise RequestError(f"no KV of request {key!r} is here: fetched, dropped or expired", status=404)
        return web.Response(status=204)

    async def _fetch(self, remote: Remote, prompt: list[int]) -> Prefilled | None:
        """KV from a prefill worker; None if it cannot be fetched: the prompt is then computed here."""
        assert self._session is not None
        outcome = "unreachable"
        try:
            async with self._session.get(remote.url) as response:
                if response.status != 200:
                    outcome = "missing"
                    return None
                data = await response.read()
            outcome = "damaged"
            prefilled = await asyncio.to_thread(self.engine.from_bytes, data)
            outcome = "mismatch"
            self.engine.check_prefilled(prefilled, prompt)
            outcome = "ok"
            self.engine.metrics.add("kv_fetch_bytes_total", by=len(data))
            return prefilled
        except (aiohttp.ClientError, TimeoutError, OSError, InputError):
            return None
        except asyncio.CancelledError:  # the client is gone: nobody will fetch it now
            self._drop(remote)
            outcome = "cancelled"
            raise
        finally:
            self.engine.metrics.add("kv_fetch_total", outcome)

    def _drop(self, remote: Remote) -> None:
        async def drop() -> None:
            assert self._session is not None
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await (await self._session.delete(remote.url)).read()

        task = asyncio.create_task(drop())
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    # -------------------------------------------------------------------------------------------------- completions

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _complete(self, http: web.Request, chat: bool) -> web.StreamResponse:
        if self.draining:
            raise RequestError("this worker is draining; send requests to another", status=503, code="draining")
        body = parse_json(await http.read())
        asked = parse_body(body, chat, self.engine.served_name, self.config.role)
        prompt = await self._tokens(asked)
        max_tokens = check_length(prompt, asked.max_tokens, self.limit, self.model.vocab_size)
        key = uuid.uuid4().hex
        name = _request_name(http, key)
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(output: Output) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        prefilled = await self._fetch(asked.remote, prompt) if asked.remote else None
        sampling = dataclasses.replace(asked.sampling, max_tokens=max_tokens)
        text = Text(self._decode, sampling.stop)
        answer = Answer(asked, name, self.engine.served_name, int(time.time()), prompt)
        self.engine.submit(
            Request(
                key=key,
                name=name,
                prompt=prompt,
                sampling=sampling,
                text=text,
                emit=emit,
                hand_over=asked.hand_over,
                prefilled=prefilled,
                address=self._address(http),
            )
        )
        try:
            if asked.stream:
                return await self._stream(http, key, asked.include_usage, answer, outputs)
            return await self._whole(answer, outputs)
        except BaseException:
            self.engine.abort(key)  # ends it wherever it is, and lets go of KV nobody heard of
            raise

    def _address(self, http: web.Request) -> tuple[str, int]:
        """Where a decode worker finds this one: as configured or, if that is any address, where the client found it."""
        host = self.config.host
        if host in WILDCARDS and http.transport is not None:
            host = http.transport.get_extra_info("sockname")[0]
        return host, self.port

    async def _whole(self, answer: Answer, outputs: asyncio.Queue[Output]) -> web.StreamResponse:
        async for output in _until_end(outputs):
            answer.add(output)
        if output.error is not None:
            return _json(error_body(f"the step failed: {output.error}", kind="server_error"), 500)
        if output.finish == "abort":
            raise RequestError("this worker is shutting down; send the request to another", status=503, code="draining")
        return _json(answer.whole(output), headers={REQUEST_ID_HEADER: answer.name})

    async def _stream(
        self, http: web.Request, key: str, usage: bool, answer: Answer, outputs: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", REQUEST_ID_HEADER: answer.name}
        response = web.StreamResponse(headers=headers)
        try:
            await self._send(response, http, usage, answer, outputs)
        except ConnectionResetError:  # the client is gone; aiohttp cancels only handlers that wait
            self.engine.abort(key)
        return response

    async def _send(
        self,
        response: web.StreamResponse,
        http: web.Request,
        usage: bool,
        answer: Answer,
        outputs: asyncio.Queue[Output],
    ) -> None:
        await response.prepare(http)
        async for output in _until_end(outputs):
            answer.add(output)
            if output.finish in ("error", "abort"):
                what = f"the step failed: {output.error}" if output.error else "this worker is shutting down"
                await response.write(_event(error_body(what, kind="server_error")))
                break
            await response.write(_event(answer.chunk(output)))
        else:
            if usage:
                await response.write(_event(answer.usage_chunk(output)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    async def _tokens(self, asked: Asked) -> list[int]:
        if not asked.chat:
            if isinstance(asked.prompt, str):
                return await asyncio.to_thread(self.model.tokenizer.encode, asked.prompt)
            return asked.prompt  # type: ignore[return-value]
        if not self.model.tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        return await asyncio.to_thread(self._chat_tokens, asked.prompt)

    def _chat_tokens(self, messages: Any) -> list[int]:
        try:
            text = self.model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from None
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.model.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _request_name(http: web.Request, default: str) -> str:
    name = http.headers.get(REQUEST_ID_HEADER, default)
    if not (name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME):
        raise RequestError(f"{REQUEST_ID_HEADER} must be 1 to {MAX_NAME} printable ASCII characters")
    return name


async def _until_end(outputs: asyncio.Queue[Output]) -> AsyncIterator[Output]:
    while True:
        output = await outputs.get()
        yield output
        if output.finish is not None:
            return


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
