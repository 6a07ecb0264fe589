"""Workers that are data-parallel ranks of one engine: a routed fleet names the rank that the router chose."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
from aiohttp import web

from coterie.gateway.fleet.health import HealthSettings
from coterie.predictors import TokenTable
from coterie.routing import Fleet, Semantic
from coterie.traces import ActivationTrace, TraceMeta
from coterie.types import Placement
from routed_fleet import RoutedFleet, Served, predict_with, rank_entries

LAYERS, EXPERTS, RANKS = 2, 8, 4


class Engine:
    """An engine that answers one token and notes the headers it was sent."""

    def __init__(self) -> None:
        self.headers: list[tuple[str, str | None]] = []
        self.failing: set[str] = set()

    async def complete(self, request: web.Request) -> web.Response:
        rank = request.headers.get("X-data-parallel-rank")  # as vLLM's servers read it
        self.headers.append((request.headers["X-Request-Id"], rank))
        if rank in self.failing:
            return web.json_response({"error": {"message": "the rank is gone"}}, status=503)
        return web.json_response({"choices": [{"token_ids": [1]}]})

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def table() -> TokenTable:
    """Learned from one request: token t asks for expert t in every layer."""
    tokens = np.arange(EXPERTS)
    meta = TraceMeta("model", EXPERTS, LAYERS, 1, tuple(range(LAYERS)))
    ids = np.repeat(tokens[:, None, None], LAYERS, axis=1)
    trace = ActivationTrace.from_arrays(meta, ids, np.array([0, EXPERTS]), token_ids=tokens.astype(np.int32))
    return TokenTable().fit(trace)


def serve(prompts: list[list[int]], failing: frozenset[str] = frozenset()) -> tuple[Engine, list[Served], RoutedFleet]:
    async def run() -> tuple[Engine, list[Served], RoutedFleet]:
        engine = Engine()
        engine.failing = set(failing)
        router = Semantic(Placement.linear(LAYERS, EXPERTS, RANKS))
        health = HealthSettings(failures=1, open_s=3600.0)
        async with (
            engine.serving() as url,
            RoutedFleet(
                [], rank_entries(url, RANKS), router, Fleet([8] * RANKS), predict_with(table()), health=health
            ) as fleet,
        ):
            served = [
                await fleet.serve("/v1/completions", {"prompt": prompt}, name=str(number))
                for number, prompt in enumerate(prompts)
            ]
        return engine, served, fleet

    return asyncio.run(run())


def test_the_chosen_rank_is_in_the_header() -> None:
    """Experts 2r and 2r + 1 are on rank r: each prompt of the first round goes to its own rank."""
    engine, served, _ = serve([[4, 5], [0, 0], [7], [2]])
    assert [one.problem for one in served] == [None] * 4
    assert engine.headers == [("0", "2"), ("1", "0"), ("2", "3"), ("3", "1")]
    assert [one.decoder for one in served] == [2, 0, 3, 1]
    assert served[0].reason.startswith("100% of its activations are local")


def test_rounds_share_requests_of_one_kind_over_all_ranks() -> None:
    engine, _, _ = serve([[0]] * 8)
    assert sorted(rank or "" for _, rank in engine.headers) == sorted("00112233")
    assert engine.headers[0] == ("0", "0")


def test_a_rank_that_fails_is_passed_over() -> None:
    engine, served, fleet = serve([[4], []], failing=frozenset({"2"}))
    assert [one.problem for one in served] == [None, None]
    assert engine.headers[0] == ("0", "2")
    assert fleet.fleet.alive.tolist() == [True, True, False, True]
    assert (fleet.counts.decode_failures, fleet.counts.retried) == (1, 1)
    assert all(rank != "2" for _, rank in engine.headers[1:])


def test_a_prompt_that_is_not_token_ids_is_not_guessed_at() -> None:
    predict = predict_with(table())
    assert predict({"prompt": "a text"}) is None
    assert predict({"prompt": []}) is None
    assert predict({"prompt": ["a", "b"]}) is None
    assert predict({"messages": []}) is None
    found = predict({"prompt": [3, 3, 5]})
    assert found is not None
    np.testing.assert_allclose(found[0], [0, 0, 0, 2, 0, 1, 0, 0], atol=1e-3)
