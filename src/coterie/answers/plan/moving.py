"""What requests notice while a plan's moves run: their latency in a simulated group that serves meanwhile.

Requests arrive at random at a share of what the group can serve at most, and join the shortest queue. Every token's
experts are drawn from the load that the plan was made for, each layer by itself: tokens of real requests are more
alike, and their steps less even.
The same requests are served without the change, by an engine that stops for it, and by one that moves weights beside
its steps; the change begins at several moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.plan.plans import Planned
from coterie.answers.suites import Report
from coterie.costs.movement import Contention, staged_exposed
from coterie.errors import check
from coterie.placement.migration.rounds import MigrationLimits, schedule_moves
from coterie.sim.fleet.requests import FleetRequests, Recordings, order_apart
from coterie.sim.group.serving import (
    MOST_RANKS,
    GroupLoads,
    GroupPrices,
    GroupServedRun,
    Rebalance,
    ServeSettings,
    ServingGroup,
)
from coterie.types import Placement, Topology

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 128
RECORDINGS, ROWS = 32, 256
"""Drawn requests, and tokens of each; half are the prompt's, and longer ones repeat them."""
REQUESTS = 48
"""Requests per rank."""
BUSY = 0.7
"""Arrivals, as a share of what the group serves when all requests arrive at once."""
STARTS = 4
"""Moments at which the change begins, each in a run of its own."""


class MovingRow(NamedTuple):
    """Latency around a change, in milliseconds, of the requests that are served between its start and its recovery."""

    movement: str
    """`none`: weights do not move; `stops`: the engine stops; `staged`: weights move beside steps."""
    requests: int
    """Number of requests, over all moments."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    """Of the requests whose first token came in that time."""
    tpot_p50_ms: float
    tpot_p99_ms: float
    longest_gap_ms: float
    """Longest time between two tokens, mean over moments."""
    moving_s: float
    """Time of the moves, without other traffic."""
    recovered_s: float | None
    """Time from the first move until as many tokens were served as without it, median; None if that is not reached."""


def check_moving(ranks: int, speeds: str | None) -> None:
    """Raise unless a change of the placement can be simulated."""
    check(
        speeds is None and 1 < ranks <= MOST_RANKS,
        f"--latency simulates a change on 2 to {MOST_RANKS} ranks that are equally fast",
    )


def latency_while_moving(planned: Planned, report: Report = lambda *_: None) -> list[MovingRow]:
    """Return the latency without the plan's moves, and while they run in each way with a price; [] if none move."""
    if not len(planned.plan.moves):
        return []
    problem, model = planned.problem, planned.pricing.model
    rng, count = np.random.default_rng(0), REQUESTS * problem.topology.num_ranks
    recordings = _recordings(planned.load.tokens, planned.load.spec.top_k, rng)
    prompts, outputs = (np.full(count, tokens) for tokens in (PROMPT_TOKENS, OUTPUT_TOKENS))
    requests = FleetRequests(recordings, order_apart(RECORDINGS, count, rng), prompts, outputs)
    prices = GroupPrices.of(model, ServeSettings())
    now = ServingGroup(prices, planned.now.placement, requests)
    at_once_s = now.serve(np.zeros(count)).end_s
    arrival_s = np.cumsum(rng.exponential(at_once_s / count / BUSY, count))
    plain = now.serve(arrival_s)
    move = partial(change_to, now.placement, planned.plan.placement, problem.topology, problem.objective.expert_bytes)
    ways = {"stops": move()}
    if {"device", "host-to-device"} <= model.contention.keys():
        ways["staged"] = move(model.contention)
    movement_s = max(ways["stops"].moved_s, default=0.0)
    starts = np.linspace(0.2, 0.6, STARTS) * plain.end_s
    runs, recovered = {"none": [plain] * STARTS}, {"none": 0.0}
    for movement, change in ways.items():
        runs[movement] = []
        for start in starts:
            report("Simulating requests while weights move", len(runs[movement]), STARTS)
            runs[movement].append(now.serve(arrival_s, controller=Once(change, start)))
        late = [_caught_up(plain, run, start) for run, start in zip(runs[movement], starts, strict=True)]
        recovered[movement] = float(np.median(late))
    window_s = max(movement_s, *(late for late in recovered.values() if np.isfinite(late)))
    return [
        _row(movement, runs[movement], plain, starts, window_s)._replace(
            moving_s=0.0 if movement == "none" else movement_s, recovered_s=late if np.isfinite(late) else None
        )
        for movement, late in recovered.items()
    ]


