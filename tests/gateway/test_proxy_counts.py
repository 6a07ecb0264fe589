"""What a routed fleet counts and says when workers fail or lie, and what it asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from canned_workers import Act, Canned, canned_workers, completion, held, resets, says, stalls
from coterie.errors import ConfigError
from coterie.gateway.config import LimitSettings, WorkerEntry
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.proxy import RoutedFleet, rank_entries
from coterie.net.http1.messages import HttpRequest
from coterie.net.http1.responder import Responder
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request, RoundRobin
from coterie.wire.footprints import KEY, WireFootprint, encode_footprint

PATH = "/v1/completions"
LAYERS, EXPERTS = 2, 4
FAST = HealthSettings(backoff_s=0.0)
RIGHT = np.array([[3, 2, 1, 0], [0, 1, 2, 3]], np.uint16)
"""Three tokens that activate two experts each."""


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def ended() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(ended())


def hands_over(*texts: str) -> Act:
    """A prefill worker that puts these footprints into its answers, one after the other, the last one for ever."""
    left = list(texts)

    async def act(worker: Canned, _: HttpRequest, responder: Responder) -> None:
        text = left.pop(0) if len(left) > 1 else left[0]
        params = {"do_remote_prefill": True, KEY: text}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        responder.send(200, msgspec.json.encode(completion(worker, usage=usage, kv_transfer_params=params)))

    return act


def encoded(counts: Any = RIGHT, tokens: int = 3, missing: int = 0) -> str:
    counts = np.asarray(counts, np.uint16)
    return encode_footprint(WireFootprint(counts, tuple(range(len(counts))), tokens, missing))


class Noting:
    """Shortest queue, and the requests it was asked about."""

    def __init__(self) -> None:
        self.seen: list[Request] = []

    def route(self, request: Request, fleet: Fleet) -> Decision:
        self.seen.append(request)
        return JoinShortestQueue().route(request, fleet)


class Broken:
    """A router that fails on requests with a footprint."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        if request.footprint is not None:
            raise ValueError("its own bug")
        return RoundRobin().route(request, fleet)


def test_workers_that_cannot_be_a_fleet() -> None:
    url, one = "http://127.0.0.1:1", Fleet([16])
    with pytest.raises(ConfigError, match="0 prefill and 1 decode workers: at least one of each, or predict"):
        RoutedFleet([], [url], RoundRobin(), one)
    with pytest.raises(ConfigError, match="1 prefill and 0 decode workers"):
        RoutedFleet([url], [], RoundRobin(), one)
    with pytest.raises(ConfigError, match="fleet has 1 workers; there are 2 decode workers"):
        RoutedFleet([url], [url, url], RoundRobin(), one)
    with pytest.raises(ConfigError, match="url='ftp://x' must be"):
        RoutedFleet([url], ["ftp://x"], RoundRobin(), one)
    with pytest.raises(ConfigError, match="'twice' is there twice"):
        RoutedFleet([url], [WorkerEntry(id="twice", url=url)] * 2, RoundRobin(), Fleet([1, 1]))
    with pytest.raises(ConfigError, match="ranks=0 must be at least 1"):
        rank_entries(url, 0)
    assert [entry.data_parallel_rank for entry in rank_entries(url + "/v1/", 2)] == [0, 1]


def test_the_fleet_says_places_speeds_and_masks() -> None:
    local = np.array([[[3]], [[12]]], np.uint64)
    places = Fleet([4, 8])
    places.speeds[:] = [1.0, 2.0]
    places.local = local.copy()
    fleet = RoutedFleet(["http://127.0.0.1:1"], ["http://127.0.0.1:2"] * 2, RoundRobin(), places)
    assert fleet.fleet is places
    assert (places.places.tolist(), places.speeds.tolist()) == ([4, 8], [1.0, 2.0])
    assert places.local is not None
    np.testing.assert_array_equal(places.local, local)
    assert places.alive.all()


def test_damaged_and_untrue_footprints_are_counted_and_left_out() -> None:
    async def work() -> None:
        texts = [encoded(), "no footprint", encoded(RIGHT * 2), encoded(RIGHT[:1]), encoded(missing=2), encoded()]
        router = Noting()
        async with (
            canned_workers("p", "d", p=hands_over(*texts)) as (p, d),
            RoutedFleet([p.url], [d.url], router, Fleet([16]), health=FAST) as fleet,
        ):
            router.seen.clear()
            served = [await fleet.serve(PATH, {"prompt": "x"}, domain="code") for _ in texts]
            right = [True, False, False, False, True, True]
            assert [one.problem for one in served] == [None] * 6
            assert [one.footprint is not None for one in served] == right
            assert [one.footprint is not None for one in router.seen] == right
            assert {(one.prompt_tokens, one.domain) for one in router.seen} == {(3, "code")}
            counts = fleet.counts
            assert (counts.handoffs, counts.footprints, counts.damaged, counts.incomplete) == (6, 3, 3, 1)
            assert len(counts.problems) == 3
            assert all(KEY not in one.body["kv_transfer_params"] for one in d.completions), "footprints stay here"

    run(work)


def test_what_workers_are_asked() -> None:
    async def work() -> None:
        asked = {"prompt": "x", "return_token_ids": True, "stream": True, "request_id": "mine", "rid": "other"}
        async with (
            canned_workers("p", "d", p=hands_over(encoded())) as (p, d),
            RoutedFleet([p.url + "/v1"], [d.url], RoundRobin(), Fleet([16]), key="k" * 32) as fleet,
        ):
            assert [(await fleet.serve(PATH, asked, name)).name for name in (None, "given")] == ["mine", "given"]
            for worker in (p, d):
                assert [one.headers[b"x-request-id"] for one in worker.completions] == [b"mine", b"given"]
                assert {one.headers[b"authorization"] for one in worker.completions} == {b"Bearer " + b"k" * 32}
                assert {one.headers[b"content-type"] for one in worker.completions} == {b"application/json"}
                assert all(one.body["return_token_ids"] and not one.body["stream"] for one in worker.completions)
                assert not any({"rid", "request_id"} & set(one.body) for one in worker.completions)

    run(work)


