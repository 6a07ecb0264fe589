"""The demo: record, fit and route on a fleet of real workers on this machine.

One prefill worker and three decode workers serve coterie-tiny behind a gateway, each in its own process. Requests of
three domains are recorded through the gateway and a router is fitted on them. Other requests are then served under each
router: join-shortest-queue, round robin and routing by expected experts. The workers count the distinct experts of
their steps and measure the step times. Step times on an H200 are predicted for a model with the same number of experts
and the same top-k. The trace of all requests is kept for other commands.

Requests are sent as ``coterie load`` sends them, by a fixed number of clients; the gateway's router is swapped between
runs. Results of a run are read from the decode workers: the expert event of every request, and the log of decode steps
with the distinct experts that each step computed. The decode workers' prefix caches are emptied before each run, so
that no router profits from the previous run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from coterie.answers.demo.runs import REFERENCE_SHAPE, DemoAnswer, LoopResult, RouterRun, predicted_step_ms
from coterie.answers.figures import Theme, write_figure
from coterie.answers.load.client import Asking, LoadClient, RequestOutcome
from coterie.answers.load.measure import DECODE, context_length, use_router
from coterie.answers.load.run import LoadRun, Pace, read_steps
from coterie.answers.load.workload import LONGEST, TEMPLATE_TOKENS, LoadRequest, Message, that_fit
from coterie.answers.suites import Report
from coterie.answers.verdicts import HARDLY, NOT, PAYS, UNTOLD, change, opening_of, verdict_of
from coterie.costs.presets import step_model
from coterie.engines.tiny import TINY
from coterie.engines.vllm.recording import EventSink, Subscriber, hear
from coterie.errors import InputError, UnavailableError, check
from coterie.footprints import footprint
from coterie.footprints.positions import ROWS
from coterie.gateway.config import ControlSection
from coterie.gateway.embedded import DECODERS, OURS, EmbeddedFleet, run_embedded
from coterie.gateway.serve import RunningGateway
from coterie.gateway.watching.logs import Log
from coterie.models import get_model
from coterie.net.http_client import Client, served_model
from coterie.net.processes import bind
from coterie.prompts import Prompt, load_prompts, take_in_turn
from coterie.routing import Calibration, RouterFit
from coterie.traces import ActivationTrace
from coterie.types import Interval
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

    async def run(self, prompts: Sequence[Prompt], routers: Sequence[str], fit: Path, seed: int = 0) -> LoopResult:
        """Record, fit, save the fit to `fit`, and serve under every router."""
        rng = np.random.default_rng(seed)
        async with self._connected():
            learn, test = await self._split(prompts, rng)
            await self._warm_up([*learn, *test])
            await self._swap(BASE, seed)
            recorded = await self._serve("Recording", BASE, learn, "recorded.")
            self._report("Fitting the router", 0, 1)
            known = _calibration(recorded)
            fitted = await asyncio.to_thread(RouterFit(len(self.workers), batch=self.in_flight).fit, known, rng)
            await asyncio.to_thread(fitted.save, fit)
            runs: list[RouterRun] = []
            for name in routers:
                await self._swap(name, seed, fit)
                runs.append(await self._serve(f"Serving under {name}", name, test))
        return LoopResult(runs, len(known.prefill), recorded, fitted)

    async def run_as_it_is(self, prompts: Sequence[Prompt], name: str, seed: int = 0) -> RouterRun:
        """Serve all prompts under the router in use, called `name`: for front ends that cannot swap it."""
        async with self._connected():
            learn, test = await self._split(prompts, np.random.default_rng(seed))
            await self._warm_up([*learn, *test])
            return await self._serve(f"Serving under {name}", name, [*learn, *test])

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        """Connect to the front end and to the decode workers, and hear their events."""
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
            yield

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

    async def _swap(self, router: str, seed: int, fit: Path | None = None) -> None:
        spec = {"seed": seed, "model": REFERENCE_SHAPE} | ({} if fit is None else {"fit": str(fit.resolve())})
        await use_router(self._gateway, DECODE, router, spec, alone=True)

    async def _serve(self, doing: str, router: str, requests: Sequence[LoadRequest], prefix: str = "") -> RouterRun:
        """Serve the requests. Raise if a request fails, or if the workers also served other requests."""
        for client in self._clients:
            await client.call("POST", "/reset_prefix_cache")
        before = [(await read_steps(client)).total for client in self._clients]
        run, started = LoadRun(), time.perf_counter()
        names = {request.number: f"{prefix}{router}.{request.number}" for request in requests}

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


DOMAINS = ("code", "legal", "math")
"""As many domains as decoders: a router can give each decoder one domain, and the effect shows in a short run."""
BASELINES = ("join_shortest_queue", "round_robin")
"""The first is the one that the others are compared with, as in ``coterie fleet``."""
IN_FLIGHT = 8
"""Requests in flight per decode worker: a mixed batch of 8 uses about half of coterie-tiny's 32 experts per layer."""
MAX_TOKENS = 20
FIGURE, TRACE, FIT = "routing", "trace", "router.safetensors"
SOURCE = "coterie demo"
METRIC = "the experts of a token's step"
"""Engine name in the metadata of the demo's trace."""


