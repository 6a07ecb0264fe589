"""Single steps of a load, to plan for and to score on: drawn from requests, or made of windows and domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_one_of, check_share
from coterie.footprints.counting import accumulate_load
from coterie.placement import Load
from coterie.placement.scenarios import Phase, concentration_of, mixes_of, mixtures, steps_of_requests, steps_of_trace
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.load import domain_of
from coterie.types import PREFILL

Array = NDArray[np.float64]
Over = Literal["windows", "domains", "mixtures"]
Brought = Literal["prefill", "decode", "mixed", "all"]
"""Tokens that a request adds to a step: as :data:`~coterie.placement.scenarios.Phase`, or all of its recorded tokens
as one prompt."""


PARTS = 4
"""Number of parts that the windows of a domain are divided into."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of the steps to plan for: `requests` drawn from an activation trace, or `over` parts of a load table."""

    requests: int | None = None
    """Number of requests in a step; None draws no steps from requests."""
    phase: Brought | None = None
    """Tokens that a request adds to a step; None takes prefill if the trace has prompts, else decode."""
    bursts: float = 0.0
    """Share of the steps whose requests are all of one domain."""
    over: Over | None = None
    steps: int = 64
    """Number of steps or mixtures to draw."""

    def __post_init__(self) -> None:
        check_at_least(1, requests=self.requests)
        check_at_least(2, steps=self.steps)
        check_share(bursts=self.bursts)
        if self.phase is not None:
            check_one_of(get_args(Brought), phase=self.phase)
        if self.over is not None:
            check_one_of(get_args(Over), over=self.over)
        check(
            self.requests is None or self.over is None,
            f"--requests={self.requests} draws steps of a trace; --over={self.over} is of load tables",
        )
        check(
            self.requests is not None or (self.phase is None and not self.bursts),
            "--phase and --bursts say what is in a step of so many --requests",
        )

    @property
    def asked(self) -> bool:
        """Whether to plan for single steps instead of the mean step."""
        return self.requests is not None or self.over is not None


class Sample(NamedTuple):
    """Steps to plan for. Drawn steps are in tokens per step; windows and domains are in the counts of their table."""

    load: Load
    what: str
    sized: bool
    """Whether steps have real sizes; if not, only their shape counts and they are scaled to the batch."""
    names: tuple[str, ...] = ()
    """[scenario] name of its domain; empty if steps are not domains."""

    def layers(self, rows: slice) -> Sample:
        """Return the sample restricted to some layers."""
        assert self.load.scenarios is not None
        kept = Load.of_scenarios(self.load.scenarios[:, rows], self.load.weights, whole_steps=self.load.whole_steps)
        return self._replace(load=kept)

    def at(self, tokens: float) -> Load:
        """Return the steps scaled to `tokens` activations per layer; unchanged if they have real sizes."""
        if self.sized:
            return self.load
        assert self.load.scenarios is not None
        total = self.load.scenarios.sum(axis=2, keepdims=True)
        scaled = np.divide(
            self.load.scenarios * tokens, total, out=np.zeros(self.load.scenarios.shape), where=total > 0
        )
        return Load.of_scenarios(scaled, self.load.weights)


def of_requests(trace: ActivationTrace, asked: Sampling, chosen: NDArray[np.int64], seed: int) -> Sample:
    """Draw steps from the `chosen` requests of a trace."""
    assert asked.requests is not None
    domains = trace.requests.domains if asked.bursts else None
    if asked.bursts and domains is None:
        raise ConfigError(f"--bursts={asked.bursts:g} needs the domains of the requests, which the trace does not name")
    rng, phase = np.random.default_rng(seed), asked.phase or _phase(trace)
    if phase == "all":
        labels = None if domains is None else [domains[one] for one in chosen]
        footprints = _footprints(trace, chosen)
        drawn = steps_of_requests(footprints, asked.requests, asked.steps, rng, domains=labels, bursts=asked.bursts)
    else:
        drawn = steps_of_trace(
            trace, asked.requests, asked.steps, rng, phase=phase, chosen=chosen, domains=domains, bursts=asked.bursts
        )
    many = "request" if asked.requests == 1 else "requests"
    what = f"{asked.steps} steps of {asked.requests} {many}, {'all of their tokens' if phase == 'all' else phase}"
    if asked.bursts:
        what += f", {asked.bursts:.0%} of them of one domain"
    return Sample(Load.of_scenarios(drawn, whole_steps=True), what, sized=True)


