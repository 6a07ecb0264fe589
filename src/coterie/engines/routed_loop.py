"""Record → fit → route, closed on a running fleet: what it learns from requests it served, it routes others by.

Calibration requests go through the fleet under round robin. Their prefill footprints come with the answers, their
decode footprints from the workers' expert events; together they are a :class:`Calibration`. Then the same test
requests, none of them seen before, are served under one router after another.

Distinct experts per decode step are counted inside the workers, never estimated here: by the reference worker's
counters, or by the slot store of vLLM's plugin. The latter counts every row of a step, so prompts are cut to whole KV
blocks and a token or two (:func:`whole_blocks`): a decode worker then loads all but those from the prefill worker, and
nearly every row it computes makes one output token. :func:`serve` holds the workers' row counts against the tokens that
came out, and refuses to report if they do not agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.costs.step import Batch, StepModel
from coterie.engines.http_client import completion_path, served_model
from coterie.engines.routed_fleet import FleetCounts, RoutedFleet, Served, WorkerClient
from coterie.engines.vllm.subscriber import Subscriber
from coterie.engines.worker.metrics import PREFIX
from coterie.errors import ConfigError, InputError, UnavailableError
from coterie.footprints import footprint
from coterie.footprints.slots import SlotStore
from coterie.models import get_model
from coterie.prompts import Prompt
from coterie.routing import FittedRouting, LatencyAware, Router, StepPrices, routers
from coterie.routing.fitted import Calibration
from coterie.wire.expert_events import RequestExperts
from coterie.wire.handoff import prefill_body

Progress = Callable[[str, int, int], None]

MOST_PROMPT_TOKENS = 200
"""Longer prompts are left out: all workers of a test fleet must take every one."""
EVENTS_S = 20.0
"""How long the last expert event may take."""
REFERENCE_SHAPE = "gpt-oss-20b"
"""Its layers have 32 experts and take 4, as coterie-tiny's: what is counted in those is what these would stream."""


@dataclass(frozen=True, slots=True)
class DecodeWorker:
    url: str
    events: str
    """ZMQ endpoint of its expert events."""
    store: Path | None = None
    """vLLM: file of its slot store. A reference worker counts in /metrics."""


class StepTotals(NamedTuple):
    """What a worker has counted since it started."""

    steps: int
    rows: int
    """Tokens of those steps."""
    distinct: float
    """Distinct experts of a layer, summed over steps (mean over layers)."""
    seconds: float
    """In forward passes: CPU time where the worker counts it, else by the clock; 0 where it counts neither."""

    def since(self, before: StepTotals) -> StepTotals:
        return StepTotals(
            self.steps - before.steps, self.rows - before.rows, self.distinct - before.distinct,
            self.seconds - before.seconds,
        )  # fmt: skip


class RouterRun(NamedTuple):
    """One router's run; made by :func:`serve`."""

    router: str
    requests: int
    output_tokens: int
    steps: int
    """Decode steps of all workers."""
    rows_per_step: float
    distinct_per_step: float
    """Distinct experts of a layer in a decode step, mean over layers, steps and workers."""
    distinct_per_token: float
    """The same over the step's rows: experts streamed for each token."""
    step_ms: float | None
    """Mean of the forward passes as the workers measured them; None where they do not."""
    wall_s: float
    per_worker: list[int]
    """[worker] requests."""
    answers: list[list[int]]
    """[request] token ids."""
    counts: FleetCounts


