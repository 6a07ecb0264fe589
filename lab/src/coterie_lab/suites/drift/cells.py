"""One seed of changing traffic under one router: never fitted anew, by the live loop, and at every change.

    without     the fit on the first turn's requests serves all turns
    loop        the same fit, and the live loop, which sees requests as they finish and nothing else
    fresh       a fit on requests set apart from each turn, in force from the turn's first request on
    chance      as without, but the first request that is measured goes to the next worker

All variants serve the same requests in the same order in a closed loop. Measured are the turns after the first, without
the requests in flight at the end, whose speed depends on how the fleet happens to run empty. The loop pays for what it
does: it notices a change by finished requests, a re-fit takes as long as `FIT_REQUESTS` requests take to finish, and a
candidate waits for requests that it can be scored on. The difference between *chance* and *without* is the noise of the
figures: one request elsewhere changes which requests run together from then on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.control import ControlEvent, ControlLoop, ControlSettings, LoopShape
from coterie.costs.lines import DecodeStepPrices
from coterie.errors import ConfigError
from coterie.routing import Router, RouterFit, routers
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import FleetController
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie_lab.suites.drift.controlled import FitsAtChanges, LoopController, OneElsewhere
from coterie_lab.suites.drift.traffic import GLM, GPT_OSS, Turns, read_turns

DECODERS = 4
PER_DECODER = {GPT_OSS: 8, GLM: 16}
"""Requests in flight per decoder."""
ROOM = 4
"""Places of a decoder, as a multiple of its mean requests."""
ROUTERS = ("latency_aware", "locality_band")
REQUESTS = 400
"""Most requests of a turn; gpt-oss-20b's recordings give some turns fewer."""
FIT_REQUESTS = 32
"""Requests that end while a router is fitted anew."""
SETTINGS = ControlSettings(cooldown_s=0.0)
"""Settings of the loop. Simulated requests are short, so that a cooldown in seconds would span several turns."""
CONTEXT = 64
"""Cached tokens per request at which step prices are taken."""
WITHOUT, LOOP, FRESH, CHANCE = VARIANTS = ("without", "loop", "fresh", "chance")


class DriftCell(NamedTuple):
    trace: str
    router: str
    seed: int
    """Seed of the requests, of their order and of the fits."""


class Outcome(NamedTuple):
    """Metrics of the turns after the first, without the requests in flight at the end."""

    tpot_ms: float
    """Mean over requests."""
    experts: float
    """Distinct experts per layer and step, steps weighted by their tokens."""
    late_tpot_ms: float
    """TPOT of the second half of each turn, when the loop has had the time to act."""
    late_experts: float


class CellResult(NamedTuple):
    outcomes: dict[str, Outcome]
    events: dict[str, int]
    """Kind of event → how often the loop reported it."""
    waited: float
    """Requests from a change to the first fit taken after it, mean over the turns that had one; NaN if none had."""
    changes: int


def serve_cell(cell: DriftCell, data: Path, requests: int) -> CellResult:
    """Serve one seed's traffic once per variant."""
    per_decoder = PER_DECODER[cell.trace]
    least = 4 * DECODERS * per_decoder
    if requests < least:
        raise ConfigError(f"requests={requests} must be at least {least}, four times those in flight")
    turns = read_turns(cell.trace, data, cell.seed, requests)
    bench = _Bench(turns, cell, per_decoder)
    loop = bench.loop()
    fresh = FitsAtChanges(bench.firsts, bench.fits[1:], bench.make, bench.places)
    chance = OneElsewhere(bench.firsts[0], bench.make(bench.fits[0]))
    controllers = {WITHOUT: None, LOOP: loop, FRESH: fresh, CHANCE: chance}
    outcomes = {name: bench.serve(controller) for name, controller in controllers.items()}
    return CellResult(
        {name: bench.outcome(run) for name, run in outcomes.items()},
        dict(Counter(event.kind for event in loop.events)),
        bench.waited(outcomes[LOOP], loop.events),
        len(bench.firsts),
    )


class _Bench:
    def __init__(self, turns: Turns, cell: DriftCell, per_decoder: int) -> None:
        self.turns, self.cell, self.per_decoder = turns, cell, per_decoder
        self.places, self.in_flight = ROOM * per_decoder, DECODERS * per_decoder
        self.fits = [
            RouterFit(DECODERS, per_decoder).fit(known, np.random.default_rng([cell.seed, 1, turn]))
            for turn, known in enumerate(turns.fits)
        ]
        tokens = float(turns.requests.output_tokens.mean())
        self.prices = DecodeStepPrices.of(turns.model, per_decoder, CONTEXT, tokens)
        self.firsts = [int(np.flatnonzero(turns.turn == turn)[0]) for turn in range(1, len(turns.fits))]

    def make(self, fit: RouterFit) -> Router:
        return routers.make(self.cell.router, {"fitted": fit, "cost": self.prices, "seed": self.cell.seed})

    def loop(self) -> LoopController:
        fit = self.fits[0]
        shape = LoopShape(fit.model, fit.num_layers, fit.num_experts, fit.learned.top_k, DECODERS)
        settings = replace(SETTINGS, seed=self.cell.seed)
        loop = ControlLoop(shape, fit, self.make, settings, batch=self.per_decoder, prices=self.prices)
        return LoopController(loop, self.make, self.places, FIT_REQUESTS)

    def serve(self, controller: FleetController | None) -> FleetRun:
        return run_fleet(
            self.turns.requests,
            self.turns.model,
            self.make(self.fits[0]),
            FleetConfig(decode_workers=DECODERS, places=self.places),
            in_flight=self.in_flight,
            fleet=self.fits[0].fleet(self.places),
            controller=controller,
        )

    def outcome(self, run: FleetRun) -> Outcome:
        turn = self.turns.turn
        full = np.arange(len(turn)) < len(turn) - self.in_flight
        late = np.zeros(len(turn), np.bool_)
        for first in self.firsts:
            own = np.flatnonzero(turn == turn[first])
            late[own[len(own) // 2 :]] = True
        return Outcome(*_measured(run, full & (turn > 0)), *_measured(run, full & late))

    def waited(self, run: FleetRun, events: list[ControlEvent]) -> float:
        """Count requests that arrived from a change until a fit was taken; return the mean over changes."""
        taken = np.array([event.at_s for event in events if event.kind == "refit_taken"])
        waits = []
        for first, end in zip(self.firsts, [*self.firsts[1:], len(run.arrival_s)], strict=True):
            inside = taken[(taken > run.arrival_s[first]) & (taken <= run.arrival_s[end - 1])]
            if len(inside):
                waits.append(int((run.arrival_s[first:end] < inside[0]).sum()))
        return float(np.mean(waits)) if waits else float("nan")


def _measured(run: FleetRun, chosen: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the TPOT of the chosen requests in ms, and the experts of the steps that began while they arrived."""
    tpot_ms = 1e3 * float(run.tpot_s[chosen & np.isfinite(run.tpot_s)].mean())
    # A request stands for the time until the next one arrives.
    steps = chosen[np.searchsorted(run.arrival_s, run.step_start_s, side="right") - 1]
    return tpot_ms, float(np.average(run.step_distinct[steps], weights=run.step_decoding[steps]))
