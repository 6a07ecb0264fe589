"""A routed fleet of real workers: right tokens, exact footprints, books that add up, and workers that die.

The last tests of the file end workers on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import numpy as np
import pytest

from coterie.answers.demo.loop import (
    DecodeWorker,
    LoopSettings,
    logged_steps,
    record_served,
    run_loop,
    serve_under,
    whole_blocks,
)
from coterie.engines.tiny import TINY, tiny_model_path
from coterie.engines.worker.embedded import embedded_fleet
from coterie.engines.worker.model import RequestRows
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.footprints import footprint
from coterie.footprints.positions import ENDED_S, ROWS
from coterie.gateway.fleet.health import HealthSettings
from coterie.gateway.proxy import RoutedFleet, Served
from coterie.models import model_from_config
from coterie.net.http_client import Client
from coterie.net.processes import ServerProcess
from coterie.prompts import load_prompts, take_in_turn
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request, RoundRobin, Router
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

    @property
    def prefill_urls(self) -> list[str]:
        return [server.url for server in self.prefill]


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


def routed(
    workers: Workers, router: Router | None = None, decoders: Sequence[str] = (), fleet: Fleet | None = None
) -> RoutedFleet:
    """A fleet of these workers, or of other ways to the decode workers. One failure opens a breaker, for a minute."""
    urls = decoders or [one.url for one in workers.decode]
    health = HealthSettings(failures=1, open_s=60.0, backoff_s=0.0)
    places = Fleet([16, 16]) if fleet is None else fleet
    return RoutedFleet(workers.prefill_urls, urls, router or RoundRobin(), places, key=workers.key, health=health)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def ended() -> None:
        async with asyncio.timeout(300):
            await work()

    asyncio.run(ended())


@contextlib.asynccontextmanager
async def clients(workers: Workers) -> AsyncIterator[list[Client]]:
    """Clients of the decode workers."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(one.url, key=workers.key)) for one in workers.decode]


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
        result = MODEL.step([RequestRows(tokens, start, BLOCKS, True)])
        experts.append(result.expert_ids)
        start += len(tokens)
        tokens = [int(result.logits[0].argmax())]
        out += tokens
        if out[-1] in MODEL.eos:
            break
    return out, np.concatenate(experts)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {**BODY, "prompt": prompt, **more}


async def serve_all(fleet: RoutedFleet, asked: list[list[int]]) -> list[Served]:
    return list(await asyncio.gather(*(fleet.serve(PATH, body(prompt)) for prompt in asked)))


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


