"""Open and closed loops against theory, on a clock that jumps: waits are exact and take no time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from coterie.answers.load.client import RequestOutcome
from coterie.answers.load.run import MOST_OPEN, LoadRun, Pace, Send
from coterie.answers.load.summary import summarise
from coterie.answers.load.workload import LoadRequest, Message, arrival_times
from coterie.errors import ConfigError
from virtual_time import run_virtually

SERVICE_S = 0.5


def requests(count: int, per_conversation: int = 1) -> list[LoadRequest]:
    message = (Message("user", "Hello."),)
    return [LoadRequest(number, number // per_conversation, "", message, 1) for number in range(count)]


def sender(serve: Callable[[LoadRequest], Awaitable[None]]) -> Send:
    async def send(request: LoadRequest, planned: float | None) -> RequestOutcome:
        clock = asyncio.get_running_loop().time
        sent = clock()
        await serve(request)
        end = clock()
        return RequestOutcome(
            request.number, sent if planned is None else planned, sent, end, first=end, output_tokens=1
        )

    return send


def drive(asked: list[LoadRequest], pace: Pace, serve: Callable[[LoadRequest], Awaitable[None]]) -> LoadRun:
    run = LoadRun()
    run_virtually(run.drive(asked, pace, sender(serve)))
    return run


async def fixed(_: LoadRequest) -> None:
    await asyncio.sleep(SERVICE_S)


@pytest.mark.parametrize("clients", [1, 4, 25])
def test_throughput_of_a_closed_loop_is_clients_over_time(clients: int) -> None:
    run = drive(requests(100), Pace(concurrency=clients), fixed)
    found = summarise([run], np.random.default_rng(0))
    assert found.requests_per_s == pytest.approx(clients / SERVICE_S)
    assert found.in_flight == pytest.approx(clients)
    assert found.offered_per_s is None
    assert not found.behind


def test_a_closed_loop_asks_a_conversation_in_order_and_never_twice_at_once() -> None:
    active: dict[int, int] = {}
    order: list[int] = []

    async def serve(request: LoadRequest) -> None:
        assert request.conversation not in active, "the answer to the last question is still awaited"
        active[request.conversation] = request.number
        order.append(request.number)
        await asyncio.sleep(0.1 * (1 + request.number % 3))
        del active[request.conversation]

    run = drive(requests(40, per_conversation=4), Pace(concurrency=3), serve)
    assert sorted(order) == list(range(40))
    turns = {number: order.index(number) for number in order}
    assert all(turns[number] < turns[number + 1] for number in range(39) if number % 4 != 3)
    assert run.in_flight == 0


def test_open_loop_waits_are_those_of_m_d_1() -> None:
    """Poisson arrivals at one server with fixed service: Pollaczek and Khinchine's mean wait."""
    load, count = 0.7, 12_000
    arrivals = arrival_times(count, np.random.default_rng(1), rate=load / SERVICE_S)

    async def main() -> LoadRun:
        one_at_a_time, run = asyncio.Lock(), LoadRun()

        async def serve(_: LoadRequest) -> None:
            async with one_at_a_time:
                await asyncio.sleep(SERVICE_S)

        await run.drive(requests(count), Pace(arrival_s=arrivals), sender(serve))
        return run

    waits = [one.end - one.planned - SERVICE_S for one in run_virtually(main()).outcomes]
    assert np.mean(waits) == pytest.approx(load * SERVICE_S / (2 * (1 - load)), rel=0.08)


def test_a_stall_shows_in_every_request_that_was_planned_during_it() -> None:
    """Coordinated omission: a client that waited for its answers would see the stall once."""
    stall_s, arrivals = 10.0, 0.5 * np.arange(100, dtype=np.float64)

    async def main() -> LoadRun:
        well, run = asyncio.Event(), LoadRun()

        async def serve(request: LoadRequest) -> None:
            if request.number == 20:
                asyncio.get_running_loop().call_later(stall_s, well.set)
            if request.number >= 20:
                await well.wait()

        await run.drive(requests(100), Pace(arrival_s=arrivals), sender(serve))
        return run

    run = run_virtually(main())
    waits = {one.request: one.ttft_s for one in run.outcomes}
    for number in range(100):
        expected = max(0.0, 10.0 + stall_s - arrivals[number]) if number >= 20 else 0.0
        assert waits[number] == pytest.approx(expected, abs=1e-6)
    assert summarise([run], np.random.default_rng(0)).metrics["ttft"].p90.mean == pytest.approx(5.0, abs=0.3)


def test_a_client_that_cannot_send_more_is_late_and_times_count_it() -> None:
    count = MOST_OPEN + 1
    run = drive(requests(count), Pace(arrival_s=np.zeros(count)), fixed)
    last = max(run.outcomes, key=lambda one: one.end)
    assert last.sent - last.planned == pytest.approx(SERVICE_S)
    assert last.e2e_s == pytest.approx(2 * SERVICE_S)
    found = summarise([run], np.random.default_rng(0))
    assert found.late_p99_s == 0.0


def test_a_server_that_falls_behind_is_noticed() -> None:
    async def main(rate: float) -> bool:
        one_at_a_time, run = asyncio.Lock(), LoadRun()

        async def serve(_: LoadRequest) -> None:
            async with one_at_a_time:
                await asyncio.sleep(SERVICE_S)

        times = arrival_times(400, np.random.default_rng(3), rate=rate)
        await run.drive(requests(400), Pace(arrival_s=times), sender(serve))
        return summarise([run], np.random.default_rng(0)).behind

    assert run_virtually(main(2.0 / SERVICE_S))
    assert not run_virtually(main(0.5 / SERVICE_S))


@pytest.mark.parametrize(
    "pace", [Pace(concurrency=4, duration_s=5.2), Pace(arrival_s=0.1 * np.arange(1000, dtype=np.float64), duration_s=5)]
)
def test_nothing_is_sent_after_the_time_and_all_that_was_sent_is_answered(pace: Pace) -> None:
    run = drive(requests(1000), pace, fixed)
    assert max(one.sent for one in run.outcomes) <= pace.duration_s + 1e-6 if pace.duration_s else False
    assert len(run.outcomes) == (44 if pace.concurrency else 51)


def test_an_interrupted_run_keeps_what_it_measured() -> None:
    async def main() -> LoadRun:
        run = LoadRun()
        driving = asyncio.create_task(run.drive(requests(100), Pace(concurrency=4), sender(fixed)))
        await asyncio.sleep(5.75 * SERVICE_S)
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        return run

    run = run_virtually(main())
    assert len(run.outcomes) == 20
    found = summarise([run], np.random.default_rng(0))
    assert (found.answered, found.unfinished) == (20, 4)


def test_a_pace_is_open_or_closed() -> None:
    for settings in ({}, {"concurrency": 2, "arrival_s": np.zeros(1)}):
        with pytest.raises(ConfigError, match="either a concurrency"):
            Pace(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="concurrency=0"):
        Pace(concurrency=0)
