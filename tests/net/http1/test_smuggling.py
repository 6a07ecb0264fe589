"""Messages that two readers could cut differently are refused, and so is whatever follows them."""

from __future__ import annotations

import re

import pytest

from coterie.errors import ConfigError
from coterie.net.http1.messages import check_target, header_lines, passed_on, status_line
from http1_peers import Echo, get, run_on, serving

HEAD = b"POST / HTTP/1.1\r\nHost: test\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
CASES = {
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    "two equal lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello",
    "list of lengths": HEAD + b"Content-Length: 5, 5\r\n\r\nhello",
    "signed length": HEAD + b"Content-Length: +5\r\n\r\nhello",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\nhello",
    "hexadecimal length": HEAD + b"Content-Length: 0x5\r\n\r\nhello",
    "length with a blank": HEAD + b"Content-Length: 1 0\r\n\r\nhello",
    "empty length": HEAD + b"Content-Length:\r\n\r\nhello",
    "length past 64 bits": HEAD + b"Content-Length: 18446744073709551621\r\n\r\nhello",
    "unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding before chunks": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity coding": HEAD + b"Transfer-Encoding: identity\r\n\r\n",
    "chunks twice": CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks twice in one": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunks before a coding": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding after a tab": HEAD + b"Transfer-Encoding:\tchunked\x0b\r\n\r\n0\r\n\r\n",
    "blank before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded header": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "folded value": HEAD + b"X: a\r\n b\r\n\r\n",
    "no size": CHUNKED + b"\r\n\r\nabc\r\n0\r\n\r\n",
    "size of letters": CHUNKED + b"\r\nzz\r\nabc\r\n0\r\n\r\n",
    "negative size": CHUNKED + b"\r\n-3\r\nabc\r\n0\r\n\r\n",
    "size with a prefix": CHUNKED + b"\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "size past 64 bits": CHUNKED + b"\r\n10000000000000003\r\nabc\r\n0\r\n\r\n",
    "size with a blank": CHUNKED + b"\r\n3 \r\nabc\r\n0\r\n\r\n",
    "size ended by LF": CHUNKED + b"\r\n3\nabc\r\n0\r\n\r\n",
    "chunk too long": CHUNKED + b"\r\n3\r\nabcd\r\n0\r\n\r\n",
    "chunk ended by LF": CHUNKED + b"\r\n3\r\nabc\n0\r\n\r\n",
    "lines ended by LF": b"GET / HTTP/1.1\nHost: test\n\n",
    "one line ended by LF": b"GET / HTTP/1.1\r\nHost: test\nX: y\r\n\r\n",
    "lone CR": b"GET / HTTP/1.1\r\nHost: test\rX: y\r\n\r\n",
    "head ended by LF": b"GET / HTTP/1.1\r\nHost: test\r\n\n",
    "NUL in a value": HEAD + b"X: a\0b\r\n\r\n",
    "NUL in a name": HEAD + b"X\0: a\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: test\r\n\r\n",
    "blank in the target": b"GET /a b HTTP/1.1\r\nHost: test\r\n\r\n",
    "byte above 127 in the target": b"GET /\xff HTTP/1.1\r\nHost: test\r\n\r\n",
    "fragment": b"GET /a#b HTTP/1.1\r\nHost: test\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "header without a colon": b"GET / HTTP/1.1\r\nHost test\r\n\r\n",
    "blank before the first header": b"GET / HTTP/1.1\r\n Host: test\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: test\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT test:80 HTTP/1.1\r\nHost: test\r\n\r\n",
    "upgrade": b"GET / HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "upgrade to HTTP/2": HEAD + b"Content-Length: 2\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nhi",
    "unknown method": b"HELLO / HTTP/1.1\r\nHost: test\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by_byte", [False, True], ids=["whole", "by byte"])
def test_ambiguous_messages_are_refused_with_all_that_follows(case: str, by_byte: bool) -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo) as served:
            message = CASES[case] + get("/smuggled") * 2
            pieces = [message[at : at + 1] for at in range(len(message))] if by_byte else [message]
            answer = await served.ask(*pieces)
            assert answer.startswith(b"HTTP/1.1 400"), answer
            assert len(re.findall(rb"HTTP/1.1 \d", answer)) == 1
            assert b"connection: close" in answer
            assert not echo.seen

    run_on("asyncio", main())


def test_malformed_message_after_good_ones_is_refused_in_its_turn() -> None:
    async def main() -> None:
        echo = Echo()
        async with serving(echo) as served:
            answers = await served.ask(get("/1") + get("/2") + CASES["length and chunks"] + get("/smuggled"))
            assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]
            assert [request.path for request in echo.seen] == ["/1", "/2"]
            assert served.server.counters.malformed == 1

    run_on("asyncio", main())


@pytest.mark.parametrize("value", [b"a\rb", b"a\nb", b"a\r\nb: c", b"a\0b", b"\r\n"])
def test_header_values_cannot_end_their_line(value: bytes) -> None:
    with pytest.raises(ConfigError, match="CR, LF or NUL"):
        header_lines([(b"x", b"fine"), (b"y", value)])


@pytest.mark.parametrize(
    "name", [b"", b"a b", b"a:b", b"a\r\nb", b"a\n", b"\xff", b"Content-Length", b"connection", b"Host"]
)
def test_header_names_are_tokens_and_not_the_framing(name: bytes) -> None:
    for _ in range(2):  # known names are not checked again
        with pytest.raises(ConfigError, match="header"):
            header_lines([(name, b"x")])


@pytest.mark.parametrize("target", [b"/ HTTP/1.1", b"/\r\n", b"/\0", b"/\x7f", b"/\xc3"])
def test_targets_cannot_end_their_line(target: bytes) -> None:
    with pytest.raises(ConfigError, match="target"):
        check_target(target)


def test_statuses_of_answers_are_final() -> None:
    assert status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"
    for status in (100, 199, 600, 1000):
        with pytest.raises(ConfigError, match=f"status={status}"):
            status_line(status)


def test_headers_of_the_connection_are_not_passed_on() -> None:
    headers = [(b"connection", b"close, X-Private"), (b"x-private", b"1"), (b"x-public", b"2"), (b"host", b"a")]
    headers += [(b"transfer-encoding", b"chunked"), (b"content-length", b"3"), (b"te", b"trailers")]
    assert passed_on(headers) == [(b"x-public", b"2")]
    assert passed_on([(b"a", b"1"), (b"a", b"2")]) == [(b"a", b"1"), (b"a", b"2")]
