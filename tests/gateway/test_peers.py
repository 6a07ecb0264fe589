"""Gateways that share workers: what they take over from each other, and from peers that lie, stall and vanish."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from books import check_keeper
from canned_workers import canned_workers, held
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig, PeerSettings, WorkerEntry
from coterie.gateway.exchange.peers import ABSENT_S, GatewayPart, Peers, loads_of, own_part
from coterie.gateway.exchange.pool import DECODE, Member, Pool
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.spec import Made, PoolShape
from coterie.gateway.signals.worker_metrics import WorkerReport
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request
from gateway_runs import FAST, Run, config_of, gateway, run, settled

EXPERTS = 6
PRIOR = np.full(EXPERTS, 0.25)


class Profiled:
    """The shortest queue, with a profile for every request: the first expert as likely as its prompt is long."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        profile = np.full(EXPERTS, 0.1, np.float32)
        profile[0] = min(0.9, request.prompt_tokens / 100)
        return JoinShortestQueue().route(request, fleet)._replace(profile=profile)


def made(shape: PoolShape) -> Made:
    return Made("profiled", Profiled(), Fleet([8] * shape.rows, np.tile(PRIOR, (shape.rows, 1))))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(workers: tuple[str, ...], clock: Clock, source: Any = made) -> Pool:
    pool = Pool(DECODE, FleetKeeper(source), clock)
    config = GatewayConfig()
    for id in workers:
        entry = WorkerEntry(id=id, url="http://127.0.0.1:1", places=8)
        pool.add(Member(entry, config, None, pool.rng, 0.0, healthy=True))
    return pool


def peers_of(pool: Pool, clock: Clock, *names: str, said: list[str] | None = None) -> Peers:
    said = [] if said is None else said
    urls = [f"http://{name}:1" for name in names]
    return Peers(PeerSettings(urls=urls), {DECODE: pool}, said.append, clock)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 99)), max_size=30))
def test_the_fleet_is_that_of_one_gateway_for_all(actions: list[tuple[bool, int, int]]) -> None:
    """Over the wire and with the workers in another order: counts are equal, profiles within the wire's rounding."""
    clock = Clock()
    pools = pool_of(("a", "b", "c"), clock), pool_of(("c", "a", "b"), clock)
    whole, running = pool_of(("a", "b", "c"), clock), dict[str, int]()
    sides = [peers_of(pool, clock, "other") for pool in pools]
    for number, (arrives, side, value) in enumerate(actions):
        if arrives:
            choice = pools[side].keeper.route(str(number), Request("", value))
            there = {name for name in ("a", "b", "c") if name != choice.worker_id}
            whole.keeper.route(str(number), Request("", value), there)
            running[str(number)] = side
        elif running:
            name = sorted(running)[value % len(running)]
            pools[running.pop(name)].keeper.finish(name)
            whole.keeper.finish(name)
    for mine, other in ((0, 1), (1, 0)):
        sides[mine].heard(sides[mine].peers[0], 200, sides[other].own())
        sides[mine].count()
    for pool in pools:
        check_keeper(pool.keeper)
        fleet, all_of = pool.keeper.fleet, whole.keeper.fleet
        rows = [pool.keeper.members[id].row for id in ("a", "b", "c")]
        for name in ("in_flight", "context_tokens", "prefill_tokens", "_profiled"):
            assert getattr(fleet, name)[rows].tolist() == getattr(all_of, name).tolist(), name
        assert fleet.routed == all_of.routed
        assert np.abs(fleet._logs[rows] - all_of._logs).max(initial=0) <= len(actions)


def test_a_peer_of_another_shape_is_counted_without_profiles() -> None:
    clock = Clock()
    pool, other = pool_of(("a",), clock), pool_of(("a", "z"), clock)
    for number in range(3):
        other.keeper.route(str(number), Request("", 10), {"z"})
    part = own_part(other)
    assert loads_of(pool, [part]).profiled.tolist() == [3]
    for odd in (
        msgspec.structs.replace(part, experts=EXPERTS + 1),
        msgspec.structs.replace(part, workers={"a": replace(part.workers["a"], logs=b"\xff")}),
    ):
        loads = loads_of(pool, [odd])
        assert (loads.running.tolist(), loads.profiled.tolist()) == ([3], [0])
        assert not loads.logs.any()
    blind = pool_of(("a",), clock, lambda shape: Made("blind", JoinShortestQueue(), Fleet([8] * shape.rows)))
    assert loads_of(blind, [part]).running.tolist() == [3]


def test_what_a_peer_says_is_bounded() -> None:
    clock = Clock()
    pool = pool_of(("a",), clock)
    peers = peers_of(pool, clock, "other")
    (peer,) = peers.peers

    def say(**changes: Any) -> str:
        worker = {"running": 1, "context_tokens": 1, "prefill_tokens": 0, "profiled": 0, "logs": b""} | changes
        part = {"experts": EXPERTS, "routed": 1, "workers": {"a": list(worker.values())}}
        peers.heard(peer, 200, msgspec.msgpack.encode({"id": "x", "pools": {DECODE: part}}))
        peers.count()
        return peer.error

    assert say() == ""
    for wrong in (
        {"running": -1},
        {"running": 1 << 21},
        {"running": 1.5},
        {"context_tokens": 1 << 62},
        {"profiled": 1 << 13},
        {"logs": "text"},
    ):
        assert say(**wrong), wrong
        assert pool.keeper.fleet.in_flight.tolist() == [1], "the last good answer counts"
    for body in (b"", b"\xc1", b"\x81" * 5000, msgspec.json.encode({"id": "x"})):
        peers.heard(peer, 200, body)
        assert peer.error
    peers.heard(peer, 401, peers.own())
    assert peer.error.startswith("HTTP 401: ")
    assert say(profiled=5, logs=b"\xff\xff" * EXPERTS) == "", "as certain as can be"
    assert np.isfinite(pool.keeper.fleet.distinct).all()
    clock.now += ABSENT_S + 0.1
    peers.count()
    assert pool.keeper.fleet.in_flight.tolist() == [0]
    assert not peers.present


