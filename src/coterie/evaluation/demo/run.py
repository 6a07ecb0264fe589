"""The demo: record → fit → route on a fleet of real workers, all of it on this machine.

One prefill worker and three decode workers serve coterie-tiny, each in a process of its own. A mixed-domain workload is
recorded through them, a router is fitted on it, and other requests are served under each router: round robin,
join-shortest-queue and by the experts they are expected to use. What each way touched is counted in the workers. The
time of such steps on an H200 is predicted for a model whose layers have as many experts and take as many of them; what
they took here is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from coterie.costs.presets import step_model
from coterie.engines.tiny import TINY
from coterie.engines.worker.embedded import embedded_worker
from coterie.errors import ConfigError
from coterie.evaluation.demo.loop import DecodeWorker, LoopSettings, run_loop
from coterie.evaluation.demo.runs import REFERENCE_SHAPE, LoopResult, predicted_step_ms
from coterie.evaluation.figures import Theme, write_figure
from coterie.models import get_model
from coterie.net.processes import ServerProcess
from coterie.prompts import load_prompts, take_in_turn

DECODERS = 3
BASELINES = ("round_robin", "join_shortest_queue")
OURS = "latency_aware"
IN_FLIGHT = 8
"""Per decode worker: of coterie-tiny's 32 experts a layer, a mixed batch of 8 touches about half."""
MAX_TOKENS = 32
FIGURE = "routing"
Report = Callable[[str, int, int], None]


class DemoRow(NamedTuple):
    """The test requests under one router."""

    router: str
    distinct_experts: float
    """Distinct experts of a layer in a decode step, mean over layers, steps and workers."""
    saving_pct: float
    """Fewer than under round robin."""
    by_token_pct: float
    """The same of the steps that tokens are in: a step counts once for each of its rows."""
    equal_rows_pct: float
    """The same of steps with as many rows each."""
    steps: int
    rows_per_step: float
    h200_ms: float
    """A token's decode step on an H200, in the reference shape, predicted."""
    cpu_ms: float
    """A token's decode step here: CPU time as the workers measured it."""
    requests: list[int]
    """[worker]"""


class DemoResult(NamedTuple):
    rows: list[DemoRow]
    calibrated: int
    """Requests the router was fitted on."""
    served: int
    """Others, served under each router."""
    domains: int
    output_tokens: int
    same_tokens: bool
    """Every request was answered with the same tokens under all routers."""
    model: str
    shape: str
    hardware: str
    figure: str
    wall_s: float


class _Workers(NamedTuple):
    prefill: str
    decoders: list[DecodeWorker]


@contextlib.contextmanager
def reference_fleet(decoders: int = DECODERS) -> Iterator[_Workers]:
    """One prefill and some decode workers of coterie-tiny on NumPy; ended with the block, whatever ends it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers: list[ServerProcess] = []
        workers: list[DecodeWorker] = []
        for number in range(decoders + 1):
            server, events = embedded_worker("decode" if number else "prefill", Path(folder), f"worker-{number}")
            stack.callback(_end, server)
            servers.append(server.launch())
            workers.append(DecodeWorker(server.url, events))
        for server in servers:
            server.wait_ready()
        yield _Workers(servers[0].url, workers[1:])


def _end(server: ServerProcess) -> None:
    with contextlib.suppress(ConfigError):  # it may not have been started
        server.kill()


def run_demo(
    seed: int = 0,
    requests: int = 240,
    out: str | Path = "out",
    report: Report | None = None,
    routers: tuple[str, ...] = (OURS,),
) -> DemoResult:
    """Start the workers, close the loop, end the workers, draw the figure into `out`.

    `routers` are compared with the baselines.
    """
    report = report or (lambda *_: None)
    started = time.perf_counter()
    prompts = take_in_turn(load_prompts(), requests)
    settings = LoopSettings(
        in_flight=IN_FLIGHT, max_tokens=MAX_TOKENS, routers=tuple(dict.fromkeys((*BASELINES, *routers))), seed=seed
    )
    report("Starting one prefill and three decode workers", 0, 1)
    with reference_fleet() as workers:
        result = asyncio.run(run_loop([workers.prefill], workers.decoders, prompts, settings, report))
    rows = _rows(result)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    figure = write_figure(lambda canvas, theme: _draw(canvas, theme, rows), folder, FIGURE, 3.2)[-1]
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
        wall_s=time.perf_counter() - started,
    )


def _rows(result: LoopResult) -> list[DemoRow]:
    model = step_model(get_model(REFERENCE_SHAPE), "h200")
    return [
        DemoRow(
            router=run.router,
            distinct_experts=run.distinct_per_step,
            saving_pct=result.saving_pct(run),
            by_token_pct=result.saving_by_token_pct(run),
            equal_rows_pct=result.saving_at_equal_rows_pct(run),
            steps=len(run.steps),
            rows_per_step=run.rows_per_step,
            h200_ms=predicted_step_ms(run.distinct_by_token, run.rows_by_token, result.context, model),
            cpu_ms=run.step_ms or 0.0,
            requests=run.per_worker,
        )
        for run in result.runs
    ]


def _draw(figure: Figure, theme: Theme, rows: list[DemoRow]) -> None:
    """Distinct experts on the left; on the right both times, as a share of round robin's."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
    at = np.arange(len(rows))
    names = [row.router.replace("_", "\n") for row in rows]
    _bars(left, at, [row.distinct_experts for row in rows], 0.6, theme.series[0], "{:.1f}")
    left.set(title="Distinct experts per step", ylabel="experts of a layer")
    first = rows[0]
    shares = (
        ("H200, predicted", theme.series[0], [100 * row.h200_ms / first.h200_ms for row in rows]),
        ("this CPU, measured", theme.series[1], [100 * row.cpu_ms / first.cpu_ms for row in rows]),
    )
    for shift, (label, color, values) in zip((-0.2, 0.2), shares, strict=True):
        _bars(right, at + shift, values, 0.38, color, "{:.0f}", label)
    right.set(title="Time of a token's decode step", ylabel="% of round robin", ylim=(0, 135))
    right.legend(loc="upper center", ncols=2, fontsize=8)
    for axes in (left, right):
        axes.set_xticks(at, names)
        axes.grid(axis="y")


def _bars(
    axes: Any, at: Any, values: list[float], width: float, color: str, form: str, label: str | None = None
) -> None:
    bars = axes.bar(at, values, width, color=color, label=label)
    axes.bar_label(bars, [form.format(value) for value in values], fontsize=8)
