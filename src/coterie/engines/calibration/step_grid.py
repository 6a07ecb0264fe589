"""The steps that a calibration runs in an engine, with even and with drawn routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.cells import StepCell, step_load
from coterie.engines.calibration.imposed import LARGEST_GRAPH, LEFT_OUT, ImposedEngine, TimedStep
from coterie.errors import check
from coterie.traces.activations import ActivationTrace
from coterie.types import ModelSpec, Report

Rows = NDArray[np.int64]

ZIPF = 0.8
"""Exponent of the popularity of experts that are drawn."""
DECODED = 20
"""Tokens that a request has decoded when a step is timed, about the mean."""
DECODED_MOST = 256
"""Room for the tokens that a request decodes in one job."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """Sizes of the steps to time."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    """Requests of decode steps: all sizes of vLLM's graphs, since the time between two of them is no straight line."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Cached tokens per request of decode steps; levels of distinct experts are timed at the second."""
    prompts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    draws: int = 16
    """Drawn batches of a cell; even ones are a quarter of that for each number of experts."""
    repeats: int = 3

    def within(self, longest: int) -> StepGrid:
        """Return the sizes that a model with so many positions can run."""
        contexts = tuple(context for context in self.contexts if context + DECODED_MOST <= longest)
        prompts = tuple(tokens for tokens in self.prompts if tokens + DECODED_MOST <= longest)
        check(
            len(contexts) >= 2 and prompts, f"a model of {longest} positions is too short for contexts {self.contexts}"
        )
        return StepGrid(self.rows, contexts, prompts, self.draws, self.repeats)


class _Job(NamedTuple):
    prompts: int
    context: int
    at: Rows
    """[step, token] rows of the ids."""
    even: tuple[bool, ...]
    """[step]"""
    left_out: bool = False


class RoutedTokens(NamedTuple):
    """Experts of tokens by request."""

    ids: NDArray[np.integer]
    """[token, layer, k]"""
    offsets: NDArray[np.int64]
    """[request + 1] the first token of each request."""

    @classmethod
    def of(cls, trace: ActivationTrace) -> RoutedTokens:
        tokens, offsets = trace.arrays()
        return cls(tokens.expert_ids, np.asarray(offsets))

    @classmethod
    def draw(cls, spec: ModelSpec, requests: int = 96, tokens: int = 96) -> RoutedTokens:
        """Draw tokens with some experts more popular than others, and requests that differ in which."""
        rng, shape = np.random.default_rng(0), (spec.num_moe_layers, spec.num_experts)
        popular = -ZIPF * np.log1p(rng.permuted(np.broadcast_to(np.arange(shape[1]), shape), axis=1))
        parts = []
        for _ in range(requests):
            likely = popular + rng.normal(size=shape) + rng.gumbel(size=(tokens, *shape))
            parts.append(np.argpartition(-likely, spec.top_k, axis=2)[:, :, : spec.top_k].astype(np.uint16))
        return cls(np.concatenate(parts), np.arange(requests + 1) * tokens)


class _Tokens:
    """All tokens of a calibration: those given, then those made for even routing."""

    def __init__(self, spec: ModelSpec, given: RoutedTokens, rng: Generator) -> None:
        self.spec, self.rng, self.offsets = spec, rng, given.offsets
        self.parts, self.size = [given.ids], len(given.ids)

    def drawn(self, rows: int) -> Rows:
        """Draw a token of each of `rows` requests; half of the time of neighbours, which are alike."""
        requests = len(self.offsets) - 1
        near, first = self.rng.random() < 0.5, self.rng.integers(requests)
        chosen = (first + np.arange(rows)) % requests if near else self.rng.integers(requests, size=rows)
        return self.rng.integers(self.offsets[chosen], self.offsets[chosen + 1])

    def stretch(self, tokens: int) -> Rows:
        """Draw `tokens` neighbouring tokens; a short trace is repeated."""
        total = int(self.offsets[-1])
        return np.asarray((self.rng.integers(total) + np.arange(tokens)) % total, np.int64)

    def even(self, rows: int, distinct: int) -> Rows:
        """Make tokens that take `distinct` experts in turn, others in every layer."""
        spec = self.spec
        turn = (np.arange(rows * spec.top_k) % distinct).reshape(rows, spec.top_k)
        ids = np.stack([self.rng.permutation(spec.num_experts)[turn] for _ in range(spec.num_moe_layers)], axis=1)
        self.parts.append(ids.astype(self.parts[0].dtype))
        self.size += rows
        return np.arange(self.size - rows, self.size)


