"""The demo: record, fit and route on a fleet of real workers on this machine.

One prefill worker and three decode workers serve coterie-tiny behind a gateway, each in its own process. Requests of
three domains are recorded through the gateway and a router is fitted on them. Other requests are then served under each
router: round robin, join-shortest-queue and routing by expected experts. The workers count the distinct experts of
their steps and measure the step times. Step times on an H200 are predicted for a model with the same number of experts
and the same top-k. The trace of all requests is kept for other commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from coterie.answers.demo.loop import RoutedLoop
from coterie.answers.demo.runs import REFERENCE_SHAPE, LoopResult, predicted_step_ms
from coterie.answers.figures import Theme, write_figure
from coterie.answers.suites import Report
from coterie.costs.presets import step_model
from coterie.engines.tiny import TINY
from coterie.engines.vllm.recording import EventSink
from coterie.errors import InputError, check
from coterie.gateway.config import ControlSection
from coterie.gateway.embedded import DECODERS, OURS, EmbeddedFleet, run_embedded
from coterie.gateway.serve import RunningGateway
from coterie.gateway.watching.logs import Log
from coterie.models import get_model
from coterie.net.processes import bind
from coterie.prompts import load_prompts, take_in_turn
from coterie.traces import ActivationTrace

DOMAINS = ("code", "legal", "math")
"""As many domains as decoders: a router can give each decoder one domain, and the effect shows in a short run."""
BASELINES = ("round_robin", "join_shortest_queue")
IN_FLIGHT = 8
"""Requests in flight per decode worker: a mixed batch of 8 uses about half of coterie-tiny's 32 experts per layer."""
MAX_TOKENS = 20
FIGURE, TRACE, FIT = "routing", "trace", "router.safetensors"
SOURCE = "coterie demo"
"""Engine name in the metadata of the demo's trace."""


class DemoRow(NamedTuple):
    """Results of the test requests under one router."""

    router: str
    experts: float
    """Distinct experts of a layer in a token's decode step, mean over layers and tokens, at equal batch sizes."""
    saving_pct: float
    """Reduction of `experts` relative to round robin, percent."""
    interval_pct: tuple[float, float]
    """95% interval of the saving, percent."""
    h200_ms: float
    """Predicted time of a token's decode step on an H200, for the reference model."""
    cpu_ms: float
    """Measured time of a token's decode step on this machine's CPU."""
    requests_per_step: float
    requests: list[int]
    """[worker] number of requests served."""


class DemoResult(NamedTuple):
    rows: list[DemoRow]
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
    rows_so_far: Callable[[list[DemoRow]], None] | None = None,
) -> DemoResult:
    """Record, fit and compare routers on a fleet; write the trace and the figure to the folder `out`.

    `routers` are compared with the baselines. The trace of an earlier demo in the folder is replaced. `served` is a
    running fleet and the URL of its gateway; if None, both are started, and stopped before the results are written.
    `rows_so_far` is called after each router's run, with all rows so far.
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
        after = None if rows_so_far is None else lambda result: rows_so_far(_rows(result, seed))
        result = asyncio.run(loop.run(prompts, names, folder / FIT, seed, after))
    rows = _rows(result, seed)
    _save_trace(result, folder / TRACE)
    figure = write_figure(lambda canvas, theme: _draw(canvas, theme, rows), folder, FIGURE, 3.4)[-1]
    first = result.runs[0]
    return DemoResult(
        rows=rows,
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
        verdict=_verdict(rows),
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
    """Return a row per router at the batch sizes of round robin, so that only the choice of requests differs."""
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
                cpu_ms=run.step_ms or 0.0,
                requests_per_step=run.rows_per_step,
                requests=run.per_worker,
            )
        )
    return rows


def _verdict(rows: list[DemoRow]) -> str:
    """Say in words what the last router saves, and its 95% interval."""
    best, (low, high) = rows[-1], rows[-1].interval_pct
    faster = 100 * (1 - best.h200_ms / rows[0].h200_ms)
    said = f"{best.router}: a token's step streams {best.saving_pct:.1f}% fewer experts than under {rows[0].router}"
    sure = f"95% {low:.1f} to {high:.1f}"
    if low <= 0:
        return f"{said} ({sure}): too little to be sure of in a run this small."
    return f"{said} ({sure}), which is {faster:.1f}% less time per step on an H200, predicted."


def _draw(figure: Figure, theme: Theme, rows: list[DemoRow]) -> None:
    """Draw distinct experts with their intervals on the left, and step times relative to round robin on the right."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    at = np.arange(len(rows))
    names = [row.router.replace("_", "\n") for row in rows]
    first = rows[0]
    spread = np.array([row.interval_pct for row in rows]) - np.array([[row.saving_pct] for row in rows])  # [row, 2]
    bounds = np.abs(spread[:, ::-1].T) * first.experts / 100  # reversed, because more saving means fewer experts
    bars = left.bar(at, [row.experts for row in rows], 0.6, color=theme.series[0])
    left.errorbar(at[1:], [row.experts for row in rows[1:]], bounds[:, 1:], fmt="none", ecolor=theme.text, capsize=3)
    left.bar_label(bars, [f"{row.experts:.1f}" for row in rows], label_type="center", color=theme.background)
    left.set(title="Experts per layer in a token's step", ylabel="distinct experts, 95% interval")
    shares = (
        ("H200, predicted", theme.series[0], [100 * row.h200_ms / first.h200_ms for row in rows]),
        ("CPU, measured here", theme.series[1], [100 * row.cpu_ms / first.cpu_ms for row in rows]),
    )
    for shift, (label, color, values) in zip((-0.2, 0.2), shares, strict=True):
        bars = right.bar(at + shift, values, 0.38, color=color, label=label)
        right.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=9)
    right.set(title="Time of a token's step", ylabel="% of round robin", ylim=(0, 140))
    right.legend(loc="upper center", ncols=2, fontsize=9)
    for axes in (left, right):
        axes.set_xticks(at, names)
        axes.grid(axis="y")
