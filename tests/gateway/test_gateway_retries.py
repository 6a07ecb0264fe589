"""Requests that workers fail before the first byte: which are tried again, how often, and which are moved on."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from canned_pairs import deleted, vllm_pair
from canned_workers import STREAM, Act, Canned, answer, canned_workers, held, resets, says
from coterie.gateway.config import LimitSettings
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.net.processes import free_port
from gateway_runs import FAST, Run, config_of, gateway, idle, run, settled
from http1_peers import until

UNHEALTHY = 'coterie_gateway_worker_failures_total{{kind="unhealthy",worker="{}"}}'


def say(found: Run, pool: str, name: str, ok: bool) -> None:
    """Health checks of a worker, as many as it takes."""
    members = found.running.parts.pools[pool]
    for _ in range(HealthSettings().unhealthy_after):
        members.checked(members.members[name], ok)


def failing_first(count: int, failure: Act) -> tuple[Act, list[str]]:
    """The first requests fail, whichever worker gets them; also the workers that were asked."""
    order: list[str] = []

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        order.append(worker.name)
        await (failure if len(order) <= count else answer)(worker, request, responder)

    return act, order


def test_workers_that_all_failed_once_are_tried_again() -> None:
    act, order = failing_first(3, says(503))

    async def test() -> None:
        async with canned_workers("a", "b", "c", a=act, b=act, c=act) as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b", "c"})
            assert (await found.client.complete()).status == 200
            assert sorted(order[:3]) == ["a", "b", "c"]
            assert order[3] != order[2], "the one that failed last is left out"
            idle(found)

    run(test)


def test_the_log_tells_what_failed_before() -> None:
    act, order = failing_first(2, says(503))

    async def test() -> None:
        async with (
            canned_workers("a", "b", a=act, b=act) as workers,
            gateway(config_of(workers, log_requests=True)) as found,
        ):
            await until(lambda: found.open("decode") == {"a", "b"})
            for _ in range(2):
                assert (await found.client.complete()).status == 200
            assert not found.running.parts.watcher._failures
            await until(lambda: found.said.getvalue().count('"event":"request"') == 2)
            first, second = [line for line in map(json.loads, found.said.getvalue().splitlines()) if "status" in line]
            assert (first["retries"], first["failures"]) == (2, [f"{name} 503" for name in order[:2]])
            assert (second["retries"], "failures" in second) == (0, False)

    run(test)


@pytest.mark.parametrize(
    ("failure", "asked", "status"),
    [
        (says(400), 1, 400),
        (says(422), 1, 422),
        (says(429), 2, 429),
        (says(500), 2, 500),
        (says(503), 7, 503),
        (resets, 3, 502),
    ],
)
def test_how_often_a_request_is_sent(failure: Act, asked: int, status: int) -> None:
    act, _ = failing_first(100, failure)

    async def test() -> None:
        async with canned_workers("a", "b", a=act, b=act) as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b"})
            assert (await found.client.complete()).status == status
            sent = [value for name, value in found.metrics.items() if name.startswith("coterie_gateway_routed_total")]
            assert sum(sent) == asked
            idle(found)

    run(test)


def test_another_round_needs_time_left() -> None:
    act, order = failing_first(100, says(503))

    async def test() -> None:
        health = msgspec.structs.replace(FAST, retry_s=1e-9)
        async with (
            canned_workers("a", "b", a=act, b=act) as workers,
            gateway(config_of(workers, health=health)) as found,
        ):
            await until(lambda: found.open("decode") == {"a", "b"})
            assert (await found.client.complete()).status == 503
            assert sorted(order) == ["a", "b"], "each once, however long that took"

    run(test)


def test_a_worker_that_is_alone_is_waited_for_once() -> None:
    async def test() -> None:
        limits = LimitSettings(first_token_s=0.05)
        async with canned_workers("a", a=held) as (a,), gateway(config_of([a], limits=limits)) as found:
            await until(lambda: found.open("decode") == {"a"})
            assert (await found.client.complete()).status == 504
            assert len(a.completions) == 1

    run(test)


async def heads(_: Canned, __: HttpRequest, responder: Responder) -> None:
    """A head at once, as vLLM sends it, and then nothing."""
    responder.start(200, [(b"content-type", STREAM)])
    await asyncio.Event().wait()


@pytest.mark.parametrize("act", [held, heads])
def test_a_request_moves_on_when_its_worker_turns_unhealthy(act: Act) -> None:
    """Before its first byte; the worker hears that it was left."""

    async def test() -> None:
        health = msgspec.structs.replace(FAST, retries=0)
        async with canned_workers("a", "b") as workers, gateway(config_of(workers, health=health)) as found:
            await until(lambda: found.open("decode") == {"a", "b"})
            for worker in workers:
                worker.act = act
            asking = asyncio.create_task(found.client.complete(stream=True))
            await until(lambda: any(worker.got.is_set() for worker in workers))
            stalled, other = sorted(workers, key=lambda one: -len(one.completions))
            other.act = answer
            say(found, "decode", stalled.name, ok=False)
            got = await asking
            assert (got.status, b"[DONE]" in got.body) == (200, True)
            await stalled.left.wait()
            assert (len(stalled.completions), len(other.completions)) == (1, 1)
            assert found.metrics[UNHEALTHY.format(stalled.name)] == 1
            say(found, "decode", stalled.name, ok=True)
            assert found.open("decode") == {"a", "b"}, "it was counted once, by its health checks"
            idle(found)

    run(test)


def test_a_request_whose_first_byte_came_stays() -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b"})

            async def act(worker: Canned, _: HttpRequest, responder: Responder) -> None:
                responder.start(200, [(b"content-type", STREAM)])
                responder.write(b"data: {}\n\n")
                await worker.go.wait()
                responder.write(b"data: [DONE]\n\n")
                responder.end()

            for worker in workers:
                worker.act = act
            asked = await found.client.upstream.send("POST", "/v1/completions", [], b'{"prompt": "x", "stream": true}')
            await anext(asked)
            busy = max(workers, key=lambda one: len(one.completions))
            say(found, "decode", busy.name, ok=False)
            busy.go.set()
            assert await asked.read() == b"data: [DONE]\n\n"
            await settled(found)

    run(test)


def test_a_request_stays_where_no_other_worker_can_take_it() -> None:
    async def test() -> None:
        async with canned_workers("a", a=held) as (a,), gateway(config_of([a])) as found:
            await until(lambda: found.open("decode") == {"a"})
            asking = asyncio.create_task(found.client.complete())
            await a.got.wait()
            say(found, "decode", "a", ok=False)
            a.go.set()
            assert (await asking).status == 200
            assert len(a.completions) == 1

    run(test)


def test_a_request_at_an_unhealthy_worker_moves_when_another_opens() -> None:
    """It was sent there because none was open."""

    async def test() -> None:
        async with canned_workers("a", "b", a=held, b=held) as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b"})
            for worker in workers:
                say(found, "decode", worker.name, ok=False)
            asking = asyncio.create_task(found.client.complete())
            await until(lambda: any(worker.got.is_set() for worker in workers))
            stalled, other = sorted(workers, key=lambda one: -len(one.completions))
            other.act = answer
            say(found, "decode", other.name, ok=True)
            assert (await asking).json["choices"][0]["text"] == f"from {other.name}"
            await stalled.left.wait()
            idle(found)

    run(test)


def test_an_unhealthy_worker_is_not_asked_while_another_may_be_well() -> None:
    """Not even in the second round: a stalled one would hold the request for as long as a first token may take."""
    act, order = failing_first(3, says(503))

    async def test() -> None:
        async with canned_workers("a", "b", "c", a=act, b=act, c=held) as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b", "c"})
            say(found, "decode", "c", ok=False)
            assert (await found.client.complete()).status == 200
            assert (len(order), order[0] != order[1] != order[2] != order[3]) == (4, True)
            assert not workers[2].completions
            idle(found)

    run(test)


def test_requests_move_on_when_others_cannot_connect() -> None:
    """A worker that hangs and takes no connection: the breaker opens long before the first token is overdue."""

    async def test() -> None:
        health, taking_turns = msgspec.structs.replace(FAST, failures=2), RouterSpec("round_robin")
        async with (
            canned_workers("a", "b") as workers,
            gateway(config_of(workers, health=health, decode=taking_turns)) as found,
        ):
            await until(lambda: found.open("decode") == {"a", "b"})
            for worker in workers:
                worker.act = held
            asking = asyncio.create_task(found.client.complete())
            await until(lambda: any(worker.got.is_set() for worker in workers))
            stalled, other = sorted(workers, key=lambda one: -len(one.completions))
            other.act = answer
            member = found.running.parts.pools["decode"].members[stalled.name]
            member.upstream._address = ("127.0.0.1", free_port())  # from now on nothing listens there
            member.upstream.retire()
            while not asking.done():
                assert (await found.client.complete()).status == 200
                await asyncio.sleep(0)
            assert (await asking).json["choices"][0]["text"] == f"from {other.name}"
            await stalled.left.wait()
            assert found.open("decode") == {other.name}
            idle(found)

    run(test)


def test_a_prefill_that_stalls_is_left_when_its_worker_turns_unhealthy() -> None:
    """A decode worker computes the prompt, though no other prefill worker is there."""

    async def test() -> None:
        async with vllm_pair("d", prefill=held) as (found, workers):
            asking = asyncio.create_task(found.client.complete())
            await workers["p"].got.wait()
            say(found, "prefill", "p", ok=False)
            assert (await asking).json["choices"][0]["text"] == "from d"
            await workers["p"].left.wait()
            assert "kv_transfer_params" not in workers["d"].completions[-1].body
            await settled(found)

    run(test)


def test_staged_kv_is_dropped_when_its_decode_worker_turns_unhealthy() -> None:
    """The worker that was left may have fetched it: the next computes the prompt."""

    async def test() -> None:
        async with vllm_pair("d", "e") as (found, workers):
            workers["d"].act = workers["e"].act = held
            asking = asyncio.create_task(found.client.complete())
            await until(lambda: workers["d"].got.is_set() or workers["e"].got.is_set())
            first, second = ("d", "e") if workers["d"].got.is_set() else ("e", "d")
            workers[second].act = answer
            say(found, "decode", first, ok=False)
            assert (await asking).json["choices"][0]["text"] == f"from {second}"
            assert "kv_transfer_params" in workers[first].completions[0].body
            assert "kv_transfer_params" not in workers[second].completions[0].body
            await until(lambda: bool(deleted(workers["p"])))
            await settled(found)

    run(test)
