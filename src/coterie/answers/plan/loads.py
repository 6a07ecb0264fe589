"""Loads to plan for: read from a trace in any known format, with a part that a plan can be scored on.

A plan looks best on the load it was made for. So a load is divided where it can be: a plan made on one part is scored
on the other, which it has not seen. The same holds for single steps (:mod:`~coterie.answers.plan.samples`):
those that a plan is scored on are drawn from requests or windows that it has not seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.plan.samples import Sample, Sampling, of_domains, of_requests, of_windows
from coterie.errors import ConfigError, TraceError
from coterie.footprints.counting import accumulate_load
from coterie.models import model_of
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.load import MERGED, choose_windows
from coterie.traces.readers import ReadOptions, read_trace
from coterie.types import ModelSpec

Array = NDArray[np.float64]


FEWEST_REQUESTS = 20
"""Requests of an activation trace from which on every other one is held out; half of fewer says little."""


class Parts(NamedTuple):
    """Tokens to plan on and others to score that plan on."""

    planned: Array | None
    """[layer, expert]; None: all that was asked for, because windows outside of it are scored on."""
    scored: Array
    """[layer, expert]"""
    what: str
    """Which part is which, in words."""
    planned_steps: Sample | None = None
    """Steps of the part to plan on, where they were asked for."""
    scored_steps: Sample | None = None
    domains: Sample | None = None
    """Domains of the part to score on, where plans are over domains or mixtures of them."""

    def of_layers(self, rows: slice) -> Parts:
        steps = (None if one is None else one.layers(rows) for one in self[3:])
        return Parts(None if self.planned is None else self.planned[rows], self.scored[rows], self.what, *steps)


class WindowLoad(NamedTuple):
    """A load and its model."""

    spec: ModelSpec
    tokens: Array
    """[layer, expert]"""
    layer_ids: tuple[int, ...]
    what: str
    """Which part of which file, in words."""
    labels: tuple[str, ...] = ()
    """Labels of the windows it is the sum of, if any."""
    parts: Parts | None = None
    whole_because: str = ""
    """Why it is not divided, in words, where `parts` is None."""
    steps: Sample | None = None
    """Single steps to plan for; None: the mean step."""


class _Found(NamedTuple):
    """What a trace holds, before its layers are known."""

    tokens: Array
    """[layer, expert]"""
    what: str
    labels: tuple[str, ...]
    parts: Parts | None
    whole_because: str = ""
    steps: Sample | None = None


MEAN = Sampling()


def read_load(
    path: Path, format: str | None, model: str | None, window: str | None, sampling: Sampling = MEAN
) -> WindowLoad:
    """The load of a trace in any known format: all of it, or of a load table the windows asked for.

    `window` is what :func:`~coterie.traces.load.choose_windows` takes; `sampling` says which steps to plan for.
    """
    trace = read_trace(path, format, ReadOptions(model=model if model is None or not Path(model).exists() else None))
    said = trace.model if isinstance(trace, LoadTable) else getattr(getattr(trace, "meta", None), "model", "unknown")
    spec = model_of(said, model)
    if isinstance(trace, LoadTable):
        if sampling.requests is not None:
            raise ConfigError(f"--requests={sampling.requests} needs an activation trace; {path} is a load table")
        found = _of_table(path, trace, window, sampling)
        ids = None if trace.layer_ids is None else tuple(int(n) for n in trace.layer_ids)
    elif isinstance(trace, ActivationTrace):
        if window is not None:
            raise ConfigError(f"--window={window} chooses from a load table; {path} holds activations")
        if sampling.over is not None:
            raise ConfigError(f"--over={sampling.over} chooses from a load table; {path} holds activations")
        found, ids = _of_activations(path, trace, sampling), trace.meta.layer_ids
    else:
        raise ConfigError(f"{path} holds requests without their experts: a load or an activation trace is needed")
    tokens, rows = found.tokens, slice(None)
    layers, experts = tokens.shape
    if experts != spec.num_experts:
        raise TraceError(path, "load", f"has {experts} experts a layer; {spec.name} has {spec.num_experts}")
    if ids is None and layers == spec.num_layers > spec.num_moe_layers:
        dense = np.setdiff1d(np.arange(spec.num_layers), spec.moe_layer_ids)
        if tokens[dense].any():
            raise TraceError(path, "load", f"has tokens in layer {dense[0]}, which is dense in {spec.name}")
        rows, ids = slice(spec.first_moe_layer, None, spec.moe_layer_step), spec.moe_layer_ids
    if ids is None and layers == spec.num_moe_layers:
        ids = spec.moe_layer_ids
    if ids is None or not set(ids) <= set(spec.moe_layer_ids):
        raise TraceError(path, "load", f"has {layers} layers; {spec.name} has {spec.num_moe_layers} MoE ones")
    parts, why = found.parts, found.whole_because
    if parts is not None and not all(part is None or part.any() for part in parts[:2]):
        parts, why = None, "one part of it has no tokens"
    parts = None if parts is None else parts.of_layers(rows)
    steps = None if found.steps is None else found.steps.layers(rows)
    return WindowLoad(spec, tokens[rows], ids, found.what, found.labels, parts, why, steps)


def _of_activations(path: Path, trace: ActivationTrace, sampling: Sampling) -> _Found:
    """All requests, and every other one: requests often lie in the trace by domain, so halves in order would differ."""
    if sampling.requests is not None:
        return _steps_of(path, trace, sampling)
    load = np.zeros((2, trace.meta.num_layers, trace.meta.num_experts))
    for chunk in trace.chunks():
        requests = chunk.first_request + np.arange(len(chunk.offsets) - 1)
        second = np.repeat(requests % 2 == 1, np.diff(chunk.offsets))
        ids = chunk.tokens.expert_ids
        try:
            for part, chosen in zip(load, (~second, second), strict=True):
                accumulate_load(ids[chosen], part)
        except ConfigError:
            trace.validate()  # names the file
            raise
    count = trace.num_requests
    what, whole = f"{count:,} requests of {path.name}", load.sum(axis=0)
    if count < FEWEST_REQUESTS:
        few = f"it has {count} requests, fewer than the {FEWEST_REQUESTS} that are needed to divide it"
        return _Found(whole, what, (), None, few)
    return _Found(whole, what, (), Parts(load[0], load[1], "planned on every other request, scored on the rest"))


def _steps_of(path: Path, trace: ActivationTrace, sampling: Sampling) -> _Found:
    """Steps of all requests, and of every other one; the load is their mean step."""
    everyone = np.arange(trace.num_requests)
    steps = of_requests(trace, sampling, everyone, 0)
    what, tokens = f"{steps.what} of the {trace.num_requests:,} requests of {path.name}", steps.load.tokens
    if trace.num_requests < FEWEST_REQUESTS:
        few = f"it has {trace.num_requests} requests, fewer than the {FEWEST_REQUESTS} that are needed to divide it"
        return _Found(tokens, what, (), None, few, steps)
    first, second = (of_requests(trace, sampling, everyone[part::2], 1 + part) for part in range(2))
    how = "planned on steps of every other request, scored on steps of the rest"
    parts = Parts(first.load.tokens, second.load.tokens, how, first, second)
    return _Found(tokens, what, (), parts, steps=steps)


def _of_table(path: Path, table: LoadTable, window: str | None, sampling: Sampling) -> _Found:
    chosen, what = choose_windows(path, table, window)
    if sampling.over is not None:
        return _over(table, chosen, what, sampling)
    labels = list(table.labels or ())
    named = tuple(labels[i] for i in chosen) if labels else ()

    def total(rows: list[int]) -> Array:
        return np.asarray(table.counts[rows].sum(axis=0, dtype=np.float64))

    def whole(because: str) -> _Found:
        return _Found(total(chosen), what, named, None, because)

    merged = [label for label in named if label.startswith(MERGED)]
    if merged:
        return whole(f"{merged[0]} is a sum of other windows")
    if len(chosen) > 1:
        first, second = _halves(chosen, labels)
        how = f"planned on {len(first)} of its windows, scored on the other {len(second)}"
        return _Found(total(chosen), what, named, Parts(total(first), total(second), how))
    others = [i for i in range(len(table)) if i not in chosen and not (labels and labels[i].startswith(MERGED))]
    if not others:
        return whole("it is one window")
    windows = "the other window" if len(others) == 1 else f"the {len(others)} other windows"
    return _Found(total(chosen), what, named, Parts(None, total(others), f"scored on {windows} of {path.name}"))


def _over(table: LoadTable, chosen: list[int], what: str, sampling: Sampling) -> _Found:
    """Windows, domains or mixtures as steps; the load is their mean."""
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
        return _Found(tokens, what, (), None, f"half of it is too little for steps over {sampling.over}", steps)
    how = f"planned on {len(first)} of its windows, scored on the other {len(second)}"
    parts = Parts(one.load.tokens, other.load.tokens, how, one, other, domains)
    return _Found(tokens, what, (), parts, steps=steps)


def _halves(chosen: list[int], labels: list[str]) -> tuple[list[int], list[int]]:
    """The first half of the windows and the second, in order of time; shards of one label (law/0, law/1 …) by label.

    A label names a kind of traffic: halves of each are the same mixture.
    """
    groups: dict[str, list[int]] = {}
    for i in chosen:
        name, slash, _ = labels[i].partition("/") if labels else ("", "", "")
        groups.setdefault(name if slash else "", []).append(i)
    alone = groups.pop("", [])
    for name in [name for name, rows in groups.items() if len(rows) == 1]:
        alone += groups.pop(name)
    first: list[int] = []
    second: list[int] = []
    for rows in (*groups.values(), sorted(alone)):
        first += rows[: -(-len(rows) // 2)]
        second += rows[-(-len(rows) // 2) :]
    return first, second
