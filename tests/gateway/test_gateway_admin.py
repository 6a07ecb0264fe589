"""Endpoints of those who run the gateway, used while requests run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canned_workers import canned_workers, held
from coterie.errors import ConfigError
from gateway_runs import config_of, gateway, idle, run, settled


def test_workers_come_and_go_while_requests_run() -> None:
    async def test() -> None:
        async with canned_workers("a", "b", a=held) as (a, b), gateway(config_of([a])) as found:
            ask = found.client.ask
            first = asyncio.create_task(found.client.complete())
            await a.got.wait()
            got = await ask("POST", "/workers", {"id": "b", "url": b.url, "places": 4})
            assert (got.status, got.json) == (200, {"added": "b"})
            assert (await ask("DELETE", "/workers/a")).json == {"removed": "a"}
            for _ in range(3):
                assert (await found.client.complete()).json["choices"][0]["text"] == "from b"
            (row,) = (await ask("GET", "/workers")).json["workers"]
            assert (row["id"], row["places"], row["pool"], row["running"]) == ("b", 4, "decode", 0)
            a.go.set()
            assert (await first).json["choices"][0]["text"] == "from a", "what runs on a worker that left goes on"
            await ask("POST", "/workers", {"id": "a", "url": a.url})
            a.got.clear()
            while not a.got.is_set():
                assert (await found.client.complete()).status == 200
            await settled(found)
            assert (await ask("DELETE", "/workers/a")).status == (await ask("DELETE", "/workers/b")).status == 200
            assert (await found.client.complete()).status == 503
            idle(found)

    run(test)


def test_the_same_worker_again_changes_it_in_place() -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as (a, b), gateway(config_of([a])) as found:
            ask, parts = found.client.ask, found.running.parts
            member = parts.pools["decode"].members["a"]
            await ask("POST", "/workers", {"id": "a", "url": a.url})
            assert parts.pools["decode"].members["a"] is member, "nothing changed"
            await ask("POST", "/workers", {"id": "a", "url": b.url})
            assert parts.pools["decode"].members["a"].entry.url == b.url
            assert (await found.client.complete()).json["choices"][0]["text"] == "from b"
            idle(found)

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        "x",
        b"{",
        b"",
        b"[" * 10_000,
        {"id": "a"},
        {"id": "a", "url": "ftp://x"},
        {"id": "a", "url": "http://user@x"},
        {"id": "a", "url": "http://user:word@x"},
        {"id": "a", "url": "http://x/path"},
        {"id": "a", "url": "http://x#y"},
        {"id": "a", "url": "http://x y"},
        {"id": "a", "url": "http://x\r\nHost: y"},
        {"id": "a", "url": "http://[::1"},
        {"id": "a", "url": "http://x:99999"},
        {"id": "a", "url": "http://x:-1"},
        {"id": "a", "url": "http://\u00fc"},
        {"id": "a", "url": ""},
        {"id": "", "url": "http://x"},
        {"id": "a\n", "url": "http://x"},
        {"id": "a" * 129, "url": "http://x"},
        {"id": "a", "url": "http://x", "places": 0},
        {"id": "a", "url": "http://x", "places": 10**9},
        b'{"id": "a", "url": "http://x", "places": 1000000000000000000000000000000}',
        {"id": "a", "url": "http://x", "speed": -1},
        b'{"id": "a", "url": "http://x", "speed": 1e999}',
        {"id": "a", "url": "http://x", "role": "prefill"},
        {"id": "a", "url": "http://x", "role": "boss"},
        {"id": "a", "url": "http://x", "bootstrap_port": 70_000},
        {"id": "a", "url": "http://x", "kv_events": "http://x"},
        {"id": "a", "url": "http://x", "unheard_of": 1},
    ],
)
def test_workers_that_cannot_join_change_nothing(body: Any) -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a])) as found:
            got = await found.client.ask("POST", "/workers", body)
            assert got.status == 400, got.body
            assert "\n" not in got.json["error"]["message"]
            assert [one.url for one in found.running.parts.entries()] == [a.url]
            assert (await found.client.complete()).status == 200

    run(test)


def test_a_worker_that_the_router_has_no_place_for_stays_out() -> None:
    """The old worker of that id stays: here the second join fails after the first pool took it."""

    async def test() -> None:
        roles = ["prefill", "decode"]
        async with (
            canned_workers("p", "d", "x") as (p, d, x),
            gateway(config_of([p, d], roles, handshake="vllm")) as found,
        ):
            parts = found.running.parts
            keeper = parts.pools["prefill"].keeper
            join = keeper.join

            def refuses(worker_id: str, *rest: Any) -> int:
                if worker_id == "d":
                    raise ConfigError("no place")
                return join(worker_id, *rest)

            keeper.join = refuses  # type: ignore[method-assign,assignment]
            got = await found.client.ask("POST", "/workers", {"id": "d", "url": x.url, "role": "both"})
            assert (got.status, got.json["error"]["message"]) == (400, "no place")
            entry = parts.pools["decode"].members["d"].entry
            assert (entry.url, entry.role) == (d.url, "decode")
            assert (await found.client.complete()).status == 200
            idle(found)

    run(test)


def test_routers_are_swapped_while_requests_run() -> None:
    async def test() -> None:
        async with canned_workers("a", "b", a=held, b=held) as (a, b), gateway(config_of([a, b])) as found:
            ask = found.client.ask
            assert (await ask("GET", "/routers")).json == {"decode": {"router": "join_shortest_queue"}}
            running = [asyncio.create_task(found.client.complete()) for _ in range(4)]
            await asyncio.gather(a.got.wait(), b.got.wait())
            got = await ask("PUT", "/routers/decode", {"router": "round_robin"})
            assert (got.status, got.json["router"]) == (200, "round_robin")
            a.go.set()
            b.go.set()
            assert {(await one).status for one in running} == {200}
            before = len(a.completions)
            for _ in range(6):
                await found.client.complete()
            assert len(a.completions) == before + 3, "round robin"
            idle(found)
            wrong: list[Any] = [
                {"router": "unheard_of"},
                {"router": ""},
                {"router": 3},
                {"router": None},
                {"router": "joint:unheard_of=1"},
                {"router": "joint:kv=much"},
                {"router": "joint", "settings": {"kv": 1}},
                {"router": "joint", "settings": []},
                {"router": "latency_aware"},
                {"router": "latency_aware", "fit": "/missing"},
                {"router": "latency_aware", "fit": "/dev/zero"},
                {"router": "latency_aware", "fit": "/etc/passwd"},
                {"router": "round_robin", "labels": {"x": 3}},
                {"router": "round_robin", "seed": -1.5},
                {"more": 1},
                [],
                b"{",
            ]
            for bad in wrong:
                got = await ask("PUT", "/routers/decode", bad)
                assert got.status == 400, (bad, got.body)
                assert (await ask("GET", "/routers")).json["decode"] == {"router": "round_robin"}
            assert (await ask("PUT", "/routers/nowhere", {"router": "round_robin"})).status == 404
            assert (await found.client.complete()).status == 200
            idle(found)

    run(test)


def test_decisions_are_filtered() -> None:
    async def test() -> None:
        roles = ["prefill", "decode", "decode"]
        async with (
            canned_workers("p", "d0", "d1") as workers,
            gateway(config_of(workers, roles, handshake="vllm")) as found,
        ):
            ask = found.client.ask
            for number in range(6):
                body = {"prompt": f"secret {number}"}
                await ask("POST", "/v1/completions", body, [(b"x-request-id", b"r%d" % number)])

            async def decisions(query: str) -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = (await ask("GET", f"/decisions{query}")).json["decisions"]
                return found

            assert len(await decisions("")) == 12
            assert [one["id"] for one in await decisions("?last=2&pool=prefill")] == ["r5", "r4"]
            assert {one["worker"] for one in await decisions("?worker=d1")} == {"d1"}
            assert await decisions("?worker=nobody") == await decisions("?last=0") == []
            (last,) = await decisions("?last=1&pool=decode")
            assert set(last["scores"]) == {"d0", "d1"}
            assert b"secret" not in (await ask("GET", "/decisions")).body
            for bad in ("x", "-1", "1e3", "9" * 20, "%00", "%D9%A1"):
                assert (await ask("GET", f"/decisions?last={bad}")).status == 400, bad

    run(test)


def test_metrics_are_what_prometheus_reads() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a])) as found:
            await found.client.complete()
            await found.client.ask("POST", "/v1/completions", b"{")
            got = await found.client.ask("GET", "/metrics")
            assert got.headers[b"content-type"].startswith(b"text/plain")
            families = {one.name: one for one in text_string_to_metric_families(got.body.decode())}
            requests = families["coterie_gateway_requests"].samples
            assert {one.labels["outcome"]: one.value for one in requests if one.value} == {"ok": 1, "invalid": 1}
            assert all(one.documentation for one in families.values())
            assert families["coterie_gateway_worker_running"].samples[0].labels == {"worker": "a"}
            await found.client.ask("DELETE", "/workers/a")
            text = (await found.client.ask("GET", "/metrics")).body.decode()
            assert 'worker="a"' not in text, "a worker that left is no series any more"

    run(test)


def test_unknown_paths_and_wrong_methods() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a])) as found:
            ask = found.client.ask
            for path in (
                "/page/nowhere",
                "/nowhere",
                "/v1",
                "/v1/",
                "/v1/nowhere",
                "//workers",
                "/workers/a/b/",
                "/metrics/x",
                "/%77orkers",
            ):
                got = await ask("GET", path)
                assert got.status in (404, 405), path
                assert got.json["error"]["type"] in ("not_found_error", "invalid_request_error")
            for method, path in (
                ("GET", "/v1/completions"),
                ("DELETE", "/v1/chat/completions"),
                ("POST", "/metrics"),
                ("PUT", "/workers"),
                ("GET", "/workers/a"),
                ("POST", "/routers/decode"),
                ("GET", "/reload"),
                ("PATCH", "/decisions"),
            ):
                got = await ask(method, path)
                assert got.status == 405, (method, path)
                assert got.headers[b"allow"], (method, path)
            assert (await ask("DELETE", "/workers/nobody")).status == 404
            assert (await ask("DELETE", "/workers/%61")).json == {"removed": "a"}
            assert (await ask("POST", "/reload")).status == 400, "there is no file"
            assert (await ask("HEAD", "/metrics")).body == b""
            idle(found)

    run(test)
