"""Workers' own metrics in routing: second front ends, engines that lie, hang and vanish; prompts still to compute."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from numpy.random import default_rng

from books import check_keeper
from canned_workers import Act, Canned, answer, canned_workers, events, held, resets, says, stalls
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.pool import DECODE, STALE_REPORTS, Member, Pool
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.signals.worker_metrics import WorkerReport
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import FAST, Run, config_of, gateway, run, settled

POLLED = replace(FAST, metrics_every_s=0.01)
BLIND = replace(FAST, metrics_every_s=0.0)
TEXT = b'vllm:num_requests_running{engine="0"} %d\nvllm:num_requests_waiting{engine="0"} 0\n'


async def until(holds: Callable[[], object]) -> None:
    """Wait for a condition; the test's own end is the limit."""
    while not holds():
        await asyncio.sleep(0.001)


def others(found: Run, worker: str) -> int:
    pool = found.running.parts.pools[DECODE]
    return pool.others(pool.members[worker])


def metric(found: Run, name: str, **labels: str) -> float | None:
    listed = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return found.metrics.get(f"coterie_gateway_{name}{{{listed}}}")


class Engine:
    """What a canned worker does as vLLM would: it holds requests until it may go on, and counts them."""

    def __init__(self) -> None:
        self.running = 0

    async def serve(self, worker: Canned, request: HttpRequest, responder: Responder) -> None:
        self.running += 1
        try:
            await held(worker, request, responder)
        finally:
            self.running -= 1

    async def report(self, _: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.send(200, TEXT % self.running)


def test_a_worker_that_a_second_front_end_loads_is_avoided() -> None:
    async def test() -> None:
        engine = Engine()
        async with canned_workers("a", "b") as (a, b):
            a.act, a.report = engine.serve, engine.report
            b.report = says(200, TEXT % 0)
            async with (
                gateway(config_of([a, b], health=POLLED)) as first,
                gateway(config_of([a, b], health=BLIND)) as blind,
                gateway(config_of([a])) as second,
            ):
                busy = [asyncio.create_task(second.client.complete()) for _ in range(4)]
                await until(lambda: engine.running == 4 and others(first, "a") == 4)
                assert metric(first, "worker_others", worker="a") == metric(
                    first, "worker_reported_requests", worker="a"
                )
                asked = [asyncio.create_task(first.client.complete()) for _ in range(3)]
                await asyncio.gather(*asked)
                assert Counter(one.path for one in b.completions) == {"/v1/completions": 3}
                assert engine.running == 4
                (row, _) = (await first.client.ask("GET", "/workers")).json["workers"]
                assert (row["running"], row["others"], row["reported"]["running"]) == (0, 4, 4)
                assert row["reported"]["error"] is None
                assert row["reported"]["age_s"] >= 0
                unseeing = [asyncio.create_task(blind.client.complete()) for _ in range(2)]
                await until(lambda: engine.running == 5)  # without reports, the requests are spread evenly
                a.go.set()
                await asyncio.gather(*busy, *unseeing)
                await until(lambda: others(first, "a") == 0)
                for found in (first, blind, second):
                    await settled(found)

    run(test)


def test_a_worker_whose_metrics_cannot_be_read_gets_its_fair_share() -> None:
    """It got 5 of these 8 requests when it was taken to be empty, beside three with four requests of others each."""

    async def test() -> None:
        async with canned_workers("a", "b", "c", "unread") as workers:
            for worker in workers:
                worker.act = held
            for worker in workers[:3]:
                worker.report = says(200, TEXT % 4 + b"vllm:kv_cache_usage_perc 0.5\n")
            # Read once: reports that are older than a request hide some of the others' requests.
            async with gateway(config_of(workers, health=replace(FAST, metrics_every_s=3600.0))) as found:
                fleet = found.running.parts.pools[DECODE].keeper.fleet
                await until(lambda: fleet.in_flight.tolist() == [4, 4, 4, 4] and fleet.kv_used.tolist() == [0.5] * 4)
                asked = [asyncio.create_task(found.client.complete()) for _ in range(8)]
                await until(lambda: sum(len(worker.completions) for worker in workers) == 8)
                assert [len(worker.completions) for worker in workers] == [2, 2, 2, 2]
                rows = (await found.client.ask("GET", "/workers")).json["workers"]
                assert [row["others"] for row in rows] == [4, 4, 4, 4]
                assert rows[3]["reported"] == {"age_s": None, "error": "status: HTTP 404"}, "said to be unknown"
                for worker in workers:
                    worker.go.set()
                await asyncio.gather(*asked)
                await settled(found)

    run(test)


def test_what_is_assumed_is_by_place_and_follows_the_known() -> None:
    pool = Pool(DECODE, FleetKeeper())
    members = [
        Member(WorkerEntry(id=id, url="http://a:1", places=places), GatewayConfig(), None, default_rng(0), 0.0)
        for id, places in (("a", 8), ("b", 24), ("big", 64), ("small", 4))
    ]
    for member in members:
        pool.add(member)
    a, b, *_ = members
    fleet = pool.keeper.fleet
    pool.reported(members[2], None, "timeout: late")
    assert fleet.in_flight.tolist() == [0, 0, 0, 0], "nothing is known of any"
    pool.reported(a, WorkerReport(4, 0, 0.2))
    assert fleet.in_flight.tolist() == [4, 12, 32, 2]
    assert fleet.kv_used.tolist() == [0.2] * 4
    pool.reported(b, WorkerReport(0, 4, 0.4))
    assert fleet.in_flight.tolist() == [4, 4, 16, 1]
    assert fleet.kv_used.tolist() == pytest.approx([0.2, 0.4, 0.3, 0.3])
    pool.reported(members[2], WorkerReport(1, 0, 0.0))
    assert fleet.in_flight.tolist() == [4, 4, 1, 0], "what is known takes the place of what was assumed"
    check_keeper(pool.keeper)


def test_own_requests_are_not_taken_for_those_of_others() -> None:
    async def test() -> None:
        engine = Engine()
        async with canned_workers("a") as (a,):
            a.act, a.report = engine.serve, engine.report
            async with gateway(config_of([a], health=POLLED)) as found:
                seen = Counter[int]()
                for _ in range(5):
                    a.go.clear()
                    asked = [asyncio.create_task(found.client.complete()) for _ in range(6)]
                    await until(lambda: engine.running == 6)
                    before = metric(found, "worker_reports_total", worker="a", outcome="ok") or 0.0
                    a.go.set()
                    while (metric(found, "worker_reports_total", worker="a", outcome="ok") or 0.0) < before + 3:
                        seen[others(found, "a")] += 1
                        await asyncio.sleep(0)
                    await asyncio.gather(*asked)
                assert set(seen) == {0}
                await settled(found)

    run(test)


def endless(piece: bytes) -> Act:
    async def act(_: Canned, __: HttpRequest, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/plain")])
        while True:
            responder.write(piece)
            await responder.drain()
            await asyncio.sleep(0)

    return act


async def half(_: Canned, __: HttpRequest, responder: Responder) -> None:
    responder.start(200, [(b"content-type", b"text/plain")])
    responder.write(TEXT % 9)
    await responder.drain()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        (says(200, TEXT.replace(b"%d", b"NaN")), "impossible"),
        (says(200, TEXT.replace(b"%d", b"-3")), "impossible"),
        (says(200, TEXT.replace(b"%d", b"1e308")), "impossible"),
        (says(200, TEXT % 3 + b"vllm:kv_cache_usage_perc 77\n"), "impossible"),
        (says(200, TEXT.replace(b"%d", b"lots")), "malformed"),
        (says(200, b"<html>no metrics</html>", [(b"content-type", b"text/html")]), "unknown"),
        (says(200, gzip.compress(TEXT % 9), [(b"content-encoding", b"gzip")]), "unknown"),
        (says(200, b""), "unknown"),
        (says(404), "status"),
        (says(500, TEXT % 9), "status"),
        (says(307, TEXT % 9, [(b"location", b"http://127.0.0.1:1/metrics")]), "status"),
        (endless(b"#" * (1 << 20)), "too_large"),
        (says(200, b"#" * (100 << 20)), "too_large"),
        (resets, "reset"),
        (stalls, "timeout"),
        (half, "timeout"),
        (endless(b"# slow\n"), "timeout|too_large"),
    ],
    ids=str.split("nan negative 1e308 kv words html gzip empty 404 500 moved endless 100MB reset hangs half drips"),
)
def test_metrics_that_cannot_be_used_are_named_and_ignored(act: Act, outcome: str) -> None:
    async def test() -> None:
        patience = 0.3 if "timeout" in outcome else 60.0
        async with canned_workers("a", "b") as (a, b):
            a.report = act
            async with gateway(config_of([a, b], health=replace(POLLED, timeout_s=patience))) as found:
                kinds = outcome.split("|")
                counts = [{"worker": "a", "outcome": kind} for kind in kinds]
                await until(lambda: any(metric(found, "worker_reports_total", **labels) for labels in counts))
                got = [await found.client.complete() for _ in range(4)]
                assert [one.status for one in got] == [200] * 4
                assert len(a.completions) == len(b.completions) == 2, "as if nothing had been reported"
                assert others(found, "a") == found.running.parts.pools[DECODE].keeper.fleet.kv_used.any() == 0
                listed = (await found.client.ask("GET", "/workers")).json
                assert any(listed["last_errors"]["metrics of a"].startswith(f"{kind}: ") for kind in kinds)
                assert len(listed["last_errors"]["metrics of a"]) <= 300
                assert metric(found, "worker_kv_used", worker="a") is None
                await settled(found)

    run(test)


