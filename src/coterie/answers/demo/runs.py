"""Results of the demo's runs: distinct experts per decode step, and the savings of each router."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.step import Batch, StepModel
from coterie.footprints import footprint
from coterie.footprints.positions import DISTINCT, ROWS, SECONDS
from coterie.routing import RouterFit
from coterie.wire.expert_events import RequestExperts

REFERENCE_SHAPE = "gpt-oss-20b"
"""Model with the same 32 experts and top 4 as coterie-tiny, so that expert counts of one apply to the other."""


BLOCK_STEPS = 16
"""Consecutive steps of one worker per bootstrap block, about as many as a request takes part in."""
DRAWS = 1000


class DemoAnswer(NamedTuple):
    """Answer to one request."""

    worker: int
    """Index of the decode worker."""
    event: RequestExperts
    """Experts of the request's tokens, as the decode worker published them."""
    text: str


class RouterRun(NamedTuple):
    """Run of one router; made by :class:`coterie.answers.demo.run.RoutedLoop`."""

    router: str
    log: list[NDArray[np.float64]]
    """[worker] log of its decode steps, one row per step (columns: :mod:`coterie.footprints.positions`)."""
    wall_s: float
    answers: list[DemoAnswer]
    """[request] answers in the order of the requests."""

    @property
    def requests(self) -> int:
        return len(self.answers)

    @property
    def output_tokens(self) -> int:
        return sum(answer.event.output_tokens for answer in self.answers)

    @property
    def per_worker(self) -> list[int]:
        """Number of requests of each worker."""
        return [sum(answer.worker == worker for answer in self.answers) for worker in range(len(self.log))]

    @property
    def steps(self) -> NDArray[np.float64]:
        """Decode steps of all workers, one row per step."""
        return np.concatenate(self.log)

    @property
    def rows_per_step(self) -> float:
        return float(self.steps[:, ROWS].mean())

    @property
    def distinct_by_token(self) -> float:
        """Distinct experts of a layer in a token's decode step, mean over layers, tokens and workers."""
        return self._by_token(DISTINCT)

    @property
    def rows_by_token(self) -> float:
        return self._by_token(ROWS)

    @property
    def step_s(self) -> float:
        """CPU seconds of the forward pass of a token's step, mean over tokens; 0 if workers do not measure it."""
        return self._by_token(SECONDS)

    def blocks(self) -> Iterator[NDArray[np.float64]]:
        """Yield blocks of :data:`BLOCK_STEPS` consecutive steps of a worker, or all its steps if they are fewer."""
        for log in self.log:
            yield from np.array_split(log, max(1, len(log) // BLOCK_STEPS))

    def _by_token(self, column: int) -> float:
        steps = self.steps
        return float(np.average(steps[:, column], weights=steps[:, ROWS]))


class LoopResult(NamedTuple):
    runs: list[RouterRun]
    calibrated: int
    """Number of requests that the router was fitted on."""
    recorded: RouterRun
    """Run of the calibration requests, under round robin."""
    fitted: RouterFit

    @property
    def context(self) -> float:
        """Mean number of tokens in the KV cache of a request, halfway through its answer."""
        first = self.runs[0]
        prompts = sum(answer.event.prompt_tokens for answer in first.answers)
        return (prompts + first.output_tokens / 2) / first.requests

    def like_with_like(self, run: RouterRun, rng: np.random.Generator) -> tuple[float, float, float]:
        """Return the saving of distinct experts relative to the first run at equal batch sizes, percent, low and high.

        A step of n random requests uses sum(1 - (1 - p)^n) distinct experts, where p is :attr:`probabilities`. Runs
        are compared by their ratio to this number: small steps use fewer experts whatever their requests, and the
        batch sizes of routers differ.

        The 95% interval is a bootstrap over blocks of :data:`BLOCK_STEPS` steps, since consecutive steps share most
        requests.
        """
        first, other = (self._ratios(one, rng) for one in (self.runs[0], run))
        low, high = np.percentile(100 * (1 - other[1:] / first[1:]), [2.5, 97.5])
        return float(100 * (1 - other[0] / first[0])), float(low), float(high)

    def cpu_s_an_expert(self, rng: np.random.Generator) -> tuple[float, float, float]:
        """Return the CPU seconds that one more distinct expert of each layer adds to a step, with low and high.

        Least squares over all steps, with a constant for each run: between runs, other work on the machine moves CPU
        time by up to 20%, more than any router does. The interval is a bootstrap over blocks, as in `like_with_like`.
        """
        sums = []  # [block, term, term + 1] normal equations: a constant of each run, rows, distinct experts
        for number, run in enumerate(self.runs):
            for block in run.blocks():
                terms = np.zeros((len(block), len(self.runs) + 2))
                terms[:, number] = 1.0
                terms[:, -2:] = block[:, [ROWS, DISTINCT]]
                sums.append(terms.T @ np.column_stack([terms, block[:, SECONDS]]))
        both = _drawn(np.array(sums), rng)
        seconds = (np.linalg.pinv(both[:, :, :-1], hermitian=True) @ both[:, :, -1:])[:, -1, 0]
        low, high = np.percentile(seconds[1:], [2.5, 97.5])
        return float(seconds[0]), float(low), float(high)

    def _ratios(self, run: RouterRun, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return ratios of distinct experts per token to the number expected in steps of random requests.

        The first ratio is that of the run; the other :data:`DRAWS` are bootstrap draws of as many of its blocks.
        """
        probabilities = self.probabilities
        sums = []  # [block, 2] sums over tokens: distinct experts counted, and expected of random requests
        for block in run.blocks():
            random = [(1 - (1 - probabilities) ** rows).sum(axis=1).mean() for rows in block[:, ROWS]]
            sums.append((block[:, ROWS] @ block[:, DISTINCT], block[:, ROWS] @ np.array(random)))
        both = _drawn(np.array(sums), rng)
        return np.asarray(both[:, 0] / both[:, 1], np.float64)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Probability [layer, expert] that a decode token activates the expert, mean over the served requests."""
        shares = []
        for event in (answer.event for answer in self.runs[0].answers):
            ids = event.ids()[event.prompt_tokens :]
            if len(ids):
                shares.append(footprint(ids, event.num_experts) / len(ids))
        return np.asarray(np.mean(shares, axis=0), np.float64)

    def differing(self) -> int:
        """Return the number of requests whose answer differs between the first run and any other run."""
        return sum(
            any(run.answers[request].text != answer.text for run in self.runs[1:])
            for request, answer in enumerate(self.runs[0].answers)
        )


def _drawn(blocks: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return sums over blocks [1 + draw, ...]: of the blocks themselves, then of bootstrap draws of as many."""
    drawn = blocks[rng.integers(0, len(blocks), (DRAWS, len(blocks)))].sum(axis=1)
    return np.concatenate([blocks.sum(axis=0)[None], drawn])


def predicted_step_ms(distinct: float, rows: float, context: float, model: StepModel) -> float:
    """Predict the milliseconds of a decode step of `rows` requests with `context` cached tokens each.

    Layers run `distinct` experts on average, 3 below to 3 above it: recorded layers deviate by 1.6 to 2.4, and a kernel
    that runs in waves would put equal layers on one stair, 7% off. Fractional experts and rows are interpolated.
    """
    spec = model.spec

    def at(active: int, requests: int) -> float:
        load = np.zeros((spec.num_moe_layers, spec.num_experts), np.int64)
        active = min(max(active, spec.top_k), requests * spec.top_k, spec.num_experts)
        share, more = divmod(requests * spec.top_k, active)
        load[:, :active] = share
        load[:, :more] += 1
        return 1e3 * model.step(load, Batch(decode_requests=requests, decode_context=round(requests * context))).total_s

    def between(low: float, high: float, at: float) -> float:
        return low + (high - low) * (at - math.floor(at))

    def of(requests: int) -> float:
        near = (distinct + shift for shift in range(-3, 4))
        return float(np.mean([between(at(math.floor(n), requests), at(math.floor(n) + 1, requests), n) for n in near]))

    return between(of(max(1, math.floor(rows))), of(max(1, math.floor(rows)) + 1), max(rows, 1.0))