def test_a_peer_that_workers_contradict_counts_as_absent() -> None:
    clock = Clock()
    pool = pool_of(("a", "b"), clock)
    peers = peers_of(pool, clock, "other", "honest")
    liar, honest = peers.peers
    member = pool.members["a"]
    pool.reported(member, WorkerReport(2, 0, 0.0))
    for number in range(3):
        pool.keeper.route(str(number), Request("", 10))
    half = GatewayPart("honest", {DECODE: own_part(pool)})
    lie = replace(half, id="liar", pools={DECODE: replace(half.pools[DECODE], workers={})})
    many = replace(half.pools[DECODE].workers["a"], running=500)
    lie.pools[DECODE].workers["a"] = many

    def hear(seconds: float) -> list[bool]:
        for _ in range(round(seconds / peers.settings.every_s)):
            clock.now += peers.settings.every_s
            for peer, part in ((liar, lie), (honest, half)):
                peers.heard(peer, 200, msgspec.msgpack.encode(part))
            peers.count()
        return [liar.present, honest.present]

    assert hear(1.0) == [True, True], "a report may be older than the requests"
    assert hear(10.0) == [False, True]
    assert pool.keeper.fleet.heard.running.sum() == 3, "the honest peer's alone"
    lie.pools[DECODE].workers["a"] = replace(many, running=2)
    assert hear(0.5) == [True, True]


def test_coming_and_going_is_logged_once_and_a_peer_that_never_comes_too() -> None:
    clock, said = Clock(), list[str]()
    pool = pool_of(("a",), clock)
    peers = peers_of(pool, clock, "never", "other", said=said)
    never, other = peers.peers
    answer = msgspec.msgpack.encode(GatewayPart("x", {DECODE: own_part(pool)}))
    peers.heard(other, 200, answer)
    peers.count()
    assert [line.split()[1:4] for line in said] == [["http://other:1", "is", "present"]], "the other is not asked yet"
    for status in (404, 200):
        peers.heard(never, status, b"<html>")
        peers.count()
    assert [line.split()[1:4] for line in said[1:]] == [["http://never:1", "is", "absent:"]]
    clock.now += ABSENT_S + 0.1
    peers.count()
    peers.count()
    assert [line.split()[1:4] for line in said[2:]] == [["http://other:1", "is", "absent:"]]


def test_peers_are_named_once() -> None:
    with pytest.raises(ConfigError, match="must name each peer once"):
        PeerSettings(urls=["http://a:1", "http://a:1"])
    with pytest.raises(ConfigError):
        PeerSettings(urls=["a:1"])
    with pytest.raises(ConfigError):
        PeerSettings(every_s=0.0)


async def until(holds: Callable[[], object]) -> None:
    """Wait for a condition; the test's own end is the limit."""
    while not holds():
        await asyncio.sleep(0.001)


def running(found: Run) -> list[int]:
    return [int(found.running.parts.pools[DECODE].keeper.fleet.in_flight.sum())]


def test_two_gateways_fill_the_workers_as_one() -> None:
    """Each asks the other, and finds itself in its own list; where one ends, its requests count no more."""

    async def test() -> None:
        async with canned_workers("a", "b") as (a, b):
            a.act = b.act = held
            health = replace(FAST, metrics_every_s=0.0)
            async with gateway(config_of([a, b], health=health)) as first:
                settings = PeerSettings(urls=[first.running.url], every_s=0.005)
                async with gateway(replace(config_of([a, b], health=health), peers=settings)) as second:
                    parts = second.running.parts
                    await until(lambda: parts.peers.present)
                    asked = []
                    for number in range(8):
                        asked.append(asyncio.create_task((first, second)[number % 2].client.complete()))
                        await until(lambda: parts.pools[DECODE].keeper.fleet.in_flight.sum() == len(asked))
                    chosen = Counter(parts.pools[DECODE].keeper.fleet.in_flight.tolist())
                    assert chosen == {4: 2}, "as by one gateway"
                    pool = parts.pools[DECODE]
                    assert [pool.others(member) for member in pool.members.values()] == [2, 2]
                    assert second.metrics["coterie_gateway_peers_present"] == 1
                    (known,) = (await second.client.ask("GET", "/workers")).json["peers"]
                    assert known["present"]
                    a.go.set()
                    b.go.set()
                    await asyncio.gather(*asked)
                    await settled(first)
                    await until(lambda: running(second) == [0])
                    await settled(second)
                    parts.peers.peers[0].upstream.retire()
                    alone = Peers(PeerSettings(urls=[second.running.url], every_s=0.005), parts.pools, print)
                    alone.id = parts.peers.id
                    alone.start()
                    await until(lambda: not alone.peers)
                    await alone.close()

    run(test)


def test_a_gateway_that_ends_counts_no_more() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,):
            a.act = held
            async with gateway(config_of([a])) as first:
                settings = PeerSettings(urls=[first.running.url], every_s=0.005)
                async with gateway(replace(config_of([a]), peers=settings)) as second:
                    asked = asyncio.create_task(first.client.complete())
                    await until(lambda: running(second) == [1])
                    a.go.set()
                    await asked
                    await first.running.close(0.0)
                    await until(lambda: not second.running.parts.peers.present)
                    assert running(second) == [0]
                    await settled(second)

    run(test)
