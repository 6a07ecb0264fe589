"""vLLM's pair through the gateway: who decodes, what is handed over, and that no KV stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canned_pairs import deleted, footprint_on, params_of, prefills, vllm_pair
from canned_workers import Act, Canned, answer, completion, events, held, opens, resets, says, stalls
from coterie.gateway.config import LimitSettings
from coterie.gateway.exchange.knowledge import Knowledge
from coterie.gateway.exchange.pool import Pool
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.routing import Request
from coterie.wire.footprints import KEY, encode_footprint
from gateway_runs import Run, idle, run, settled
from http1_peers import until
from routing_cases import GROUPS, fitted

DAMAGED = 'coterie_gateway_footprints_total{source="damaged"}'
HANDED, FAILED = (f'coterie_gateway_handoffs_total{{outcome="{one}"}}' for one in ("ok", "prefill_failed"))


def fails_once(workers: Mapping[str, Canned]) -> Act:
    """Whoever of the workers is asked first to decode fails."""

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        first = sum(len(one.completions) for one in workers.values() if one.name != "p") == 1
        await (says(503) if first else answer)(worker, request, responder)

    return act


def group_of(body: Any) -> int:
    return int(body["prompt"].split()[-1])


def test_decode_is_chosen_by_the_footprint_of_the_answer(tmp_path: Path) -> None:
    """Prompts of a group go to the worker that was fitted for it, by what the prefill says and not by their text."""

    async def test() -> None:
        fitted().save(tmp_path / "fit.safetensors")
        spec = RouterSpec("locality_band", fit=str(tmp_path / "fit.safetensors"), model="gpt-oss-20b")
        lies = {"on": False}

        def footprint(body: Any) -> Any:
            group = group_of(body)
            group = (group + 1) % GROUPS if lies["on"] else group
            return footprint_on((2 * group, 2 * group + 1), 120)

        names = [f"d{row}" for row in range(6)]
        async with vllm_pair(*names, prefill=prefills(footprint=footprint), decode=spec) as (found, workers):

            async def served_by(group: int) -> str:
                got = await found.client.complete(prompt=f"of group {group}")
                text: str = got.json["choices"][0]["text"]
                return text.removeprefix("from ")

            first = [await served_by(group) for group in range(GROUPS)]
            assert len(set(first)) == GROUPS
            assert [await served_by(group) for group in range(GROUPS)] == first
            lies["on"] = True
            assert [await served_by(group) for group in range(GROUPS)] == first[1:] + first[:1]
            sources = (await found.client.ask("GET", "/decisions?pool=decode")).json["decisions"]
            assert {one["footprint"] for one in sources} == {"answer"}
            asked = workers[first[0]].completions[0].body
            assert KEY not in asked["kv_transfer_params"], "the footprint is not the decode worker's"
            assert asked["kv_transfer_params"]["remote_request_id"].startswith("cmpl-")
            assert found.metrics[HANDED] == 3 * GROUPS
            idle(found)

    run(test)


@pytest.mark.parametrize("fails", [False, True])
def test_a_decoder_lacks_a_transfer_or_if_the_prefill_failed_its_computing(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []
    wanted = Knowledge.wanted

    def noted(self: Knowledge, pool: Pool, *args: Any) -> tuple[Request, str]:
        request, source = wanted(self, pool, *args)
        asked.append((pool.name, request.prefilled))
        return request, source

    monkeypatch.setattr(Knowledge, "wanted", noted)

    async def test() -> None:
        async with vllm_pair("d", prefill=says(500) if fails else prefills()) as (found, _):
            assert (await found.client.complete()).status == 200

    run(test)
    assert asked == [("prefill", False), ("decode", not fails)]


def test_a_worker_that_wants_the_footprint_gets_it_as_it_came() -> None:
    """Also after a failure, when KV is no longer offered."""

    async def test() -> None:
        footprint, wants = footprint_on((0, 1)), {"a": True, "b": True}
        async with vllm_pair(*wants, prefill=prefills(footprint=lambda _: footprint), wants=wants) as (found, workers):
            for one in workers.values():
                if one.name in wants:
                    one.act = fails_once(workers)
            assert (await found.client.complete(prompt="bird")).status == 200
            bodies = [workers[name].completions[0].body for name in wants]
            assert {one["prompt"] for one in bodies} == {"bird"}
            given = [one["kv_transfer_params"] for one in bodies]
            assert {one.pop(KEY) for one in given} == {encode_footprint(footprint)}
            assert sorted(map(len, given)) == [0, 4], "KV is offered to the first alone"
            idle(found)

    run(test)


def test_a_footprint_that_cannot_be_is_handed_to_nobody() -> None:
    async def test() -> None:
        lie = footprint_on((0, 1))._replace(tokens=1)
        async with vllm_pair("d", prefill=prefills(footprint=lambda _: lie), wants={"d": True}) as (found, workers):
            assert (await found.client.complete()).status == 200
            (asked,) = workers["d"].completions
            assert KEY not in asked.body["kv_transfer_params"]
            assert found.metrics[DAMAGED] == 1

    run(test)


def test_both_get_the_same_id_and_the_prefill_one_token() -> None:
    async def test() -> None:
        async with vllm_pair("d") as (found, workers):
            body = {
                "prompt": "x",
                "max_tokens": 9,
                "stream": True,
                "stream_options": {"include_usage": True},
                "top_p": 0.5,
            }
            got = await found.client.ask("POST", "/v1/completions", body, [(b"x-request-id", b"mine")])
            assert got.body == b"".join(events(workers["d"]))
            prefill, decode = workers["p"].completions[0], workers["d"].completions[0]
            assert prefill.headers[b"x-request-id"] == decode.headers[b"x-request-id"] == b"mine"
            assert (prefill.body["max_tokens"], prefill.body["stream"], prefill.body["top_p"]) == (1, False, 0.5)
            assert prefill.body["kv_transfer_params"]["do_remote_decode"] is True
            assert {key: decode.body[key] for key in body} == body
            assert decode.body["kv_transfer_params"]["remote_request_id"] == "cmpl-mine"
            await found.running.parts.flow.close()
            assert not deleted(workers["p"]), "the decode worker has taken it"
            idle(found)

    run(test)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_refusal_of_the_prefill_is_passed_on(status: int) -> None:
    async def test() -> None:
        refusal = b'{"error": {"message": "too long"}}'
        async with vllm_pair("d", prefill=says(status, refusal)) as (found, workers):
            got = await found.client.ask("POST", "/v1/completions", {"prompt": "x"}, [(b"x-request-id", b"mine")])
            assert (got.status, got.body) == (status, refusal)
            assert got.headers[b"x-request-id"] == b"mine"
            assert not workers["d"].completions
            assert 'coterie_gateway_worker_failures_total{kind="status_5xx",worker="p"}' not in found.metrics
            idle(found)

    run(test)


@pytest.mark.parametrize("fails", [resets, says(500), says(503), says(429), says(200, b"no JSON"), says(200, b"[]")])
def test_a_prompt_is_decoded_from_scratch_if_no_prefill_answers(fails: Any) -> None:
    async def test() -> None:
        async with vllm_pair("d", prefill=fails, prefillers=("p", "q")) as (found, workers):
            got = await found.client.complete(stream=True)
            assert got.body == b"".join(events(workers["d"]))
            assert "kv_transfer_params" not in workers["d"].completions[0].body
            assert workers["p"].completions, "both were asked"
            assert workers["q"].completions
            assert found.metrics[FAILED] == 1
            idle(found)

    run(test)


def test_another_prefill_worker_is_asked() -> None:
    async def test() -> None:
        async with vllm_pair("d", prefillers=("p", "q")) as (found, workers):
            workers["p"].act = resets
            for _ in range(4):
                assert (await found.client.complete()).status == 200
            assert all("kv_transfer_params" in one.body for one in workers["d"].completions)
            idle(found)

    run(test)


DAMAGE: list[Any] = ["", "AAAA", "\u00fc", "x" * 100_000, 3, [], {}, True, 1e300, {"a": {"b": []}}]


@pytest.mark.parametrize("value", DAMAGE)
def test_damaged_footprints_are_counted_and_served(value: Any) -> None:
    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        params = {**params_of(request), KEY: value}
        responder.send(200, msgspec.json.encode(completion(worker, kv_transfer_params=params)))

    async def test() -> None:
        async with vllm_pair("d", prefill=act) as (found, workers):
            assert (await found.client.complete()).status == 200
            assert workers["d"].completions[0].body["kv_transfer_params"]["remote_port"] == 1, "the KV is still used"
            assert found.metrics[DAMAGED] == 1
            idle(found)

    run(test)


@pytest.mark.parametrize(
    "lie",
    [
        footprint_on((0, 1), 5)._replace(tokens=0),
        footprint_on((0, 1), 5)._replace(tokens=2**63),
        footprint_on((0, 1), 5)._replace(tokens=4),
        footprint_on((0, 1), 5)._replace(counts=footprint_on((0, 1), 5).counts[:, :3]),
        footprint_on((0, 1, 2), 5),
        footprint_on((), 5),
    ],
)
def test_lying_footprints_are_counted_and_served(lie: Any, tmp_path: Path) -> None:
    async def test() -> None:
        fitted().save(tmp_path / "fit.safetensors")
        spec = RouterSpec("locality_band", fit=str(tmp_path / "fit.safetensors"), model="gpt-oss-20b")
        async with vllm_pair("d", "e", prefill=prefills(footprint=lambda _: lie), decode=spec) as (found, _):
            for _ in range(3):
                assert (await found.client.complete()).status == 200
            assert found.metrics[DAMAGED] == 3
            assert found.running.parts.knowledge.footprints.learned == 0
            idle(found)

    run(test)


USAGES: list[Any] = [None, {}, {"prompt_tokens": 0}, {"prompt_tokens": 3, "more": []}]
BAD_USAGES: list[Any] = [3, [], "x", {"prompt_tokens": None}, {"prompt_tokens": -1}, {"prompt_tokens": 1.5}]


def test_cached_tokens_are_counted_by_pool() -> None:
    async def test() -> None:
        usage = {"prompt_tokens": 48, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}}
        async with vllm_pair("d", prefill=prefills(usage=usage)) as (found, workers):
            told = {**usage, "prompt_tokens_details": {"cached_tokens": 48}}
            workers["d"].act = says(200, msgspec.json.encode(completion(workers["d"], usage=told)))
            assert (await found.client.complete()).status == 200
            name = 'coterie_gateway_cached_tokens_total{{pool="{}",source="reported"}}'
            assert [found.metrics[name.format(pool)] for pool in ("prefill", "decode")] == [32, 48]

    run(test)


@pytest.mark.parametrize("usage", [*USAGES, *BAD_USAGES, {"prompt_tokens": 2**31 + 1}])
def test_any_usage_is_served(usage: Any) -> None:
    async def test() -> None:
        async with vllm_pair("d", prefill=prefills(usage=usage)) as (found, workers):
            assert (await found.client.complete()).status == 200
            assert len(workers["d"].completions) == 1
            idle(found)

    run(test)


def test_a_ghost_request() -> None:
    """10**30 prompt tokens left a request in the fleet for ever: admitted halfway, never finished."""

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        raw = msgspec.json.encode(completion(worker, kv_transfer_params=params_of(request)))
        responder.send(200, raw[:-1] + b',"usage":{"prompt_tokens":1' + b"0" * 30 + b"}}")

    async def test() -> None:
        async with vllm_pair("d", "e", prefill=act) as (found, workers):
            for _ in range(4):
                assert (await found.client.complete()).status == 200
            assert len(workers["d"].completions) == len(workers["e"].completions) == 2, "the load is seen as it is"
            assert found.metrics['coterie_gateway_worker_failures_total{kind="protocol",worker="p"}'] == 4
            idle(found)

    run(test)


async def leave_in_prefill(found: Run, worker: Canned) -> None:
    """A client that goes away while the prefill worker computes."""
    asking = asyncio.create_task(found.client.complete())
    await worker.got.wait()
    asking.cancel()
    await worker.left.wait()


def test_a_client_that_leaves_in_the_prefill() -> None:
    async def test() -> None:
        async with vllm_pair("d", prefill=stalls) as (found, workers):
            await leave_in_prefill(found, workers["p"])
            await settled(found)
            assert not workers["d"].completions

    run(test)


@pytest.mark.parametrize("grant", [True, False])
def test_staged_kv_is_let_go_when_no_decode_worker_was_reached(grant: bool) -> None:
    """The client leaves between prefill and decode: the gateway waits to try another decode worker."""

    async def test() -> None:
        health = HealthSettings(every_s=3600.0, backoff_s=3600.0, retries=1)
        async with vllm_pair("d", "e", prefill=prefills(grant), health=health) as (found, workers):
            parts = found.running.parts
            await workers["d"].stop()
            parts.pools["decode"].keeper.set_open("e", False)  # so that the one which is gone is chosen
            asking = asyncio.create_task(found.client.complete())
            await until(lambda: 'coterie_gateway_retries_total{pool="decode"}' in found.metrics)
            await until(lambda: found.metrics['coterie_gateway_retries_total{pool="decode"}'])
            parts.pools["decode"].keeper.set_open("e", True)
            parts.pools["decode"].keeper.set_open("d", False)
            asking.cancel()
            await settled(found)
            await parts.flow.close()
            if grant:
                (key,) = deleted(workers["p"])
                assert key.startswith("cmpl-")
                assert not workers["e"].completions
            else:
                assert not deleted(workers["p"])
                (taken,) = workers["e"].completions
                assert taken.body["kv_transfer_params"]["do_remote_prefill"] is True
                assert (taken.body["max_tokens"], taken.body["stream"]) == (1, False)
            await settled(found)

    run(test)


def test_a_client_that_leaves_in_the_decode() -> None:
    async def test() -> None:
        async with vllm_pair("d") as (found, workers):
            workers["d"].act = opens
            body = msgspec.json.encode({"prompt": "x", "stream": True})
            got = await found.client.upstream.send("POST", "/v1/completions", [], body)
            await anext(got)
            got.close()
            await workers["d"].left.wait()
            await settled(found)
            await found.running.parts.flow.close()
            assert len(deleted(workers["p"])) == 1, "dropped, fetched or not"

    run(test)


def test_a_decode_worker_that_was_never_reached_leaves_the_kv_to_another() -> None:
    async def test() -> None:
        async with vllm_pair("d", "e") as (found, workers):
            await workers["d"].stop()
            for _ in range(4):
                assert (await found.client.complete()).json["choices"][0]["text"] == "from e"
            assert all("kv_transfer_params" in one.body for one in workers["e"].completions)
            assert found.metrics['coterie_gateway_worker_failures_total{kind="connect",worker="d"}'] >= 1
            await found.running.parts.flow.close()
            assert not deleted(workers["p"])
            idle(found)

    run(test)


@pytest.mark.parametrize("fails", [resets, says(500), says(429)])
def test_kv_that_a_decode_worker_may_have_taken_is_not_offered_again(fails: Any) -> None:
    async def test() -> None:
        async with vllm_pair("d", "e") as (found, workers):
            workers["d"].act = fails
            while not workers["d"].completions:
                assert (await found.client.complete()).json["choices"][0]["text"] == "from e"
            assert "kv_transfer_params" in workers["d"].completions[0].body
            assert "kv_transfer_params" not in workers["e"].completions[-1].body
            await found.running.parts.flow.close()
            assert len(deleted(workers["p"])) == 1
            idle(found)

    run(test)


def test_no_decode_worker_answers() -> None:
    async def test() -> None:
        async with vllm_pair("d", "e") as (found, workers):
            workers["d"].act = workers["e"].act = resets
            got = await found.client.complete()
            assert (got.status, got.json["error"]["code"]) == (502, "worker_failed")
            assert b"127.0.0.1" not in got.body, "workers' addresses are not the clients'"
            assert got.headers[b"x-request-id"]
            await found.running.parts.flow.close()
            assert len(deleted(workers["p"])) == 1
            idle(found)

    run(test)


def test_a_prefill_worker_that_does_not_end_its_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is dropped in the background: what a worker does then must not keep the gateway from closing."""

    async def act(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        if request.method == "DELETE":
            await stalls(worker, request, responder)
        await prefills()(worker, request, responder)

    async def test() -> None:
        async with vllm_pair("d", prefill=act) as (found, workers):
            workers["d"].act = resets
            assert (await found.client.complete()).status == 502
            await until(lambda: deleted(workers["p"]))
            flow = found.running.parts.flow
            closing = asyncio.create_task(flow.close())
            await until(lambda: closing.done() or workers["p"].cancelled)
            await closing

    monkeypatch.setattr("coterie.gateway.exchange.vllm_pair.DROP_S", 0.05)
    run(test)


def test_many_under_one_id() -> None:
    async def test() -> None:
        async with vllm_pair("d", prefill=prefills(), limits=LimitSettings(in_flight=50)) as (found, workers):
            workers["d"].act = held
            same = [(b"x-request-id", b"mine")]
            asking = [
                asyncio.create_task(found.client.ask("POST", "/v1/completions", {"prompt": "x"}, same))
                for _ in range(20)
            ]
            await until(lambda: len(workers["d"].completions) == 20)
            workers["d"].go.set()
            assert {(await one).status for one in asking} == {200}
            names = [one.headers[b"x-request-id"] for one in workers["d"].completions]
            assert len(set(names)) == 20
            keys = [one.body["kv_transfer_params"]["remote_request_id"] for one in workers["d"].completions]
            assert keys == [f"cmpl-{name.decode()}" for name in names], "each fetches its own"
            workers["d"].act = answer
            idle(found)

    run(test)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 1024}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_completion_tokens", {"max_completion_tokens": 1e300}),
    ("min_tokens", {"min_tokens": 10**9}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": -0.001}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": -0.5}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": -(2**63) - 1}),
    ("n", {"n": 0}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": -1}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": "usage"}),
]


