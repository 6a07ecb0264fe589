"""The fleet simulator against the fleet itself: what it says of a routed fleet's run, before that run is looked at.

Calibrated in place: how long a decode step of n rows takes on these workers is read from their logs of the recording,
other requests than those that are predicted, and drawn as a straight line; some workers may be faster than it. Whatever
shares the machine with them is in that line, so it holds while as much is going on. What a request spent on its decoder
but in no step is a mean of the recording too. Then every router serves the test requests in
:func:`coterie.sim.fleet.run.run_fleet`, each token with the experts that it really had. Prefill is left out: as many
requests are in flight as the run had on its decoders, on average, which is taken from it as arrival times would be.
Wrong where steps of one size take very different times, and where what else the machine does changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.experts import MoeParams
from coterie.costs.roofline import Quality, RooflineLaw
from coterie.costs.step import StepModel
from coterie.errors import InputError
from coterie.footprints.positions import DISTINCT, ENDED_S, ROWS
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie.types import ModelSpec
from coterie.wire.expert_events import RequestExperts
from routed_loop import LoopSettings, make_router
from routed_runs import LoopResult, RouterRun

NOT_FITTED = Quality(0.0, 0.0, 0)
FREE = RooflineLaw(1e-9, 1e15, 1e15, 1.0, NOT_FITTED)


class StepLine(NamedTuple):
    """Seconds from one step's end to the next's, on a worker that always has requests."""

    fixed_s: float
    row_s: float
    speeds: tuple[float, ...]
    """[worker] by which its steps are faster than the line says."""
    outside_s: float
    """Seconds of a request at its decoder outside of any step: transfer, loading of its KV, sending of its answer."""
    steps: int
    """It was drawn through."""


class Figures(NamedTuple):
    """Results of one run, real or simulated."""

    distinct_per_step: float
    rows_per_step: float
    token_ms_p50: float
    """From a request's way to its decoder to its answer, over its tokens."""
    token_ms_p99: float

    @classmethod
    def of(cls, distinct: NDArray[np.float64], rows: NDArray[Any], token_s: NDArray[np.float64]) -> Figures:
        p50, p99 = 1e3 * np.percentile(token_s, [50, 99])
        return cls(float(distinct.mean()), float(rows.mean()), float(p50), float(p99))


class Predicted(NamedTuple):
    router: str
    measured: Figures
    predicted: Figures


def step_line(run: RouterRun) -> StepLine:
    """By least squares through all workers' steps.

    A worker's time from step to step counts where a request was with it all the while; a line that would fall with the
    rows is taken to be flat.
    """
    found: list[tuple[int, float, float]] = []  # worker, rows, seconds
    for worker, log in enumerate(run.log):
        sent = np.array(
            [
                (one.started_s + one.prefill_s, one.started_s + one.total_s)
                for one in run.served
                if one.decoder == worker
            ]
        ).reshape(-1, 2)
        for before, step in pairwise(log):
            if ((sent[:, 0] <= before[ENDED_S]) & (sent[:, 1] >= step[ENDED_S])).any():
                found.append((worker, step[ROWS], step[ENDED_S] - before[ENDED_S]))
    if len(found) < 2:
        raise InputError(f"{len(found)} steps followed another while a request was there; a line needs 2")
    worker, rows, seconds = np.array(found).T
    slope, fixed = np.polyfit(rows, seconds, 1) if len(set(rows)) > 1 else (0.0, seconds.mean())
    if not (slope >= 0 and fixed >= 0):
        slope, fixed = 0.0, seconds.mean()
    said = fixed + slope * rows
    speeds, within = [], 0.0
    for one, log in enumerate(run.log):
        mine = worker == one
        speeds.append(float(said[mine].sum() / seconds[mine].sum()) if mine.any() else 1.0)
        within += float((log[:, ROWS] * (fixed + slope * log[:, ROWS])).sum()) / speeds[-1]
    outside = max(0.0, sum(_decoding_s(run)) - within) / len(run.served)
    return StepLine(float(fixed), float(slope), tuple(speeds), outside, len(found))


def _decoding_s(run: RouterRun) -> list[float]:
    """[request] from its way to its decoder to its answer."""
    return [one.total_s - one.prefill_s for one in run.served]


def line_model(spec: ModelSpec, line: StepLine) -> StepModel:
    """A step model whose steps take what the line says, whichever experts they touch."""
    moe = MoeParams(
        overhead_us=1e6 * line.fixed_s / spec.num_moe_layers,
        token_us=1e6 * line.row_s / spec.num_moe_layers,
        stream_bytes_per_us=1e15,
        row_us=0.0,
        tile_flops_per_us=(1e15, 1e15),
        tile_rows=(16, 64),
        switch_rows=1e9,
        sharpness=1.0,
        fill_penalty=0.0,
        partial_penalty=0.0,
    )
    return StepModel(
        spec=spec,
        dtype=spec.weight_dtype,
        moe=moe,
        routing=None,
        gemm=FREE,
        decode_attention=FREE,
        prefill_attention=FREE,
    )


def decode_recordings(run: RouterRun, events: Sequence[RequestExperts | None]) -> tuple[list[int], Recordings]:
    """Served requests with more than one token, and their experts: a step each, the first takes the prompt's last."""
    kept, ids, shown = [], [], []
    for number, (one, event) in enumerate(zip(run.served, events, strict=True)):
        if event is None or one.footprint is None:
            continue
        rows = event.ids()[event.prompt_tokens - 1 :]
        if not event.seen()[event.prompt_tokens - 1 :].all():
            raise InputError(f"the experts of request {one.name!r} are not known for every token it decoded")
        kept.append(number)
        ids.append(rows)
        shown.append(one.footprint.counts)
    if not kept:
        raise InputError(f"none of {len(run.served)} requests was told of by its worker")
    lengths = np.array([len(rows) for rows in ids], np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    experts = next(event.num_experts for event in events if event is not None)
    return kept, Recordings(
        np.concatenate(ids), experts, first, np.ones(len(kept), np.int64), first, lengths, np.asarray(shown)
    )


def predict(result: LoopResult, spec: ModelSpec, settings: LoopSettings) -> tuple[StepLine, list[Predicted]]:
    """Every run of the loop, measured and simulated; `spec` is the shape of the served model."""
    line, fitted, decoders = step_line(result.recorded), result.fitted, len(result.recorded.log)
    model = line_model(spec, line)
    config = FleetConfig(decode_workers=decoders, places=settings.places, speeds=line.speeds)
    kept, recordings = decode_recordings(result.runs[0], result.events)
    tokens = recordings.decode_rows
    requests = FleetRequests(recordings, np.arange(len(kept)), np.ones(len(kept), np.int64), tokens)
    found = []
    for run in result.runs:
        there, all_along = _decoding_s(run), sum(one.total_s for one in run.served)
        within = max(0.0, sum(there) - line.outside_s * len(there)) / all_along
        in_flight = max(1, round(settings.in_flight * decoders * within))
        router = make_router(run.router, fitted, settings.in_flight)
        said = run_fleet(requests, model, router, config, in_flight=in_flight, fleet=fitted.fleet(settings.places))
        seconds = said.finish_s - said.arrival_s + line.outside_s
        found.append(
            Predicted(
                run.router,
                Figures.of(run.steps[:, DISTINCT], run.steps[:, ROWS], np.array(there)[kept] / tokens),
                Figures.of(said.step_distinct, said.step_decoding, seconds / tokens),
            )
        )
    return line, found
