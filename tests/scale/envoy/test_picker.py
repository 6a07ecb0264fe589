"""The picker behind a real Envoy: where requests go, what they carry, and that no load stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

pytest.importorskip("hpack", reason="the picker needs coterie[envoy]")

from canned_pairs import deleted, footprint_on, prefills
from canned_workers import Canned, canned_workers, held, opens, says
from coterie.gateway.config import LimitSettings, PickerSection
from coterie.gateway.embedded import EmbeddedFleet, run_embedded
from coterie.net.http1.upstream import Upstream, UpstreamError
from coterie.routing import Request
from coterie.wire.footprints import KEY
from envoys import SUBSET_HEADER, needs_envoy
from gateway_runs import Client, Got, run, settled
from http1_peers import until
from picked import Picked, behind_envoy, config_with, coordinate

pytestmark = [pytest.mark.scale, needs_envoy]
PATH = "/v1/completions"
CHAT = [{"role": "user", "content": "How many ducks are there on the pond?"}]


def endpoint(worker: Canned) -> bytes:
    return worker.url.removeprefix("http://").encode()


def text_of(body: bytes, stream: bool) -> str:
    """Text of an answer, of all its events if it streams."""
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-2]] if stream else [body]
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    parts = [one["text"] if "text" in one else (one.get("message") or one["delta"]).get("content") for one in choices]
    return "".join(part or "" for part in parts)


def footprints_of_routes(picked: Picked) -> list[Any]:
    """Record the footprint of every request that the decode pool routes from now on."""
    pool, seen = picked.found.running.parts.pools["decode"], []
    route = pool.route

    def recorded(key: str, wanted: Request, exclude: Any = ()) -> Any:
        seen.append(wanted.footprint)
        return route(key, wanted, exclude)

    pool.route = recorded  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_through_envoy_is_the_workers_own(stream: bool, tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            direct = Client(workers[0].url)
            told = [await client.complete(stream=stream) for client in (direct, picked.client)]
            assert told[0].body == told[1].body
            assert told[1].status == 200
            assert workers[0].asked[-1].raw == workers[0].asked[-2].raw
            await direct.upstream.close()
            await settled(picked.found)
            (decision,) = picked.decisions()
            assert decision["worker"] == "a"
            assert picked.found.metrics['coterie_gateway_requests_total{outcome="ok",path="/v1/completions"}'] == 1

    run(test)


def test_a_long_body_comes_whole_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        limits = LimitSettings(body_bytes=1 << 20)
        async with (
            canned_workers("a") as workers,
            behind_envoy(tmp_path, config_with(workers, limits=limits)) as picked,
        ):
            text = "é" * 400_000
            assert (await picked.client.complete(prompt=text)).status == 200
            assert workers[0].asked[-1].body["prompt"] == text
            assert (await picked.client.complete(prompt=2 * text)).status == 413
            assert (await picked.client.ask("POST", PATH, b"no JSON")).status == 400
            await settled(picked.found)

    run(test)


def test_other_requests_go_to_a_worker_without_being_a_load(tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            models = await picked.client.ask("GET", "/v1/models")
            assert models.json["data"][0]["id"] == "canned"
            assert (await picked.client.ask("POST", "/tokenize", {"prompt": "x" * 200_000})).status == 200
            assert workers[0].asked[-1].body == {"prompt": "x" * 200_000}
            assert picked.decisions() == []
            await settled(picked.found)

    run(test)


def test_llm_d_decode_requests_are_picked_by_the_exact_footprint(tmp_path: Path) -> None:
    """As llm-d's Coordinator asks: prefill, then decode with every key of the prefill's `kv_transfer_params`."""

    async def test() -> None:
        groups = [(2 * number, 2 * number + 1) for number in range(4)]
        acts = {"p": prefills(footprint=lambda body: footprint_on(groups[body["seed"]], tokens=5))}
        async with (
            canned_workers("p", "a", "b", **acts) as workers,
            behind_envoy(tmp_path, config_with(workers, "profiles")) as picked,
        ):
            seen = footprints_of_routes(picked)
            for number in range(20):
                body = {"model": "canned", "prompt": f"Hello {number}", "seed": number % 4}
                assert (await coordinate(picked.client, PATH, body)).status == 200
                assert np.array_equal(seen[-1], footprint_on(groups[number % 4], tokens=5).counts)
            assert len(seen) == 20
            assert {decision["footprint"] for decision in picked.decisions()} == {"answer"}
            assert len(workers[0].completions) == 20
            decoded = [asked for worker in workers[1:] for asked in worker.completions]
            assert len(decoded) == 20
            assert all(asked.body["kv_transfer_params"]["remote_port"] == 1 for asked in decoded)
            await settled(picked.found)

    run(test)


def test_a_request_by_token_ids_has_its_footprint_among_the_sampling_parameters(tmp_path: Path) -> None:
    async def test() -> None:
        params: dict[str, Any] = {}
        async with (
            canned_workers("p", "a", p=prefills(footprint=lambda _: footprint_on((1, 2)))) as workers,
            behind_envoy(tmp_path, config_with(workers, "profiles")) as picked,
        ):
            seen = footprints_of_routes(picked)
            first = await picked.client.ask("POST", PATH, {"prompt": "Hello"}, [(b"epp-profile", b"prefill")])
            params = first.json["kv_transfer_params"]
            body = {"token_ids": [1, 2, 3], "sampling_params": {"extra_args": {"kv_transfer_params": params}}}
            answer = await picked.client.ask("POST", "/inference/v1/generate", body, [(b"epp-profile", b"decode")])
            assert answer.status == 200
            assert np.array_equal(seen[0], footprint_on((1, 2)).counts)
            assert picked.decisions()[0]["prompt_tokens"] == 3
            refused = await picked.client.ask("POST", PATH, {"prompt": "x"}, [(b"epp-profile", b"encode")])
            assert refused.status == 503
            await settled(picked.found)

    run(test)


def test_the_picker_prefills_and_rewrites_the_body(tmp_path: Path) -> None:
    async def test() -> None:
        act = prefills(footprint=lambda _: footprint_on((0, 1)))
        async with (
            canned_workers("p", "a", "b", p=act) as workers,
            behind_envoy(tmp_path, config_with(workers, "prefill")) as picked,
        ):
            seen = footprints_of_routes(picked)
            answer = await picked.client.complete(stream=True)
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert np.array_equal(seen[0], footprint_on((0, 1)).counts)
            (prefill,), (decode,) = workers[0].completions, workers[1].completions + workers[2].completions
            assert prefill.body["max_tokens"] == 1
            sent = decode.body["kv_transfer_params"]
            name = prefill.headers[b"x-request-id"].decode()
            assert sent["remote_request_id"] == f"cmpl-{name}"
            assert KEY not in sent
            assert decode.headers[b"x-request-id"].decode() == name
            workers[0].act = says(400, b'{"error": "bad"}')
            refused = await picked.client.complete()
            assert (refused.status, refused.body) == (400, b'{"error": "bad"}')
            workers[0].act = says(500)
            assert (await picked.client.complete()).status == 200, "a decode worker computes the prompt"
            await settled(picked.found)

    run(test)


def test_staged_kv_is_dropped_when_no_decode_worker_takes_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            canned_workers("p", "a", p=prefills(), a=says(503)) as workers,
            behind_envoy(tmp_path, config_with(workers, "prefill")) as picked,
        ):
            assert (await picked.client.complete()).status == 503
            await until(lambda: len(deleted(workers[0])) == 1)
            await settled(picked.found)

    run(test)


def test_a_client_cannot_name_kv_to_fetch(tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            await picked.client.complete(kv_transfer_params={"remote_host": "10.0.0.1"})
            assert "kv_transfer_params" not in workers[0].asked[-1].body

    run(test)


def test_only_endpoints_of_the_subset_are_picked(tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a", "b", "c") as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            hints = [b"x-gateway-destination-endpoint-subset", SUBSET_HEADER.encode()]
            for hint in hints:
                for allowed in ([workers[1]], [workers[0], workers[2]]):
                    before = [len(worker.asked) for worker in workers]
                    value = b", ".join(endpoint(worker) for worker in allowed)
                    for _ in range(4):
                        assert (await picked.client.ask("POST", PATH, {"prompt": "x"}, [(hint, value)])).status == 200
                    went = [len(worker.asked) - count for worker, count in zip(workers, before, strict=True)]
                    assert sum(went) == 4
                    assert {worker for worker, count in zip(workers, went, strict=True) if count} == set(allowed)
                refused = await picked.client.ask("POST", PATH, {"prompt": "x"}, [(hint, b"10.0.0.1:80")])
                assert refused.status == 503
            await settled(picked.found)

    run(test)


def test_503_without_a_ready_worker_and_429_past_the_waiting_line(tmp_path: Path) -> None:
    async def test() -> None:
        limits = LimitSettings(in_flight=1, waiting=0)
        async with (
            canned_workers("a", a=held) as workers,
            behind_envoy(tmp_path, config_with(workers, limits=limits)) as picked,
        ):
            first = asyncio.create_task(picked.client.complete())
            await workers[0].got.wait()
            shed = await picked.client.complete()
            assert (shed.status, shed.json["error"]["code"]) == (429, "overloaded")
            assert shed.headers[b"retry-after"] == b"1"
            workers[0].go.set()
            assert (await first).status == 200
            pool = picked.found.running.parts.pools["decode"]
            for _ in range(3):
                pool.checked(pool.members["a"], False)
            assert (await picked.client.complete()).status == 503
            await settled(picked.found)

    run(test)


def test_a_dead_worker_is_hidden_by_the_list(tmp_path: Path) -> None:
    """Health checks have not noticed: Envoy goes to the next endpoint, and the load moves there."""

    async def test() -> None:
        async with canned_workers("a", "b", "c") as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            await workers[1].stop()
            answers = await asyncio.gather(*(picked.client.complete() for _ in range(40)))
            assert {answer.status for answer in answers} == {200}
            await settled(picked.found)
            assert picked.found.open("decode") == {"a", "c"}
            assert picked.found.metrics['coterie_gateway_worker_failures_total{kind="connect",worker="b"}'] >= 5

    run(test)


@pytest.mark.parametrize("fails_open", [False, True])
def test_without_a_picker_envoy_does_as_configured(fails_open: bool, tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            canned_workers("a", "b") as workers,
            behind_envoy(tmp_path, config_with(workers), fails_open=fails_open) as picked,
        ):
            assert (await picked.client.complete()).status == 200
            await picked.picker.close(0)
            answer = await picked.client.complete()
            while fails_open and answer.status == 500:  # until Envoy's health checks have noticed
                answer = await picked.client.complete()
            assert (answer.status == 200) == fails_open
            assert fails_open or answer.status >= 500

    run(test)


def test_a_client_that_leaves_takes_its_load_along(tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a", a=opens) as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            upstream = Upstream(picked.proxy.url)
            answer = await upstream.send("POST", PATH, [], b'{"prompt": "x", "stream": true}')
            assert await anext(answer)
            keeper = picked.found.running.parts.pools["decode"].keeper
            assert keeper.running("a") == 1
            answer.close()
            await workers[0].left.wait()
            await settled(picked.found)
            await upstream.close()
            said = 'coterie_gateway_requests_total{outcome="cancelled",path="/v1/completions"}'
            assert picked.found.metrics[said] == 1

    run(test)


def test_a_request_past_its_time_is_ended(tmp_path: Path) -> None:
    async def test() -> None:
        limits = LimitSettings(total_s=0.2)
        async with (
            canned_workers("a", a=opens) as workers,
            behind_envoy(tmp_path, config_with(workers, limits=limits)) as picked,
        ):
            with contextlib.suppress(UpstreamError):  # Envoy resets it, as nothing of the answer may be missing
                answer = await picked.client.complete(stream=True)
                assert not answer.body.endswith(b"[DONE]\n\n")
            await settled(picked.found)
            await workers[0].left.wait()

    run(test)


TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The quick brown fox. " * 9}),
    ("/v1/chat/completions", {"messages": CHAT}),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[EmbeddedFleet]:
    with run_embedded(decoders=2) as found:
        yield found


@pytest.mark.parametrize("mode", ["pick", "profiles", "prefill"])
def test_real_workers_answer_as_when_asked_directly(fleet: EmbeddedFleet, mode: Any, tmp_path: Path) -> None:
    async def test() -> None:
        config = replace(fleet.config(), picker=PickerSection(listen="127.0.0.1:0", mode=mode))
        direct = Client(fleet.workers[1].url)
        async with behind_envoy(tmp_path, config, fleet.access) as picked:
            await until(lambda: len(picked.found.open("decode")) == 2 and picked.found.open("prefill"))
            seen, ask = footprints_of_routes(picked), picked.client.ask
            for path, asked in TEXTS:
                for stream in (False, True):
                    body = {**asked, "max_tokens": 8, "temperature": 0, "stream": stream}
                    answer = await (
                        coordinate(picked.client, path, body) if mode == "profiles" else ask("POST", path, body)
                    )
                    told = await direct.ask("POST", path, body)
                    assert answer.status == 200
                    assert text_of(answer.body, stream) == text_of(told.body, stream) != ""
            assert len(seen) == 4
            sources = {decision["footprint"] for decision in picked.decisions()}
            assert ("answer" in sources) == (mode != "pick")
            assert all(footprint is not None for footprint in seen)
            await settled(picked.found)
        await direct.upstream.close()

    run(test)


async def _one(picked: Picked, number: int) -> Got | None:
    """One request of a mixed load: whole, streamed, or left by its client."""
    body = {"prompt": f"Hello {number}", "stream": number % 3 > 0}
    if number % 10:
        return await picked.client.complete(**body)
    upstream = Upstream(picked.proxy.url)
    try:
        async with asyncio.timeout(0.001 * (number % 7)):
            await upstream.send("POST", PATH, [], msgspec.json.encode(body))
    except (TimeoutError, UpstreamError):
        pass
    finally:
        await upstream.close()
    return None


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_load_stays_after_many_requests(count: int, tmp_path: Path) -> None:
    async def test() -> None:
        async with canned_workers("a", "b", "c") as workers, behind_envoy(tmp_path, config_with(workers)) as picked:
            numbers = iter(range(count))

            async def client() -> None:
                for number in numbers:
                    answer = await _one(picked, number)
                    assert answer is None or answer.status == 200

            await asyncio.gather(*(client() for _ in range(16)))
            await settled(picked.found)
            total = sum(value for name, value in picked.found.metrics.items() if "requests_total" in name)
            assert total >= 0.9 * count

    run(test, patience_s=600.0)
