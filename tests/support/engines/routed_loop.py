"""Record → fit → route on a running fleet: fit a router on served requests, then route others by it.

Calibration requests go through the fleet under round robin. Their prefill footprints come with the answers, their
decode footprints from the workers' expert events; together they are a :class:`Calibration`. Then the same test
requests, none of them seen before, are served under one router after another.

Distinct experts per decode step are counted inside the workers, never estimated here: in the reference worker's log of
steps, or in the position store of vLLM's plugin. The latter counts every row of a step, so prompts are cut to whole KV
blocks and a token or two (:func:`whole_blocks`): a decode worker then loads all but those from the prefill worker, and
nearly every row it computes makes one output token. :func:`serve` holds the workers' row counts against the tokens that
came out, and refuses to report if they do not agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.answers.demo.runs import REFERENCE_SHAPE
from coterie.answers.load.run import read_steps
from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.engines.vllm.recording import Subscriber, hear
from coterie.errors import ConfigError, InputError, UnavailableError, check_at_least
from coterie.footprints import PositionStore, footprint
from coterie.footprints.positions import ROWS, LoggedSteps
from coterie.models import get_model
from coterie.net.http_client import Client, completion_path, served_model
from coterie.prompts import Prompt
from coterie.routing import Calibration, Fleet, Router, RouterFit, routers
from coterie.wire.expert_events import RequestExperts
from coterie.wire.handoff import prefill_body
from routed_fleet import RoutedFleet, Served
from routed_runs import LoopResult, RouterRun

Progress = Callable[[str, int, int], None]

MOST_PROMPT_TOKENS = 200
"""Longer prompts are left out: all workers of a test fleet must take every one."""
EVENTS_S = 60.0
"""Seconds to wait for the last expert event."""
RECORDING = "recording"
"""Name of the run that the router is fitted on."""


@dataclass(frozen=True, slots=True)
class DecodeWorker:
    url: str
    events: str
    """ZMQ endpoint of its expert events."""
    store: Path | None = None
    """vLLM: file of its position store. A reference worker counts in /metrics."""
    secret: str | None = field(default=None, repr=False)
    """Secret of its fleet, where event streams are protected."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    in_flight: int = 8
    """Requests in flight per decode worker."""
    max_tokens: int = 48
    """Largest number of tokens per answer."""
    block_size: int = 16
    """Tokens per block of the workers' KV cache."""
    tail_tokens: int = 1
    """Tokens of a prompt past whole blocks, which its decode worker computes. vLLM's ExampleConnector needs 2: it looks
    for the blocks of a prompt without its last token, and keeps those of the whole."""
    calibrate: float = 0.4
    """Share of the requests that the router is fitted on; the others are served."""
    routers: tuple[str, ...] = ("round_robin", "join_shortest_queue", "latency_aware")
    seed: int = 0

    @property
    def places(self) -> int:
        """Capacity of a decode worker in requests, as the router sees it."""
        return max(2 * self.in_flight, 16)

    def __post_init__(self) -> None:
        check_at_least(
            1,
            in_flight=self.in_flight,
            max_tokens=self.max_tokens,
            block_size=self.block_size,
            tail_tokens=self.tail_tokens,
        )
        if not 0 < self.calibrate < 1:
            raise ConfigError(f"calibrate={self.calibrate} must be between 0 and 1")
        for name in self.routers:
            routers.check(name)


async def run_loop(
    prefill: Sequence[str],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Prompt],
    settings: LoopSettings = LoopSettings(),
    report: Progress | None = None,
    key: str | None = None,
    after_run: Callable[[LoopResult], None] | None = None,
) -> LoopResult:
    """Tokenise, record, fit, and serve under every router. `key` opens the workers' private endpoints.

    `after_run` is given what there is after each router's run.
    """
    report = report or (lambda *_: None)
    rng = np.random.default_rng(settings.seed)
    async with _clients([*prefill, *(decoder.url for decoder in decoders)], key) as clients:
        first, rest = clients[: len(prefill)], clients[len(prefill) :]
        model = await served_model(first[0])
        tokens = await tokenise(first[0], model, prompts, report)
        kept = whole_blocks(tokens, settings.block_size, settings.tail_tokens)
        order = rng.permutation(len(kept))
        split = round(settings.calibrate * len(kept))
        learn, test = ([kept[int(i)] for i in part] for part in (order[:split], order[split:]))
        many = settings.in_flight * len(decoders)
        body = _body(model, settings)
        known = await record(prefill, rest, decoders, learn, body, many, settings.tail_tokens, report, key)
        started = time.perf_counter()
        report("Fitting the router", 0, 1)
        fitted = await asyncio.to_thread(RouterFit(len(decoders), batch=settings.in_flight).fit, known, rng)
        fit_s = time.perf_counter() - started
        runs: list[RouterRun] = []
        events: list[RequestExperts | None] = []
        for name in settings.routers:
            router = make_router(name, fitted, settings.in_flight, settings.seed)
            # The prefill worker keeps its cache: it has seen every prompt, so no router waits longer than another.
            if not await _forget(rest) and not runs:
                await _warm(first, test, body, many, report)
            async with RoutedFleet(prefill, _urls(decoders), router, fitted.fleet(settings.places), key=key) as proxy:
                arguments = (proxy, name, rest, decoders, test, body, many, settings.tail_tokens, report)
                if runs:
                    runs.append(await serve(*arguments))
                else:
                    run, events = await observe(*arguments)
                    runs.append(run)
            result = LoopResult(
                runs=list(runs),
                calibrated=len(known.prefill),
                fit_s=fit_s,
                context=(sum(map(len, test)) + runs[0].output_tokens / 2) / len(test),
                events=events,
            )
            if after_run is not None:
                after_run(result)
    return result


