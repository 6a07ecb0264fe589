"""Functions that ``import coterie`` offers. Policies are given by name; all other arguments are values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.answers.fleet.simulation import FleetReport, FleetSettings, simulate_fleet
from coterie.costs.movement import Movement
from coterie.costs.presets import Preset
from coterie.costs.presets import step_model as preset_model
from coterie.costs.step import StepModel
from coterie.errors import ConfigError, check
from coterie.footprints.signatures import Weighting
from coterie.models import get_model
from coterie.placement import Load, Objective, Plan, planners
from coterie.routing import RouterFit
from coterie.traces.activations import ActivationTrace
from coterie.traces.readers import Trace, read_trace, requests_of
from coterie.types import ModelSpec, Placement, Topology, WeightDtype


def open_trace(path: str | Path, format: str | None = None) -> Trace:
    """Open a trace in any known format; without `format`, the reader that recognises the file is used."""
    return read_trace(path, format)


def step_model(
    model: str | ModelSpec,
    device: str | Preset = "h200",
    dtype: WeightDtype | None = None,
    topology: Topology | None = None,
    engine: str | None = None,
) -> StepModel:
    """Return the calibrated step-time model of a known model (or any ModelSpec) on a device.

    `device` is a preset's name or your own calibration; `dtype` is the weight dtype, by default as published;
    `topology` spreads the experts over several ranks; `engine` ("vllm", "sglang") takes whole steps as measured in that
    engine, or else its kernels in public tables; by default the first that is known, else torch's kernels ("kernels").
    """
    spec = get_model(model) if isinstance(model, str) else model
    return preset_model(spec, device, dtype, Topology(1) if topology is None else topology, engine=engine)


def fit_router(
    trace: Trace, workers: int, *, batch: int = 16, weighting: Weighting = "count_idf", seed: int = 0
) -> RouterFit:
    """Fit the values that routers need to an activation trace, for a fleet of `workers` decode workers."""
    if not isinstance(trace, ActivationTrace):
        raise ConfigError(f"a router is fitted on activations; this is a {type(trace).__name__}")
    return RouterFit(workers, batch, weighting).fit(trace, np.random.default_rng(seed))


def load_router(path: str | Path, model: str | None = None, workers: int | None = None) -> RouterFit:
    """Read a saved fit; raise InputError if it was made for another `model` or number of `workers`, if given."""
    return RouterFit.load(path, model, workers)


def plan(
    load: Load | NDArray[np.floating] | NDArray[np.integer],
    topology: Topology,
    current: Placement | None = None,
    *,
    model: StepModel,
    tokens: int = 8192,
    horizon: float = 1000.0,
    movement: Movement = "stops",
    planner: str = "latency_optimal",
    **settings: Any,
) -> Plan:
    """Plan a placement of the experts, and decide whether moving them pays within `horizon` steps.

    `load` is the load of a window of steps: a Load, or tokens [layer, expert], or a sample of single steps
    [scenario, layer, expert], whose expected time is minimised. `current` is the present placement; None is the
    engines' default, expert e in slot e. `tokens` is the number of tokens in a step over all ranks. `movement` says
    whether the engine `stops` for every move or moves are `staged` behind its steps. `settings` are the planner's own.
    """
    if not isinstance(load, Load):
        sample = np.asarray(load, np.float64)
        load = Load.of_scenarios(sample) if sample.ndim == 3 else Load(sample)
    if current is None:
        current = Placement.linear(load.num_layers, load.num_experts, topology.num_ranks)
    objective = Objective.of(model.on(topology), tokens, movement, horizon=horizon)
    return planners.make(planner, {"objective": objective}, **settings).plan(load, topology, current)


def simulate(
    trace: Trace,
    *,
    model: StepModel,
    decoders: int = 8,
    in_flight: int = 16,
    prefill: int = 0,
    routers: Sequence[str] = ("join_shortest_queue", "latency_aware"),
    arrivals: Trace | None = None,
    rate: float | None = None,
    fitted: RouterFit | None = None,
    splits: int = 3,
    requests: int = 2000,
) -> FleetReport:
    """Simulate what routers gain on a fleet of decoders with `in_flight` requests each, on the trace's own activations.

    The first router is the baseline of the others. Without `arrivals` (whose times and lengths are used) and `rate`
    (requests per second) the number of requests in flight is kept constant. `fitted` serves requests it was not fitted
    on; without it routers are fitted on one half of the trace and serve the other, `splits` times.
    """
    if not isinstance(trace, ActivationTrace):
        raise ConfigError(f"a fleet replays activations; this is a {type(trace).__name__}")
    check(routers, "routers=[] must name at least one")
    settings = FleetSettings(
        decoders=decoders,
        in_flight=in_flight,
        prefill=prefill,
        routers=tuple(routers),
        base=routers[0],
        arrivals=None if arrivals is None else requests_of(arrivals),
        rate=rate,
        fitted=fitted,
        splits=splits,
        requests=requests,
    )
    return simulate_fleet(trace, model, settings)