@dataclass(frozen=True, slots=True)
class LoopSettings:
    in_flight: int = 8
    """Requests per decode worker that are under way at once."""
    max_tokens: int = 48
    """Of an answer, at most; it may end by itself before."""
    block_size: int = 16
    """Of the workers' KV cache."""
    over: int = 1
    """Tokens of a prompt past whole blocks, which its decode worker computes. vLLM's ExampleConnector needs 2: it looks
    for the blocks of a prompt without its last token, and keeps those of the whole."""
    calibrate: float = 0.4
    """Share of the requests that the router is fitted on; the others are served."""
    routers: tuple[str, ...] = ("round_robin", "join_shortest_queue", "latency_aware")
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("in_flight", "max_tokens", "block_size", "over"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.calibrate < 1:
            raise ConfigError(f"calibrate={self.calibrate} must be between 0 and 1")
        for name in self.routers:
            _ = routers[name]  # an unknown one raises, with those that are known


class LoopResult(NamedTuple):
    runs: list[RouterRun]
    calibrated: int
    """Requests the router was fitted on."""
    fitted: FittedRouting
    fit_s: float
    context: float
    """Cached tokens of a request in the middle of its answer, on average."""
    usual: NDArray[np.float32]
    """[layer, expert] probability that a token of a calibration request activates it in decode."""

    def saving_pct(self, run: RouterRun) -> float:
        """Distinct experts per step below the first run's."""
        return 100 * (1 - run.distinct_per_step / self.runs[0].distinct_per_step)

    def saving_at_equal_rows_pct(self, run: RouterRun) -> float:
        """The same with what smaller batches alone would save taken out.

        Steps of requests put together at random touch ``sum(1 - (1 - usual)^rows)`` experts: the first run's number is
        scaled to the run's rows per step by that.
        """
        mixed = [float((1 - (1 - self.usual) ** one.rows_per_step).sum()) for one in (self.runs[0], run)]
        return 100 * (1 - run.distinct_per_step / (self.runs[0].distinct_per_step * mixed[1] / mixed[0]))

    def differing(self) -> int:
        """Requests that some router's run answered with other tokens than the first's."""
        return sum(
            any(run.answers[request] != first for run in self.runs[1:])
            for request, first in enumerate(self.runs[0].answers)
        )


async def run_loop(
    prefill: Sequence[str],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Prompt],
    settings: LoopSettings = LoopSettings(),  # noqa: B008
    report: Progress | None = None,
) -> LoopResult:
    """The whole: tokenise, record, fit, serve under every router."""
    report = report or (lambda *_: None)
    rng = np.random.default_rng(settings.seed)
    async with _clients([*prefill, *(decoder.url for decoder in decoders)]) as clients:
        first, rest = clients[: len(prefill)], clients[len(prefill) :]
        model = await served_model(first[0])
        tokens = await tokenise(first[0], model, prompts, report)
        kept = whole_blocks(tokens, settings.block_size, settings.over)
        order = rng.permutation(len(kept))
        split = round(settings.calibrate * len(kept))
        learn, test = ([kept[int(i)] for i in part] for part in (order[:split], order[split:]))
        many = settings.in_flight * len(decoders)
        known = await record(first, rest, decoders, learn, _body(model, settings), many, report)
        started = time.perf_counter()
        report("Fitting the router", 0, 1)
        fitted = await asyncio.to_thread(FittedRouting.fit, known, len(decoders), rng, batch=settings.in_flight)
        fit_s = time.perf_counter() - started
        runs: list[RouterRun] = []
        for name in settings.routers:
            proxy = RoutedFleet(
                first, rest, make_router(name, fitted, settings.in_flight),
                places=max(2 * settings.in_flight, 16), cells=fitted.num_layers * fitted.num_experts,
                usual=fitted.profiles,
            )  # fmt: skip
            body = _body(model, settings)
            if not await _forget(clients) and not runs:
                await _warm(first, test, body, many, report)
            runs.append(await serve(proxy, name, rest, decoders, test, body, many, settings.over, report))
    context = (sum(map(len, test)) + runs[0].output_tokens / 2) / len(test)
    usual = known.probabilities[1].mean(axis=0).reshape(fitted.num_layers, fitted.num_experts)
    return LoopResult(runs, len(known.prefill), fitted, fit_s, context, usual)