def make_router(name: str, fitted: RouterFit, in_flight: int, seed: int = 0) -> Router:
    """A registered router; steps are priced as on an H200, each layer as one of the reference shape."""
    spec = get_model(REFERENCE_SHAPE)
    line = DecodeStepPrices.of(step_model(spec, "h200"), in_flight)
    depth = spec.num_moe_layers / fitted.num_layers  # layers of the reference shape that one here stands for
    cost = replace(line, expert_us=line.expert_us * depth)
    return routers.make(name, {"fitted": fitted, "cost": cost, "seed": seed})


async def tokenise(
    client: Client, model: str, prompts: Sequence[Prompt], report: Progress | None = None
) -> list[list[int]]:
    """Prompts as the worker's chat template and tokenizer make them; those it finds too long are left out."""
    gate, done = asyncio.Semaphore(8), 0

    async def one(number: int, prompt: Prompt) -> list[int]:
        nonlocal done
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt.prompt}],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        async with gate:
            answer = await client.post(completion_path(chat=True), body, f"tokenise-{number}")
        if answer.server_failed:
            raise UnavailableError(f"{client.url}: {answer.problem}")
        done += 1
        if report is not None:
            report("Tokenising prompts", done, len(prompts))
        return [] if answer.body is None else list(answer.body["prompt_token_ids"])

    found = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    return [tokens for tokens in found if 0 < len(tokens) <= MOST_PROMPT_TOKENS]


def whole_blocks(prompts: Sequence[Sequence[int]], block_size: int, tail_tokens: int = 1) -> list[list[int]]:
    """Cut each to a multiple of `block_size`, and `tail_tokens` more; duplicates are dropped.

    What all prompts end with (a chat template's last words) stays: tokens before it go. Too short ones are left out.
    """
    tail = 0
    if len(prompts) > 1:
        shortest = min(len(prompt) for prompt in prompts)
        while tail < shortest and len({prompt[-tail - 1] for prompt in prompts}) == 1:
            tail += 1
    out: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        excess = (len(prompt) - tail_tokens) % block_size
        end = len(prompt) - tail
        if len(prompt) >= block_size + tail_tokens and excess <= end:
            out[(*prompt[: end - excess], *prompt[end:])] = None
    return [list(prompt) for prompt in out]


async def record(
    prefill: Sequence[str],
    clients: Sequence[Client],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    tail_tokens: int = 1,
    report: Progress | None = None,
    key: str | None = None,
) -> Calibration:
    """Serve under round robin, and count each request's experts before and after it was routed.

    Requests whose answer was one token have no decode to learn from, and are left out.
    """
    in_turn, places = routers.make("round_robin"), Fleet([in_flight] * len(clients))
    async with RoutedFleet(prefill, _urls(decoders), in_turn, places, key=key) as proxy:
        run, events = await observe(proxy, RECORDING, clients, decoders, prompts, body, in_flight, tail_tokens, report)
    before, after = [], []
    for one, event in zip(run.served, events, strict=True):
        if event is not None:
            if one.footprint is None:
                raise UnavailableError(f"recorded request {one.name!r} came without a footprint")
            decoded = event.seen() & (np.arange(len(event.tokens())) >= event.prompt_tokens)
            before.append(one.footprint.counts)
            after.append(footprint(event.ids()[decoded], event.num_experts))
            model, top_k = event.model, event.top_k
    if not before:
        raise InputError(f"none of {len(prompts)} answers had more than one token: nothing to learn from")
    return Calibration(
        prefill=np.asarray(before, np.uint32),
        decode=np.asarray(after, np.uint32),
        gates=None,
        requests=np.arange(len(before)),
        halved=False,
        model=model,
        top_k=top_k,
    )


