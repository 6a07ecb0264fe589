"""Samples of steps (scenarios) to plan for, drawn from recorded requests, windows or domains; their files on disk.

A step holds a few requests, each from one domain. In prefill a request adds all tokens of its prompt to the load of the
step, in decode one token. :func:`steps_of_requests` and :func:`steps_of_trace` draw such steps. Loads of windows or
domains can be used as scenarios directly (:meth:`Load.of_scenarios <coterie.placement.base.Load.of_scenarios>`), and
:func:`mixtures` draws mixes of domains for traffic that shifts.

Wrong if the service forms batches differently from `requests` and `bursts`: measure both on the real traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check, check_at_least, check_file, check_share
from coterie.footprints.counting import accumulate_load
from coterie.placement.base import HELD_OUT, Load
from coterie.traces.activations import ActivationTrace
from coterie.traces.store import ArrayFile, write_described
from coterie.types import DECODE, PREFILL

Counts = NDArray[np.integer] | NDArray[np.floating]
Steps = NDArray[np.float64]
"""[scenario, layer, expert] tokens."""

APART = 2
"""Held-out steps get separate requests if at least HELD_OUT x APART x (requests per step) requests are available."""

Phase = Literal["prefill", "decode", "mixed"]

LEAST_CONCENTRATION = 0.1
"""Lowest Dirichlet concentration: nearly every mixture consists of a single domain."""

MOST_RATIO = 4.0
"""Largest factor by which :func:`at_mean` scales an expert's tokens, relative to the factor of its layer."""


def steps_of_requests(
    footprints: Counts,
    requests: int,
    count: int,
    rng: Generator,
    *,
    domains: Sequence[str] | NDArray[np.integer] | None = None,
    bursts: float = 0.0,
) -> Steps:
    """Draw `count` steps of `requests` requests each from the footprints of requests [request, layer, expert].

    A share `bursts` of the steps has requests of one domain only, drawn in proportion to the requests of each domain;
    `domains` [request] names the domain of each request. A request appears once in a step, unless there are too few to
    draw from. If there are enough requests, every :data:`~coterie.placement.base.HELD_OUT`-th step shares no request
    with the steps between.
    """
    check(footprints.ndim == 3, f"footprints has shape {footprints.shape}; it must be [request, layer, expert]")
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
    """Draw `count` steps of `requests` requests each from the tokens of a trace.

    In `prefill` a request adds its whole prompt, in `decode` one of its output tokens; in a `mixed` step one request
    adds its prompt and all others decode. Requests are drawn from `chosen` (default: all); requests without tokens of
    the phase are left out. `domains` [request] names the domain of each request of the trace.
    """
    wanted = np.arange(trace.num_requests) if chosen is None else np.asarray(chosen, np.int64)
    tokens = [trace.request(int(request)) for request in wanted]
    prefill, decode = (np.array([bool((part.phase == of).any()) for part in tokens]) for of in (PREFILL, DECODE))
    kept = np.flatnonzero({"prefill": prefill, "decode": decode, "mixed": prefill & decode}[phase])
    check(len(kept), f"none of {len(wanted)} requests has tokens of phase {phase!r}")
    labels = None if domains is None else np.asarray(domains)[wanted[kept]]
    groups = _draw(len(kept), requests, count, rng, labels, bursts)
    steps = np.zeros((count, trace.meta.num_layers, trace.meta.num_experts), np.uint32)
    for step, group in zip(steps, groups, strict=True):
        for place, row in enumerate(kept[group]):
            ids, phases = tokens[row].expert_ids, tokens[row].phase
            whole = phase == "prefill" or (phase == "mixed" and not place)
            at = phases == PREFILL if whole else [rng.choice(np.flatnonzero(phases == DECODE))]
            accumulate_load(ids[at], step)
    return steps.astype(np.float64)