def _recordings(tokens: NDArray[np.float64], top_k: int, rng: Generator) -> Recordings:
    """Draw requests whose tokens take `top_k` different experts, by the load [layer, expert]."""
    rows = RECORDINGS * ROWS
    ids = np.empty((rows, len(tokens), top_k), np.int64)
    for layer, load in enumerate(tokens):  # the first of exponential clocks whose rates are the loads
        clocks = rng.standard_exponential((rows, len(load)), np.float32) / np.maximum(load, 1e-12).astype(np.float32)
        ids[:, layer] = np.argpartition(clocks, top_k - 1, axis=1)[:, :top_k]
    first, half = np.arange(RECORDINGS) * ROWS, np.full(RECORDINGS, ROWS // 2)
    return Recordings(ids, tokens.shape[1], first, half, first + half, half)


def _row(
    movement: str, runs: list[GroupServedRun], plain: GroupServedRun, starts: NDArray[np.float64], window_s: float
) -> MovingRow:
    ttft, tpot, gaps = [], [], []
    for run, start in zip(runs, starts, strict=True):
        end = start + window_s
        first = (plain.first_s >= start) & (plain.arrival_s <= end)
        first[np.argmax(plain.first_s >= start)] = True  # the next one, if none arrives in that time
        ttft.append((run.first_s - run.arrival_s)[first])
        served = first | ((plain.arrival_s <= end) & (plain.finish_s >= start))
        tpot.append((run.finish_s - run.first_s)[served] / (OUTPUT_TOKENS - 1))
        ends = run.steps.start_s + run.steps.seconds
        gaps.append(np.diff(ends)[(ends[1:] >= start) & (run.steps.start_s[1:] <= end)].max(initial=0.0))
    first_s, token_s = np.concatenate(ttft), np.concatenate(tpot)
    return MovingRow(
        movement=movement,
        requests=len(token_s),
        ttft_p50_ms=1e3 * float(np.quantile(first_s, 0.5)),
        ttft_p99_ms=1e3 * float(np.quantile(first_s, 0.99)),
        tpot_p50_ms=1e3 * float(np.quantile(token_s, 0.5)),
        tpot_p99_ms=1e3 * float(np.quantile(token_s, 0.99)),
        longest_gap_ms=1e3 * float(np.mean(gaps)),
        moving_s=0.0,
        recovered_s=None,
    )


def _caught_up(plain: GroupServedRun, run: GroupServedRun, start_s: float) -> float:
    """Return the seconds after `start_s` at which `run` has served as many tokens as `plain`; infinite if it never has.

    Tokens of a step count evenly over its time.
    """

    def tokens(of: GroupServedRun, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        steps, new = of.steps, of.steps.prompt + of.steps.decoded
        done, times = np.cumsum(new), np.stack([steps.start_s, steps.start_s + steps.seconds], axis=1)
        return np.asarray(np.interp(at_s, times.ravel(), np.stack([done - new, done], axis=1).ravel()))

    ends_s = (run.steps.start_s + run.steps.seconds)[run.steps.start_s >= start_s]
    ahead = np.flatnonzero(tokens(run, ends_s) >= tokens(plain, ends_s))
    return float(ends_s[ahead[0]] - start_s) if len(ahead) else np.inf


def change_to(
    current: Placement,
    placement: Placement,
    topology: Topology,
    expert_bytes: float,
    contention: Mapping[str, Contention] | None = None,
    reason: str = "",
) -> Rebalance:
    """Return the change from one placement to another, which may have other slots: its rounds of transfers in time.

    With `contention`, as measured, weights move beside steps; without, the engine stops.
    """
    wide = max(current.slots_per_rank, placement.slots_per_rank)
    limits = MigrationLimits(expert_bytes)
    schedule = schedule_moves(current.widened(wide), placement.widened(wide), topology, limits)
    return Rebalance(
        placement=schedule.placement if wide == placement.slots_per_rank else placement,
        layers=[switch.layer for switch in schedule.switches],
        moved_s=schedule.ready_s,
        exposed=1.0 if contention is None else staged_exposed(contention, topology),
        moved_bytes=schedule.moved_bytes,
        reason=reason,
    )


@dataclass(slots=True)
class Once:
    """Makes one change, at the first step that starts at `every_s` or later. Make a new one for each run."""

    change: Rebalance
    every_s: float
    late_s: float = 0.0

    def tick(self, _now_s: float, _loads: GroupLoads) -> Rebalance | None:
        self.every_s = np.inf
        return self.change

    def landed(self, _now_s: float, _placement: Placement) -> None:
        pass
