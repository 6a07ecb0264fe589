"""What faults under load found: retries while the fleet changes, and prefill workers known to fail."""

from __future__ import annotations

from canned_pairs import vllm_pair
from canned_workers import Canned, answer, canned_workers, says
from coterie.gateway.fleet.health import HealthSettings
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from gateway_runs import config_of, gateway, idle, run
from http1_peers import until

TASKS = "coterie_gateway_tasks"
FAILED = 'coterie_gateway_handoffs_total{outcome="prefill_failed"}'


def test_a_worker_that_failed_and_was_removed_takes_no_retry_away() -> None:
    """Three workers fail in turn, the first is removed meanwhile: the third attempt must still be made."""

    async def test() -> None:
        order: list[str] = []
        async with canned_workers("a", "b", "c") as workers, gateway(config_of(workers)) as found:
            await until(lambda: found.open("decode") == {"a", "b", "c"})

            async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
                order.append(worker.name)
                if len(order) == 1:
                    found.running.parts.remove_worker(worker.name)
                if len(order) < 3:
                    responder.send(500)
                else:
                    await answer(worker, request, responder)

            for worker in workers:
                worker.act = act
            got = await found.client.complete()
            assert (got.status, got.json["choices"][0]["text"]) == (200, f"from {order[2]}")
            assert sorted(order) == ["a", "b", "c"]
            idle(found)

    run(test)


def test_prefill_workers_known_to_be_unhealthy_are_not_waited_for() -> None:
    """A stalled one would hold up every request for as long as a prefill may take."""

    async def test() -> None:
        async with vllm_pair("d", prefillers=("p", "q")) as (found, workers):
            pool = found.running.parts.pools["prefill"]

            def say(name: str, ok: bool) -> None:
                for _ in range(HealthSettings().unhealthy_after):
                    pool.checked(pool.members[name], ok)

            say("p", False)
            assert (await found.client.complete()).status == 200
            assert [len(workers[name].completions) for name in "pq"] == [0, 1], "the other one prefills"
            say("q", False)
            got = await found.client.complete()
            assert got.json["choices"][0]["text"] == "from d"
            assert [len(workers[name].completions) for name in "pq"] == [0, 1], "neither is asked"
            assert "kv_transfer_params" not in workers["d"].completions[-1].body
            assert found.metrics[FAILED] == 1
            say("p", True)
            assert (await found.client.complete()).status == 200
            assert [len(workers[name].completions) for name in "pq"] == [1, 1], "it is back"
            idle(found)

    run(test)


def test_a_prefill_worker_whose_breaker_is_open_is_probed_and_comes_back() -> None:
    health = HealthSettings(failures=1, open_s=60.0, backoff_s=0.0, every_s=3600.0)

    async def test() -> None:
        async with vllm_pair("d", health=health) as (found, workers):
            prefills, workers["p"].act = workers["p"].act, says(500)
            for _ in range(3):
                assert (await found.client.complete()).status == 200
            assert len(workers["p"].completions) == 1, "its breaker is open"
            workers["p"].act = prefills
            pool = found.running.parts.pools["prefill"]
            clock = pool.clock
            pool.clock = lambda: clock() + 120.0
            for _ in range(2):
                assert (await found.client.complete()).status == 200
            assert len(workers["p"].completions) == 3
            assert "kv_transfer_params" in workers["d"].completions[-1].body
            idle(found)

    run(test)


def test_tasks_are_told_and_none_is_left_of_a_request() -> None:
    async def test() -> None:
        async with canned_workers("a") as (a,), gateway(config_of([a])) as found:
            await until(lambda: found.open("decode") == {"a"})
            before = found.metrics[TASKS]
            assert before > 0
            for _ in range(3):
                assert (await found.client.complete()).status == 200
            await until(lambda: found.metrics[TASKS] == before)

    run(test)
