"""The least gateway on coterie.net.http1: reads the body as JSON, takes the workers in turn, passes the answer on.

python lab/benchmarks/gateway/minimal.py PORT WORKER_URL [WORKER_URL …]
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys

import msgspec
import uvloop

from coterie.net.http1 import HttpError, HttpRequest, HttpServer, Responder, Upstream, UpstreamError, passed_on


async def serve(port: int, urls: list[str]) -> None:
    workers = itertools.cycle([Upstream(url) for url in urls])

    async def forward(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/health":
            responder.send(200, b"{}")
            return
        try:
            if request.body:
                msgspec.json.decode(request.body)
            worker = next(workers)
            answer = await worker.send(request.method, request.path, passed_on(request.headers), request.body)
            if answer.complete:
                responder.send(answer.status, await answer.read(), b"", passed_on(answer.headers))
                return
            responder.start(answer.status, passed_on(answer.headers))
            async for piece in answer:
                responder.write(piece)
                await responder.drain()
            responder.end()
        except msgspec.DecodeError:
            raise HttpError(400, "the body is not JSON") from None
        except UpstreamError as error:
            raise HttpError(502, f"the worker failed: {error.kind}") from None

    server = HttpServer(forward)
    await server.start(socket.create_server(("127.0.0.1", port)))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2:]))