class DemoRow(NamedTuple):
    """Results of the test requests under one router."""

    router: str
    experts: float
    """Distinct experts of a layer in a token's decode step, mean over layers and tokens, at equal batch sizes."""
    saving_pct: float
    """Reduction of `experts` relative to the shortest queue, percent."""
    interval_pct: tuple[float, float]
    """95% interval of the saving, percent."""
    h200_ms: float
    """Predicted time of a token's decode step on an H200, for the reference model."""
    requests_per_step: float
    requests: list[int]
    """[worker] number of requests served."""


class CpuStep(NamedTuple):
    """Measured CPU time of a decode step on this machine: of all runs, since other work moves each run's."""

    step_ms: float
    """Of the step that a token is in, mean over tokens and runs."""
    expert_ms: float
    """Of one more distinct expert in every layer, at the same number of rows."""
    interval_ms: tuple[float, float]
    """95% interval of `expert_ms`."""
    spread_pct: float
    """By how much the steps of the slowest run take longer than those of the fastest, percent."""


class DemoResult(NamedTuple):
    rows: list[DemoRow]
    cpu: CpuStep
    calibrated: int
    """Number of requests that the router was fitted on."""
    served: int
    """Number of other requests, all of them served under each router."""
    domains: int
    output_tokens: int
    same_tokens: bool
    """Whether every request got the same answer under all routers."""
    model: str
    shape: str
    hardware: str
    figure: str
    trace: str
    """Folder of the trace of all requests: calibration requests, and the others as served under the first router."""
    fit: str
    """File of the fitted router."""
    verdict: str
    next: str
    wall_s: float


def run_demo(
    seed: int = 0,
    requests: int = 132,
    out: str | Path = "out",
    report: Report = lambda *_: None,
    routers: tuple[str, ...] = (OURS,),
    served: tuple[EmbeddedFleet, str] | None = None,
) -> DemoResult:
    """Record, fit and compare routers on a fleet; write the trace and the figure to the folder `out`.

    `routers` are compared with the baselines. The trace of an earlier demo in the folder is replaced. `served` is a
    running fleet and the URL of its gateway; if None, both are started, and stopped before the results are written.
    """
    started = time.perf_counter()
    folder = Path(out)
    check_trace(folder / TRACE)
    prompts = take_in_turn([prompt for prompt in load_prompts() if prompt.domain in DOMAINS], requests)
    names = tuple(dict.fromkeys((*BASELINES, *routers)))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if served is None:
            report(f"Starting one prefill and {DECODERS} decode workers", 0, 1)
            fleet = stack.enter_context(run_embedded())
            served = fleet, stack.enter_context(gateway_in_thread(fleet))
        loop = RoutedLoop(served[1], served[0], IN_FLIGHT, MAX_TOKENS, report)
        result = asyncio.run(loop.run(prompts, names, folder / FIT, seed))
    rows = _rows(result, seed)
    cpu = _cpu(result, seed)
    _save_trace(result, folder / TRACE)
    figure = write_figure(lambda canvas, theme: _draw(canvas, theme, rows), folder, FIGURE, 3.4)[-1]
    first = result.runs[0]
    return DemoResult(
        rows=rows,
        cpu=cpu,
        calibrated=result.calibrated,
        served=first.requests,
        domains=len({prompt.domain for prompt in prompts}),
        output_tokens=first.output_tokens,
        same_tokens=result.differing() == 0,
        model=TINY,
        shape=REFERENCE_SHAPE,
        hardware="H200",
        figure=str(figure),
        trace=str(folder / TRACE),
        fit=str(folder / FIT),
        verdict=_verdict(rows, cpu),
        next=f"coterie inspect {folder / TRACE}",
        wall_s=time.perf_counter() - started,
    )


@contextlib.contextmanager
def gateway_in_thread(fleet: EmbeddedFleet) -> Iterator[str]:
    """Run a gateway for the fleet during the block; yield its URL. Its control loop is off: it would swap routers."""
    ready: Future[str] = Future()
    ends: list[Callable[[], object]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        with (fleet.folder / "gateway.log").open("w") as log:
            config = fleet.config(control=ControlSection(enabled=False))
            running = RunningGateway(config, None, Log(log), fleet.access)
            await running.start(bind(*config.address))
            ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
            ready.set_result(running.url)
            await stop.wait()
            await running.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=run, name="coterie-gateway", daemon=True)
    thread.start()
    try:
        yield ready.result()
    finally:
        for end in ends:
            end()
        thread.join()


def check_trace(folder: Path) -> None:
    """Raise if the folder exists and is not the trace of an earlier demo."""
    with contextlib.suppress(InputError, OSError):
        if not folder.is_symlink() and ActivationTrace.open(folder).meta.source.get("engine") == SOURCE:
            return
    check(not folder.exists(), f"{folder} exists and is not the trace of a demo; choose another --out")


