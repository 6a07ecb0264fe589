"""The proxy on real workers: right tokens, exact footprints, a fleet that adds up, and workers that die.

The last tests of the file end workers on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.embedded import embedded_fleet
from coterie.engines.worker.model import Rows
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.evaluation.demo.loop import DecodeWorker, LoopSettings, record, run_loop, serve, steps_of, whole_blocks
from coterie.footprints import footprint
from coterie.footprints.positions import ENDED_S, ROWS
from coterie.gateway.proxy import RoutedFleet, Served
from coterie.models import model_from_config
from coterie.net.http_client import Answer, Client
from coterie.net.processes import ServerProcess
from coterie.prompts import load_prompts, take_in_turn
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request, RoundRobin
from routed_prediction import predict

PATH = "/v1/completions"
TOKENS = 6
MODEL = NumpyModel(tiny_model_path(), num_blocks=64, block_size=16)
BODY = {"model": TINY, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
BLOCKS = list(range(20))


class Workers(NamedTuple):
    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    described: list[DecodeWorker]
    key: str | None


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("workers")
    made = embedded_fleet(["prefill", "decode", "decode"], folder)
    servers, access = [one.process for one in made], made[0].access
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.push(server)
            server.launch()
        for server in servers:
            server.wait_ready(120)
        described = [DecodeWorker(one.url, one.expert_events, secret=access.secret) for one in made[1:]]
        yield Workers(servers[:1], servers[1:], described, access.key)


class Clients(NamedTuple):
    prefill: list[Client]
    decode: list[Client]


def with_clients(workers: Workers, work: Callable[[Clients], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with contextlib.AsyncExitStack() as stack:
            groups = []
            for group in (workers.prefill, workers.decode):
                groups.append(
                    [await stack.enter_async_context(Client(server.url, key=workers.key)) for server in group]
                )
            return await work(Clients(*groups))

    return asyncio.run(run())


def prompts(count: int) -> list[list[int]]:
    texts = [prompt.prompt for prompt in take_in_turn(load_prompts(), 3 * count)]
    ids = (MODEL.tokenizer.encode(MODEL.tokenizer.apply_chat_template([{"role": "user", "content": t}])) for t in texts)
    return whole_blocks([one for one in ids if len(one) < 120], 16)[:count]


def alone(prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of one request by itself, and the experts [token, layer, k] of all that was computed."""
    tokens, start = prompt, 0
    out: list[Any] = []
    experts: list[Any] = []
    while len(out) < TOKENS:
        result = MODEL.step([Rows(tokens, start, BLOCKS, True)])
        experts.append(result.expert_ids)
        start += len(tokens)
        tokens = [int(result.logits[0].argmax())]
        out += tokens
        if out[-1] in MODEL.eos:
            break
    return out, np.concatenate(experts)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {**BODY, "prompt": prompt, **more}


async def serve_all(proxy: RoutedFleet, asked: list[list[int]]) -> list[Served]:
    return list(await asyncio.gather(*(proxy.serve(PATH, body(prompt)) for prompt in asked)))


class Watching(NamedTuple):
    """Shortest queue, and what it was asked. Sets `all_routed` at request number `expected`."""

    seen: list[tuple[Request, list[int]]]
    all_routed: asyncio.Event
    expected: int

    def route(self, request: Request, fleet: Fleet) -> Decision:
        self.seen.append((request, fleet.running.tolist()))
        if len(self.seen) == self.expected:
            self.all_routed.set()
        decision = JoinShortestQueue().route(request, fleet)
        return decision._replace(profile=np.full(fleet.missed.shape[1], 0.25, np.float32))


class Gated(Client):
    """A worker's client that says when it is first asked, and sends nothing before `go`. Both without a clock."""

    def __init__(self, client: Client, go: asyncio.Event | None = None) -> None:
        super().__init__(client.url)
        self.asked = asyncio.Event()
        self._client, self._go = client, go

    async def post(self, *args: Any, **options: Any) -> Answer:
        self.asked.set()
        if self._go is not None:
            await self._go.wait()
        return await self._client.post(*args, **options)

    async def well(self) -> bool:
        return await self._client.well()


