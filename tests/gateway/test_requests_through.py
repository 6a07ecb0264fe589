"""Requests through a gateway: what workers get, what clients get, what happens when a worker fails."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from canned_workers import canned_workers, cuts, events, head_only, held, opens, resets, says
from coterie.gateway.config import LimitSettings
from coterie.gateway.exchange.relay import Relayed, Usage
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.gateway import Gateway
from coterie.net.http1.upstream import UpstreamError
from gateway_runs import config_of, gateway, idle, run
from http1_peers import until


def test_bodies_and_answers_are_passed_on_as_they_are() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            body = {"model": "canned", "prompt": "Hi", "logprobs": 3, "tools": [{"x": 1}], "unheard_of": {"y": [1.5]}}
            raw = b'{"model":"canned",  "prompt": "Hi", "z": 1e5}'
            got = await found.client.ask("POST", "/v1/completions", body)
            assert got.status == 200
            assert got.json["choices"][0]["text"] == "from a"
            assert worker.completions[0].body == body
            await found.client.ask("POST", "/v1/completions", raw)
            assert worker.completions[1].raw == raw, "a body that needs no change is sent as it came"
            for path in ("/v1/chat/completions", "/v1/embeddings"):
                assert (await found.client.ask("POST", path, {"model": "canned", "input": "x"})).status == 200
                assert worker.completions[-1].path == path
            assert (await found.client.ask("GET", "/v1/models")).json["data"][0]["id"] == "canned"
            idle(found)

    run(test)


def test_streams_byte_for_byte() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            got = await found.client.complete(stream=True)
            assert got.headers[b"content-type"] == b"text/event-stream"
            assert got.body == b"".join(events(worker))
            idle(found)

    run(test)


def test_request_ids_are_kept() -> None:
    async def test() -> None:
        async with canned_workers("a", a=held) as (worker,), gateway(config_of([worker])) as found:
            ask = found.client.ask
            body, same = {"prompt": "x"}, [(b"x-request-id", b"mine")]
            first = asyncio.create_task(ask("POST", "/v1/completions", body, same))
            await worker.got.wait()
            worker.got.clear()
            second = asyncio.create_task(ask("POST", "/v1/completions", body, same))
            await worker.got.wait()
            worker.go.set()
            assert [(await one).headers[b"x-request-id"] for one in (first, second)] == [b"mine", b"mine"]
            names = [one.headers[b"x-request-id"] for one in worker.completions]
            assert names[0] == b"mine"
            assert names[1] != b"mine", "two requests in flight never have one name towards a worker"
            for bad in (b"", b"\xff", b"x" * 300):
                assert (await ask("POST", "/v1/completions", body, [(b"x-request-id", bad)])).status == 400
            idle(found)

    run(test)


def test_what_only_the_gateway_may_say_is_taken_out() -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            hostile = {
                "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1},
                "request_id": "x",
                "rid": "x",
                "bootstrap_host": "evil",
                "bootstrap_room": 1,
                "data_parallel_rank": 3,
            }
            headers = [(b"x-data-parallel-rank", b"7"), (b"cookie", b"secret")]
            await found.client.ask("POST", "/v1/completions", {"prompt": "x", "n": 1, **hostile}, headers)
            asked = worker.completions[0]
            assert asked.body == {"prompt": "x", "n": 1}
            assert not {b"x-data-parallel-rank", b"cookie", b"authorization"} & set(asked.headers)

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"[" * 100_000,
        b'{"stream": "yes"}',
        b'{"stream": 1}',
        b'{"model": 3}',
        b"\xff\xfe",
        b'{"cache_salt": []}',
    ],
)
def test_bodies_that_are_refused(body: bytes) -> None:
    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            got = await found.client.ask("POST", "/v1/completions", body)
            assert got.status == 400
            assert got.json["error"]["type"] == "invalid_request_error"
            assert not worker.completions
            idle(found)

    run(test)


@pytest.mark.parametrize("fails", [resets, head_only, says(500), says(503), says(429)])
def test_another_worker_is_tried_before_the_first_byte(fails: Any) -> None:
    async def test() -> None:
        async with canned_workers("a", "b", a=fails) as workers, gateway(config_of(workers)) as found:
            for _ in range(4):
                got = await found.client.complete(stream=True)
                assert (got.status, got.body) == (200, b"".join(events(workers[1])))
            idle(found)

    run(test)


@pytest.mark.parametrize(("fails", "status"), [(resets, 502), (says(500), 500), (says(429), 429)])
def test_all_workers_fail(fails: Any, status: int) -> None:
    async def test() -> None:
        async with canned_workers("a", "b", a=fails, b=fails) as workers, gateway(config_of(workers)) as found:
            got = await found.client.complete()
            assert got.status == status
            assert all(worker.completions for worker in workers), "each was tried"
            idle(found)

    run(test)


def test_what_a_worker_refuses_is_not_tried_again() -> None:
    async def test() -> None:
        refusal = b'{"error": {"message": "too long"}}'
        refuses = says(400, refusal)
        async with canned_workers("a", "b", a=refuses, b=refuses) as workers, gateway(config_of(workers)) as found:
            for _ in range(20):
                got = await found.client.complete()
                assert (got.status, got.body) == (400, refusal)
            assert sum(len(worker.completions) for worker in workers) == 20
            states = [row["breaker"] for row in (await found.client.ask("GET", "/workers")).json["workers"]]
            assert states == ["closed", "closed"], "a 4xx is never the worker's failure"

    run(test)


def test_an_answer_that_breaks_after_its_first_byte_says_so() -> None:
    async def test() -> None:
        async with canned_workers("a", "b", a=cuts, b=cuts) as workers, gateway(config_of(workers)) as found:
            got = await found.client.complete(stream=True)
            whole, _, last = got.body.rstrip(b"\n").rpartition(b"\n\n")
            assert msgspec.json.decode(last.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
            assert b"[DONE]" not in got.body
            assert whole.startswith(b"data: {")
            assert sum(len(worker.completions) for worker in workers) == 1, "it is not sent twice"
            assert found.metrics['coterie_gateway_requests_total{outcome="broken",path="/v1/completions"}'] == 1
            idle(found)

    run(test)


def test_a_client_that_leaves_is_heard_of_by_the_worker() -> None:
    async def test() -> None:
        async with canned_workers("a", a=opens) as (worker,), gateway(config_of([worker])) as found:
            answer = await found.client.upstream.send(
                "POST", "/v1/completions", [], msgspec.json.encode({"prompt": "x", "stream": True})
            )
            assert (await anext(answer)).startswith(b"data: ")
            answer.close()
            await worker.left.wait()
            while found.running.parts.line.in_use:
                await asyncio.sleep(0)
            idle(found)

    run(test)


def test_a_full_queue() -> None:
    async def test() -> None:
        limits = LimitSettings(in_flight=1, waiting=1, queue_s=60)
        async with canned_workers("a", a=held) as (worker,), gateway(config_of([worker], limits=limits)) as found:
            running = asyncio.create_task(found.client.complete())
            await worker.got.wait()
            waiting = asyncio.create_task(found.client.complete())
            while not found.running.parts.line.waiting:
                await asyncio.sleep(0)
            refused = await found.client.complete()
            assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
            assert int(refused.headers[b"retry-after"]) >= 1
            worker.go.set()
            assert [(await one).status for one in (running, waiting)] == [200, 200]
            idle(found)

    run(test)


def test_a_place_that_does_not_come_in_time() -> None:
    async def test() -> None:
        limits = LimitSettings(in_flight=1, waiting=1, queue_s=0.05)
        async with canned_workers("a", a=held) as (worker,), gateway(config_of([worker], limits=limits)) as found:
            running = asyncio.create_task(found.client.complete())
            await worker.got.wait()
            assert (await found.client.complete()).status == 503
            worker.go.set()
            assert (await running).status == 200
            idle(found)

    run(test)


def test_breaker_opens_and_the_worker_comes_back() -> None:
    async def test() -> None:
        health = HealthSettings(backoff_s=0.0, failures=2, open_s=1e-3, every_s=0.01, timeout_s=60.0, retries=1)
        async with (
            canned_workers("a", "b", a=says(500)) as (bad, good),
            gateway(config_of([bad, good], health=health)) as found,
        ):
            for _ in range(30):
                assert (await found.client.complete()).status == 200
            assert len(bad.completions) < 30
            bad.act = good.act
            before = len(bad.completions)
            while len(bad.completions) < before + 5:  # it is probed, and takes requests again
                assert (await found.client.complete()).status == 200

    run(test)


def test_no_workers() -> None:
    async def test() -> None:
        async with gateway(config_of([])) as found:
            got = await found.client.complete()
            assert (got.status, got.json["error"]["code"]) == (503, "no_worker")
            assert got.headers[b"retry-after"] == b"1"
            assert (await found.client.ask("GET", "/v1/models")).status == 503

    run(test)


def test_bodies_over_the_limit_and_compressed_ones() -> None:
    async def test() -> None:
        limits = LimitSettings(body_bytes=1000)
        async with canned_workers("a") as (worker,), gateway(config_of([worker], limits=limits)) as found:
            assert (await found.client.complete(prompt="x" * 2000)).status == 413
            zipped = await found.client.ask("POST", "/v1/completions", b"xx", [(b"content-encoding", b"gzip")])
            assert zipped.status == 415
            assert not worker.completions

    run(test)


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    """The port was closed, so that a load balancer saw a dead gateway."""

    async def test() -> None:
        async with canned_workers("a", a=held) as (worker,), gateway(config_of([worker])) as found:
            running = asyncio.create_task(found.client.complete(stream=True))
            await worker.got.wait()
            found.running.stop(asyncio.Event())
            closing = asyncio.create_task(found.running.close())
            await until(lambda: found.running.server.draining)
            for path in ("/health", "/v1/completions", "/v1/models"):
                method = "POST" if path == "/v1/completions" else "GET"
                for given in ([(b"x-request-id", b"mine")], [(b"x-request-id", b"\x80")], []):
                    got = await found.client.ask(method, path, headers=given)
                    assert (got.status, got.json["error"]["code"]) == (503, "draining")
                    assert got.headers[b"retry-after"] == b"1"
                    assert got.headers[b"connection"] == b"close"
                    named = got.headers[b"x-request-id"]
                    assert named == b"mine" if b"mine" in dict(given).values() else len(named) > 20
            assert (await found.client.ask("GET", "/metrics")).status == 200, "the drain can be watched"
            worker.go.set()
            got = await running
            assert (got.status, got.body) == (200, b"".join(events(worker)))
            await closing
            assert found.metrics['coterie_gateway_rejected_total{reason="draining"}'] == 6
            with pytest.raises(UpstreamError):
                await found.client.ask("GET", "/health")
            assert '"event":"stop","reason":"asked to","cut":0' in found.logged()

    run(test)


def test_an_unexpected_exception_is_counted_and_logged_without_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: object) -> None:
        raise ZeroDivisionError("my secret prompt")

    monkeypatch.setattr(Gateway, "handle", breaks)

    async def test() -> None:
        async with canned_workers("a") as (worker,), gateway(config_of([worker])) as found:
            assert (await found.client.complete()).status == 500
            assert found.metrics['coterie_gateway_errors_total{kind="handler"}'] == 1
            await found.running.close(0)
            logged = found.logged()
            assert '"event":"exception","error":"ZeroDivisionError","line":"test_requests_through.py:' in logged
            assert "secret" not in logged

    run(test)


def test_an_answer_of_one_token_has_no_time_per_token_after_it() -> None:
    """Its token, its end and its usage are three events within microseconds."""
    assert Relayed(1.0, 1.00001, 4, Usage(completion_tokens=1)).tpot_s is None
    assert Relayed(1.0, 4.0, 4, Usage(completion_tokens=4)).tpot_s == 1.0
    assert Relayed(1.0, 4.0, 4).tpot_s == 1.0, "a worker that counts none"