def make_router(name: str, fitted: FittedRouting, in_flight: int) -> Router:
    """A registered router; `latency_aware` with the H200's prices of a layer of the reference shape, whatever depth."""
    settings: dict[str, Any] = {}
    make = routers[name]
    if "fitted" in getattr(make, "__dataclass_fields__", {}):
        settings["fitted"] = fitted
    if make is LatencyAware:
        spec = get_model(REFERENCE_SHAPE)
        prices = StepPrices.of(step_model(spec, "h200"), in_flight)
        depth = spec.num_moe_layers / fitted.num_layers  # each layer here stands for so many of those
        settings["prices"] = StepPrices(
            prices.fixed_us, prices.expert_us * depth, prices.request_us, prices.context_us, prices.prefill_us,
            prices.output_tokens,
        )  # fmt: skip
    return make(**settings)


def predicted_step_ms(distinct: float, rows: float, context: float, model: StepModel) -> float:
    """Of a decode step of `rows` requests with `context` cached tokens each, so many experts touched in every layer.

    Between whole numbers of experts and rows, on the straight line between their times.
    """
    spec = model.spec

    def at(active: int, requests: int) -> float:
        load = np.zeros((spec.num_moe_layers, spec.num_experts), np.int64)
        active = min(max(active, spec.top_k), requests * spec.top_k, spec.num_experts)
        share, more = divmod(requests * spec.top_k, active)
        load[:, :active] = share
        load[:, :more] += 1
        return 1e3 * model.step(load, Batch(decode_requests=requests, decode_context=round(requests * context))).total_s

    def between(low: float, high: float, at: float) -> float:
        return low + (high - low) * (at - math.floor(at))

    def of(requests: int) -> float:
        return between(at(math.floor(distinct), requests), at(math.floor(distinct) + 1, requests), distinct)

    return between(of(max(1, math.floor(rows))), of(max(1, math.floor(rows)) + 1), max(rows, 1.0))


async def tokenise(
    client: WorkerClient, model: str, prompts: Sequence[Prompt], report: Progress | None = None
) -> list[list[int]]:
    """Prompts as the worker's chat template and tokenizer make them; those it finds too long are left out."""
    gate, done = asyncio.Semaphore(8), 0

    async def one(number: int, prompt: Prompt) -> list[int]:
        nonlocal done
        body = {
            "model": model, "messages": [{"role": "user", "content": prompt.prompt}], "max_tokens": 1,
            "temperature": 0, "return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True},
        }  # fmt: skip
        async with gate:
            reply = await client.ask(completion_path(chat=True), body, f"tokenise-{number}")
        if reply.worker_failed:
            raise UnavailableError(str(reply.problem))
        done += 1
        if report is not None:
            report("Tokenising prompts", done, len(prompts))
        return [] if reply.body is None else list(reply.body["prompt_token_ids"])

    found = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    return [tokens for tokens in found if 0 < len(tokens) <= MOST_PROMPT_TOKENS]


def whole_blocks(prompts: Sequence[Sequence[int]], block_size: int, over: int = 1) -> list[list[int]]:
    """Cut each to a multiple of `block_size`, and `over` more; without doubles.

    What all prompts end with (a chat template's last words) stays: tokens before it go. Too short ones are left out.
    """
    tail = 0
    if len(prompts) > 1:
        shortest = min(len(prompt) for prompt in prompts)
        while tail < shortest and len({prompt[-tail - 1] for prompt in prompts}) == 1:
            tail += 1
    out: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        excess = (len(prompt) - over) % block_size
        end = len(prompt) - tail
        if len(prompt) >= block_size + over and excess <= end:
            out[(*prompt[: end - excess], *prompt[end:])] = None
    return [list(prompt) for prompt in out]