def test_tokens_footprints_and_the_fleet_in_between(workers: Workers) -> None:
    asked = prompts(8)

    async def work(clients: Clients) -> None:
        all_routed = asyncio.Event()
        router = Watching([], all_routed, len(asked))
        decoders = [Gated(client, all_routed) for client in clients.decode]
        proxy = RoutedFleet(clients.prefill, decoders, router, Fleet([4, 4], np.full((2, 8 * 32), 0.125)))
        served = await serve_all(proxy, asked)
        assert [one.problem for one in served] == [None] * 8
        for one, prompt in zip(served, asked, strict=True):
            tokens, experts = alone(prompt)
            assert one.tokens == tokens
            assert one.footprint is not None
            np.testing.assert_array_equal(one.footprint.counts, footprint(experts[: len(prompt)], 32))
        assert sorted(one.decoder for one in served if one.decoder is not None) == [0] * 4 + [1] * 4
        assert [sum(running) for _, running in router.seen] == list(range(8)), "a request is admitted once routed"
        assert all(request.prompt_tokens == len(asked[number]) for number, (request, _) in _by_length(router, asked))
        assert proxy.fleet.running.tolist() == [0, 0]
        assert proxy.fleet.context_tokens.tolist() == [0, 0]
        assert (proxy.fleet.missed == 255).all(), "nobody is left"
        counts = proxy.counts
        assert (counts.served, counts.footprints, counts.incomplete, counts.failed, counts.retried) == (8, 8, 0, 0, 0)

    with_clients(workers, work)


def _by_length(router: Watching, asked: list[list[int]]) -> list[tuple[int, tuple[Request, list[int]]]]:
    """Each routed request beside a prompt of its length: names are the proxy's own."""
    lengths = [len(prompt) for prompt in asked]
    return [(lengths.index(entry[0].prompt_tokens), entry) for entry in router.seen]


def test_a_refused_request_is_its_own_fault(workers: Workers) -> None:
    async def work(clients: Clients) -> None:
        proxy = RoutedFleet(*clients, RoundRobin(), Fleet([16, 16]))
        bad = await proxy.serve(PATH, body(prompts(1)[0], n=2))
        assert "HTTP 400" in str(bad.problem)
        with pytest.raises(ConfigError, match="was not answered"):
            _ = bad.tokens
        good = await proxy.serve(PATH, body(prompts(1)[0]), name="mine")
        assert (good.name, good.problem) == ("mine", None)
        assert proxy.fleet.alive.all()
        assert proxy.prefill_alive == [True]
        assert (proxy.counts.failed, proxy.counts.served) == (1, 1)

    with_clients(workers, work)


def test_a_fleet_needs_both_kinds() -> None:
    with pytest.raises(ConfigError, match="0 prefill and 1 decode workers: at least one of each, or predict"):
        RoutedFleet([], [Client("http://127.0.0.1:1")], RoundRobin(), Fleet([16]))
    with pytest.raises(ConfigError, match="data_parallel_rank=-1 must be at least 0"):
        Client("http://127.0.0.1:1", data_parallel_rank=-1)


def test_recorded_counts_are_those_of_each_request_alone(workers: Workers) -> None:
    asked = prompts(6)

    async def work(clients: Clients) -> None:
        run, _, known = await record(*clients, workers.described, asked, BODY, 4)
        truth = [(prompt, *alone(prompt)) for prompt in asked]
        truth = [one for one in truth if len(one[1]) > 1]
        assert len(known.prefill) == len(truth)
        for row, (prompt, _, experts) in enumerate(truth):
            np.testing.assert_array_equal(known.prefill[row], footprint(experts[: len(prompt)], 32))
            np.testing.assert_array_equal(known.decode[row], footprint(experts[len(prompt) :], 32))
        assert (known.model, known.top_k, known.halved) == (TINY, 4, False)
        assert len(run.served) == len(asked)

    with_clients(workers, work)


def test_distinct_experts_are_counted_in_the_workers(workers: Workers) -> None:
    """One request at a time: every step touches the 4 experts of one token."""
    asked = prompts(3)

    async def work(clients: Clients) -> None:
        proxy = RoutedFleet(*clients, RoundRobin(), Fleet([16, 16]))
        run = await serve(proxy, "round_robin", clients.decode, workers.described, asked, BODY, 1)
        assert run.answers == [alone(prompt)[0] for prompt in asked]
        assert (run.rows_per_step, run.distinct_per_step) == (1.0, 4.0)
        assert len(run.steps) == run.output_tokens - 3
        assert (np.diff(run.log[0][:, ENDED_S]) > 0).all()
        assert run.per_worker == [2, 1]
        assert run.step_ms is not None
        assert run.step_ms > 0
        before = (await steps_of(clients.decode[0], workers.described[0])).total
        await proxy.serve(PATH, body(asked[0]))
        away = await steps_of(clients.decode[0], workers.described[0], before)
        assert away.rows[:, ROWS].sum() in (0, len(run.answers[0]) - 1)
        assert away.total == before + len(away.rows)
        with pytest.raises(UnavailableError, match=r"steps after 99999 were asked for; of \d+"):
            await steps_of(clients.decode[0], workers.described[0], 99999)
        for after in ("x", "-1", "1.5", "", "9" * 5000):
            status, text = await clients.decode[0].call("GET", f"/steps?after={after}")
            assert status == 400, after
            assert json.loads(text)["error"]["param"] == "after"
        with pytest.raises(InputError, match="position store"):
            await steps_of(clients.decode[0], DecodeWorker(clients.decode[0].url, "", Path("no-position-store")))

    with_clients(workers, work)