async def observe(
    proxy: RoutedFleet,
    name: str,
    clients: Sequence[Client],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    tail_tokens: int = 1,
    report: Progress | None = None,
) -> tuple[RouterRun, list[RequestExperts | None]]:
    """:func:`serve`, and the expert event of every request with more than one token; one that is missing raises."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(Subscriber(one.events, secret=one.secret)) for one in decoders]
        for client, listener in zip(clients, listeners, strict=True):
            await hear(client, listener, {**body, "max_tokens": 2, "prompt": list(prompts[0][:2])}, EVENTS_S)
        run = await serve(proxy, name, clients, decoders, prompts, body, in_flight, tail_tokens, report)
        several = [one for one in run.served if len(one.tokens) > 1]
        events: dict[str, RequestExperts] = {}
        for worker, listener in enumerate(listeners):
            wanted = {one.name for one in several if one.decoder == worker}
            events |= await asyncio.to_thread(_events, listener, wanted)
    if len(events) < len(several):
        raise UnavailableError(f"{len(several) - len(events)} of {len(several)} requests came without an expert event")
    return run, [events.get(one.name) for one in run.served]


async def serve(
    proxy: RoutedFleet,
    name: str,
    clients: Sequence[Client],
    decoders: Sequence[DecodeWorker],
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    tail_tokens: int = 1,
    report: Progress | None = None,
) -> RouterRun:
    """One router's run over the test requests; raises where the workers' counts are not of decode alone."""
    before = [(await steps_of(*worker)).total for worker in zip(clients, decoders, strict=True)]
    started = time.perf_counter()
    served = await _serve_all(proxy, name, prompts, body, in_flight, report)
    wall_s = time.perf_counter() - started
    log = [(await steps_of(*worker)).rows for worker in zip(clients, decoders, before, strict=True)]
    run = RouterRun(name, log, wall_s, served, proxy.counts)
    # A reference worker counts decode rows, the first of which makes the second token; vLLM's store counts all rows.
    counts_all = [decoders[one.decoder or 0].store is not None for one in served]
    expected = run.output_tokens + sum(tail_tokens - 1 if all_rows else -1 for all_rows in counts_all)
    rows = [int(steps[:, ROWS].sum()) for steps in log]
    if sum(rows) != expected and not proxy.counts.retried:
        raise UnavailableError(
            f"the decode workers computed {sum(rows)} rows, {expected} were expected (by worker: {rows}): some "
            f"computed prompts, or served others; {proxy.counts}"
        )
    if proxy.counts.fallbacks:
        raise UnavailableError(f"router {name!r} did not place {proxy.counts.fallbacks} requests; {proxy.counts}")
    return run


async def steps_of(client: Client, decoder: DecodeWorker, after: int | None = None) -> LoggedSteps:
    """What a decode worker logged of all steps but its first `after`, or all that it keeps."""
    if decoder.store is not None:
        return PositionStore.attach(decoder.store).log.read(after)
    return await read_steps(client, after)


async def _serve_all(
    proxy: RoutedFleet,
    name: str,
    prompts: Sequence[Sequence[int]],
    body: Mapping[str, Any],
    in_flight: int,
    report: Progress | None,
) -> list[Served]:
    """Serve in order, `in_flight` at a time; a failed request raises."""
    gate, done = asyncio.Semaphore(in_flight), 0
    what = "Recording" if name == RECORDING else f"Serving under {name}"

    async def one(number: int, prompt: Sequence[int]) -> Served:
        nonlocal done
        async with gate:
            # A dot: dashes are for vLLM, which puts them around the name it is given.
            asked = {**body, "prompt": list(prompt)}
            served = await proxy.serve(completion_path(chat=False), asked, f"{name}.{number}")
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


def _events(listener: Subscriber, wanted: set[str]) -> dict[str, RequestExperts]:
    """Events of these requests; those that have not come in time are left out."""
    found: dict[str, RequestExperts] = {}
    until = time.monotonic() + EVENTS_S
    while len(found) < len(wanted) and time.monotonic() < until:
        for event in listener.events(1.0):
            if isinstance(event, RequestExperts):
                name = next((part for part in event.request_id.split("-") if part in wanted), None)
                if name is not None:
                    found[name] = event
            if len(found) == len(wanted):
                break
    return found


def _urls(decoders: Sequence[DecodeWorker]) -> list[str]:
    return [one.url for one in decoders]


def _body(model: str, settings: LoopSettings) -> dict[str, Any]:
    return {"model": model, "max_tokens": settings.max_tokens, "temperature": 0, "return_token_ids": True}


async def _forget(clients: Sequence[Client]) -> bool:
    """Empty prefix caches, so that no router profits from the one before it; whether every worker can."""
    return all([(await client.call("POST", "/reset_prefix_cache"))[0] == 200 for client in clients])


async def _warm(
    prefill: Sequence[Client],
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
            asked, client = prefill_body({**body, "prompt": list(prompt)}), prefill[number % len(prefill)]
            answer = await client.post(completion_path(chat=False), asked, f"warm.{number}")
        if answer.problem is not None:
            raise UnavailableError(f"{client.url}: {answer.problem}")
        done += 1
        if report is not None:
            report("Warming up", done, len(prompts))

    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


@contextlib.asynccontextmanager
async def _clients(urls: Sequence[str], key: str | None) -> AsyncIterator[list[Client]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Client(url, key=key)) for url in urls]
