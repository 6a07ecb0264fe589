"""Reference workers in this process and its event loop, a raw client for them, and a hostile peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple, cast

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.embedded import EmbeddedEngine
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.model import PackedModel
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.engines.worker.server import Server
from coterie.net.processes import bind

BLOCKS, BLOCK_SIZE = 128, 16
SECRET = "a secret that all workers of this fleet share"
KEY = "a key that its gateway and workers know"
WAIT_S = 60.0


@cache
def model(copy: int) -> NumpyModel:
    """Loading takes longer than most tests. Workers that run at once need copies: blocks of one are not another's."""
    del copy
    return NumpyModel(tiny_model_path(), BLOCKS, BLOCK_SIZE)


@cache
def torch_model(copy: int) -> PackedModel:
    del copy
    return PackedModel(tiny_model_path(), "float32", "cpu", BLOCKS, BLOCK_SIZE)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def tokens(self) -> list[int]:
        assert self.status == 200, self
        return list(self.json["choices"][0]["token_ids"])


class Attacked(NamedTuple):
    server: Server
    port: int

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def complete(self, prompt: Any, count: int = 2, **more: Any) -> Reply:
        return await self.ask("POST", "/v1/completions", json.dumps(asking(prompt, count, **more)).encode())

    async def raw(self, data: bytes) -> Reply:
        """Send these bytes and read one answer."""
        async with connected(self.port) as (reader, writer):
            writer.write(data)
            return await read_reply(reader)

    def counted(self, name: str, label: str = "") -> float:
        return self.server.engine.metrics.get(name, label)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    async with asyncio.timeout(WAIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Reply(int(head[0].split()[1]), headers, body)


def asking(prompt: Any, count: int = 2, **more: Any) -> dict[str, Any]:
    fixed = {"model": TINY, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "prompt": prompt, "max_tokens": count, **more}


def _engine(copy: int, torch: bool, config: WorkerConfig) -> Engine:
    if torch:
        return Engine(torch_model(copy), config)
    return EmbeddedEngine(cast(PackedModel, model(copy)), config)


@contextlib.asynccontextmanager
async def attacked(copy: int = 0, torch: bool = False, **settings: Any) -> AsyncIterator[Attacked]:
    """A worker on a free port of this machine, on NumPy or torch."""
    defaults = {"port": 0, "kv_blocks": BLOCKS, "block_size": BLOCK_SIZE, "served_model_name": TINY, "drain_s": 0.01}
    config = WorkerConfig(tiny_model_path(), **{**defaults, **settings})
    with bind(config.host, config.port) as listener:
        server = Server(_engine(copy, torch, config), config)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(server.run(listener, ready.set_result))
        try:
            running.add_done_callback(lambda _: ready.cancel())  # it failed
            async with asyncio.timeout(WAIT_S):
                await ready
            yield Attacked(server, server.port)
            assert server.engine.alive, "no attack ends the engine"
            assert server.engine.metrics.get("step_failures_total") == 0
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


class Hostile(NamedTuple):
    """A server that answers as told, and what it was asked."""

    port: int
    asked: list[str]
    """First line of every request."""


Answering = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def hostile(answer: Answering | bytes) -> AsyncIterator[Hostile]:
    asked: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            asked.append(head.split("\r\n")[0])
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(head, writer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield Hostile(server.sockets[0].getsockname()[1], asked)


def whole(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def remote(port: int, key: str = "abc", host: str = "127.0.0.1", **more: Any) -> dict[str, Any]:
    """What a client makes up: KV at an address of its choice."""
    where = {"remote_host": host, "remote_port": port, "remote_request_id": key}
    return {"do_remote_prefill": True, "do_remote_decode": False, **where, **more}
