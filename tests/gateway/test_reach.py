"""Workers that were never reached and event streams that do not come are said once; probes ask who can serve."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec
import pytest

from canned_workers import canned_workers, resets
from coterie.engines.vllm.publisher import EventPublisher
from coterie.gateway.access import new_key
from coterie.gateway.config import ControlSection, GatewayConfig, WorkerEntry
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.page.snapshot import PageQuery, snapshot
from coterie.gateway.trying import Tried, try_workers
from coterie.net.access import FleetAccess
from coterie.net.http1 import HttpRequest, Responder
from coterie.wire.event_security import secure_publisher
from gateway_runs import FAST, Run, config_of, gateway, run
from http1_peers import until
from kv_publisher import Publisher

OFTEN = HealthSettings(every_s=0.01, timeout_s=60.0, metrics_every_s=0, unhealthy_after=2)
"""Looks at workers all the time."""
ALONE = FleetAccess()


def closed_url() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def states(found: Run, worker: str) -> list[str]:
    said = [msgspec.json.decode(line) for line in found.said.getvalue().splitlines()]
    return [one["state"] for one in said if one["event"] == "worker" and one["worker"] == worker]


def verdict(found: Run) -> str:
    return str(snapshot(found.running.parts, time.time(), PageQuery())["verdict"])


def test_a_worker_that_was_never_reached_is_said_once() -> None:
    """It had no line in the log: it was unhealthy before its first check, and stayed so."""

    async def test() -> None:
        async with canned_workers("a") as (a,):
            a.well = False
            entries = [WorkerEntry(id="a", url=a.url), WorkerEntry(id="gone", url=closed_url())]
            config = GatewayConfig(workers=entries, listen="127.0.0.1:0", health=OFTEN)
            async with gateway(config) as found:
                members = found.running.parts.pools["decode"].members
                await until(lambda: all(member.health.checks > 6 for member in members.values()))
                await until(lambda: "unreached" in states(found, "a") and "unreached" in states(found, "gone"))
                assert "Not reached: a, gone. To do: look after a, gone; see what coterie serve" in verdict(found)
                assert found.metrics['coterie_gateway_worker_healthy{worker="gone"}'] == 0
                told = (await found.client.ask("GET", "/workers")).json["workers"]
                assert [one["health_error"].partition(":")[0] for one in told] == ["HTTP 503", "connect"]
                a.well = True
                await until(lambda: "healthy" in states(found, "a"))
                assert "Not reached: gone. To do: look after gone; see what" in verdict(found)
                a.well = False
                await until(lambda: "unhealthy" in states(found, "a"))
                assert states(found, "a") == ["joined", "unreached", "healthy", "unhealthy"]
                assert states(found, "gone") == ["joined", "unreached"]
                assert '"state":"unhealthy","reason":"HTTP 503"' in found.logged()

    run(test)


def test_event_streams_that_do_not_come_are_said_once_and_when_they_are_back(tmp_path: Path) -> None:
    """Routing went on without them, and nothing told why it had become worse."""
    kv, experts = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/experts"
    speaking = EventPublisher(f"ipc://{tmp_path}/speaking", 0, 16)

    async def test() -> None:
        async with canned_workers("a", "b") as (a, b):
            entries = [
                WorkerEntry(id="a", url=a.url, kv_events=kv, expert_events=experts),
                WorkerEntry(id="b", url=b.url, expert_events=speaking.endpoint),
            ]
            control = ControlSection(enabled=True)
            config = GatewayConfig(workers=entries, listen="127.0.0.1:0", health=OFTEN, control=control)
            async with gateway(config) as found:

                def connected() -> dict[str, float]:
                    begin = "coterie_gateway_worker_stream_connected{"
                    return {
                        name[len(begin) : -1]: value for name, value in found.metrics.items() if name.startswith(begin)
                    }

                def lost() -> set[str]:
                    return found.running.parts.pools["decode"].members["a"].lost_streams

                await until(lambda: lost() == {"kv_events", "expert_events"})
                await until(lambda: connected().get('stream="expert_events",worker="b"') == 1)
                assert "Not reached: expert_events of a, kv_events of a. To do: see what coterie serve" in verdict(
                    found
                )
                told = (await found.client.ask("GET", "/workers")).json["workers"]
                assert told[0]["streams"] == {"kv_events": False, "expert_events": False}
                publishers: list[Publisher | EventPublisher] = [Publisher(kv), EventPublisher(experts, 0, 16)]
                try:
                    await until(lambda: not lost())
                    assert set(connected().values()) == {1}
                    assert "Not reached" not in verdict(found)
                finally:
                    for publisher in publishers:
                        publisher.close()
                await until(lambda: lost() == {"kv_events", "expert_events"})
                said = [msgspec.json.decode(line) for line in found.logged().splitlines()]
                changes = [(one["state"], one.get("reason")) for one in said if one.get("worker") == "a"]
                for name, endpoint in (("kv_events", kv), ("expert_events", experts)):
                    own = [change for change in changes if change[0].startswith(name)]
                    assert own == [(f"{name} {state}", endpoint) for state in ("lost", "back", "lost")]

    try:
        run(test)
    finally:
        speaking.close()


def test_ready_while_a_worker_can_serve() -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as (a, b):
            health = msgspec.structs.replace(OFTEN, failures=1, retries=0, open_s=50.0)
            async with gateway(config_of([a, b], health=health)) as found:

                async def ready() -> str:
                    got = await found.client.ask("GET", "/ready")
                    assert (got.status == 200) == (got.body == b"")
                    return "" if got.status == 200 else str(got.json["error"]["message"])

                pool = found.running.parts.pools["decode"]
                await until(lambda: found.open("decode") == {"a", "b"})
                assert await ready() == ""
                a.well = False
                await until(lambda: found.open("decode") == {"b"})
                assert await ready() == ""
                b.act = resets
                assert (await found.client.complete()).status == 502
                assert await ready() == "no decode worker can serve: 1 pass no health check, 1 fail requests"
                assert (await found.client.ask("GET", "/health")).status == 200, "it is alive"
                pool.clock = lambda: time.monotonic() + 100.0
                assert await ready() == "", (
                    "a request may probe the worker: none would come if the gateway stayed unready"
                )
                pool.clock = time.monotonic
                b.well = False
                await until(lambda: pool.members["b"].is_unhealthy)
                assert await ready() == "no decode worker can serve: 2 pass no health check, 0 fail requests"
                for name in ("a", "b"):
                    found.running.parts.remove_worker(name)
                assert await ready() == "there are no decode workers"

    run(test)


def test_a_pair_is_ready_without_prefill_workers_if_decode_workers_compute_prompts(tmp_path: Path) -> None:
    admin = new_key("admin", admin=True)
    (tmp_path / "keys.yaml").write_text(admin.entry.as_yaml())

    async def test() -> None:
        async with canned_workers("p", "d") as (p, d):
            p.well = False
            keys = str(tmp_path / "keys.yaml")
            config = config_of([p, d], ["prefill", "decode"], handshake="vllm", health=OFTEN, keys=keys)
            async with gateway(config) as found:
                await until(lambda: found.open("decode") == {"d"})
                assert (await found.client.ask("GET", "/ready")).status == 200, "without a key too"
                d.well, p.well = False, True
                await until(lambda: not found.open("decode"))
                assert (await found.client.ask("GET", "/ready")).status == 503

    run(test)


async def tried(*entries: WorkerEntry, access: FleetAccess = ALONE, try_s: float = 60.0) -> list[Tried]:
    return await try_workers(GatewayConfig(workers=list(entries), health=FAST), access, try_s)


def test_trying_workers_that_are_as_the_config_says(tmp_path: Path) -> None:
    access = FleetAccess.fresh()
    assert access.secret is not None
    secret = access.secret
    plain, secured = Publisher(), Publisher(secure=lambda one: secure_publisher(one, secret))
    experts = EventPublisher(f"ipc://{tmp_path}/experts", 0, 16)

    async def test() -> None:
        async with canned_workers("a", "b") as (a, b):
            found = await tried(
                WorkerEntry(
                    id="a", url=a.url, kv_events=plain.endpoint, kv_replay=plain.replay, expert_events=experts.endpoint
                ),
                WorkerEntry(id="b", url=b.url, kv_events=secured.endpoint, secure_events=True),
                access=access,
            )
            assert found == [Tried("a", a.url, ["canned"], 1024, []), Tried("b", b.url, ["canned"], 1024, [])]

    try:
        run(test)
    finally:
        for one in (plain, secured, experts):
            one.close()


def test_trying_workers_says_what_is_wrong_and_what_would_be_right(tmp_path: Path) -> None:
    access = FleetAccess.fresh()
    assert access.secret is not None
    secret = access.secret
    secured = Publisher(secure=lambda one: secure_publisher(one, secret))
    plain = Publisher()
    gone, nothing = closed_url(), f"ipc://{tmp_path}/nothing"

    async def other_model(request: HttpRequest, responder: Responder) -> None:
        responder.send(200, b'{"data": [{"id": "other"}]}' if request.path == "/v1/models" else b"")

    async def test() -> None:
        async with canned_workers("a", "loading", "other") as (a, loading, other):
            loading.well = False
            assert other.server is not None
            other.server.handler = other_model
            cases = {
                WorkerEntry(id="a", url=a.url): [],
                WorkerEntry(id="gone", url=gone): [f"url={gone}: GET /health: connect: ", "start its engine"],
                WorkerEntry(id="loading", url=loading.url): ["HTTP 503; wait until it has loaded its weights"],
                WorkerEntry(id="other", url=other.url): ["serves other, and a serves canned"],
                WorkerEntry(id="http", url=a.url, kv_events=a.url.replace("http", "tcp")): [
                    "refuses this reader",
                    "right port",
                ],
                WorkerEntry(id="star", url=a.url, kv_events="tcp://*:5557"): [
                    "kv_events=tcp://*:5557: ",
                    "worker's host",
                ],
                WorkerEntry(id="keys", url=a.url, kv_events=secured.endpoint): ["set secure_events, or"],
                WorkerEntry(id="none", url=a.url, expert_events=plain.endpoint, secure_events=True): [
                    "with this COTERIE_FLEET_SECRET"
                ],
            }
            for one, words in zip(await tried(*cases, access=access), cases.values(), strict=True):
                assert len(one.problems) == bool(words), one
                assert all(word in one.problems[0] for word in words), one.problems
            silent = WorkerEntry(id="silent", url=a.url, expert_events=nothing)
            (found,) = await tried(silent, try_s=0.05)
            assert "nothing accepted a connection within 0.05 s; the plugin" in found.problems[-1]

    try:
        run(test)
    finally:
        secured.close()
        plain.close()


@pytest.mark.parametrize("status", [401, 404])
def test_what_a_status_of_a_health_check_means(status: int) -> None:
    async def handle(_: HttpRequest, responder: Responder) -> None:
        responder.send(status)

    async def test() -> None:
        async with canned_workers("a") as (a,):
            assert a.server is not None
            a.server.handler = handle
            (found,) = await tried(WorkerEntry(id="a", url=a.url))
            assert ("COTERIE_WORKER_KEY" if status == 401 else "OpenAI server") in found.problems[0]

    run(test)