def mixtures(
    domains: NDArray[np.floating] | NDArray[np.integer], count: int, rng: Generator, concentration: float
) -> Steps:
    """Draw `count` steps that mix domains [domain, layer, expert] around the present mix.

    Mixes are Dirichlet draws: the higher the concentration, the closer they are to each domain's share of the tokens.
    :func:`concentration_of` estimates the concentration from observed mixes. Domains are
    normalised per layer; a step has the domains' mean number of tokens. Traffic of an unlisted domain is not covered.
    """
    check_at_least(1, count=count)
    # infinity is allowed: every step then has the present mix
    check(concentration > 0, f"concentration={concentration} must be above 0")
    shapes, sizes = _shapes(domains)
    check(sizes.any(), "domains have no tokens to mix")
    today = sizes / sizes.sum()
    drawn = np.zeros((count, len(today)))
    some = today > 0
    drawn[:, some] = rng.dirichlet(concentration * today[some], count) if np.isfinite(concentration) else today[some]
    return np.asarray(np.tensordot(drawn, shapes * sizes.mean(), (1, 0)))


def mixes_of(windows: NDArray[np.floating] | NDArray[np.integer], domains: NDArray[np.floating]) -> NDArray[np.float64]:
    """Fit windows [window, layer, expert] by domains [domain, layer, expert]; return shares [window, domain]."""
    from scipy.optimize import nnls  # slow to import

    known = _shapes(domains)[0].reshape(len(domains), -1).T
    shares = np.array([nnls(known, window.ravel())[0] for window in _shapes(windows)[0]])
    total = shares.sum(axis=1, keepdims=True)
    return np.where(total > 0, shares / np.where(total > 0, total, 1.0), 1.0 / len(domains))


def concentration_of(mixes: NDArray[np.floating]) -> float:
    """Estimate the Dirichlet concentration of mixes [window, domain] from their mean and variance.

    The more the traffic shifts between windows, the lower the concentration. Infinite if all mixes are equal; at least
    LEAST_CONCENTRATION.
    """
    check(
        mixes.ndim == 2 and len(mixes) >= 2,
        f"mixes has shape {mixes.shape}; two or more windows [window, domain] are needed",
    )
    mean, variance = mixes.mean(axis=0), float(mixes.var(axis=0, ddof=1).sum())
    spread = float((mean * (1.0 - mean)).sum())
    return max(spread / variance - 1.0, LEAST_CONCENTRATION) if variance > 0 else np.inf


