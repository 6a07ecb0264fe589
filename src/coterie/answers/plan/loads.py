"""Loads to plan for: read from a trace in any known format, with a held-out part to score a plan on.

A plan looks best on the load it was made for. A load is therefore divided if possible: a plan made on one part is
scored on the other part. The same holds for single steps (:mod:`~coterie.answers.plan.samples`): steps to score on are
drawn from requests or windows that the plan was not made on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.plan.learning import ItemKind, SeenRequests
from coterie.answers.plan.samples import Sample, Sampling, of_domains, of_requests, of_windows
from coterie.errors import ConfigError, TraceError, check, check_file
from coterie.footprints.counting import accumulate_load
from coterie.models import model_of
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.load import MERGED, choose_windows
from coterie.traces.readers import ReadOptions, read_trace
from coterie.types import ModelSpec

Array = NDArray[np.float64]


FEWEST_REQUESTS = 20
"""Fewest requests of an activation trace to hold out every other one; half of fewer requests shows little."""


class Division(NamedTuple):
    """Requests of a trace, or windows of a table: those to plan on, and those to score on."""

    planned: NDArray[np.int64]
    """Ascending indices."""
    scored: NDArray[np.int64]
    names: tuple[str, str]
    """Description of the two parts, in words."""

    @property
    def what(self) -> str:
        return f"planned on {self.names[0]}, scored on {self.names[1]}"


def divide_requests(count: int, arrival_s: NDArray[np.float64] | None) -> Division:
    """Divide the requests of a trace, for `coterie plan` and `coterie advise`.

    With arrival times the earlier half is planned on and the later half scored: a plan serves what comes after it.
    Without, every other request is planned on: traces are often sorted by domain, so halves would differ.
    """
    everyone = np.arange(count)
    if count < 2 or arrival_s is None or not np.ptp(arrival_s) > 0:
        return Division(everyone[::2], everyone[1::2], ("every other request", "the rest"))
    earlier, later = np.array_split(np.argsort(arrival_s, kind="stable"), 2)
    return Division(np.sort(earlier), np.sort(later), ("the earlier half of the requests", "the later half"))


def divide_windows(chosen: list[int], labels: list[str]) -> Division:
    """Divide the chosen windows of a table, of at least two.

    They are divided in order of time; shards of a label (law/0, law/1 …) by label. A label names a kind of traffic:
    dividing each label gives both parts the same mixture.
    """
    groups: dict[str, list[int]] = {}
    for i in chosen:
        name, slash, _ = labels[i].partition("/") if labels else ("", "", "")
        groups.setdefault(name if slash else "", []).append(i)
    alone = groups.pop("", [])
    for name in [name for name, rows in groups.items() if len(rows) == 1]:
        alone += groups.pop(name)
    cut = [(rows, -(-len(rows) // 2)) for rows in (*groups.values(), sorted(alone))]
    first = [i for rows, half in cut for i in rows[:half]]
    second = [i for rows, half in cut for i in rows[half:]]
    names = f"{len(first)} of its windows", f"the other {len(second)}"
    return Division(np.array(first, np.int64), np.array(second, np.int64), names)


class Parts(NamedTuple):
    """Load to plan on, and held-out load to score the plan on."""

    planned: Array | None
    """[layer, expert] tokens; None: the whole chosen load, since the plan is scored on windows outside of it."""
    scored: Array
    """[layer, expert] tokens."""
    what: str
    """Description of the two parts, in words."""
    planned_steps: Sample | None = None
    """Single steps of the part to plan on; None if the plan is for the mean step."""
    scored_steps: Sample | None = None
    domains: Sample | None = None
    """Domains of the part to score on; None unless plans are over domains or mixtures of domains."""
    learned: tuple[SeenRequests, SeenRequests] | None = None
    """Requests of the part to plan on, and of the part to score on; None for a load table."""

    def of_layers(self, rows: slice) -> Parts:
        return Parts(
            None if self.planned is None else self.planned[rows],
            self.scored[rows],
            self.what,
            self.planned_steps and self.planned_steps.layers(rows),
            self.scored_steps and self.scored_steps.layers(rows),
            self.domains and self.domains.layers(rows),
            self.learned and (self.learned[0].of_layers(rows), self.learned[1].of_layers(rows)),
        )


class WindowLoad(NamedTuple):
    """Load to plan for, and its model."""

    spec: ModelSpec
    layer_ids: tuple[int, ...]
    tokens: Array
    """[layer, expert] tokens."""
    what: str
    """Description of the load: which part of which file, in words."""
    parts: Parts | None = None
    whole_because: str = ""
    """Reason why the load is not divided, in words, if `parts` is None."""
    steps: Sample | None = None
    """Single steps to plan for; None plans for the mean step."""
    learned: SeenRequests | None = None
    """Requests that planners may learn from; None for a load table."""


Make = Callable[..., WindowLoad]
"""Function that makes a load of a model from the fields after `layer_ids`."""
MEAN = Sampling()


def read_load(
    path: Path,
    format: str | None,
    model: str | None,
    window: str | None,
    sampling: Sampling = MEAN,
    items: ItemKind = "requests",
) -> WindowLoad:
    """Read the load of a trace in any known format: the whole trace, or the chosen windows of a load table.

    `window` is as in :func:`~coterie.traces.load.choose_windows`; `sampling` chooses the steps to plan for, and
    `items` what planners that learn from requests get.
    """
    trace = read_trace(path, format, ReadOptions(model=model if model is None or not Path(model).exists() else None))
    said = trace.model if isinstance(trace, LoadTable) else getattr(getattr(trace, "meta", None), "model", "unknown")
    spec = model_of(said, model)
    make = partial(WindowLoad, spec, ())
    if isinstance(trace, LoadTable):
        check(
            sampling.requests is None,
            f"--requests={sampling.requests} needs an activation trace; {path} is a load table",
        )
        load = _of_table(make, path, trace, window, sampling)
        ids = None if trace.layer_ids is None else tuple(int(n) for n in trace.layer_ids)
    elif isinstance(trace, ActivationTrace):
        for option, value in (("--window", window), ("--over", sampling.over)):
            check(value is None, f"{option}={value} chooses from a load table; {path} holds activations")
        load, ids = _of_activations(make, path, trace, sampling), trace.meta.layer_ids
        divided, everyone = _divided(trace), np.arange(trace.num_requests)
        learned, *halves = (
            SeenRequests(trace, chosen, items) for chosen in (everyone, divided.planned, divided.scored)
        )
        parts = load.parts and load.parts._replace(learned=(halves[0], halves[1]))
        load = load._replace(learned=learned, parts=parts)
    else:
        raise ConfigError(f"{path} holds requests without their experts: a load or an activation trace is needed")
    rows, layer_ids = moe_layers(path, spec, load.tokens, ids)
    if load.parts is not None and not all(part is None or part.any() for part in load.parts[:2]):
        load = load._replace(parts=None, whole_because="one part of it has no tokens")
    return load._replace(
        layer_ids=layer_ids,
        tokens=load.tokens[rows],
        parts=load.parts and load.parts.of_layers(rows),
        steps=load.steps and load.steps.layers(rows),
        learned=load.learned and load.learned.of_layers(rows),
    )


class MoeLayers(NamedTuple):
    """Rows of a load that are MoE layers, and their indices in the model."""

    rows: slice
    layer_ids: tuple[int, ...]


def moe_layers(path: Path, spec: ModelSpec, tokens: Array, ids: tuple[int, ...] | None) -> MoeLayers:
    """Return the MoE layers of a load [layer, expert]; `ids` are those that its file names, if any."""
    rows, (layers, experts) = slice(None), tokens.shape
    check_file(
        experts == spec.num_experts, path, "load", f"has {experts} experts a layer; {spec.name} has {spec.num_experts}"
    )
    if ids is None and layers == spec.num_layers > spec.num_moe_layers:
        dense = np.setdiff1d(np.arange(spec.num_layers), spec.moe_layer_ids)
        if tokens[dense].any():
            raise TraceError(path, "load", f"has tokens in layer {dense[0]}, which is dense in {spec.name}")
        rows, ids = slice(spec.first_moe_layer, None, spec.moe_layer_step), spec.moe_layer_ids
    if ids is None and layers == spec.num_moe_layers:
        ids = spec.moe_layer_ids
    if ids is None or not set(ids) <= set(spec.moe_layer_ids):
        raise TraceError(path, "load", f"has {layers} layers; {spec.name} has {spec.num_moe_layers} MoE ones")
    return MoeLayers(rows, ids)


def _divided(trace: ActivationTrace) -> Division:
    return divide_requests(trace.num_requests, trace.requests.arrival_s)


def _of_activations(make: Make, path: Path, trace: ActivationTrace, sampling: Sampling) -> WindowLoad:
    """Return the load of all requests, of those to plan on and of those to score on."""
    if sampling.requests is not None:
        return _steps_of(make, path, trace, sampling)
    load = np.zeros((2, trace.meta.num_layers, trace.meta.num_experts))
    divided = _divided(trace)
    is_scored = np.zeros(trace.num_requests, np.bool_)
    is_scored[divided.scored] = True
    for chunk in trace.chunks():
        requests = chunk.first_request + np.arange(len(chunk.offsets) - 1)
        second = np.repeat(is_scored[requests], np.diff(chunk.offsets))
        ids = chunk.tokens.expert_ids
        try:
            for part, chosen in zip(load, (~second, second), strict=True):
                accumulate_load(ids[chosen], part)
        except ConfigError:
            trace.validate()  # raises an error that names the file
            raise
    what, whole = f"{trace.num_requests:,} requests of {path.name}", load.sum(axis=0)
    if few := _too_few(trace):
        return make(whole, what, whole_because=few)
    return make(whole, what, parts=Parts(load[0], load[1], divided.what))


def _too_few(trace: ActivationTrace) -> str:
    """Say that the trace has too few requests to divide it; empty if it has enough."""
    few = f"it has {trace.num_requests} requests, fewer than the {FEWEST_REQUESTS} that are needed to divide it"
    return few if trace.num_requests < FEWEST_REQUESTS else ""


def _steps_of(make: Make, path: Path, trace: ActivationTrace, sampling: Sampling) -> WindowLoad:
    """Return steps of all requests, of those to plan on and of those to score on; the load is their mean step."""
    everyone = np.arange(trace.num_requests)
    steps = of_requests(trace, sampling, everyone, 0)
    what, tokens = f"{steps.what} of the {trace.num_requests:,} requests of {path.name}", steps.load.tokens
    if few := _too_few(trace):
        return make(tokens, what, whole_because=few, steps=steps)
    divided = _divided(trace)
    first, second = (
        of_requests(trace, sampling, part, seed) for seed, part in enumerate((divided.planned, divided.scored), 1)
    )
    how = f"planned on steps of {divided.names[0]}, scored on steps of {divided.names[1]}"
    parts = Parts(first.load.tokens, second.load.tokens, how, first, second)
    return make(tokens, what, parts=parts, steps=steps)


def _of_table(make: Make, path: Path, table: LoadTable, window: str | None, sampling: Sampling) -> WindowLoad:
    chosen, what = choose_windows(path, table, window)
    if sampling.over is not None:
        return _over(make, table, chosen, what, sampling)
    labels = list(table.labels or ())
    named = tuple(labels[i] for i in chosen) if labels else ()

    def total(rows: list[int] | NDArray[np.int64]) -> Array:
        return np.asarray(table.counts[rows].sum(axis=0, dtype=np.float64))

    whole = partial(make, total(chosen), what)
    merged = [label for label in named if label.startswith(MERGED)]
    if merged:
        return whole(whole_because=f"{merged[0]} is a sum of other windows")
    if len(chosen) > 1:
        divided = divide_windows(chosen, labels)
        return whole(Parts(total(divided.planned), total(divided.scored), divided.what))
    others = [i for i in range(len(table)) if i not in chosen and not (labels and labels[i].startswith(MERGED))]
    if not others:
        return whole(whole_because="it is one window")
    windows = "the other window" if len(others) == 1 else f"the {len(others)} other windows"
    return whole(Parts(None, total(others), f"scored on {windows} of {path.name}"))


def _over(make: Make, table: LoadTable, chosen: list[int], what: str, sampling: Sampling) -> WindowLoad:
    """Return windows, domains or mixtures of domains as steps; the load is their mean."""
    labels = list(table.labels or ())
    merged = [labels[i] for i in chosen if labels and labels[i].startswith(MERGED)]
    if merged:
        raise ConfigError(f"--over={sampling.over}: {merged[0]} is a sum of other windows")
    steps = of_windows(table, sampling, chosen, 0)
    what, tokens = f"{steps.what} of {what}", steps.load.tokens
    divided = divide_windows(chosen, labels)
    first, second = divided.planned.tolist(), divided.scored.tolist()
    try:
        one, other = (of_windows(table, sampling, part, seed) for seed, part in enumerate((first, second), 1))
        domains = None if sampling.over == "windows" else of_domains(table, sampling, second)
    except ConfigError:
        return make(tokens, what, whole_because=f"half of it is too little for steps over {sampling.over}", steps=steps)
    parts = Parts(one.load.tokens, other.load.tokens, divided.what, one, other, domains)
    return make(tokens, what, parts=parts, steps=steps)