async def record(
    prefill: Sequence[WorkerClient],
    clients: Sequence[WorkerClient],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    report: Progress | None = None,
) -> Calibration:
    """Serve under round robin, and count each request's experts before and after it was routed.

    Requests whose answer was one token have no decode to learn from, and are left out.
    """
    proxy = RoutedFleet(prefill, clients, routers["round_robin"](), places=in_flight)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(Subscriber(decoder.events)) for decoder in decoders]
        for client, listener in zip(clients, listeners, strict=True):
            await _hear(client, listener, {**body, "max_tokens": 2, "prompt": list(prompts[0])})
        served = await _serve_all(proxy, "Recording", prompts, body, in_flight, report)
        wanted = {one.name for one in served if len(one.tokens) > 1}
        events: dict[str, RequestExperts] = {}
        for listener in listeners:
            events |= await asyncio.to_thread(_events, listener, wanted)
    missing = [one.name for one in served if one.name in wanted and (one.name not in events or one.footprint is None)]
    if missing:
        raise UnavailableError(f"{len(missing)} of {len(wanted)} recorded requests came without footprint or event")
    before, after = [], []
    for one in served:
        if one.name in wanted and one.footprint is not None:
            event = events[one.name]
            decoded = event.seen() & (np.arange(len(event.tokens())) >= event.prompt_tokens)
            before.append(one.footprint.counts)
            after.append(footprint(event.ids()[decoded], event.num_experts))
    if not before:
        raise InputError(f"none of {len(prompts)} answers had more than one token: nothing to learn from")
    return Calibration(
        np.asarray(before, np.uint32), np.asarray(after, np.uint32), None, np.arange(len(before)), False,
        event.model, event.top_k,
    )  # fmt: skip


async def serve(
    proxy: RoutedFleet,
    name: str,
    clients: Sequence[WorkerClient],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    over: int = 1,
    report: Progress | None = None,
) -> RouterRun:
    """One router's run over the test requests; raises where the workers' counts are not of decode alone."""
    before = [await totals(client, decoder) for client, decoder in zip(clients, decoders, strict=True)]
    started = time.perf_counter()
    served = await _serve_all(proxy, f"Serving under {name}", prompts, body, in_flight, report)
    wall_s = time.perf_counter() - started
    after = [await totals(client, decoder) for client, decoder in zip(clients, decoders, strict=True)]
    counted = [now.since(then) for now, then in zip(after, before, strict=True)]
    steps, rows = sum(one.steps for one in counted), sum(one.rows for one in counted)
    answers = [one.tokens for one in served]
    tokens = sum(map(len, answers))
    # A reference worker counts decode rows, the first of which makes the second token; vLLM's store counts all rows.
    counts_all = [decoders[one.decoder or 0].store is not None for one in served]
    expected = tokens + sum(over - 1 if all_rows else -1 for all_rows in counts_all)
    if rows != expected and not proxy.counts.retried:
        raise UnavailableError(
            f"the decode workers computed {rows} rows, {expected} were expected (by worker: "
            f"{[one.rows for one in counted]}): some computed prompts, or served others; {proxy.counts}"
        )
    distinct, seconds = sum(one.distinct for one in counted), sum(one.seconds for one in counted)
    per_worker = np.bincount([one.decoder or 0 for one in served], minlength=len(decoders))
    return RouterRun(
        name, len(served), tokens, steps, rows / max(1, steps), distinct / max(1, steps), distinct / max(1, rows),
        1e3 * seconds / steps if seconds and steps else None, wall_s, per_worker.tolist(), answers, proxy.counts,
    )  # fmt: skip


async def totals(client: WorkerClient, decoder: DecodeWorker) -> StepTotals:
    """What a decode worker counted so far."""
    if decoder.store is not None:
        store = SlotStore.attach(decoder.store)
        steps, rows, distinct = store.totals
        return StepTotals(steps, rows, distinct / store.shape.num_layers, 0.0)
    status, text = await client.call("GET", "/metrics")
    found = {
        (name, label or ""): float(value)
        for name, label, value in re.findall(
            rf'^{PREFIX}(\w+)\{{(?:[^}}]*,(?:phase|over_layers)="(\w+)"|[^}}]*)\}} (\S+)$', text, re.MULTILINE
        )
    }
    try:
        return StepTotals(
            int(found["distinct_experts_steps_total", ""]), int(found["step_rows_total", "decode"]),
            found["distinct_experts_sum", "mean"],
            found["step_cpu_seconds_total", ""] or found["step_seconds_total", ""],
        )  # fmt: skip
    except KeyError as error:
        raise UnavailableError(
            f"{client.url}/metrics (HTTP {status}) lacks {error.args[0][0]}: not a reference worker, and no slot store"
            " is named"
        ) from None