class Gate:
    """A relay before a worker: it says when it is first asked, and passes nothing on before `go`."""

    def __init__(self, url: str, go: asyncio.Event | None = None) -> None:
        self.asked = asyncio.Event()
        self.url = ""
        self._target, self._go = urlsplit(url), go
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the connections to end: their clients are closed by now."""
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.asked.set()
        if self._go is not None:
            await self._go.wait()
        with contextlib.suppress(OSError):
            back, there = await asyncio.open_connection(self._target.hostname, self._target.port)
            await asyncio.gather(self._copy(reader, there), self._copy(back, writer))
        await _end(writer)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        await _end(sink)


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def test_tokens_footprints_and_the_fleet_in_between(workers: Workers) -> None:
    asked = prompts(8)

    async def work() -> None:
        all_routed = asyncio.Event()
        router = Watching([], all_routed, len(asked))
        places = Fleet([4, 4], np.full((2, 8 * 32), 0.125))
        async with (
            Gate(workers.decode[0].url, all_routed) as a,
            Gate(workers.decode[1].url, all_routed) as b,
            routed(workers, router, [a.url, b.url], places) as fleet,
        ):
            router.seen.clear()  # what it was tried with
            served = await serve_all(fleet, asked)
        assert [one.problem for one in served] == [None] * 8
        for one, prompt in zip(served, asked, strict=True):
            tokens, experts = alone(prompt)
            assert one.tokens == tokens
            assert one.footprint is not None
            np.testing.assert_array_equal(one.footprint.counts, footprint(experts[: len(prompt)], 32))
        assert sorted(one.decoder for one in served if one.decoder is not None) == [0] * 4 + [1] * 4
        assert [sum(running) for _, running in router.seen] == list(range(8)), "a request is admitted once routed"
        assert all(request.prompt_tokens == len(asked[number]) for number, (request, _) in _by_length(router, asked))
        assert {request.id for request, _ in router.seen} == {one.name for one in served}
        assert fleet.fleet is places
        assert fleet.fleet.places.tolist() == [4, 4]
        assert fleet.fleet.running.tolist() == [0, 0]
        assert fleet.fleet.context_tokens.tolist() == [0, 0]
        assert (fleet.fleet.missed == 255).all(), "nobody is left"
        counts = fleet.counts
        assert (counts.served, counts.footprints, counts.incomplete, counts.failed, counts.retried) == (8, 8, 0, 0, 0)
        assert (counts.fallbacks, counts.damaged, counts.handoffs) == (0, 0, 8)

    run(work)


def _by_length(router: Watching, asked: list[list[int]]) -> list[tuple[int, tuple[Request, list[int]]]]:
    """Each routed request beside a prompt of its length: names are the proxy's own."""
    lengths = [len(prompt) for prompt in asked]
    return [(lengths.index(entry[0].prompt_tokens), entry) for entry in router.seen]


def test_a_refused_request_is_its_own_fault(workers: Workers) -> None:
    async def work() -> None:
        async with routed(workers) as fleet:
            bad = await fleet.serve(PATH, body(prompts(1)[0], n=2))
            assert "HTTP 400" in str(bad.problem)
            with pytest.raises(ConfigError, match="was not answered"):
                _ = bad.tokens
            good = await fleet.serve(PATH, body(prompts(1)[0]), name="mine")
            assert (good.name, good.problem) == ("mine", None)
            assert fleet.fleet.alive.all()
            assert fleet.prefill.keeper.is_open("prefill-0")
            assert (fleet.counts.failed, fleet.counts.served) == (1, 1)

    run(work)


def test_recorded_counts_are_those_of_each_request_alone(workers: Workers) -> None:
    asked = prompts(6)

    async def work() -> None:
        async with clients(workers) as decoders:
            recorded, _, known = await record_served(
                workers.prefill_urls, decoders, workers.described, asked, BODY, 4, key=workers.key
            )
        truth = [(prompt, *alone(prompt)) for prompt in asked]
        truth = [one for one in truth if len(one[1]) > 1]
        assert len(known.prefill) == len(truth)
        for row, (prompt, _, experts) in enumerate(truth):
            np.testing.assert_array_equal(known.prefill[row], footprint(experts[: len(prompt)], 32))
            np.testing.assert_array_equal(known.decode[row], footprint(experts[len(prompt) :], 32))
        assert (known.model, known.top_k, known.halved) == (TINY, 4, False)
        assert len(recorded.served) == len(asked)

    run(work)


def test_distinct_experts_are_counted_in_the_workers(workers: Workers) -> None:
    """One request at a time: every step touches the 4 experts of one token."""
    asked = prompts(3)

    async def work() -> None:
        async with clients(workers) as decoders, routed(workers) as fleet:
            found = await serve_under(fleet, "round_robin", decoders, workers.described, asked, BODY, 1)
            assert found.answers == [alone(prompt)[0] for prompt in asked]
            assert (found.rows_per_step, found.distinct_per_step) == (1.0, 4.0)
            assert len(found.steps) == found.output_tokens - 3
            assert (np.diff(found.log[0][:, ENDED_S]) > 0).all()
            assert found.per_worker == [2, 1]
            assert found.step_ms is not None
            assert found.step_ms > 0
            before = (await logged_steps(decoders[0], workers.described[0])).total
            await fleet.serve(PATH, body(asked[0]))
            away = await logged_steps(decoders[0], workers.described[0], before)
            assert away.rows[:, ROWS].sum() in (0, len(found.answers[0]) - 1)
            assert away.total == before + len(away.rows)
            with pytest.raises(UnavailableError, match=r"steps after 99999 were asked for; of \d+"):
                await logged_steps(decoders[0], workers.described[0], 99999)
            for after in ("x", "-1", "1.5", "", "9" * 5000):
                status, text = await decoders[0].call("GET", f"/steps?after={after}")
                assert status == 400, after
                assert json.loads(text)["error"]["param"] == "after"
            with pytest.raises(InputError, match="position store"):
                await logged_steps(decoders[0], DecodeWorker(decoders[0].url, "", Path("no-position-store")))

    run(work)


