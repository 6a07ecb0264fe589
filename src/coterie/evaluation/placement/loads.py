"""Loads to plan for: read from a trace in any known format, with a part that a plan can be scored on.

A plan looks best on the load it was made for. So a load is divided where it can be: a plan made on one part is scored
on the other, which it has not seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.footprints.counting import accumulate_load
from coterie.models import model_of
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import ReadOptions, read_trace
from coterie.traces.windows import MERGED, choose_windows
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


class _Found(NamedTuple):
    """What a trace holds, before its layers are known."""

    tokens: Array
    """[layer, expert]"""
    what: str
    labels: tuple[str, ...]
    parts: Parts | None
    whole_because: str = ""


def read_load(path: Path, format: str | None, model: str | None, window: str | None) -> WindowLoad:
    """The load of a trace in any known format: all of it, or of a load table the windows asked for.

    `window` is what :func:`~coterie.traces.windows.choose_windows` takes.
    """
    trace = read_trace(path, format, ReadOptions(model=model if model is None or not Path(model).exists() else None))
    said = trace.model if isinstance(trace, LoadTable) else getattr(getattr(trace, "meta", None), "model", "unknown")
    spec = model_of(said, model)
    if isinstance(trace, LoadTable):
        found = _of_table(path, trace, window)
        ids = None if trace.layer_ids is None else tuple(int(n) for n in trace.layer_ids)
    elif isinstance(trace, ActivationTrace):
        if window is not None:
            raise ConfigError(f"--window={window} chooses from a load table; {path} holds activations")
        found, ids = _of_activations(path, trace), trace.meta.layer_ids
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
    if parts is not None:
        planned = None if parts.planned is None else parts.planned[rows]
        parts = parts._replace(planned=planned, scored=parts.scored[rows])
    return WindowLoad(spec, tokens[rows], ids, found.what, found.labels, parts, why)


def _of_activations(path: Path, trace: ActivationTrace) -> _Found:
    """All requests, and every other one: requests often lie in the trace by domain, so halves in order would differ."""
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


def _of_table(path: Path, table: LoadTable, window: str | None) -> _Found:
    chosen, what = choose_windows(path, table, window)
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