async def _serve_all(
    proxy: RoutedFleet,
    what: str,
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    report: Progress | None,
) -> list[Served]:
    """In their order, so many at a time; one that fails raises."""
    gate, done = asyncio.Semaphore(in_flight), 0

    async def one(number: int, prompt: Sequence[int]) -> Served:
        nonlocal done
        async with gate:
            # Dashes are for vLLM, which puts them around the name it is given.
            name = f"{what.split()[-1]}.{number}"
            served = await proxy.serve(completion_path(chat=False), {**body, "prompt": list(prompt)}, name)
        if served.problem is not None:
            raise UnavailableError(f"request {number} failed: {served.problem}")
        done += 1
        if report is not None:
            report(what, done, len(prompts))
        return served

    tasks = [asyncio.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _hear(client: WorkerClient, listener: Subscriber, body: Mapping[str, Any]) -> None:
    """Send a request until its event arrives: a subscription takes a while, and not every worker greets."""
    until = time.monotonic() + EVENTS_S
    while time.monotonic() < until:
        reply = await client.ask(completion_path(chat=False), body, "hear")
        if reply.problem is not None:
            raise UnavailableError(reply.problem)
        if await asyncio.to_thread(lambda: any(isinstance(e, RequestExperts) for e in listener.events(0.5))):
            return
    raise UnavailableError(f"no expert events from {listener.endpoint} within {EVENTS_S:g} s")


def _events(listener: Subscriber, wanted: set[str]) -> dict[str, RequestExperts]:
    """Events of these requests that have arrived; the rest of a second's silence ends it."""
    found: dict[str, RequestExperts] = {}
    until = time.monotonic() + EVENTS_S
    while time.monotonic() < until:
        quiet = True
        for event in listener.events(1.0):
            quiet = False
            if isinstance(event, RequestExperts):
                name = next((part for part in event.request_id.split("-") if part in wanted), None)
                if name is not None:
                    found[name] = event
        if quiet:
            break
    return found


def _body(model: str, settings: LoopSettings) -> dict[str, Any]:
    return {
        "model": model, "max_tokens": settings.max_tokens, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip


async def _forget(clients: Sequence[WorkerClient]) -> bool:
    """Empty prefix caches, so that no router profits from the one before it; whether every worker can."""
    return all([(await client.call("POST", "/reset_prefix_cache"))[0] == 200 for client in clients])


async def _warm(
    prefill: Sequence[WorkerClient],
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    report: Progress | None,
) -> None:
    """Where caches stay, prefill every prompt once: the first router must not be the only one to wait for that."""
    gate, done = asyncio.Semaphore(in_flight), 0

    async def one(number: int, prompt: Sequence[int]) -> None:
        nonlocal done
        async with gate:
            asked = prefill_body({**body, "prompt": list(prompt)})
            reply = await prefill[number % len(prefill)].ask(completion_path(chat=False), asked, f"warm.{number}")
        if reply.problem is not None:
            raise UnavailableError(reply.problem)
        done += 1
        if report is not None:
            report("Warming up", done, len(prompts))

    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


@contextlib.asynccontextmanager
async def _clients(urls: Sequence[str]) -> AsyncIterator[list[WorkerClient]]:
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for url in urls:
            client = WorkerClient(url)
            await stack.enter_async_context(client)
            clients.append(client)
        yield clients
