"""Damage to bytes, drawn at random: what a broken or hostile peer may send in place of what is right."""

from __future__ import annotations

import random
from collections.abc import Sequence

TOKENS: Sequence[bytes] = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff",
    b":",
    b"; ",
    b"{",
    b"}",
    b"[" * 200,
    b'"',
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"1" + b"0" * 30,
    b"\\ud800",
    b"\xed\xa0\x80",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Connection: close\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"GET /workers HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"0\r\n\r\n",
    b"data: [DONE]\n\n",
    b"!!int ''",
    b"&a *a",
    b"- ",
    b"? ",
    b"%00",
    b"../",
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Some changes: bytes flipped, cut out, doubled, put elsewhere, or replaced by what parsers stumble over."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(found) + 1)
        to = min(len(found), at + rng.choice((1, 1, 2, 4, 16, 200)))
        way = rng.randrange(6)
        if way == 0 and at < len(found):
            found[at] = rng.randrange(256)
        elif way == 1:
            del found[at:to]
        elif way == 2:
            found[at:at] = found[at:to]
        elif way == 3:
            found[at:to] = rng.choice(TOKENS)
        elif way == 4:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
        else:
            del found[at:]
    return bytes(found)
