"""What became of a routed fleet's runs: distinct experts of their steps, and what routers save.

Routers differ in how evenly they spread requests. Small steps touch few experts whichever requests are in them, and in
a mean over steps they count as much as large ones: so savings are given by token and at equal rows as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.footprints import footprint
from coterie.footprints.positions import DISTINCT, ROWS, SECONDS
from coterie.wire.expert_events import RequestExperts
from routed_fleet import FleetCounts, Served

BLOCK_STEPS = 16
"""Steps in a row of one worker that are drawn together, about as many as a request is in."""
DRAWS = 1000


class RouterRun(NamedTuple):
    """One router's run; made by :func:`routed_loop.serve`."""

    router: str
    log: list[NDArray[np.float64]]
    """[worker] its decode steps, a row each (:mod:`coterie.footprints.positions`)."""
    wall_s: float
    served: list[Served]
    counts: FleetCounts

    @property
    def requests(self) -> int:
        return len(self.served)

    @property
    def answers(self) -> list[list[int]]:
        """[request] token ids."""
        return [one.tokens for one in self.served]

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def per_worker(self) -> list[int]:
        """[worker] requests."""
        return [sum(one.decoder == worker for one in self.served) for worker in range(len(self.log))]

    @property
    def steps(self) -> NDArray[np.float64]:
        """Decode steps of all workers."""
        return np.concatenate(self.log)

    @property
    def rows_per_step(self) -> float:
        return float(self.steps[:, ROWS].mean())

    @property
    def distinct_per_step(self) -> float:
        """Distinct experts of a layer in a decode step, mean over layers, steps and workers."""
        return float(self.steps[:, DISTINCT].mean())

    @property
    def distinct_by_token(self) -> float:
        """The same, steps weighted by their rows."""
        return self._by_token(DISTINCT)

    @property
    def rows_by_token(self) -> float:
        return self._by_token(ROWS)

    @property
    def step_ms(self) -> float | None:
        """Forward pass of a token's step, as the workers measured it; None where they do not."""
        return 1e3 * self._by_token(SECONDS) or None

    def _by_token(self, column: int) -> float:
        steps = self.steps
        return float(np.average(steps[:, column], weights=steps[:, ROWS]))


class LoopResult(NamedTuple):
    runs: list[RouterRun]
    calibrated: int
    """Requests the router was fitted on."""
    fit_s: float
    context: float
    """Cached tokens of a request in the middle of its answer, on average."""
    events: list[RequestExperts | None]
    """[request] expert event in the first router's run; None for answers of one token."""

    def saving_pct(self, run: RouterRun) -> float:
        """Saving of distinct experts per step against the first run, percent."""
        return 100 * (1 - run.distinct_per_step / self.runs[0].distinct_per_step)

    def saving_by_token_pct(self, run: RouterRun) -> float:
        """The same, steps weighted by their rows."""
        return 100 * (1 - run.distinct_by_token / self.runs[0].distinct_by_token)

    def like_with_like(self, run: RouterRun, rng: np.random.Generator) -> tuple[float, float, float]:
        """Saving by token at equal rows, percent, and its 95% interval: see :meth:`against_random`.

        Intervals come from runs resampled in blocks of :data:`BLOCK_STEPS` steps: steps in a row share most requests.
        """
        first, other = (self._ratios(one, rng) for one in (self.runs[0], run))
        low, high = np.percentile(100 * (1 - other[1:] / first[1:]), [2.5, 97.5])
        return float(100 * (1 - other[0] / first[0])), float(low), float(high)

    def _ratios(self, run: RouterRun, rng: np.random.Generator) -> NDArray[np.float64]:
        """Distinct experts of the steps that tokens are in over those of requests put together at random.

        The first is the run's, the others are of runs made of as many of its blocks, drawn at random.
        """
        probabilities = self.probabilities
        sums = []  # [block, 2] of tokens: experts counted, and expected at random
        for log in run.log:
            for block in np.array_split(log, max(1, len(log) // BLOCK_STEPS)):
                random = [(1 - (1 - probabilities) ** rows).sum(axis=1).mean() for rows in block[:, ROWS]]
                sums.append((block[:, ROWS] @ block[:, DISTINCT], block[:, ROWS] @ np.array(random)))
        blocks = np.array(sums)
        drawn = blocks[rng.integers(0, len(blocks), (DRAWS, len(blocks)))].sum(axis=1)  # [draw, 2]
        both = np.vstack([blocks.sum(axis=0), drawn])
        return np.asarray(both[:, 0] / both[:, 1], np.float64)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """[layer, expert] probability that a token of a served request activates it, mean over requests."""
        shares = []
        for event in self.events:
            if event is not None:
                ids = event.ids()[event.prompt_tokens :]
                shares.append(footprint(ids, event.num_experts) / len(ids))
        return np.asarray(np.mean(shares, axis=0), np.float64)

    def against_random(self, run: RouterRun) -> float:
        """Distinct experts of the run's steps over those that requests put together at random would touch.

        A step of n such requests touches sum(1 - (1 - p)^n) experts, p being :attr:`probabilities`. It is taken at the
        rows of every step, because small steps touch fewer experts and routers differ in how even their steps are.
        """
        sizes, steps = np.unique(run.steps[:, ROWS], return_counts=True)
        probabilities = self.probabilities
        random = [(1 - (1 - probabilities) ** size).sum(axis=1).mean() for size in sizes]
        return float(run.steps[:, DISTINCT].sum() / (steps @ random))

    def saving_at_equal_rows_pct(self, run: RouterRun) -> float:
        """Distinct experts below the first run's, at the rows of every step; see :meth:`against_random`."""
        return 100 * (1 - self.against_random(run) / self.against_random(self.runs[0]))

    def differing(self) -> int:
        """Requests that some router's run answered with other tokens than the first's."""
        return sum(
            any(run.answers[request] != first for run in self.runs[1:])
            for request, first in enumerate(self.runs[0].answers)
        )