def _shapes(loads: NDArray[np.floating] | NDArray[np.integer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each expert's share of its layer's tokens [load, layer, expert] and the mean tokens per layer [load]."""
    check(
        loads.ndim == 3 and loads.size,
        f"domains or windows of shape {loads.shape}; they must be [domain, layer, expert], none 0",
    )
    total = loads.sum(axis=2, keepdims=True, dtype=np.float64)
    shares = np.divide(loads, total, out=np.zeros(loads.shape), where=total > 0)
    return shares, np.asarray(total.mean(axis=(1, 2)))


def at_mean(steps: Steps, weights: NDArray[np.float64] | None, mean: NDArray[np.float64]) -> Steps:
    """Scale steps [scenario, layer, expert] so that their mean is another mean step [layer, expert].

    Each expert's tokens are scaled by one factor, so that its hot steps stay hot. The factor is limited by MOST_RATIO;
    tokens above that limit, and tokens of an expert missing from the sample, are added to all steps equally.
    """
    known = np.average(steps, axis=0, weights=weights)
    check(known.shape == mean.shape, f"the steps have {known.shape} layers and experts; the mean step has {mean.shape}")
    total = known.sum(axis=1, keepdims=True)
    size = np.divide(mean.sum(axis=1, keepdims=True), total, out=np.zeros(total.shape), where=total > 0)
    ratio = np.divide(mean, known, out=np.zeros(mean.shape), where=known > 0)
    scaled = steps * np.minimum(ratio, MOST_RATIO * size)
    return np.asarray(scaled + (mean - np.average(scaled, axis=0, weights=weights)).clip(0.0))


def _draw(
    available: int,
    requests: int,
    count: int,
    rng: Generator,
    domains: Sequence[str] | NDArray[np.integer] | None,
    bursts: float,
) -> list[NDArray[np.int64]]:
    """Return, for each step, the indices of its requests."""
    check_at_least(1, requests=requests, count=count)
    check_share(bursts=bursts)
    check(available, "there are no requests to draw steps from")
    check(domains is not None or not bursts, f"bursts={bursts} needs the domains of the requests")
    labels = np.zeros(available, np.int64) if domains is None else np.asarray(domains)
    check(len(labels) == available, f"domains has {len(labels)} entries; there are {available} requests")
    part = np.zeros(available, np.bool_)
    if available >= HELD_OUT * APART * requests:
        part[rng.permutation(available)[::HELD_OUT]] = True  # requests of the steps that planners hold out
    groups = []
    for step in range(count):
        pool = np.flatnonzero(part == (step % HELD_OUT == HELD_OUT - 1)) if part.any() else np.arange(available)
        if rng.random() < bursts:
            pool = pool[labels[pool] == labels[rng.choice(pool)]]
        groups.append(rng.choice(pool, requests, replace=len(pool) < requests))
    return groups


MOST_RECENT = 64
"""Number of scenarios kept from the newest windows: planning over more takes longer and gains little."""


class RecentSteps:
    """Scenarios of the newest windows, in bounded memory; windows without scenarios change nothing."""

    def __init__(self, most: int = MOST_RECENT) -> None:
        check_at_least(1, most=most)
        self.most = most
        self._steps: Steps | None = None
        self._weights = np.zeros(0)
        self._whole = True

    def update(self, load: Load, weight: float) -> None:
        """Add the scenarios of the next window; `weight` is the weight that the forecast gave this window."""
        if load.scenarios is None or load.weights is None:
            return
        count = load.num_scenarios
        some = np.linspace(0, count - 1, min(count, self.most)).round().astype(np.int64)
        new, new_weights = load.scenarios[some], load.weights[some]
        new_weights = weight * new_weights / max(float(new_weights.sum()), 1e-300)
        if self._steps is not None:
            room = self.most - len(new)
            keep = slice(max(0, len(self._steps) - room), None)
            new = np.concatenate([self._steps[keep], new])
            new_weights = np.concatenate([(1.0 - weight) * self._weights[keep], new_weights])
        self._steps, self._weights, self._whole = new, new_weights, self._whole and load.whole_steps

    def around(self, expected: Load) -> Load:
        """Return `expected` with the kept scenarios, scaled to its mean step; unchanged if none are kept."""
        if self._steps is None:
            return expected
        steps = at_mean(self._steps, self._weights, expected.tokens / expected.steps)
        return replace(expected, scenarios=steps, weights=self._weights, whole_steps=self._whole)


# Files: written by a program that sees requests, read by one that sees only mean loads, such as Coterie's vLLM policy.

FORMAT, VERSION = "scenarios", 1


def save_scenarios(path: str | Path, load: Load) -> None:
    """Write the scenarios of a load to a file, replacing an existing file atomically."""
    if load.scenarios is None or load.weights is None:
        raise ConfigError("the load has no scenarios to write")
    arrays: dict[str, NDArray[np.floating]] = {"steps": load.scenarios.astype(np.float32), "weights": load.weights}
    about = {"format": FORMAT, "version": VERSION, "whole_steps": load.whole_steps}
    try:
        write_described(Path(path), arrays, about)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def load_scenarios(path: str | Path) -> Load:
    """Read the load whose scenarios are in a file; its window is their mean step."""
    path = Path(path)
    file = ArrayFile(path)
    about = file.about(FORMAT, VERSION)
    steps, weights = file["steps"], file["weights"]
    check_file(
        steps.dtype.kind == "f" and weights.dtype.kind == "f",
        path,
        "steps",
        f"are {steps.dtype} with weights {weights.dtype}; both must be floats",
    )
    check_file(
        steps.ndim == 3 and len(steps),
        path,
        "steps",
        f"have shape {steps.shape}; they must be [scenario, layer, expert], none 0",
    )
    try:
        mean = np.average(steps, axis=0, weights=weights)
        return Load(mean, scenarios=steps, weights=weights, whole_steps=about.get("whole_steps") is True)
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise TraceError(path, "steps", str(error)) from None
