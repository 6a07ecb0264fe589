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
        everyone = np.arange(trace.num_requests)
        learned, *halves = (SeenRequests(trace, chosen, items) for chosen in (everyone, everyone[::2], everyone[1::2]))
        parts = load.parts and load.parts._replace(learned=(halves[0], halves[1]))
        load = load._replace(learned=learned, parts=parts)
    else:
        raise ConfigError(f"{path} holds requests without their experts: a load or an activation trace is needed")
    rows, (layers, experts) = slice(None), load.tokens.shape
    check_file(
        experts == spec.num_experts, path, "load", f"has {experts} experts a layer; {spec.name} has {spec.num_experts}"
    )
    if ids is None and layers == spec.num_layers > spec.num_moe_layers:
        dense = np.setdiff1d(np.arange(spec.num_layers), spec.moe_layer_ids)
        if load.tokens[dense].any():
            raise TraceError(path, "load", f"has tokens in layer {dense[0]}, which is dense in {spec.name}")
        rows, ids = slice(spec.first_moe_layer, None, spec.moe_layer_step), spec.moe_layer_ids
    if ids is None and layers == spec.num_moe_layers:
        ids = spec.moe_layer_ids
    if ids is None or not set(ids) <= set(spec.moe_layer_ids):
        raise TraceError(path, "load", f"has {layers} layers; {spec.name} has {spec.num_moe_layers} MoE ones")
    if load.parts is not None and not all(part is None or part.any() for part in load.parts[:2]):
        load = load._replace(parts=None, whole_because="one part of it has no tokens")
    return load._replace(
        layer_ids=ids,
        tokens=load.tokens[rows],
        parts=load.parts and load.parts.of_layers(rows),
        steps=load.steps and load.steps.layers(rows),
        learned=load.learned and load.learned.of_layers(rows),
    )


def _of_activations(make: Make, path: Path, trace: ActivationTrace, sampling: Sampling) -> WindowLoad:
    """Return the load of all, even and odd requests: traces are often sorted by domain, so halves would differ."""
    if sampling.requests is not None:
        return _steps_of(make, path, trace, sampling)
    load = np.zeros((2, trace.meta.num_layers, trace.meta.num_experts))
    for chunk in trace.chunks():
        requests = chunk.first_request + np.arange(len(chunk.offsets) - 1)
        second = np.repeat(requests % 2 == 1, np.diff(chunk.offsets))
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
    return make(whole, what, parts=Parts(load[0], load[1], "planned on every other request, scored on the rest"))


def _too_few(trace: ActivationTrace) -> str:
    """Say that the trace has too few requests to divide it; empty if it has enough."""
    few = f"it has {trace.num_requests} requests, fewer than the {FEWEST_REQUESTS} that are needed to divide it"
    return few if trace.num_requests < FEWEST_REQUESTS else ""


def _steps_of(make: Make, path: Path, trace: ActivationTrace, sampling: Sampling) -> WindowLoad:
    """Return steps of all requests, and of even and odd ones; the load is their mean step."""
    everyone = np.arange(trace.num_requests)
    steps = of_requests(trace, sampling, everyone, 0)
    what, tokens = f"{steps.what} of the {trace.num_requests:,} requests of {path.name}", steps.load.tokens
    if few := _too_few(trace):
        return make(tokens, what, whole_because=few, steps=steps)
    first, second = (of_requests(trace, sampling, everyone[part::2], 1 + part) for part in range(2))
    how = "planned on steps of every other request, scored on steps of the rest"
    parts = Parts(first.load.tokens, second.load.tokens, how, first, second)
    return make(tokens, what, parts=parts, steps=steps)


def _of_table(make: Make, path: Path, table: LoadTable, window: str | None, sampling: Sampling) -> WindowLoad:
    chosen, what = choose_windows(path, table, window)
    if sampling.over is not None:
        return _over(make, table, chosen, what, sampling)
    labels = list(table.labels or ())
    named = tuple(labels[i] for i in chosen) if labels else ()

    def total(rows: list[int]) -> Array:
        return np.asarray(table.counts[rows].sum(axis=0, dtype=np.float64))

    whole = partial(make, total(chosen), what)
    merged = [label for label in named if label.startswith(MERGED)]
    if merged:
        return whole(whole_because=f"{merged[0]} is a sum of other windows")
    if len(chosen) > 1:
        first, second = _halves(chosen, labels)
        how = f"planned on {len(first)} of its windows, scored on the other {len(second)}"
        return whole(Parts(total(first), total(second), how))
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
    first, second = _halves(chosen, labels)
    try:
        one, other = (of_windows(table, sampling, part, seed) for seed, part in enumerate((first, second), 1))
        domains = None if sampling.over == "windows" else of_domains(table, sampling, second)
    except ConfigError:
        return make(tokens, what, whole_because=f"half of it is too little for steps over {sampling.over}", steps=steps)
    how = f"planned on {len(first)} of its windows, scored on the other {len(second)}"
    parts = Parts(one.load.tokens, other.load.tokens, how, one, other, domains)
    return make(tokens, what, parts=parts, steps=steps)


def _halves(chosen: list[int], labels: list[str]) -> tuple[list[int], list[int]]:
    """Split the windows into a first and a second half in order of time; shards of a label (law/0, law/1 …) by label.

    A label names a kind of traffic: splitting each label gives both halves the same mixture.
    """
    groups: dict[str, list[int]] = {}
    for i in chosen:
        name, slash, _ = labels[i].partition("/") if labels else ("", "", "")
        groups.setdefault(name if slash else "", []).append(i)
    alone = groups.pop("", [])
    for name in [name for name, rows in groups.items() if len(rows) == 1]:
        alone += groups.pop(name)
    cut = [(rows, -(-len(rows) // 2)) for rows in (*groups.values(), sorted(alone))]
    return [i for rows, half in cut for i in rows[:half]], [i for rows, half in cut for i in rows[half:]]