def test_a_report_counts_for_three_intervals() -> None:
    now = [100.0]
    pool = Pool(DECODE, FleetKeeper(), clock=lambda: now[0])
    config = GatewayConfig(health=HealthSettings(metrics_every_s=2.0))
    member = Member(WorkerEntry(id="a", url="http://a:1"), config, None, default_rng(0), 0.0, healthy=True)
    pool.add(member)
    fleet = pool.keeper.fleet
    pool.reported(member, WorkerReport(5, 2, 0.5))
    assert (pool.others(member), fleet.kv_used[0], member.report_error) == (7, 0.5, "")
    for later, kept in ((1.9, 7), (2 * STALE_REPORTS - 0.1, 7), (2.0 * STALE_REPORTS, 0)):
        now[0] = 100.0 + later
        pool.reported(member, None, "timeout: late")
        assert (pool.others(member), fleet.kv_used[0]) == (kept, kept / 14)
        assert pool.described_report(member)["error"] == "timeout: late"
    assert member.report is None
    pool.reported(member, WorkerReport(1, 0, 0.1))
    member.configure(GatewayConfig(health=HealthSettings(metrics_every_s=0.0)))
    pool.reported(member, None)
    assert (pool.others(member), fleet.kv_used[0]) == (0, 0.0), "switched off: forgotten at once"
    pool.reported(member, WorkerReport(4, 0, 0.1))
    pool.remove("a")
    assert fleet.in_flight.tolist() == [0]
    pool.reported(member, WorkerReport(4, 0, 0.1))  # was on its way when the worker left
    assert fleet.in_flight.tolist() == [0]


