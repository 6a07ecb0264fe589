"""What-if run of batch selection: compare strategies with fcfs on the user's own requests, scheduler and device.

All strategies serve the same requests at the same times. One of two models gives the time of a batch: CAPS's, a base
time that grows with the imbalance of the load (`spread`), or the calibrated step time of a known model. The latter runs
prompts batch by batch (`prefill`) or replays recorded tokens with continuous batching (`decode`).
docs/simulate.md says when the numbers can be trusted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.batches.drawn import DRAWN
from coterie.answers.batches.options import DRY_RUN, SimulateOptions
from coterie.answers.batches.requests import (
    PATTERNS,
    RECORDED,
    Arrived,
    ModelRouting,
    Requests,
    arrive,
    recorded,
    route_prompts,
    synthetic,
)
from coterie.answers.batches.servers import SpreadServer, StepServer, make_strategy
from coterie.answers.batches.verdict import batches_verdict
from coterie.answers.suites import Report
from coterie.answers.verdicts import Verdict
from coterie.batching import SpreadCost, strategies
from coterie.batching.scheduler import CapsConfig, SchedulerConfig
from coterie.costs.presets import step_model
from coterie.errors import ConfigError, TraceError, check, check_file, check_known
from coterie.models import model_from_config, model_of
from coterie.predictors import predictors
from coterie.prompts import read_prompts
from coterie.sim.metrics import Run, RunSummary, summarise_run
from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.readers import ReadOptions, Trace, kind_of, read_trace, requests_of, trace_path
from coterie.traces.readers.routed_experts import find_model
from coterie.types import BYTES_PER_WEIGHT, ModelSpec, Placement, Topology, WeightDtype

REQUESTS = {"spread": 3000, "prefill": 1000, "decode": 400}
"""Default requests per run, by execution."""
LOAD = 0.8
"""Default arrival rate, as a share of the capacity of fcfs."""
PLACES = 32
MAX_BYTES = 1 << 31
"""Largest size in bytes of the loads of a run's requests."""
BASELINE = "fcfs"
LOWER_IS_BETTER = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "imbalance", "distinct")

