"""Workers that always give the same OpenAI answer, at the least cost: what a gateway adds shows, not what they take.

    python lab/benchmarks/gateway/canned.py PORT [PORT …]

One process serves all ports. A request is only cut out of the bytes (head, Content-Length). A body with
``"stream":true`` gets its tokens as server-sent events, in one write.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

TOKENS = 16
TEXT = " ".join(["token"] * TOKENS)
CHAT = (
    '{"id":"chatcmpl-canned","object":"chat.completion","created":1700000000,"model":"canned","choices":[{"index":0,'
    f'"message":{{"role":"assistant","content":"{TEXT}"}},"logprobs":null,"finish_reason":"length"}}],'
    f'"usage":{{"prompt_tokens":64,"completion_tokens":{TOKENS},"total_tokens":{64 + TOKENS}}}}}'
).encode()
MODELS = b'{"object":"list","data":[{"id":"canned","object":"model","created":1700000000,"owned_by":"canned"}]}'
EVENT = (
    b'data: {"id":"chatcmpl-canned","object":"chat.completion.chunk",'
    b'"choices":[{"index":0,"delta":{"content":"token"}}]}\n\n'
)


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


ANSWER = whole(CHAT)
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*[EVENT] * TOKENS, b"data: [DONE]\n\n"))
    + b"0\r\n\r\n"
)
GETS = {b"/v1/models": whole(MODELS)}
OTHER = whole(b'{"status":"ok","model_path":"canned","model_id":"canned","max_model_len":32768}')


class Canned(asyncio.Protocol):
    def __init__(self) -> None:
        self.held = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.held:
            data = self.held + data
        while data:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                break
            if data.startswith(b"GET"):
                self.transport.write(GETS.get(data[4 : data.index(b" ", 4)], OTHER))
            else:
                head = data[:end].lower()
                if b"transfer-encoding: chunked" in head:
                    last = data.find(b"\r\n0\r\n\r\n", end - 2)
                    if last < 0:
                        break
                    body, end = data[end:last], last + 7
                else:
                    at = head.index(b"content-length:") + 15
                    length = int(head[at : head.index(b"\r", at)])
                    if len(data) < end + length:
                        break
                    body, end = data[end : end + length], end + length
                streams = b'"stream":true' in body or b'"stream": true' in body
                self.transport.write(STREAM if streams else ANSWER)
            data = data[end:]
        self.held = data


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Canned, "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