def _phase(trace: ActivationTrace) -> Phase:
    prompts = any((chunk.tokens.phase == PREFILL).any() for chunk in trace.chunks())
    return "prefill" if prompts else "decode"


def _footprints(trace: ActivationTrace, chosen: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the footprints [request, layer, expert] of all recorded tokens."""
    found = np.zeros((len(chosen), trace.meta.num_layers, trace.meta.num_experts), np.uint32)
    for footprint, request in zip(found, chosen, strict=True):
        accumulate_load(trace.request(int(request)).expert_ids, footprint)
    return found


def of_windows(table: LoadTable, asked: Sampling, chosen: list[int], seed: int) -> Sample:
    """Return windows or domains as steps, weighted by their tokens, or drawn mixtures of domains."""
    counts = np.asarray(table.counts[chosen], np.float64)
    kept = np.asarray(counts.any(axis=(1, 2)))
    if asked.over == "windows":
        _check(int(kept.sum()), "windows")
        return Sample(_weighted(counts[kept]), f"{int(kept.sum())} windows", sized=False)
    names, labels = _domains(table, asked, chosen, kept)
    if asked.over == "domains":
        return _in_parts(counts[kept], names, labels)
    domains = np.array([counts[kept][labels == name].sum(axis=0) for name in names])
    concentration = concentration_of(mixes_of(counts[kept], domains))
    drawn = mixtures(domains, asked.steps, np.random.default_rng(seed), concentration)
    what = f"{asked.steps} mixtures of {len(domains)} domains, concentration {concentration:.2g} as between windows"
    return Sample(Load.of_scenarios(drawn), what, sized=False)


def of_domains(table: LoadTable, asked: Sampling, chosen: list[int]) -> Sample:
    """Return every domain as one step, weighted by its tokens."""
    counts = np.asarray(table.counts[chosen], np.float64)
    kept = np.asarray(counts.any(axis=(1, 2)))
    names, labels = _domains(table, asked, chosen, kept)
    domains = np.array([counts[kept][labels == name].sum(axis=0) for name in names])
    return Sample(_weighted(domains), f"{len(domains)} domains", sized=False, names=names)


def _domains(
    table: LoadTable, asked: Sampling, chosen: list[int], kept: NDArray[np.bool_]
) -> tuple[tuple[str, ...], NDArray[np.str_]]:
    """Return the names of the domains, and the domain [window] of each window that has tokens."""
    if table.labels is None:
        raise ConfigError(f"--over={asked.over} needs windows with labels, whose part before a / names their domain")
    labels = np.array([domain_of(table.labels[number]) for number in chosen])[kept]
    names = tuple(dict.fromkeys(labels.tolist()))
    _check(len(names), "domains")
    return names, labels


def _in_parts(counts: Array, names: tuple[str, ...], labels: NDArray[np.str_]) -> Sample:
    """Return each domain in up to PARTS parts, in random order.

    A planner holds out some scenarios to validate its plan. With parts, these are some windows of a domain, not all.
    """
    parts = [
        (name, counts[rows].sum(axis=0))
        for name in names
        for rows in np.array_split(np.flatnonzero(labels == name), PARTS)
        if len(rows)
    ]
    order = np.random.default_rng(0).permutation(len(parts))
    found = np.array([parts[at][1] for at in order])
    what = f"{len(names)} domains in {len(parts)} parts"
    return Sample(_weighted(found), what, sized=False, names=tuple(parts[at][0] for at in order))


def _check(count: int, what: str) -> None:
    check(count >= 2, f"--over {what} needs two or more of them with tokens; there is {count}")


def _weighted(counts: Array) -> Load:
    """Scale scenarios to one size, weighted by their counts: their mean is the total if layers have equal counts."""
    sizes = counts.sum(axis=(1, 2))
    shapes = counts / counts.sum(axis=2, keepdims=True).clip(1e-300)
    return Load.of_scenarios(shapes * counts.sum(axis=(0, 2)).mean(), sizes)