def test_a_name_that_is_in_use_or_cannot_be_sent() -> None:
    async def work() -> None:
        async with (
            canned_workers("p", "d", d=held) as (p, d),
            RoutedFleet([p.url], [d.url], RoundRobin(), Fleet([16])) as fleet,
        ):
            first = asyncio.create_task(fleet.serve(PATH, {"prompt": "x"}, "same"))
            await d.got.wait()
            again = await fleet.serve(PATH, {"prompt": "x"}, "same")
            assert again.problem == "another request named 'same' is in flight"
            d.go.set()
            assert (await first).problem is None
            assert (await fleet.serve(PATH, {"prompt": "x"}, "same")).problem is None
            for bad in ("", "ä", "\ud800", "a\nb", "x" * 300):
                assert "must be 1 to 256 printable" in str((await fleet.serve(PATH, {}, bad)).problem)
            assert (fleet.counts.served, fleet.counts.failed) == (2, 6)

    run(work)


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (resets, "the worker failed"),
        (says(500, b'{"error": {"message": "broken"}}'), "decode-1: HTTP 500: broken"),
        (says(400, b'{"error": {"message": "too long"}}'), "HTTP 400: too long"),
        (says(200, b"[]"), "the answer is not a JSON object"),
        (says(200, b"{"), "the answer is not a JSON object"),
    ],
)
def test_decoders_that_all_fail(act: Act, problem: str) -> None:
    async def work() -> None:
        async with (
            canned_workers("p", "a", "b", a=act, b=act) as (p, a, b),
            RoutedFleet([p.url], [a.url, b.url], RoundRobin(), Fleet([16, 16]), health=FAST) as fleet,
        ):
            served = await fleet.serve(PATH, {"prompt": "x"})
            assert problem in str(served.problem)
            assert served.body is None
            failures = 3 if act is resets else 2 if "500" in problem else 0
            assert (fleet.counts.decode_failures, fleet.counts.retried) == (failures, max(failures - 1, 0))
            assert (fleet.counts.handoffs, fleet.counts.failed, fleet.fleet.running.sum()) == (1, 1, 0)

    run(work)


def test_a_prefill_worker_that_fails_gives_way_to_the_next() -> None:
    async def work() -> None:
        async with (
            canned_workers("a", "b", "d", a=resets, b=hands_over(encoded())) as (a, b, d),
            RoutedFleet([a.url, b.url], [d.url], RoundRobin(), Fleet([16]), health=FAST) as fleet,
        ):
            served = [await fleet.serve(PATH, {"prompt": "x"}) for _ in range(4)]
            assert all(one.footprint is not None for one in served)
            assert fleet.counts.prefill_failures == len(a.completions) > 0
            assert (fleet.counts.handoffs, fleet.counts.retried, len(b.completions)) == (4, 0, 4)

    run(work)


def test_a_request_that_takes_too_long() -> None:
    async def work() -> None:
        async with (
            canned_workers("p", "d", d=stalls) as (p, d),
            RoutedFleet([p.url], [d.url], RoundRobin(), Fleet([16]), limits=LimitSettings(total_s=0.05)) as fleet,
        ):
            assert (await fleet.serve(PATH, {"prompt": "x"})).problem == "no answer within 0.05 s"
            assert (fleet.counts.failed, fleet.fleet.running.sum()) == (1, 0)

    run(work)


def test_the_worker_hears_of_a_request_that_is_given_up() -> None:
    async def work() -> None:
        async with (
            canned_workers("p", "d", d=stalls) as (p, d),
            RoutedFleet([p.url], [d.url], RoundRobin(), Fleet([16])) as fleet,
        ):
            given_up = asyncio.create_task(fleet.serve(PATH, {"prompt": "x"}, "mine"))
            await d.got.wait()
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            await d.left.wait()
            assert fleet.fleet.running.sum() == 0
            fleet.decode.keeper.check_integrity()
            d.act = says(200)
            assert (await fleet.serve(PATH, {"prompt": "x"}, "mine")).problem is None, "the name is free again"

    run(work)


def test_a_router_that_fails_is_counted() -> None:
    async def work() -> None:
        async with (
            canned_workers("p", "a", "b", p=hands_over(encoded())) as (p, a, b),
            RoutedFleet([p.url], [a.url, b.url], Broken(), Fleet([16, 16])) as fleet,
        ):
            served = await fleet.serve(PATH, {"prompt": "x"})
            assert served.problem is None
            assert "ValueError" in served.reason
            assert (fleet.counts.fallbacks, fleet.counts.served) == (1, 1)

    run(work)


def test_a_prediction_stands_for_a_footprint() -> None:
    async def work() -> None:
        router = Noting()

        def predict(body: Any) -> np.ndarray | None:
            return np.full((LAYERS, EXPERTS), float(len(body["prompt"]))) if body["prompt"] else None

        async with (
            canned_workers("p", "d", p=resets) as (p, d),
            RoutedFleet([p.url], [d.url], router, Fleet([16]), predict, health=FAST) as fleet,
        ):
            router.seen.clear()
            for prompt in ([1, 2], []):
                assert (await fleet.serve(PATH, {"prompt": prompt})).footprint is None
            first, second = router.seen
            assert first.footprint is not None
            assert (first.footprint == 2).all()
            assert second.footprint is None
            assert (fleet.counts.footprints, fleet.counts.handoffs) == (0, 0)

    run(work)
