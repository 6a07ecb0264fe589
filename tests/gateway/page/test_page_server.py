"""The page's files and its stream, on real sockets: who may read them, and what is left when a reader goes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_workers import canned_workers, held
from coterie.gateway.access import new_key
from coterie.gateway.page.serving import Live, page_files
from gateway_runs import Run, config_of, gateway, run
from http1_peers import Raw, until
from shown_control import ShownControl, full_view


@asynccontextmanager
async def one_worker(**more: Any) -> AsyncIterator[Run]:
    async with canned_workers("a") as (a,), gateway(config_of([a], **more)) as found:
        yield found


def asked(found: Run, path: str = "/live", *lines: str) -> bytes:
    head = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{found.port}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n"


async def listen(found: Run, path: str = "/live", *lines: str) -> Raw:
    raw = await Raw.open(found.port)
    raw.send(asked(found, path, *lines))
    head = await raw.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"text/event-stream" in head
    return raw


async def next_event(raw: Raw, name: str) -> Any:
    """The next event of a name: its data."""
    while True:
        piece = await raw.reader.readuntil(b"\n\n")
        lines = piece[piece.index(b"event: ") :].split(b"\n")
        if lines[0] == b"event: " + name.encode():
            return msgspec.json.decode(lines[1].removeprefix(b"data: "))


def test_every_file_is_served_with_a_strict_policy() -> None:
    async def test() -> None:
        async with one_worker() as found:
            on_disk = {one.name for one in files("coterie.gateway.page").joinpath("static").iterdir()}
            assert len(page_files()) == len(on_disk), "every file has a known type"
            for path, file in page_files().items():
                got = await found.client.ask("GET", path)
                assert (got.status, got.body) == (200, file.body)
                policy = got.headers[b"content-security-policy"]
                assert b"default-src 'none'" in policy
                assert b"unsafe" not in policy
                assert b"http" not in policy, "nothing from elsewhere"
                assert got.headers[b"x-content-type-options"] == b"nosniff"
                again = await found.client.ask("GET", path, headers=[(b"if-none-match", got.headers[b"etag"])])
                assert (again.status, again.body) == (304, b"")
                assert (await found.client.ask("HEAD", path)).body == b""
            for path in (
                "/page/",
                "/page/../page.css",
                "/page/%2e%2e/admin.py",
                "/page/nothing.js",
                "/page/index.html",
            ):
                assert (await found.client.ask("GET", path)).status == 404, path
            assert (await found.client.ask("POST", "/", {})).status == 413, "the page takes no body"
            assert (await found.client.ask("DELETE", "/page/main.js")).status == 405

    run(test)


def test_files_name_nothing_from_elsewhere() -> None:
    for path, file in page_files().items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        for word in ("http://", "https://", "//cdn", "innerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, (path, word)
        assert not re.search(r"\son[a-z]+=|<script(?! type=\"module\" src=)| style=", text), path


def test_without_keys_only_this_machine_is_served() -> None:
    async def test() -> None:
        async with one_worker() as found:
            for path in ("/", "/page/main.js", "/live", "/switchback"):
                raw = await Raw.open(found.port)
                raw.send(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
                assert (await raw.answer()).startswith(b"HTTP/1.1 403"), path
                raw.close()

    run(test)


@pytest.mark.parametrize(
    "line", ["Origin: https://evil.example", "Origin: null", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"]
)
def test_no_other_page_reads_the_data(line: str) -> None:
    """A fetch of another page has an Origin; its picture or script has none, but tells where it came from."""

    async def test() -> None:
        async with one_worker() as found:
            for path in ("/live", "/switchback", "/workers", "/decisions", "/metrics"):
                raw = await Raw.open(found.port)
                raw.send(asked(found, path, line))
                answer = await raw.answer()
                assert answer.startswith(b"HTTP/1.1 403"), path
                assert b"access-control" not in answer.lower()
                raw.close()
            for own in ("Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: none", "X-Other: 1"):
                (await listen(found, "/live", own)).close()
            assert (await found.client.ask("GET", "/", headers=[(b"sec-fetch-site", b"cross-site")])).status == 200, (
                "a link to the page may be followed; it holds no data"
            )

    run(test)


def test_with_keys_the_page_is_public_and_its_data_is_not(tmp_path: Path) -> None:
    async def test() -> None:
        made = {name: new_key(name, admin=name == "admin") for name in ("team", "admin")}
        path = tmp_path / "keys.yaml"
        path.write_text("".join(one.entry.as_yaml() for one in made.values()))
        path.chmod(0o600)
        async with one_worker(keys=str(path)) as found:
            ask = found.client.ask
            assert (await ask("GET", "/")).status == (await ask("GET", "/page/main.js")).status == 200
            for place in ("/live", "/switchback"):
                got = await ask("GET", place)
                assert got.status == 401
                assert got.headers[b"www-authenticate"] == b"Bearer"
                assert (await ask("GET", place, key=made["team"].key)).status == 403
            raw = await listen(found, "/live", f"Authorization: Bearer {made['admin'].key}")
            assert (await next_event(raw, "snapshot"))["workers"][0]["id"] == "a"
            raw.close()

    run(test)


def test_nothing_is_computed_while_nobody_listens() -> None:
    async def test() -> None:
        async with one_worker() as found:
            live = found.running.gateway.live
            await found.client.complete()
            assert live.computed == 0
            raw = await listen(found)
            told = await next_event(raw, "snapshot")
            assert told["decided"] == 1
            assert (await next_event(raw, "heat"))["reason"].startswith("No control loop")
            await next_event(raw, "snapshot")
            assert live.listeners == 1
            raw.close()
            await until(lambda: not live.listeners)
            assert not live._made
            before = live.computed
            for _ in range(20):
                await found.client.complete()
            assert live.computed == before

    run(test)


def test_listeners_share_what_is_computed() -> None:
    async def test() -> None:
        async with one_worker() as found:
            live = found.running.gateway.live
            live.period_s = 3600.0  # all within one period, whenever it began
            live._tick = -1
            first = await listen(found)
            await next_event(first, "snapshot")
            others = [await listen(found) for _ in range(5)]
            for other in others:
                await next_event(other, "snapshot")
            assert live.computed <= 2, "an hour may have begun between"
            other = await listen(found, "/live?worker=a")
            await next_event(other, "snapshot")
            assert live.computed <= 4, "it asked for something else"
            for raw in (first, other, *others):
                raw.close()
            await until(lambda: not live.listeners)

    run(test)


def test_the_heat_map_comes_when_it_has_changed() -> None:
    async def test() -> None:
        async with one_worker() as found:
            parts = found.running.parts
            control = parts.control = ShownControl(full_view(workers=("a", "b")))
            raw = await listen(found, "/live?heat=b")
            assert (await next_event(raw, "heat"))["worker"] == "b"
            kinds = [await raw.reader.readuntil(b"\n\n") for _ in range(3)]
            assert all(b"event: snapshot" in one for one in kinds), "the same view is not sent again"
            control.shown = full_view(workers=("a",))
            assert "has not told" in (await next_event(raw, "heat"))["reason"]
            raw.close()

    run(test)


@pytest.mark.parametrize("query", ["x=1", "heat=" + "a" * 300, "&".join(f"pool={n}" for n in range(20))])
def test_a_question_of_another_form_is_refused(query: str) -> None:
    async def test() -> None:
        async with one_worker() as found:
            assert (await found.client.ask("GET", f"/live?{query}")).status == 400
            assert (await found.client.ask("POST", "/live", {})).status == 405
            assert (await found.client.ask("HEAD", "/live")).status == 200

    run(test)


def test_pages_are_limited_and_a_reader_that_does_not_read_is_dropped() -> None:
    async def test() -> None:
        async with one_worker() as found:
            gate, server = found.running.gateway, found.running.server
            gate.live = gate._admin._live = Live(found.running.parts, period_s=0.001, most=1)
            live = gate.live
            found.running.parts.control = ShownControl(full_view(text="x" * 250, items=40))
            raw = await listen(found)
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            (connection,) = [one for one in server.connections if one.task is not None and not one.task.done()]
            await until(lambda: connection.room is not None)
            made = live.computed
            assert (await found.client.ask("GET", "/live")).status == 503
            await found.client.complete()
            assert live.computed <= made + 1, "nothing more is computed for it"
            assert connection.transport.get_write_buffer_size() < 1 << 20
            connection.time_out(connection.write_deadline)  # as the sweep does once its time is over
            await until(lambda: not live.listeners)
            raw.close()
            (await listen(found)).close()

    run(test)


def test_a_gateway_that_ends_says_so_and_does_not_wait_for_pages() -> None:
    async def test() -> None:
        async with canned_workers("a", a=held) as (a,), gateway(config_of([a])) as found:
            raw = await listen(found)
            await next_event(raw, "snapshot")
            request = asyncio.create_task(found.client.complete())
            await a.got.wait()
            found.running.stop(asyncio.Event())
            closing = asyncio.create_task(found.running.server.close(3600.0))
            assert (await raw.rest()).endswith(b"event: end\ndata: {}\n\n\r\n0\r\n\r\n")
            assert not closing.done(), "the request still runs"
            a.go.set()
            assert (await request).status == 200
            await closing

    run(test)


def test_a_body_larger_than_the_limit_is_refused() -> None:
    async def test() -> None:
        async with one_worker() as found:
            body = b'{"router": "' + b"x" * 70_000 + b'"}'
            assert (await found.client.ask("PUT", "/routers/decode", body)).status == 413

    run(test)
