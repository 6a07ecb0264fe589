"""A config file read again: what changes, and that a file which cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import io
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_workers import canned_workers, held, stalls
from coterie.errors import InputError
from coterie.gateway.access import new_key
from coterie.gateway.config import GatewayConfig, LimitSettings, WorkerEntry
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.serve import RunningGateway, serve
from coterie.gateway.watching.logs import Log
from gateway_runs import FAST, Client, Run, config_of, gateway, idle, run
from http1_peers import until

OK, REJECTED = (f'coterie_gateway_reloads_total{{outcome="{one}"}}' for one in ("ok", "rejected"))


def write(path: Path, config: GatewayConfig) -> None:
    path.write_bytes(msgspec.yaml.encode(config))


def test_workers_are_added_removed_and_changed(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "fleet.yaml"
        async with canned_workers("a", "b", "c", a=held) as (a, b, c):
            config = config_of([a, b])
            async with gateway(config, path) as found:
                parts = found.running.parts
                kept = parts.pools["decode"].members["b"]
                running = [asyncio.create_task(found.client.complete()) for _ in range(4)]
                await a.got.wait()
                new = [WorkerEntry(id="b", url=b.url), WorkerEntry(id="c", url=c.url, places=3)]
                write(path, msgspec.structs.replace(config, workers=new))
                assert (await found.client.ask("POST", "/reload")).json == {"reloaded": True}
                assert {one.id: one.places for one in parts.entries()} == {"b": 16, "c": 3}
                assert parts.pools["decode"].members["b"] is kept, "its connections and its breaker stay"
                a.go.set()
                assert {(await one).status for one in running} == {200}
                write(path, msgspec.structs.replace(config, workers=[WorkerEntry(id="b", url=c.url)]))
                await found.running.try_reload()
                assert parts.pools["decode"].members["b"].entry.url == c.url
                assert (await found.client.complete()).json["choices"][0]["text"] == "from c"
                assert (found.metrics[OK], found.metrics[REJECTED]) == (2, 0)
                idle(found)

    run(test)


def test_routers_limits_and_logging_change(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "fleet.yaml"
        async with canned_workers("a") as (a,):
            config = config_of([a])
            async with gateway(config, path) as found:
                running = found.running
                changed = msgspec.structs.replace(
                    config,
                    decode=RouterSpec("round_robin"),
                    limits=LimitSettings(in_flight=7, body_bytes=50, idle_s=9.0, head_s=3.0),
                    health=HealthSettings(failures=2, every_s=3600.0, retries=0),
                    log_requests=True,
                    drain_s=1.0,
                )
                write(path, changed)
                await running.reload()
                member = running.parts.pools["decode"].members["a"]
                assert running.parts.pools["decode"].spec.router == "round_robin"
                assert running.parts.line.places == 7
                assert (member.upstream.limits.idle_s, member.breaker.settings.failures) == (9.0, 2)
                assert running.server.limits.head_s == 3.0
                assert (await found.client.complete(prompt="x" * 100)).status == 413
                assert (await found.client.ask("POST", "/v1/completions", {"prompt": "x"})).status == 200
                assert '"event":"request"' in found.logged()

    run(test)


FIXED = [
    {"listen": "127.0.0.1:9"},
    {"handshake": "vllm"},
    {"tokenizer": "/somewhere"},
    {"block_size": 32},
    {"placement": "/somewhere"},
    {"predictor": "/somewhere"},
    {"state": "/somewhere"},
    {"decisions": 5},
]
BAD_TEXTS = [
    "",  # listen is another
    "{",
    "\x00",
    "workers: 3",
    "unheard_of: 1",
    "listen: nowhere",
    'workers: [{id: !!int "", url: x}]',
    "decode: !!timestamp x",
    "health: {retries: !!bool maybe}",
    "a: &x [*x]",
    "[" * 100_000,
]


async def refused(found: Run) -> None:
    """A reload is refused in each of its ways, and nothing changes."""
    count = found.metrics[REJECTED]
    parts, gate = found.running.parts, found.running.gateway
    keys = gate.keys
    before = (parts.config, gate.config, parts.entries(), parts.pools["decode"].spec, found.running.server.limits)
    with pytest.raises(InputError) as error:
        await found.running.reload()
    assert "\n" not in str(error.value)
    await found.running.try_reload()  # as SIGHUP does: says it and goes on
    got = await found.client.ask("POST", "/reload")
    assert (got.status, got.json["error"]["message"]) == (400, str(error.value))
    after = (parts.config, gate.config, parts.entries(), parts.pools["decode"].spec, found.running.server.limits)
    assert after == before
    assert gate.keys is keys
    assert found.metrics[REJECTED] == count + 3
    assert (await found.client.complete()).status == 200


@pytest.mark.parametrize("changes", FIXED)
def test_what_a_reload_cannot_change(changes: dict[str, Any], tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "fleet.yaml"
        async with canned_workers("a") as (a,):
            config = config_of([a])
            async with gateway(config, path) as found:
                write(path, msgspec.structs.replace(config, **changes))
                with pytest.raises(InputError, match="cannot change"):
                    await found.running.reload()
                await refused(found)

    run(test)


def test_files_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        path, keys = tmp_path / "fleet.yaml", tmp_path / "keys.yaml"
        async with canned_workers("a", "b") as (a, b):
            config = config_of([a])
            elsewhere = WorkerEntry(id="b", url=b.url)
            async with gateway(config, path) as found:
                await refused(found)  # no file
                number = 1
                for text in BAD_TEXTS:
                    path.write_text(text)
                    number += 1
                    await refused(found)
                for changes in (
                    {"decode": RouterSpec("unheard_of")},
                    {"decode": RouterSpec("joint:unheard_of=1")},
                    {"decode": RouterSpec("latency_aware", fit="/missing")},
                    {"keys": str(keys)},
                ):
                    write(path, msgspec.structs.replace(config, workers=[elsewhere], **changes))
                    number += 1
                    await refused(found)
                for text in ("{}", "- {name: x}", "- 3", "{", '- !!int ""', "- {name: x, sha256: secret}"):
                    keys.write_text(text)
                    number += 1
                    await refused(found)
                said = [msgspec.json.decode(line) for line in found.logged().splitlines()]
                told = [one for one in said if one["event"] == "reload"]
                assert len(told) == number
                assert not any(one["ok"] for one in told)
                assert all(one["problem"] for one in told)
                assert not b.completions

    run(test)


def test_a_rejected_reload_keeps_keys_and_routers_of_the_moment(tmp_path: Path) -> None:
    """Keys and routers are read before the rest is found wrong; what an administrator set at run time stays too."""

    async def test() -> None:
        path, keys = tmp_path / "fleet.yaml", tmp_path / "keys.yaml"
        old, new = new_key("old", admin=True), new_key("new", admin=True)
        keys.write_text(old.entry.as_yaml())
        roles = ["prefill", "decode"]
        async with canned_workers("p", "d") as (p, d):
            config = config_of([p, d], roles, handshake="vllm", keys=str(keys))
            async with gateway(config, path) as found:
                ask = found.client.ask
                swapped = await ask("PUT", "/routers/decode", {"router": "round_robin"}, key=old.key)
                assert swapped.status == 200
                keys.write_text(new.entry.as_yaml())
                write(path, msgspec.structs.replace(config, prefill=RouterSpec("latency_aware", fit="/missing")))
                assert (await ask("POST", "/reload", key=old.key)).status == 400
                assert (await ask("GET", "/routers", key=new.key)).status == 401
                assert (await ask("GET", "/routers", key=old.key)).json["decode"] == {"router": "round_robin"}
                write(path, config)
                assert (await ask("POST", "/reload", key=old.key)).status == 200
                assert (await ask("GET", "/routers", key=new.key)).status == 200
                assert (await ask("GET", "/routers", key=old.key)).status == 401

    run(test)


def test_requests_are_served_while_a_config_is_checked(tmp_path: Path) -> None:
    """It is checked in a thread: here the only one, which is busy until the test lets it go."""

    async def test() -> None:
        path, busy = tmp_path / "fleet.yaml", threading.Event()
        async with canned_workers("a", "b") as (a, b), gateway(config_of([a]), path) as found:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            held_up = loop.run_in_executor(None, busy.wait, 60)
            write(path, config_of([b]))
            for _ in range(2):
                found.running.start_reload()
            try:
                assert (await found.client.complete()).json["choices"][0]["text"] == "from a"
                assert found.metrics[OK] == 0
            finally:
                busy.set()
            await until(lambda: found.metrics[OK] == 2)
            assert (await found.client.complete()).json["choices"][0]["text"] == "from b"
            assert await held_up

    run(test)


def test_sighup_reloads_and_sigterm_ends(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "fleet.yaml"
        async with canned_workers("a", "b") as (a, b):
            config = config_of([a])
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            listener = socket.create_server(("127.0.0.1", 0))
            serving = asyncio.create_task(
                serve(config, path, listener, lambda running, _: ready.set_result(running.url), Log(io.StringIO()))
            )
            url = await ready
            client = Client(url)
            path.write_text("{")
            signal.raise_signal(signal.SIGHUP)
            assert (await client.complete()).json["choices"][0]["text"] == "from a"
            write(path, GatewayConfig(listen="127.0.0.1:0", health=FAST, workers=[WorkerEntry(id="b", url=b.url)]))
            signal.raise_signal(signal.SIGHUP)
            await until(lambda: b.asked)  # its health is asked for
            assert (await client.complete()).json["choices"][0]["text"] == "from b"
            signal.raise_signal(signal.SIGTERM)
            await serving
            await client.upstream.close()

    run(test)


def test_a_second_signal_ends_the_drain_and_cleans_up(tmp_path: Path) -> None:
    """It ended the process with its workers and folders left behind."""

    async def test() -> None:
        async with canned_workers("a", a=stalls) as (worker,):
            config = config_of([worker], drain_s=3600.0)
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            listener = socket.create_server(("127.0.0.1", 0))
            log = io.StringIO()
            serving = asyncio.create_task(
                serve(
                    config,
                    tmp_path / "fleet.yaml",
                    listener,
                    lambda running, _: ready.set_result(running.url),
                    Log(log),
                )
            )
            client = Client(await ready)
            asking = asyncio.create_task(client.complete())
            await worker.got.wait()
            signal.raise_signal(signal.SIGTERM)
            while (await client.ask("GET", "/health")).status != 503:  # until it drains
                await asyncio.sleep(0)
            assert callable(signal.getsignal(signal.SIGTERM)), "the default would end the process at once"
            assert not serving.done()
            signal.raise_signal(signal.SIGTERM)
            await serving
            assert (await asking).status == 503
            assert '"event":"stop","reason":"asked to","cut":1' in log.getvalue()
            await client.upstream.close()

    run(test)


def test_a_second_signal_ends_the_drain_of_the_second_server_too() -> None:
    class Front:
        def __init__(self, _: RunningGateway) -> None:
            self.draining, self.ended = asyncio.Event(), asyncio.Event()

        async def start(self) -> None: ...

        async def close(self, drain_s: float) -> None:
            if not drain_s:
                self.ended.set()
            self.draining.set()
            await self.ended.wait()

    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a], drain_s=3600.0), front=Front) as found:
            running = found.running
            assert isinstance(running.front, Front)
            running.stop(asyncio.Event())
            closing = asyncio.create_task(running.close())
            await running.front.draining.wait()
            running.stop(asyncio.Event())
            await closing

    run(test)
