"""Samples of steps to plan for: from recorded requests, from windows, from domains.

A step holds a few requests, each of one subject. Its load is theirs: all tokens of their prompts in prefill, one token
of each in decode. :func:`steps_of_requests` and :func:`steps_of_trace` draw such steps; windows and domains are
scenarios as they are (:meth:`Load.of_scenarios <coterie.placement.base.Load.of_scenarios>`).

Wrong where the service batches otherwise than `requests` and `bursts` say: measure both on the traffic itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError, check_at_least, check_share
from coterie.footprints.counting import accumulate_load
from coterie.traces.activations import ActivationTrace
from coterie.types import DECODE, PREFILL

Counts = NDArray[np.integer] | NDArray[np.floating]
Steps = NDArray[np.float64]
"""[scenario, layer, expert] tokens."""

Phase = Literal["prefill", "decode", "mixed"]


def steps_of_requests(
    footprints: Counts,
    requests: int,
    count: int,
    rng: Generator,
    *,
    domains: Sequence[str] | NDArray[np.integer] | None = None,
    bursts: float = 0.0,
) -> Steps:
    """Draw `count` steps of so many requests each, from the footprints of requests [request, layer, expert].

    A share of `bursts` of the steps has requests of one domain only, drawn by how many requests it has; `domains` names
    that of each request. No request is twice in a step, unless there are too few of its domain.
    """
    if footprints.ndim != 3:
        raise ConfigError(f"footprints has shape {footprints.shape}; it must be [request, layer, expert]")
    groups = _draw(len(footprints), requests, count, rng, domains, bursts)
    steps = np.zeros((count, *footprints.shape[1:]))
    for step, group in zip(steps, groups, strict=True):
        step += footprints[group].sum(axis=0)
    return steps


def steps_of_trace(
    trace: ActivationTrace,
    requests: int,
    count: int,
    rng: Generator,
    *,
    phase: Phase = "decode",
    chosen: NDArray[np.integer] | None = None,
    domains: Sequence[str] | NDArray[np.integer] | None = None,
    bursts: float = 0.0,
) -> Steps:
    """Draw `count` steps of so many requests each, from the tokens of a trace.

    In `prefill` a request brings its whole prompt, in `decode` one of its output tokens; in `mixed` steps one
    brings its prompt and the others decode. `chosen` requests are drawn from, all unless given; those without tokens of
    the phase
    are left out. `domains` names that of each request of the trace.
    """
    wanted = np.arange(trace.num_requests) if chosen is None else np.asarray(chosen, np.int64)
    tokens = [trace.request(int(request)) for request in wanted]
    has = {one: np.array([bool((part.phase == one).any()) for part in tokens]) for one in (PREFILL, DECODE)}
    needed = {"prefill": has[PREFILL], "decode": has[DECODE], "mixed": has[PREFILL] & has[DECODE]}[phase]
    kept = np.flatnonzero(needed)
    if not len(kept):
        raise ConfigError(f"none of {len(wanted)} requests has tokens of phase {phase!r}")
    labels = None if domains is None else np.asarray(domains)[wanted[kept]]
    groups = _draw(len(kept), requests, count, rng, labels, bursts)
    steps = np.zeros((count, trace.meta.num_layers, trace.meta.num_experts), np.uint32)
    for step, group in zip(steps, groups, strict=True):
        for place, row in enumerate(kept[group]):
            ids, phases = tokens[row].expert_ids, tokens[row].phase
            if phase == "prefill" or (phase == "mixed" and not place):
                accumulate_load(ids[phases == PREFILL], step)
            else:
                at = rng.choice(np.flatnonzero(phases == DECODE))
                accumulate_load(ids[at : at + 1], step)
    return steps.astype(np.float64)


def _draw(
    available: int,
    requests: int,
    count: int,
    rng: Generator,
    domains: Sequence[str] | NDArray[np.integer] | None,
    bursts: float,
) -> list[NDArray[np.int64]]:
    """[step] indices of the requests in each."""
    check_at_least(1, requests=requests, count=count)
    check_share(bursts=bursts)
    if not available:
        raise ConfigError("there are no requests to draw steps from")
    if domains is None:
        if bursts:
            raise ConfigError(f"bursts={bursts} needs the domains of the requests")
        labels = np.zeros(available, np.int64)
    else:
        if len(domains) != available:
            raise ConfigError(f"domains has {len(domains)} entries; there are {available} requests")
        labels = np.unique(np.asarray(domains), return_inverse=True)[1]
    everyone = np.arange(available)
    groups = []
    for _ in range(count):
        pool = everyone
        if rng.random() < bursts:
            pool = np.flatnonzero(labels == labels[rng.integers(available)])
        groups.append(rng.choice(pool, requests, replace=len(pool) < requests))
    return groups
