"""A gateway whose decode pool takes turns: real sockets, a clock that the workers' tokens move."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from canned_workers import STREAM, Canned, canned_workers, events, says
from coterie.control.switchback import SwitchbackSettings
from coterie.gateway.exchange.meter import Meter
from coterie.gateway.exchange.pool import DECODE
from coterie.gateway.fleet.spec import Made, RouterSpec
from coterie.gateway.page.snapshot import PageQuery, snapshot
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.routing import Decision, Fleet, Request
from gateway_runs import FAST, Run, config_of, gateway, idle, run, settled
from http1_peers import until

TOKENS = 40
REPORT = b'coterie_worker_running 0\ncoterie_worker_distinct_experts_sum{over_layers="mean"} %d\n'
STEPS = b"coterie_worker_distinct_experts_steps_total %d\n"


class Time:
    """The pool's clock, moved by the tokens of its workers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.served: dict[str, int] = {}

    def worker(self, step_s: float):  # type: ignore[no-untyped-def]  # an Act
        async def act(worker: Canned, _: HttpRequest, responder: Responder) -> None:
            responder.start(200, [(b"content-type", STREAM)])
            self.now_s += 0.1
            for event in events(worker, TOKENS):
                self.now_s += step_s
                responder.write(event)
                await responder.drain()
                await asyncio.sleep(0)
            responder.end()
            self.served[worker.name] = self.served.get(worker.name, 0) + 1

        return act


class Always:
    """Routes to one row, whatever its load."""

    def __init__(self, row: int) -> None:
        self.row = row

    def route(self, _: Request, fleet: Fleet) -> Decision:
        return Decision(self.row, np.zeros(len(fleet)), "always the same")


def state(found: Run) -> str | None:
    turns = found.running.parts.switchback
    return None if turns is None else turns.state


async def serve(found: Run, time: Time, until_s: float) -> None:
    """Send one request after the other until the clock says so, and let the pool take its turns."""
    while time.now_s < until_s:
        got = await found.client.complete(stream=True)
        assert got.status == 200
        await settled(found)
        found.running.parts.turn()


def test_a_worse_router_is_found_and_left() -> None:
    time = Time()

    async def test() -> None:
        async with canned_workers("fast", "slow", fast=time.worker(0.05), slow=time.worker(0.08)) as workers:
            for worker in workers:
                worker.report = says(404)
            async with gateway(config_of(workers, decode=RouterSpec("round_robin"))) as found:
                parts = found.running.parts
                pool = parts.pools[DECODE]
                await until(lambda: found.open(DECODE) == {"fast", "slow"})  # workers join closed
                pool.clock, pool.meter = lambda: time.now_s, Meter(lambda: time.now_s)
                slow = pool.ids.index("slow")
                pool.keeper.reload(lambda shape: Made("always", Always(slow), Fleet([4] * shape.rows)))
                await serve(found, time, 30.0)
                assert time.served.keys() == {"slow"}, "the router begins alone"
                assert state(found) == "measuring"
                await serve(found, time, 600.0)
                assert parts.switchback is not None
                assert state(found) == "left"
                tpot = parts.switchback.changes["tpot"]
                assert tpot.low is not None
                assert 0 < tpot.low < tpot.percent <= 60
                served = dict(time.served)
                await serve(found, time, 700.0)
                assert time.served["fast"] > served["fast"], "the shortest queue routes"
                logged = found.logged()
                assert "TPOT was" in logged
                assert "the shortest queue routes" in logged
                told = (await found.client.ask("GET", "/switchback")).json["switchback"]
                assert (told["state"], told["changes"]["tpot"]["low"]) == ("left", tpot.low)
                assert found.metrics["coterie_gateway_switchback_left"] == 1
                change = found.metrics['coterie_gateway_switchback_change_percent{bound="low",measure="tpot"}']
                assert change == tpot.low
                pool.keeper.reload(RouterSpec("random"))
                parts.turn()
                assert state(found) == "measuring", "another router is another comparison"
                assert parts.switchback.pairs == 0
                assert not pool.keeper.baseline
                alone = await found.client.ask("PUT", "/routers/decode?alone=1", {"router": "random"})
                assert alone.status == 200
                parts.turn()
                assert state(found) is None, "load compares routers itself"
                await found.client.ask("PUT", "/routers/decode", {"router": "random"})
                parts.turn()
                assert state(found) == "measuring"
                pool.keeper.reload(RouterSpec())
                parts.turn()
                assert state(found) is None, "the shortest queue is not compared with itself"
                idle(found)

    run(test)