def test_the_loop_closes(workers: Workers) -> None:
    settings = LoopSettings(in_flight=4, max_tokens=8, routers=("round_robin", "locality_band", "latency_aware"))
    chosen = take_in_turn(load_prompts(), 40)
    result = asyncio.run(run_loop(workers.prefill_urls, workers.described, chosen, settings, key=workers.key))
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

    async def work() -> None:
        async with (
            Gate(workers.decode[1].url) as victim,
            routed(workers, decoders=[workers.decode[0].url, victim.url]) as fleet,
        ):
            running = [asyncio.create_task(fleet.serve(PATH, body(prompt))) for prompt in asked]
            await victim.asked.wait()
            workers.decode[1].kill()
            served = await asyncio.gather(*running)
            assert [one.tokens for one in served] == [alone(prompt)[0] for prompt in asked]
            assert fleet.fleet.alive.tolist() == [True, False]
            assert fleet.counts.retried == fleet.counts.decode_failures > 0
            assert "decode-1" in fleet.counts.problems[0]
            assert fleet.fleet.running.tolist() == [0, 0]
            assert {(await fleet.serve(PATH, body(asked[0]))).decoder for _ in range(3)} == {0}
            failures = fleet.counts.decode_failures
            later(fleet, 100)  # it is asked again, and is still dead
            assert {(await fleet.serve(PATH, body(asked[0]))).decoder for _ in range(3)} == {0}
            assert (fleet.counts.decode_failures, fleet.fleet.alive.tolist()) == (failures + 1, [True, False])
            await asyncio.to_thread(workers.decode[1].start, 120)
            later(fleet, 1000)
            assert {(await fleet.serve(PATH, body(asked[0]))).decoder for _ in range(2)} == {0, 1}
            assert (fleet.counts.failed, fleet.fleet.alive.tolist()) == (0, [True, True])

    run(work)


def later(fleet: RoutedFleet, seconds: float) -> None:
    """Move the breakers' clock on."""
    before = fleet.decode.clock
    fleet.decode.clock = lambda: before() + seconds


def test_without_prefill_decoders_compute_prompts_and_without_decoders_nothing_is_served(workers: Workers) -> None:
    prompt = prompts(1)[0]

    async def work() -> None:
        async with routed(workers) as fleet:
            workers.prefill[0].kill()
            for _ in range(2):  # it is not asked again while its breaker is open: decode workers do without
                one = await fleet.serve(PATH, body(prompt))
                assert (one.tokens, one.footprint) == (alone(prompt)[0], None)
                assert (fleet.counts.prefill_failures, fleet.counts.handoffs) == (1, 0)
                assert not fleet.prefill.keeper.is_open("prefill-0")
            for server in workers.decode:
                server.kill()
            gone = await fleet.serve(PATH, body(prompt))
            assert "cannot be reached" in str(gone.problem)
            assert (gone.body, gone.decoder) == (None, None)
            assert (fleet.counts.decode_failures, fleet.counts.retried) == (7, 6)
            assert (fleet.counts.served, fleet.counts.failed) == (2, 1)
            assert fleet.fleet.running.tolist() == [0, 0]

    run(work)
