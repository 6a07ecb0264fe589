"""Invariants of a fleet's run (docs/invariants.md), checked independently of the simulation loop: of its reports only
times and workers are trusted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.costs.step import StepModel
from coterie.routing import Router
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import FleetRequests
from coterie.sim.fleet.run import UNBOUNDED, FleetConfig, run_fleet
from sim_checks import TOLERANCE_S, check_tokens, require_invariant


def run_checked(
    requests: FleetRequests, model: StepModel, router: Router, config: FleetConfig, **settings: Any
) -> FleetRun:
    """Serve the requests as `run_fleet` does, and check the run."""
    run = run_fleet(requests, model, router, config, **settings)
    unique, whole = settings.get("duplicates") != "allow", settings.get("until_s", np.inf) == np.inf
    check_run(run, requests, config, unique=unique, whole=whole)
    return run


def check_run(
    run: FleetRun, requests: FleetRequests, config: FleetConfig, *, unique: bool = True, whole: bool = True
) -> None:
    """Raise an InvariantError that names the broken rule.

    `unique`: no recording may be in flight twice. `whole`: the run was not cut off at a given time.
    """
    tokens = [config.prefill_kv_tokens] * run.prefill_workers + [config.kv_tokens] * run.decode_workers
    capacity = np.array([UNBOUNDED if most is None else most // requests.block_tokens for most in tokens])
    done = np.isfinite(run.finish_s)
    _check_conservation(run, done)
    left = run.queued + run.running
    require_invariant(19, not whole or left == 0, f"the run ended and {left} requests are neither done nor dropped")
    _check_times(run, done)
    check_tokens(run.decoded[done], run.output_tokens[done] - config.both)
    _check_places(run, config.places, config.prefill_places, config.both)
    for worker in np.flatnonzero(run.kv_most > capacity):
        require_invariant(30, False, f"worker {worker} held {run.kv_most[worker]} of {capacity[worker]} KV blocks")
    for worker in np.flatnonzero(run.kv_held) if whole else ():
        require_invariant(30, False, f"worker {worker} holds {run.kv_held[worker]} KV blocks of no request")
    steps = _steps_by_worker(run)
    _check_work(run, steps, done)
    if unique:
        _check_unique(run, requests)
    _check_distinct(run, requests, steps)


def _check_conservation(run: FleetRun, done: NDArray[np.bool_]) -> None:
    """INV-29: every request that arrived is done, queued, running or dropped."""
    arrived = int((np.isfinite(run.arrival_s) & (run.arrival_s <= run.end_s)).sum())
    finished, dropped = int(done.sum()), int(run.dropped.sum())
    require_invariant(
        29,
        arrived == finished + run.queued + run.running + dropped,
        f"{arrived} arrived; {finished} done + {run.queued} queued + {run.running} running + {dropped} dropped",
    )


def _check_times(run: FleetRun, done: NDArray[np.bool_]) -> None:
    """INV-20: no stage of a request begins before the previous stage ends."""
    names = ("arrival", "prefill_start", "prefill_end", "ready", "decode_start", "finish")
    stages = [getattr(run, f"{name}_s")[done] for name in names]
    for (before, earlier), (after, later) in pairwise(zip(names, stages, strict=True)):
        for row in np.flatnonzero(~(later >= earlier)):
            request = int(np.flatnonzero(done)[row])
            require_invariant(20, False, f"request {request}: {after} at {later[row]} s, {before} at {earlier[row]} s")
    first = run.first_token_s[done]
    require_invariant(
        20,
        bool(((first >= stages[2]) & (first <= stages[-1])).all()),
        "a first token came before its prompt was computed or after the last token",
    )


def _check_places(run: FleetRun, places: int, prefill_places: int, both: bool) -> None:
    """INV-30: no worker runs more requests than it has places, checked at the times when requests join and leave."""
    require_invariant(
        30, run.step_decoding.max(initial=0) <= places, f"a step decoded {run.step_decoding.max(initial=0)} tokens"
    )
    start, end = (run.prefill_start_s, run.finish_s) if both else (run.decode_start_s, run.finish_s)
    _sweep(run.decoder, start, end, places)
    if run.prefill_workers:
        _sweep(run.prefiller, run.prefill_start_s, run.prefill_end_s, prefill_places)


def _sweep(worker: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64], places: int) -> None:
    for number in np.unique(worker[worker >= 0]):
        mine = (worker == number) & np.isfinite(start)
        times = np.concatenate([start[mine], np.where(np.isfinite(end[mine]), end[mine], np.inf)])
        change = np.repeat([1, -1], mine.sum())
        order = np.lexsort((change, times))  # at equal times, requests leave before others join
        most = int(np.cumsum(change[order]).max(initial=0))
        require_invariant(30, most <= places, f"worker {number} ran {most} requests on {places} places")


def _steps_by_worker(run: FleetRun) -> list[NDArray[np.int64]]:
    order = np.argsort(run.step_worker, kind="stable")
    bounds = np.searchsorted(run.step_worker[order], np.arange(run.prefill_workers + run.decode_workers + 1))
    return [order[a:b] for a, b in pairwise(bounds)]


def _check_work(run: FleetRun, steps: list[NDArray[np.int64]], done: NDArray[np.bool_]) -> None:
    """INV-21: steps of a worker never overlap, and a worker is never idle while a request is due."""
    for worker, mine in enumerate(steps):
        start, end = run.step_start_s[mine], run.step_start_s[mine] + run.step_s[mine]
        gaps = start[1:] - end[:-1]
        require_invariant(21, bool((gaps >= -TOLERANCE_S).all()), f"two steps of worker {worker} overlap")
        if worker < run.prefill_workers:
            own, due, until = run.prefiller == worker, run.prefill_start_s, run.prefill_end_s
        else:
            own, due, until = run.decoder == worker - run.prefill_workers, run.ready_s, run.finish_s
        due, until = due[own & done], until[own & done]
        for at in np.flatnonzero(gaps > TOLERANCE_S):
            require_invariant(
                21,
                not ((due <= end[at] + TOLERANCE_S) & (until >= start[at + 1])).any(),
                f"worker {worker} idle from {end[at]} to {start[at + 1]} s while one is due",
            )
            require_invariant(
                21,
                not ((due > end[at] + TOLERANCE_S) & (due < start[at + 1] - TOLERANCE_S)).any(),
                f"worker {worker} idle until {start[at + 1]} s while one is due before",
            )


def _check_distinct(run: FleetRun, requests: FleetRequests, steps: list[NDArray[np.int64]]) -> None:
    """INV-31: a decode step touches the experts of exactly the recorded tokens that were due in it."""
    recordings = requests.recordings
    layers = np.arange(recordings.expert_ids.shape[1])[:, None]
    for decoder in range(run.decode_workers):
        mine = steps[run.prefill_workers + decoder]
        touched = np.zeros((len(mine), len(layers), recordings.num_experts), np.bool_)
        tokens = np.zeros(len(mine), np.int64)
        for request in np.flatnonzero((run.decoder == decoder) & np.isfinite(run.decode_start_s)):
            first = int(np.searchsorted(run.step_start_s[mine], run.decode_start_s[request]))
            recorded = requests.recorded[request]
            decoded = int(run.decoded[request])
            if not np.isfinite(run.finish_s[request]):
                decoded = min(decoded + 1, len(mine) - first)  # the request also takes part in the step under way
            rows = np.arange(decoded) % recordings.decode_rows[recorded] + recordings.decode_row[recorded]
            require_invariant(
                31, first + decoded <= len(mine), f"request {request} decodes past the last step of its worker"
            )
            for at, row in enumerate(rows, first):
                touched[at, layers, recordings.expert_ids[row]] = True
            tokens[first : first + decoded] += 1
        alone = run.step_prefill[mine] == 0
        counted = touched.sum(axis=(1, 2)) / len(layers)
        same = bool((tokens == run.step_decoding[mine]).all())
        require_invariant(31, same, f"decoder {decoder}: a step decodes other requests than are there")
        for wrong in np.flatnonzero(alone & (counted != run.step_distinct[mine])):
            step = mine[wrong]
            require_invariant(
                31, False, f"step {step} touches {counted[wrong]} experts a layer, reported {run.step_distinct[step]}"
            )


def _check_unique(run: FleetRun, requests: FleetRequests) -> None:
    """INV-32: a recording is in flight at most once at a time."""
    order = np.lexsort((run.arrival_s, requests.recorded))
    order = order[np.isfinite(run.arrival_s[order]) & ~run.dropped[order]]
    same = requests.recorded[order][1:] == requests.recorded[order][:-1]
    ends = np.where(np.isfinite(run.finish_s), run.finish_s, np.inf)[order][:-1]
    begins = run.arrival_s[order][1:]
    for at in np.flatnonzero(same & (begins <= run.end_s) & (begins < ends)):
        row = order[at + 1]
        require_invariant(
            32,
            False,
            f"request {row} replays recording {requests.recorded[row]}, in flight at {run.arrival_s[row]} s already",
        )