def test_a_worker_that_runs_more_than_its_places_has_more() -> None:
    """With the default places of an engine that runs hundreds, requests that run would be priced as waiting."""
    pool = Pool(DECODE, FleetKeeper())
    member = Member(WorkerEntry(id="a", url="http://a:1", places=4), GatewayConfig(), None, default_rng(0), 0.0)
    pool.add(member)
    for running, waiting, places in ((3, 9, 4), (6, 0, 6), (2, 0, 6), (1 << 20, 0, 1 << 20)):
        pool.reported(member, WorkerReport(running, waiting, 0.0))
        assert pool.keeper.fleet.places.tolist() == [places]
        check_keeper(pool.keeper)
    pool.remove("a")
    pool.add(member)
    assert pool.keeper.fleet.places.tolist() == [4]


def test_metrics_that_vanish_are_forgotten_and_come_back() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,):
            a.report = says(200, TEXT % 7 + b"vllm:kv_cache_usage_perc 0.5\n")
            async with gateway(config_of([a], health=POLLED)) as found:
                fleet = found.running.parts.pools[DECODE].keeper.fleet
                await until(lambda: others(found, "a") == 7 and fleet.kv_used[0] == 0.5)
                a.report = says(404)
                await until(lambda: others(found, "a") == fleet.kv_used[0] == 0)
                assert metric(found, "worker_report_age_seconds", worker="a") is None
                a.report = says(200, TEXT % 2)
                await until(lambda: others(found, "a") == 2)

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_count_until_their_first_byte(stream: bool) -> None:
    first, rest = asyncio.Event(), asyncio.Event()

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        await first.wait()
        if not stream:
            await answer(worker, request, responder)
            return
        one, *more = events(worker)
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(one)
        await responder.drain()
        await rest.wait()
        for event in more:
            responder.write(event)
        responder.end()

    async def test() -> None:
        async with canned_workers("a", a=act) as (a,), gateway(config_of([a])) as found:
            fleet = found.running.parts.pools[DECODE].keeper.fleet
            prompt = "word " * 400
            asked = asyncio.create_task(found.client.complete(prompt=prompt, stream=stream))
            await a.got.wait()
            assert (fleet.prefill_tokens[0] > 0) == stream, "an answer that comes whole does not say"
            assert fleet.prefill_tokens[0] <= fleet.context_tokens[0]
            first.set()
            if stream:
                await until(lambda: fleet.prefill_tokens[0] == 0)
                assert fleet.running[0] == 1, "it decodes"
            rest.set()
            assert (await asked).status == 200
            await settled(found)
            assert fleet.prefill_tokens[0] == 0

    run(test)
