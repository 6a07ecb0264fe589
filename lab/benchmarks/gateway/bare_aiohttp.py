"""The least gateway on aiohttp and uvloop, with nothing beside: what the framework alone costs.

python lab/benchmarks/gateway/bare_aiohttp.py PORT WORKER_URL [WORKER_URL …]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import uvloop
from aiohttp import web

SESSION = web.AppKey("session", aiohttp.ClientSession)


def make_app(urls: list[str]) -> web.Application:
    workers = itertools.cycle(urls)

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if body:
            msgspec.json.decode(body)
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        url = next(workers) + request.path
        async with request.app[SESSION].request(request.method, url, data=body, headers=headers) as answer:
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                return web.Response(status=answer.status, body=await answer.read(), headers={"content-type": kind})
            response = web.StreamResponse(status=answer.status, headers={"content-type": kind})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="{}")

    async def with_session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            app[SESSION] = session
            yield

    app = web.Application(client_max_size=4 << 20)
    app.router.add_get("/health", health)
    app.router.add_route("*", "/{path:.*}", forward)
    app.cleanup_ctx.append(with_session)
    return app


if __name__ == "__main__":
    uvloop.install()
    web.run_app(make_app(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