_PRECISIONS = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "nf4": "nf4",
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a run."""

    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    """One row per strategy, fcfs first: :class:`coterie.sim.metrics.RunSummary` and gains over fcfs in percent."""
    notes: list[str]
    verdict: Verdict
    runs: dict[str, Run]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "rows": self.rows,
            "notes": self.notes,
            "verdict": self.verdict.sentence,
            "next": self.verdict.then,
        }


def simulate(options: SimulateOptions, report: Report) -> Simulated:
    """Serve the same requests under fcfs and every chosen strategy."""
    config = None if options.config is None else CapsConfig.read(options.config)
    # Only the fields that the file sets describe the user's model; defaults do not.
    given = frozenset(() if options.config is None else json.loads(options.config.read_bytes()))
    names = _names(options, config)
    check_known("predictor", options.predictor, [*predictors.names(), *[DRY_RUN] * (options.with_model is not None)])
    work = _work(options, config, given, report)
    count = options.requests or REQUESTS[work.execution]
    rng = np.random.default_rng([options.seed, 1])
    meta = None if work.trace is None else work.trace.meta
    nbytes = 8 * count * (meta.num_layers * meta.num_experts if meta else (config or CapsConfig()).num_experts)
    check(
        nbytes <= MAX_BYTES,
        f"requests={count} have loads of {nbytes >> 20} MiB; they must be at most {MAX_BYTES >> 20}",
    )
    requests, arrived = _requests(options, work, config, count, rng)
    server = _server(options, work, config, requests, arrived)
    total, before = (len(names) + 1) * count, 0

    def run(name: str, arrival_s: NDArray[np.float64], doing: str) -> Run:
        nonlocal before
        done = before

        def step(more: int) -> None:
            nonlocal done
            done += more
            report(doing, done, total)

        step(0)
        before += count
        return server.run(make_strategy(name, server), arrival_s, np.random.default_rng([options.seed, 2]), step)

    capacity = summarise_run(run(BASELINE, np.zeros(count), "Measuring what the server can do")).throughput
    rate, arrival_s = _times(options, work, arrived, capacity)
    runs = {name: run(name, arrival_s, f"Simulating {name}") for name in names}
    summaries = {name: summarise_run(one) for name, one in runs.items()}
    rows = [_row(name, summaries[name], summaries[BASELINE]) for name in names]
    settings = {
        "execution": work.execution,
        "source": requests.name,
        "requests": count,
        "recorded_requests": None if requests.expert_ids is None else len(requests.counts),
        "arrivals": work.arrivals_name,
        "rate": rate,
        "capacity": capacity,
        "load": None if rate is None else rate / capacity,
        "seed": options.seed,
        "predictor": requests.predictor,
        "cosine": requests.cosine,
        "calibration_requests": requests.calibration,
        "layers": requests.counts.shape[1],
        "experts": requests.counts.shape[2],
        "top_k": requests.top_k,
        **server.settings(),
        "scheduler": json.loads(msgspec.json.encode(server.config)) | {"strategy": names[1:]},
    }
    notes = [*work.notes, *requests.notes, *_notes(settings, server, requests)]
    return Simulated(settings, rows, notes, batches_verdict(rows, settings, options.trace), runs)


# ------------------------------------------------------------------------------------------------------ settings


def _names(options: SimulateOptions, config: CapsConfig | None) -> list[str]:
    asked = list(options.strategies) or [config.scheduler.strategy if config else "latency_aware"]
    if "all" in asked:
        asked = strategies.names()
    for name in asked:
        strategies.check(name)  # for a name from the config; SimulateOptions has checked its own
    return list(dict.fromkeys((BASELINE, *asked)))


class _Work(NamedTuple):
    """Inputs of a simulation, read from files; the requests are not drawn yet."""

    execution: str
    trace: ActivationTrace | None
    name: str
    routed: ModelRouting | None
    spec: ModelSpec | None
    arrivals: str | RequestTrace | None
    arrivals_name: str
    notes: list[str]


def _work(options: SimulateOptions, config: CapsConfig | None, given: frozenset[str], report: Report) -> _Work:
    arrivals, arrivals_name = _arrivals(options)
    trace, routed, notes = None, None, []
    name = "synthetic"
    if options.with_model is not None:
        name, spec = str(options.with_model), model_from_config(options.with_model)
        # Check before loading the model, which takes minutes.
        _check_shape(options, config, given, name, spec.num_experts, spec.top_k)
        check(
            options.execution != "decode", "--with-model runs prompts, no answers: coterie record makes a trace of both"
        )
        prompts = None if options.prompts is None else read_prompts(options.prompts)
        dtype = _precision(config, spec, options.device)
        routed = route_prompts(options.with_model, dtype, options.device, prompts, options.seed, report)
        trace = routed.trace
        notes = [f"What runs is the routing of {routed.trace.num_requests} prompts in {dtype}.", *routed.notes]
    elif options.trace is not None:
        name = str(options.trace)
        read = _read_trace(options, config, given)
        if isinstance(read, RequestTrace):
            check(
                options.arrivals is None,
                f"{name} holds requests without experts: it gives arrivals, as does --arrivals",
            )
            arrivals, arrivals_name, name = _timed(read, name), name, "synthetic"
            notes = ["The trace gives times; the experts of its requests are drawn."]
        elif not isinstance(read, ActivationTrace):
            raise TraceError(options.trace, "kind", f"found {kind_of(read)!r}, expected 'activations' or 'requests'")
        else:
            trace = read
            check_file(trace.num_requests, options.trace, "requests", "there is none")
            trace.validate()  # a memory-mapped trace is unread so far; the error for a bad id must name the file
    if trace is not None:
        _check_shape(options, config, given, name, trace.meta.num_experts, trace.meta.top_k)
        if arrivals is None and trace.requests.arrival_s is not None:
            arrivals_name = "as recorded"
    execution, spec_found = _execution(options, config, trace, notes)
    options.only_for(execution)
    check(
        trace is not None or options.predictor in (None, RECORDED),
        f"predictor={options.predictor!r} needs recorded requests: give a trace or --with-model",
    )
    return _Work(
        execution=execution,
        trace=trace,
        name=name,
        routed=routed,
        spec=spec_found,
        arrivals=arrivals,
        arrivals_name=arrivals_name,
        notes=notes,
    )


def _read_trace(options: SimulateOptions, config: CapsConfig | None, given: frozenset[str]) -> Trace:
    """Read the trace by its own metadata; use the model option and the config only if the metadata is not enough.

    Used first, they would replace the metadata and hide that they do not fit the trace.
    """
    assert options.trace is not None
    experts = config.num_experts if config and "num_experts" in given else None
    try:
        return read_trace(options.trace, options.trace_format)
    except TraceError:
        if options.model is None and experts is None:
            raise
        return read_trace(options.trace, options.trace_format, ReadOptions(options.model, experts))


def _arrivals(options: SimulateOptions) -> tuple[str | RequestTrace | None, str]:
    asked = options.arrivals
    if asked is None or asked in PATTERNS:
        return asked, asked or "poisson"
    check(
        trace_path(asked).exists(),
        f"arrivals={asked!r} must be {', '.join(PATTERNS)}, or a trace; no file has that name",
    )
    return _timed(requests_of(asked), asked), asked


def _timed(trace: RequestTrace, name: str) -> RequestTrace:
    if trace.arrival_s is None or not len(trace):
        raise TraceError(name, "arrival_s", "there are no arrival times")
    return trace


def _check_shape(
    options: SimulateOptions, config: CapsConfig | None, given: frozenset[str], name: str, experts: int, top_k: int
) -> None:
    for field, found in (("num_experts", experts), ("top_k_experts", top_k)):
        if config is not None and field in given and getattr(config, field) != found:
            raise ConfigError(f"{options.config}: {field}={getattr(config, field)} must equal {found}, that of {name}")


def _precision(config: CapsConfig | None, spec: ModelSpec, device: str) -> str:
    asked = config.quantization if config else None
    if asked is None:
        precision = _PRECISIONS.get(spec.weight_dtype, "bfloat16")
        # On a CPU, float32 has the same weights as float16 and is twice as fast.
        return "float32" if precision == "float16" and device == "cpu" else precision
    check(asked in _PRECISIONS, f"quantization={asked!r} must be null or one of {', '.join(_PRECISIONS)}")
    return _PRECISIONS[asked]


def _execution(
    options: SimulateOptions, config: CapsConfig | None, trace: ActivationTrace | None, notes: list[str]
) -> tuple[str, ModelSpec | None]:
    """Return how batches are timed, and the shape of the model to time."""
    wanted = options.execution
    if trace is None:
        check(
            wanted not in ("prefill", "decode"),
            f"execution={wanted} needs recorded experts of every layer: give an activation trace",
        )
        return "spread", None
    if wanted == "spread":
        return wanted, None
    spec = _spec(options, config, trace)
    if spec is None:
        check(wanted is None, f"execution={wanted} times a known model; {trace.meta.model!r} is none: give --model")
        return "spread", None
    ours = (trace.meta.num_layers, trace.meta.num_experts, trace.meta.top_k)
    theirs = (spec.num_moe_layers, spec.num_experts, spec.top_k)
    if ours != theirs:
        said = f"the trace has (layers, experts, top_k) = {ours}, {spec.name} has {theirs}"
        check(wanted is None and options.model is None, f"{said}: steps cannot be timed")
        notes.append(f"Timed by spread: {said}.")
        return "spread", None
    if wanted is None:
        if options.with_model is not None and options.model is None:
            return "spread", None
        wanted = "decode" if int(trace.requests.output_tokens.max(initial=0)) > 1 else "prefill"
    return wanted, spec


def _spec(options: SimulateOptions, config: CapsConfig | None, trace: ActivationTrace) -> ModelSpec | None:
    if options.model is not None:
        return model_of("", options.model)
    if options.with_model is not None:
        return model_from_config(options.with_model)
    return find_model(trace.meta.model, config.model_name if config else None)


def _requests(
    options: SimulateOptions, work: _Work, config: CapsConfig | None, count: int, rng: Generator
) -> tuple[Requests, Arrived]:
    if work.trace is None:
        shape = config or CapsConfig()
        return synthetic(shape.num_experts, shape.top_k_experts, work.arrivals, count, rng)
    predictor = options.predictor or (DRY_RUN if work.routed else RECORDED)
    dry_run = work.routed.dry_run if work.routed else None
    requests = recorded(work.trace, work.name, work.execution, predictor, rng, dry_run)
    return requests, arrive(requests, work.arrivals, count, rng)


def _times(
    options: SimulateOptions, work: _Work, arrived: Arrived, capacity: float
) -> tuple[float | None, NDArray[np.float64]]:
    """Return the rate and the arrival times: from the options, as recorded, or at a share of the capacity."""
    if options.rate is None and work.arrivals_name not in PATTERNS:
        return arrived.rate, arrived.arrival_s
    if len(arrived.row) == 1:
        return options.rate, arrived.arrival_s
    rate = options.rate or LOAD * capacity
    return rate, arrived.at(rate)


def _server(
    options: SimulateOptions, work: _Work, config: CapsConfig | None, requests: Requests, arrived: Arrived
) -> SpreadServer | StepServer:
    # An engine starts a step as soon as a request waits; CAPS's server waits for 16 requests to choose from.
    scheduler = config.scheduler if config else SchedulerConfig(min_batch_trigger=16 if work.spec is None else 1)
    if work.spec is None:
        base_ms = DRAWN.base_s * 1e3 if options.base_ms is None else options.base_ms
        sensitivity = DRAWN.sensitivity if options.sensitivity is None else options.sensitivity
        return SpreadServer(scheduler, requests, arrived.row, base_ms, SpreadCost(sensitivity))
    spec, ranks, preset = work.spec, options.ranks or 1, options.preset or "h200"
    asked = config.quantization if config else None
    dtype: WeightDtype | None = asked if asked in BYTES_PER_WEIGHT else None  # type: ignore[assignment]
    return StepServer(
        config=scheduler,
        requests=requests,
        row=arrived.row,
        phase=work.execution,
        model=step_model(spec, preset, dtype, Topology(ranks)),
        placement=Placement.linear(spec.num_moe_layers, spec.num_experts, ranks) if ranks > 1 else None,
        preset=preset,
        places=scheduler.max_batch_size if work.execution == "prefill" else options.places or PLACES,
    )


# ------------------------------------------------------------------------------------------------------ in words


def _row(name: str, ours: RunSummary, base: RunSummary) -> dict[str, Any]:
    reductions = {
        f"{field.removesuffix('_ms')}_reduction_pct": 100.0 * (1.0 - getattr(ours, field) / getattr(base, field))
        for field in LOWER_IS_BETTER
    }
    gain = 100.0 * (ours.throughput / base.throughput - 1.0)
    return {"strategy": name, **ours._asdict(), **reductions, "throughput_gain_pct": gain}


def _notes(settings: dict[str, Any], server: SpreadServer | StepServer, requests: Requests) -> list[str]:
    load, rate, capacity = settings["load"], settings["rate"], settings["capacity"]
    seen = f"Load vectors by {requests.predictor}: cosine {requests.cosine:.3f} with the load that runs."
    if requests.predictor == RECORDED:
        seen = "Load vectors are the recorded ones: strategies see the exact load; a live predictor knows less."
    if load is None:
        pace = f"All requests arrive at once; fcfs serves {capacity:.4g} requests/s."
    elif load > 1.0:
        pace = (
            f"Overload: {rate:.4g} requests/s arrive, fcfs can serve {capacity:.4g}. Waits grow for as long as the run "
            "lasts, so latencies and their gains are those of this many requests and no others; compare throughput."
        )
    else:
        pace = f"The server keeps up: {rate:.4g} requests/s arrive, fcfs can serve {capacity:.4g} ({load:.0%})."
    if not isinstance(server, StepServer):
        caps = (
            "Time is CAPS's model, a straggler that all wait for. On one GPU there is none (docs/results/regimes.md)."
        )
        return [seen, pace, caps]
    decode, missing = server.phase == "decode", int(np.count_nonzero(requests.context == 0))
    notes = {
        seen: True,
        pace: True,
        server.model.caveat: bool(server.model.caveat),
        f"KV memory is not modelled: {server.places} places bound what runs.": decode,
        f"{missing} of {len(requests.counts)} requests have no prompt: context starts at 0.": decode and missing,
    }
    return [note for note, holds in notes.items() if holds]