def test_what_a_decode_worker_would_refuse_is_refused_before_the_prefill() -> None:
    """60 such requests left 2,035 of 2,048 blocks staged for 65 to 95 s."""

    async def test() -> None:
        async with vllm_pair("d") as (found, workers):
            await until(lambda: found.running.parts.pools["decode"].context_tokens == 1024)
            for field, body in REFUSED:
                got = await found.client.complete(**body)
                assert (got.status, got.json["error"]["param"]) == (400, field), body
                assert field in got.json["error"]["message"]
            assert not workers["p"].completions
            assert not workers["d"].completions
            fits = {"max_tokens": 1023, "temperature": 0, "seed": -(2**63), "top_p": 1, "n": 2, "min_tokens": 3}
            assert (await found.client.complete(**fits, stop=None, top_k="9")).status == 200
            idle(found)

    run(test)


def test_a_prompt_over_the_context_gets_the_engines_own_refusal() -> None:
    """240 KB are a body for the worker to judge, and `max_tokens` is not said to be "at most -38987"."""

    async def test() -> None:
        refusal = b'{"error": {"message": "the maximum context length is 1024 tokens"}}'
        async with vllm_pair("d", prefill=says(400, refusal)) as (found, workers):
            await until(lambda: found.running.parts.pools["decode"].context_tokens == 1024)
            got = await found.client.complete(prompt=[12345] * 40011, max_tokens=16)
            assert (got.status, got.body) == (400, refusal)
            assert not workers["d"].completions
            idle(found)

    run(test)


