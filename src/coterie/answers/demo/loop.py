"""Record, fit and route through a gateway: fit a router on served requests, then compare routers on other requests.

Requests are sent as ``coterie load`` sends them, by a fixed number of clients; the gateway's router is swapped between
runs. Results of a run are read from the decode workers: the expert event of every request, and the log of decode steps
with the distinct experts that each step computed. The decode workers' prefix caches are emptied before each run, so
that no router profits from the previous run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from coterie.answers.demo.runs import REFERENCE_SHAPE, DemoAnswer, LoopResult, RouterRun
from coterie.answers.load.client import Asking, LoadClient, RequestOutcome
from coterie.answers.load.measure import DECODE, context_length, use_router
from coterie.answers.load.run import LoadRun, Pace
from coterie.answers.load.steps import read_steps
from coterie.answers.load.workload import LONGEST, TEMPLATE_TOKENS, LoadRequest, Message, that_fit
from coterie.answers.suites import Report
from coterie.engines.vllm.recording import Subscriber, hear
from coterie.errors import InputError, UnavailableError, check
from coterie.footprints import footprint
from coterie.footprints.positions import ROWS
from coterie.gateway.embedded import EmbeddedFleet
from coterie.net.http_client import Client, served_model
from coterie.prompts import Prompt
from coterie.routing import Calibration, RouterFit
from coterie.wire.expert_events import RequestExperts

EVENTS_S = 60.0
"""Seconds to wait for the expert events of a run."""
CALIBRATE = 0.4
"""Share of the requests that the router is fitted on; the others are served under each router."""
BASE = "round_robin"
"""Router of the recorded run, on which the router is fitted."""


class RoutedLoop:
    """Record, fit and compare routers on one gateway and the decode workers behind it."""

    def __init__(
        self, url: str, fleet: EmbeddedFleet, in_flight: int, max_tokens: int, report: Report = lambda *_: None
    ) -> None:
        """Keep `in_flight` requests per decode worker, with answers of at most `max_tokens` tokens."""
        self.url, self.in_flight, self.max_tokens = url, in_flight, max_tokens
        self.workers = [worker for worker in fleet.workers if worker.role == "decode"]
        self._access = fleet.access
        self._report = report

    async def run(
        self,
        prompts: Sequence[Prompt],
        routers: Sequence[str],
        fit: Path,
        seed: int = 0,
        after_run: Callable[[LoopResult], None] | None = None,
    ) -> LoopResult:
        """Record, fit, save the fit to `fit`, and serve under every router; `after_run` gets the results so far."""
        rng = np.random.default_rng(seed)
        async with contextlib.AsyncExitStack() as stack:
            self._gateway = await stack.enter_async_context(Client(self.url))
            self._client = await stack.enter_async_context(LoadClient(self.url))
            self._clients = [
                await stack.enter_async_context(Client(worker.url, key=self._access.key)) for worker in self.workers
            ]
            self._asking = Asking(await served_model(self._gateway), keep_text=True)
            self._listeners = [
                stack.enter_context(Subscriber(worker.expert_events, secret=self._access.secret))
                for worker in self.workers
            ]
            first = {"model": self._asking.model, "max_tokens": 2, "temperature": 0, "prompt": [1, 2]}
            for client, listener in zip(self._clients, self._listeners, strict=True):
                await hear(client, listener, first, EVENTS_S)
            learn, test = await self._split(prompts, rng)
            await self._warm_up([*learn, *test])
            recorded = await self._serve("Recording", BASE, learn)
            self._report("Fitting the router", 0, 1)
            known = _calibration(recorded)
            fitted = await asyncio.to_thread(RouterFit(len(self.workers), batch=self.in_flight).fit, known, rng)
            await asyncio.to_thread(fitted.save, fit)
            runs: list[RouterRun] = []
            for name in routers:
                runs.append(await self._serve(f"Serving under {name}", name, test, fit, seed))
                result = LoopResult(list(runs), len(known.prefill), recorded, fitted)
                if after_run is not None:
                    after_run(result)
        return result

    async def _split(
        self, prompts: Sequence[Prompt], rng: np.random.Generator
    ) -> tuple[list[LoadRequest], list[LoadRequest]]:
        """Return the requests to fit on and those to serve; leave out prompts that may be too long for the model."""
        longest = await context_length(self._gateway, self._asking.model) or LONGEST
        kept = that_fit(prompts, longest - self.max_tokens - TEMPLATE_TOKENS)
        requests = [
            LoadRequest(number, number, kept[row].domain, (Message("user", kept[row].prompt),), self.max_tokens)
            for number, row in enumerate(map(int, rng.permutation(len(kept))))
        ]
        count = round(CALIBRATE * len(requests))
        return requests[:count], requests[count:]

    async def _warm_up(self, requests: Sequence[LoadRequest]) -> None:
        """Prefill every prompt once: otherwise only the run of the first router would pay for prefills."""
        run = LoadRun()

        async def send(request: LoadRequest, planned: float | None) -> RequestOutcome:
            return await self._client.ask(request._replace(max_tokens=1), self._asking, planned)

        def done(_: RequestOutcome) -> None:
            self._report("Warming up", len(run.outcomes), len(requests))

        await run.drive(requests, Pace(self.in_flight * len(self.workers)), send, done)

    async def _serve(
        self, doing: str, router: str, requests: Sequence[LoadRequest], fit: Path | None = None, seed: int = 0
    ) -> RouterRun:
        """Serve the requests under a router. Raise if a request fails, or if the workers also served other requests."""
        spec = {"seed": seed, "model": REFERENCE_SHAPE} | ({} if fit is None else {"fit": str(fit.resolve())})
        await use_router(self._gateway, DECODE, router, spec)
        for client in self._clients:
            await client.call("POST", "/reset_prefix_cache")
        before = [(await read_steps(client)).total for client in self._clients]
        run, started = LoadRun(), time.perf_counter()
        names = {request.number: f"{'' if fit else 'recorded.'}{router}.{request.number}" for request in requests}

        async def send(request: LoadRequest, planned: float | None) -> RequestOutcome:
            return await self._client.ask(request, self._asking, planned, name=names[request.number])

        def done(outcome: RequestOutcome) -> None:
            check(outcome.failure is None, f"request {outcome.request} failed: {outcome.problem}", UnavailableError)
            self._report(doing, len(run.outcomes), len(requests))

        try:
            await run.drive(requests, Pace(self.in_flight * len(self.workers)), send, done)
        except* UnavailableError as group:
            raise group.exceptions[0] from None
        wall_s = time.perf_counter() - started
        logs = [(await read_steps(client, after)).rows for client, after in zip(self._clients, before, strict=True)]
        events = await self._events(set(names.values()))
        outcomes = {outcome.request: outcome for outcome in run.outcomes}
        answers = [DemoAnswer(*events[names[request.number]], outcomes[request.number].text) for request in requests]
        # Prefill makes the first token of an answer, so a request has one decode row less than output tokens.
        expected = sum(answer.event.output_tokens - 1 for answer in answers)
        rows = [int(steps[:, ROWS].sum()) for steps in logs]
        check(
            sum(rows) == expected,
            f"the decode workers computed {sum(rows)} rows, {expected} were expected (by worker: {rows}): they "
            "served other requests too",
            UnavailableError,
        )
        return RouterRun(router, logs, wall_s, answers)

    async def _events(self, wanted: set[str]) -> dict[str, tuple[int, RequestExperts]]:
        """Return the decode worker and the expert event of every request; raise if any is missing after EVENTS_S."""
        events: dict[str, tuple[int, RequestExperts]] = {}
        until = time.monotonic() + EVENTS_S
        while len(events) < len(wanted) and time.monotonic() < until:
            for worker, listener in enumerate(self._listeners):
                for event in await asyncio.to_thread(list, listener.events(0.1)):
                    if isinstance(event, RequestExperts) and event.request_id in wanted:
                        events[event.request_id] = worker, event
        check(
            not (missing := len(wanted) - len(events)),
            f"{missing} of {len(wanted)} requests came without an expert event",
            UnavailableError,
        )
        return events


def _calibration(run: RouterRun) -> Calibration:
    """Return prefill and decode footprints of the recorded requests; skip answers of one token: they have no decode."""
    before, after = [], []
    for event in (answer.event for answer in run.answers if answer.event.output_tokens > 1):
        ids = event.ids()
        before.append(footprint(ids[: event.prompt_tokens], event.num_experts))
        after.append(footprint(ids[event.prompt_tokens :], event.num_experts))
    check(before, f"none of {len(run.answers)} answers had more than one token: nothing to learn from", InputError)
    return Calibration(
        prefill=np.asarray(before, np.uint32),
        decode=np.asarray(after, np.uint32),
        gates=None,
        requests=np.arange(len(before)),
        halved=False,
        model=event.model,
        top_k=event.top_k,
    )