def _levels(spec: ModelSpec, rows: int) -> list[int]:
    most = min(spec.num_experts, rows * spec.top_k)
    step = max(spec.top_k, spec.num_experts // 8)
    return sorted({spec.top_k, *range(step, most + 1, step), most})


def _jobs(grid: StepGrid, tokens: _Tokens) -> Iterator[_Job]:
    spec, rng = tokens.spec, tokens.rng
    for rows in grid.rows:
        for context in grid.contexts:
            steps = [tokens.drawn(rows) for _ in range(grid.draws)]
            levels = _levels(spec, rows) if context == grid.contexts[1] else []
            steps += [tokens.even(rows, level) for level in levels for _ in range(max(1, grid.draws // 8))]
            order = np.concatenate([rng.permutation(len(steps)) for _ in range(grid.repeats)])
            yield _Job(0, context, np.array(steps)[order], tuple((order >= grid.draws).tolist()))
    for size in grid.prompts:
        spread, drawn = tokens.even(size, spec.num_experts), [tokens.stretch(size) for _ in range(grid.repeats)]
        yield _Job(1, 0, np.array([spread] * grid.repeats), (True,) * grid.repeats)
        yield _Job(1, 0, np.array(np.repeat(drawn, 2, axis=0)), (False,) * (2 * grid.repeats))
        several = [8] if size == max(n for n in grid.prompts if n <= LARGEST_GRAPH) else []
        for prompts in (1, *several):
            at = np.array([tokens.stretch(size + LEFT_OUT)] * grid.repeats)
            yield _Job(prompts, 0, at, (True,) * grid.repeats, left_out=True)


def measure_steps(
    config: dict[str, Any], spec: ModelSpec, given: RoutedTokens, grid: StepGrid, report: Report
) -> tuple[str, list[StepCell]]:
    """Run the grid in vLLM; return its version and a cell for every batch. One run per process.

    vLLM 0.32 on a CPU does not start in a process that has imported Numba; nothing here does.
    """
    tokens = _Tokens(spec, given, np.random.default_rng(0))
    longest = max(*grid.contexts, *grid.prompts) + DECODED_MOST
    jobs = list(_jobs(grid, tokens))
    ids = np.concatenate(tokens.parts)
    report("start vLLM", 0, len(jobs))
    engine = ImposedEngine(config, spec, ids, grid.prompts, longest, max(grid.rows))
    cells: list[StepCell] = []
    for number, job in enumerate(jobs):
        report(f"{spec.name} steps", number, len(jobs))
        steps = engine.prefill(job.prompts, job.at) if job.prompts else engine.decode(job.context, job.at)
        cells += _cells(job, ids, spec, steps)
    return engine.version, cells


def _cells(job: _Job, ids: NDArray[np.integer], spec: ModelSpec, steps: list[TimedStep]) -> Iterator[StepCell]:
    """Yield a cell for every batch of a job: medians over its repeats."""
    repeats: dict[bytes, list[TimedStep]] = {}
    for step in steps:
        repeats.setdefault(job.at[step.number].tobytes(), []).append(step)
    for same in repeats.values():
        rows = job.at[same[0].number]
        load = step_load(ids[rows], spec.num_experts)
        periods = [step.period_us for step in same if step.period_us is not None]
        yield StepCell(
            tokens=len(rows),
            prompts=job.prompts,
            cached=0.0 if job.prompts else len(rows) * (job.context + DECODED),
            load=np.zeros_like(load) if job.left_out else load,
            even=job.even[same[0].number],
            us=float(np.median([step.us for step in same])),
            forward_us=float(np.median([step.forward_us for step in same])),
            period_us=float(np.median(periods)) if periods else np.nan,
        )