@pytest.mark.parametrize("grant", [True, False])
@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_staged_kv_is_let_go_when_the_decode_worker_refuses(status: int, grant: bool) -> None:
    """A worker of Coterie is told to drop it; another engine's KV is fetched by a request for one token."""

    async def refuses(worker: Canned, request: HttpRequest, responder: Responder) -> None:
        asked = msgspec.json.decode(request.body)
        await (answer if asked["max_tokens"] == 1 else says(status))(worker, request, responder)

    async def test() -> None:
        async with vllm_pair("d", prefill=prefills(grant)) as (found, workers):
            workers["d"].act = refuses
            assert (await found.client.complete(max_tokens=7, logit_bias={"0": "x"})).status == status
            await found.running.parts.flow.close()
            assert len(deleted(workers["p"])) == grant
            taken = [one.body for one in workers["d"].completions[1:]]
            assert [one["kv_transfer_params"]["do_remote_prefill"] for one in taken] == [True] * (not grant)
            await settled(found)

    run(test)


@pytest.mark.parametrize("status", [429, 500])
def test_staged_kv_is_let_go_when_the_only_decode_worker_fails(status: int) -> None:
    async def test() -> None:
        async with vllm_pair("d", health=HealthSettings(every_s=3600.0, backoff_s=0.0, retries=0)) as (found, workers):
            workers["d"].act = says(status)
            assert (await found.client.complete()).status == status
            await found.running.parts.flow.close()
            assert len(deleted(workers["p"])) == 1
            await settled(found)

    run(test)