def test_the_loop_closes(workers: Workers) -> None:
    settings = LoopSettings(in_flight=4, max_tokens=8, routers=("round_robin", "locality_band", "latency_aware"))
    chosen = take_in_turn(load_prompts(), 40)
    urls = [server.url for server in workers.prefill]
    result = asyncio.run(run_loop(urls, workers.described, chosen, settings, key=workers.key))
    assert result.differing() == 0
    assert [run.router for run in result.runs] == list(settings.routers)
    assert len({run.output_tokens for run in result.runs}) == 1
    assert all(run.counts.footprints == run.requests for run in result.runs)
    assert all(4 <= run.distinct_per_step <= 4 * run.rows_per_step for run in result.runs)
    first = result.runs[0]
    assert (result.saving_pct(first), result.saving_at_equal_rows_pct(first)) == pytest.approx((0, 0), abs=1e-9)
    assert result.fitted.workers == 2
    line, predictions = predict(result, model_from_config(tiny_model_path()), settings)
    assert [said.router for said in predictions] == list(settings.routers)
    for said in predictions:  # how near it is, is for a benchmark: other work on the machine decides
        for figures in (said.measured, said.predicted):
            assert 1 <= figures.rows_per_step <= 8
            assert 4 <= figures.distinct_per_step <= 4 * figures.rows_per_step
            assert 0 < figures.token_ms_p50 <= figures.token_ms_p99
        assert said.predicted.token_ms_p50 >= 1e3 * line.fixed_s / max(line.speeds)
    with pytest.raises(ConfigError, match="calibrate"):
        LoopSettings(calibrate=1.0)


def test_a_decoder_killed_in_the_middle_and_back_again(workers: Workers) -> None:
    asked = prompts(16)

    async def work(clients: Clients) -> None:
        victim = Gated(clients.decode[1])
        proxy = RoutedFleet(clients.prefill, [clients.decode[0], victim], RoundRobin(), Fleet([16, 16]))
        running = [asyncio.create_task(proxy.serve(PATH, body(prompt))) for prompt in asked]
        await victim.asked.wait()
        workers.decode[1].kill()
        served = await asyncio.gather(*running)
        assert [one.tokens for one in served] == [alone(prompt)[0] for prompt in asked]
        assert proxy.fleet.alive.tolist() == [True, False]
        assert proxy.counts.retried == proxy.counts.decode_failures > 0
        assert proxy.fleet.running.tolist() == [0, 0]
        assert (await proxy.serve(PATH, body(asked[0]))).decoder == 0
        assert await proxy.look() == 0
        await asyncio.to_thread(workers.decode[1].start, 120)
        assert await proxy.look() == 1
        assert {(await proxy.serve(PATH, body(asked[0]))).decoder for _ in range(2)} == {0, 1}

    with_clients(workers, work)


def test_without_prefill_decoders_compute_prompts_and_without_decoders_nothing_is_served(workers: Workers) -> None:
    prompt = prompts(1)[0]

    async def work(clients: Clients) -> None:
        proxy = RoutedFleet(*clients, RoundRobin(), Fleet([16, 16]))
        workers.prefill[0].kill()
        one = await proxy.serve(PATH, body(prompt))
        assert (one.tokens, one.footprint) == (alone(prompt)[0], None)
        assert (proxy.counts.prefill_failures, proxy.prefill_alive) == (1, [False])
        for server in workers.decode:
            server.kill()
        gone = await proxy.serve(PATH, body(prompt))
        assert gone.problem is not None
        assert (proxy.counts.decode_failures, proxy.counts.retried) == (2, 1)
        assert "none of the 2 workers is alive" in str((await proxy.serve(PATH, body(prompt))).problem)

    with_clients(workers, work)