def test_where_none_are_taken_the_one_reason_is_named() -> None:
    async def reason(found: Run) -> str:
        found.running.parts.turn()
        told = (await found.client.ask("GET", "/switchback")).json
        assert (told["switchback"], told["comparison"]) == (None, None)
        return str(told["reason"])

    async def test() -> None:
        async with canned_workers("a", "b") as workers:
            off = SwitchbackSettings(enabled=False)
            async with gateway(config_of(workers, decode=RouterSpec("random"), switchback=off)) as found:
                assert await reason(found) == "switchback.enabled is false"
            async with gateway(config_of(workers[:1], decode=RouterSpec("random"))) as found:
                assert await reason(found) == "they need two workers, and the pool has 1"
            async with gateway(config_of(workers)) as found:
                assert await reason(found) == "the router is the shortest queue itself"
                await found.client.ask("PUT", "/routers/decode?alone=1", {"router": "random"})
                assert await reason(found) == "routers are compared by somebody else's requests (set with ?alone=1)"
                await found.client.ask("PUT", "/routers/decode", {"router": "random"})
                found.running.parts.turn()
                told = (await found.client.ask("GET", "/switchback")).json
                assert (told["switchback"]["state"], told["reason"]) == ("measuring", None)

    run(test)


def test_decisions_name_the_router_that_chose() -> None:
    async def test() -> None:
        async with (
            canned_workers("a", "b") as workers,
            gateway(config_of(workers, decode=RouterSpec("round_robin"))) as found,
        ):
            parts = found.running.parts
            keeper = parts.pools[DECODE].keeper
            await until(lambda: found.open(DECODE) == {"a", "b"})
            for baseline in (False, True):
                keeper.baseline = baseline
                await found.client.complete(stream=True)
            newest, oldest = parts.decisions.last(2)
            assert (newest["router"], oldest["router"]) == ("join_shortest_queue", "round_robin")
            by = [one["by"] for one in snapshot(parts, 0.0, PageQuery())["decisions"]]
            assert by == ["join_shortest_queue", None], "only another router than the pool's has a label"

    run(test)


def test_the_meter_counts_streams_whole_answers_and_experts() -> None:
    async def report(worker: Canned, _: HttpRequest, responder: Responder) -> None:
        counted = len(worker.completions)
        responder.send(200, REPORT % (70 * counted) + STEPS % (10 * counted))

    async def test() -> None:
        async with canned_workers("a") as workers:
            workers[0].report = report
            polled = msgspec.structs.replace(FAST, metrics_every_s=0.01)
            async with gateway(config_of(workers, health=polled)) as found:
                meter = found.running.parts.pools[DECODE].meter
                await until(lambda: found.running.parts.pools[DECODE].members["a"].report is not None)
                await found.client.complete(stream=True)
                await settled(found)
                totals = meter.totals()
                assert (totals.firsts, totals.tokens) == (1, len(events(workers[0])))
                assert totals.waiting_s > 0
                await found.client.complete()
                await settled(found)
                totals = meter.totals()
                assert (totals.firsts, totals.tokens) == (2, len(events(workers[0])) + 1)
                await until(lambda: meter.steps >= 20)
                assert meter.totals().means()["experts"] == 7
                assert not meter._waiting
                assert not meter._decoding

    run(test)