def _save_trace(result: LoopResult, folder: Path) -> None:
    check_trace(folder)  # check again before deleting: minutes have passed since the first check
    if folder.exists():
        shutil.rmtree(folder)
    sink = EventSink(folder, None, SOURCE)
    try:
        for answer in (*result.recorded.answers, *result.runs[0].answers):
            sink.take(answer.event)
    finally:
        sink.close()
    if sink.problem is not None:
        raise sink.problem


def _rows(result: LoopResult, seed: int) -> list[DemoRow]:
    """Return a row per router at the batch sizes of the shortest queue, so that only the choice of requests differs."""
    model = step_model(get_model(REFERENCE_SHAPE), "h200")
    first, rows = result.runs[0], []
    for run in result.runs:
        saving, low, high = result.like_with_like(run, np.random.default_rng(seed))
        experts = first.distinct_by_token * (1 - saving / 100)
        rows.append(
            DemoRow(
                router=run.router,
                experts=experts,
                saving_pct=saving,
                interval_pct=(low, high),
                h200_ms=predicted_step_ms(experts, first.rows_by_token, result.context, model),
                requests_per_step=run.rows_per_step,
                requests=run.per_worker,
            )
        )
    return rows


def _cpu(result: LoopResult, seed: int) -> CpuStep:
    expert, low, high = result.cpu_s_an_expert(np.random.default_rng(seed))
    by_run = [run.step_s for run in result.runs]
    spread_pct = 100 * (max(by_run) / min(by_run) - 1)
    return CpuStep(1e3 * float(np.mean(by_run)), 1e3 * expert, (1e3 * low, 1e3 * high), spread_pct)


OPENINGS = {
    PAYS: "Fewer experts",
    HARDLY: "Hardly fewer experts",
    NOT: "No fewer experts",
    UNTOLD: "It cannot be told whether experts are fewer",
}
"""Opening of an answer about time → that of the demo's, which counts experts: the time that they save is predicted."""


def _verdict(rows: list[DemoRow], cpu: CpuStep) -> str:
    """Say in words how many experts the last router saves, with its 95% interval, and what that is in time."""
    first, last = rows[0], rows[-1]
    saving = Interval(last.saving_pct, *last.interval_pct)
    faster = 100 * (1 - last.h200_ms / first.h200_ms)
    return verdict_of(
        f"for {TINY} on {DECODERS} decoders, {IN_FLIGHT} requests on each",
        saving,
        f"{last.router} {change(last.saving_pct, METRIC)}",
        first.router,
        "",
        f"on an H200, which streams experts from memory, it {change(faster, 'the time of a step')}, predicted for "
        f"{REFERENCE_SHAPE}",
        _on_this_cpu(last.experts - first.experts, cpu),
        opening=OPENINGS[opening_of(saving)],
    )


def _on_this_cpu(more: float, cpu: CpuStep) -> str:
    """Say what `more` experts a layer are in CPU time, by what an expert was measured to cost."""
    if cpu.interval_ms[0] <= 0:
        return f"on this CPU an expert's part of a step of {cpu.step_ms:.1f} ms is too small to be measured"
    percent = abs(100 * more * cpu.expert_ms / cpu.step_ms)
    low, high = cpu.interval_ms
    each = f"{cpu.expert_ms:.2f} ms (95% {low:.2f} to {high:.2f})"
    return (
        f"on this CPU one expert is {each} of a step of {cpu.step_ms:.1f} ms, so {abs(more):.1f} "
        f"{'more' if more > 0 else 'fewer'} are {percent:.1f}%; runs differ by {cpu.spread_pct:.0f}%"
    )


def _draw(figure: Figure, theme: Theme, rows: list[DemoRow]) -> None:
    """Draw distinct experts with their intervals on the left, and the step times predicted from them on the right."""
    left, right = figure.subplots(1, 2)
    at = np.arange(len(rows))
    names = [row.router.replace("_", "\n") for row in rows]
    first = rows[0]
    spread = np.array([row.interval_pct for row in rows]) - np.array([[row.saving_pct] for row in rows])  # [row, 2]
    bounds = np.abs(spread[:, ::-1].T) * first.experts / 100  # reversed, because more saving means fewer experts
    bars = left.bar(at, [row.experts for row in rows], 0.6, color=theme.series[0])
    left.errorbar(at[1:], [row.experts for row in rows[1:]], bounds[:, 1:], fmt="none", ecolor=theme.text, capsize=3)
    left.bar_label(bars, [f"{row.experts:.1f}" for row in rows], label_type="center", color=theme.background)
    left.set(title="Experts per layer in a token's step", ylabel="distinct experts, 95% interval")
    bars = right.bar(at, [row.h200_ms for row in rows], 0.6, color=theme.series[1])
    right.bar_label(bars, [f"{row.h200_ms:.2f}" for row in rows], label_type="center", color=theme.background)
    right.set(title="Time of a token's step, predicted", ylabel="ms on an H200")
    for axes in (left, right):
        axes.set_xticks(at, names)
        axes.grid(axis="y")
