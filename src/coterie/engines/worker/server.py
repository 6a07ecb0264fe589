"""HTTP: OpenAI's endpoints, health, metrics, and the KV that one worker hands to another.

The event loop owns sockets and clients; the engine's thread owns requests. They exchange requests through
:meth:`Engine.submit` and outputs through callbacks. A client that disconnects cancels its handler, which aborts the
request. :mod:`coterie.net.http1` limits the size and duration of requests; this module limits the number of waiting
requests and checks the worker's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec

from coterie.engines.transformers.loading import check_model_folder, check_torch_dtype
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.events import open_streams
from coterie.engines.worker.fetching import Fetcher
from coterie.engines.worker.metrics import CONTENT_TYPE
from coterie.engines.worker.protocol import (
    AnswerBuilder,
    Asked,
    RequestError,
    check_max_tokens,
    check_request,
    parse_body,
    parse_json,
)
from coterie.engines.worker.requests import Output, Text, WorkerRequest
from coterie.engines.worker.tokenising import Tokenising
from coterie.engines.worker.transfer import GRANT_HEADER, GrantError
from coterie.errors import ConfigError, InputError, UnavailableError, check
from coterie.net.access import shows_key
from coterie.net.http1 import Headers, HttpError, HttpRequest, HttpServer, Limits, Responder
from coterie.net.processes import bind
from coterie.wire.handoff import REQUEST_ID_HEADER

NEEDS = ("torch", "transformers")
"""Packages that the worker needs, from the extra `torch`."""
BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 64
"""Maximum size of a body: `BODY_BYTES` plus `BODY_BYTES_PER_TOKEN` for every token of the context."""
MAX_NAME = 256
UNAUTHORIZED: Headers = [(b"www-authenticate", b"Bearer")]
CLOSE_S = 1.0
"""Seconds for clients to read unfinished answers when the worker ends."""
Handler = Callable[[HttpRequest, Responder], Awaitable[None]]
T = TypeVar("T")


class Route(NamedTuple):
    handlers: dict[str, Handler]
    """Handlers by HTTP method."""
    private: bool = False
    """Whether requests need the worker's key."""


def serve_worker(config: WorkerConfig, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called once with the URL.

    All configuration errors raise before that. Cheap checks come first: ports are bound before the model is loaded.
    """
    check_requirements()
    check_model_folder(config.model)
    check_torch_dtype(config.dtype)
    serve_engine(Engine, config, ready)


def serve_engine(kind: type[Engine], config: WorkerConfig, ready: Callable[[str], None]) -> None:
    """Serve with this kind of engine; see :func:`serve_worker`."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        kv, experts = open_streams(config, stack)
        engine = kind(kind.load_model(config), config, kv, experts)
        asyncio.run(Server(engine, config).run(listener, ready))


def check_requirements() -> None:
    missing = [module for module in NEEDS if find_spec(module) is None]
    check(not missing, f"the worker needs {', '.join(missing)}: pip install 'coterie[torch]'", UnavailableError)


class Server:
    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self.engine, self.config, self.model = engine, config, engine.model
        self.limit = min(engine.model.max_positions, config.max_tokens)
        self.port = config.port
        self.draining = False
        self.live = 0
        """Number of completions in progress, from their body to the end of their answer."""
        self.fetcher = Fetcher(engine, config)
        self.tokenising = Tokenising(engine.model.tokenizer, self.limit * engine.model.longest_token, config.tokenise_s)
        self.routes = {
            "/health": Route({"GET": self.health}),
            "/v1/models": Route({"GET": self.models}),
            "/v1/completions": Route({"POST": partial(self.complete, chat=False)}),
            "/v1/chat/completions": Route({"POST": partial(self.complete, chat=True)}),
            "/metrics": Route({"GET": self.metrics}, private=True),
            "/steps": Route({"GET": self.steps}, private=True),
            "/kv/": Route({"GET": self.send_kv, "DELETE": self.drop_kv}, private=True),
            "/reset_prefix_cache": Route({"POST": self.reset_prefix_cache}, private=True),
        }
        self.http = HttpServer(
            self.answer,
            Limits(
                body_bytes=BODY_BYTES + BODY_BYTES_PER_TOKEN * self.limit, head_s=config.head_s, body_s=config.body_s
            ),
            self.check_head,
        )

    async def run(self, listener: socket.socket, ready: Callable[[str], None]) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, stop)
        host, self.port = listener.getsockname()[:2]

        self.engine.start(lambda: loop.call_soon_threadsafe(stop.set))
        try:
            try:
                await self.http.start(listener)
            except OSError as error:
                raise UnavailableError(f"{host}:{self.port}: {error.strerror}") from None
            shown = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            ready(f"http://{shown}:{self.port}")
            await stop.wait()
            check(self.engine.failure is None, f"the engine failed: {self.engine.failure}", UnavailableError)
            await self._drain()
        finally:
            await self.http.close(CLOSE_S)
            await self.fetcher.close()
            self.tokenising.close()
            await asyncio.to_thread(self.engine.close)

    def _on_signal(self, stop: asyncio.Event) -> None:
        if self.draining:  # second signal: end now
            self.config = dataclasses.replace(self.config, drain_s=1e-9)
        self.draining = True
        stop.set()

    async def _drain(self) -> None:
        started = time.monotonic()
        while (self.live or not self.engine.idle) and time.monotonic() - started < self.config.drain_s:
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------------------------------------------------- dispatch

    def check_head(self, request: HttpRequest) -> None:
        """Raise HttpError for requests that can be refused before their body is read."""
        key = self.config.worker_key if self._route(request).private else None
        if key is not None and not shows_key(request.header(b"authorization"), key):
            self.engine.metrics.add("rejected_total")
            raise HttpError(
                401, "this endpoint needs the worker's key: Authorization: Bearer KEY", headers=UNAUTHORIZED
            )
        self._handler(request)

    async def answer(self, request: HttpRequest, responder: Responder) -> None:
        """Handle a request; count the refusals, which the server answers with an OpenAI error body."""
        try:
            await self._handler(request)(request, responder)
        except RequestError:
            self.engine.metrics.add("rejected_total")
            raise

    def _route(self, request: HttpRequest) -> Route:
        route = self.routes.get("/kv/" if request.path.startswith("/kv/") else request.path)
        if route is None:
            self.engine.metrics.add("rejected_total")
            raise HttpError(404, f"{request.method} {request.path[:80]}: Not Found; known: {', '.join(self.routes)}")
        return route

    def _handler(self, request: HttpRequest) -> Handler:
        route = self._route(request)
        method = "GET" if request.method == "HEAD" and not route.private else request.method  # a GET of KV releases it
        handler = route.handlers.get(method)
        if handler is None:
            self.engine.metrics.add("rejected_total")
            allowed = ", ".join(route.handlers)
            raise HttpError(
                405,
                f"{request.method} {request.path[:80]}: Method Not Allowed; {allowed} is",
                headers=[(b"allow", allowed.encode())],
            )
        return handler

    # ----------------------------------------------------------------------------------------------------- small ones

    async def health(self, _: HttpRequest, responder: Responder) -> None:
        check_request(not self.draining, "draining: no new requests", status=503)
        check_request(self.engine.alive, "the engine has ended", status=503)
        responder.send(200)

    async def metrics(self, _: HttpRequest, responder: Responder) -> None:
        self.engine.refresh_gauges()
        counters = self.http.counters
        problems = {
            "refused": counters.refused,
            "malformed": counters.malformed,
            "timeout": counters.timeouts.total(),
            "disconnect": counters.disconnects,
            "error": counters.errors,
        }
        for name, count in problems.items():
            self.engine.metrics.set("http_problems_total", name, count)
        responder.send(200, self.engine.metrics.render(), CONTENT_TYPE.encode())

    async def steps(self, request: HttpRequest, responder: Responder) -> None:
        """Send the log of decode steps: all but the first `after` since the start, or the latest ones."""
        after = parse_qs(request.query, keep_blank_values=True).get("after", [None])[0]
        if after is not None and not (after.isascii() and after.isdigit()):
            raise RequestError(f"after={after[:40]!r} must be a number of steps", "after")
        try:
            steps = self.engine.log.read(None if after is None else int(after))
        except (InputError, ValueError) as error:  # ValueError: more digits than Python converts
            raise RequestError(str(error), "after") from None
        _send_json(
            responder,
            {"total": steps.total, "columns": ["ended_s", "rows", "distinct", "seconds"], "steps": steps.rows.tolist()},
        )

    async def models(self, _: HttpRequest, responder: Responder) -> None:
        card = {
            "id": self.engine.served_name,
            "object": "model",
            "owned_by": "coterie",
            "root": self.model.name,
            "max_model_len": self.limit,
        }
        _send_json(responder, {"object": "list", "data": [card]})

    async def reset_prefix_cache(self, _: HttpRequest, responder: Responder) -> None:
        try:
            await asyncio.wrap_future(self.engine.call(self.engine.clear_cache))
        except ConfigError as error:
            raise RequestError(str(error), status=409) from None
        responder.send(200)

    # --------------------------------------------------------------------------------------------------------- KV

    async def send_kv(self, request: HttpRequest, responder: Responder) -> None:
        """Send staged KV and release it, whether it arrives or not."""
        grant = request.header(GRANT_HEADER.lower().encode())
        shown = None if grant is None else grant.decode("latin-1")
        try:
            data = await self._staged(request, lambda key: self.engine.hand_out(key, shown))
        except GrantError as error:
            raise RequestError(str(error), status=403) from None
        responder.send(200, data, b"application/octet-stream")

    async def drop_kv(self, request: HttpRequest, responder: Responder) -> None:
        await self._staged(request, lambda key: self.engine.release(key, "dropped"))
        responder.send(204)

    async def _staged(self, request: HttpRequest, action: Callable[[str], T | None]) -> T:
        """Run an action of the engine on the KV that the path names; 404 if there is none."""
        key = request.path.removeprefix("/kv/")
        result = await asyncio.wrap_future(self.engine.call(lambda: action(key)))
        if not result:
            raise RequestError(f"no KV of request {key[:80]!r} is here: fetched, dropped or expired", status=404)
        return result

    # -------------------------------------------------------------------------------------------------- completions

    async def complete(self, http: HttpRequest, responder: Responder, chat: bool) -> None:
        check_request(
            not self.draining, "this worker is draining; send requests to another", status=503, code="draining"
        )
        most = self.config.max_batch + self.config.max_waiting
        check_request(
            self.live < most, f"{most} requests run or wait here; try again later", status=429, code="overloaded"
        )
        self.live += 1
        try:
            await self._complete(http, responder, chat)
        finally:
            self.live -= 1

    async def _complete(self, http: HttpRequest, responder: Responder, chat: bool) -> None:
        asked = parse_body(parse_json(http.body), chat, self.engine.served_name, self.config.role)
        prompt = await self.tokenising.tokens(asked)
        max_tokens = check_max_tokens(prompt, asked.max_tokens, self.limit, self.model.vocab_size)
        key = uuid.uuid4().hex
        name = _request_name(http, key)
        outputs = await self.begin(asked, prompt, max_tokens, key, name)
        answer = AnswerBuilder(asked, name, self.engine.served_name, int(time.time()), prompt)
        try:
            if asked.stream:
                await self._stream(responder, asked.include_usage, answer, outputs)
            else:
                await self._whole(responder, answer, outputs)
        except BaseException:
            self.engine.abort(key)  # also releases staged KV, whose location the client never received
            raise

    async def begin(
        self, asked: Asked, prompt: list[int], max_tokens: int, key: str, name: str
    ) -> asyncio.Queue[Output]:
        """Submit a request to the engine under `key`; return the queue of its outputs, the last with a finish reason.

        A caller that leaves early must call :meth:`Engine.abort`.
        """
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[Output]()

        def emit(output: Output) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no handler waits any more
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        prefilled = await self.fetcher.fetch(asked.remote, prompt, asked.salt) if asked.remote else None
        sampling = dataclasses.replace(asked.sampling, max_tokens=max_tokens)
        self.engine.submit(
            WorkerRequest(
                key=key,
                name=name,
                prompt=prompt,
                sampling=sampling,
                text=Text(self.tokenising.decode, sampling.stop),
                emit=emit,
                hand_over=asked.hand_over,
                prefilled=prefilled,
                address=(self.config.advertised, self.port),
                salt=asked.salt,
            )
        )
        return outputs

    async def _whole(self, responder: Responder, answer: AnswerBuilder, outputs: asyncio.Queue[Output]) -> None:
        async for output in until_end(outputs):
            answer.add(output)
        check_request(output.error is None, f"the step failed: {output.error}", status=500)
        check_request(
            output.finish != "abort",
            "this worker is shutting down; send the request to another",
            status=503,
            code="draining",
        )
        _send_json(responder, answer.whole(output), headers=_named(answer))

    async def _stream(
        self, responder: Responder, usage: bool, answer: AnswerBuilder, outputs: asyncio.Queue[Output]
    ) -> None:
        events: Headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        responder.start(200, [*events, *_named(answer)])
        async for output in until_end(outputs):
            answer.add(output)
            if output.finish in ("error", "abort"):
                what = f"the step failed: {output.error}" if output.error else "this worker is shutting down"
                responder.write(HttpError(500, what).event())
                break
            responder.write(_event(answer.chunk(output)))
            await responder.drain()
        else:
            if usage:
                responder.write(_event(answer.usage_chunk(output)))
        responder.write(b"data: [DONE]\n\n")
        responder.end()


def _request_name(http: HttpRequest, default: str) -> str:
    header = http.header(REQUEST_ID_HEADER.lower().encode())
    name = default if header is None else header.decode("latin-1")
    check_request(
        name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME,
        f"{REQUEST_ID_HEADER} must be 1 to {MAX_NAME} printable ASCII characters",
    )
    return name


def _named(answer: AnswerBuilder) -> Headers:
    return [(REQUEST_ID_HEADER.lower().encode(), answer.name.encode())]


async def until_end(outputs: asyncio.Queue[Output]) -> AsyncIterator[Output]:
    """Yield a request's outputs up to the one with its finish reason."""
    while True:
        output = await outputs.get()
        yield output
        if output.finish is not None:
            return


def _send_json(responder: Responder, value: Any, headers: Headers = []) -> None:  # noqa: B006
    responder.send(200, msgspec.json.encode(value), headers=headers)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
