"""Distinct experts per decode step, read from the step logs of reference workers.

A step with few requests uses few experts whatever the requests, and routers differ in how evenly they spread requests.
Experts are therefore also compared at equal rows: at the step sizes that occur in both runs, weighted by the tokens of
the first run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import UnavailableError, check
from coterie.footprints.positions import COLUMNS, DISTINCT, ROWS, LoggedSteps
from coterie.net.http_client import Client


async def read_steps(client: Client, after: int | None = None) -> LoggedSteps:
    """Return the logged steps of a reference worker after its first `after` steps; None returns all that it keeps."""
    status, text = await client.call("GET", "/steps" if after is None else f"/steps?after={after}")
    check(
        status == 200,
        f"{client.url}/steps: HTTP {status}: not a reference worker, or not its key; {text[:200]}",
        UnavailableError,
    )
    found = json.loads(text)
    return LoggedSteps(found["total"], np.array(found["steps"], np.float64).reshape(-1, len(COLUMNS)))


class StepTotals(NamedTuple):
    """Sums over the steps of each size; totals of workers and blocks can be added."""

    steps: NDArray[np.float64]
    """[rows] number of decode steps with that number of rows (tokens)."""
    distinct: NDArray[np.float64]
    """[rows] sum of the distinct experts of these steps (mean over layers)."""

    @classmethod
    def of(cls, logs: Sequence[NDArray[np.float64]]) -> StepTotals:
        """Sum up step logs, [step, column] each."""
        log = np.concatenate([np.empty((0, len(COLUMNS))), *logs])
        rows = log[:, ROWS].astype(np.int64)
        steps = np.bincount(rows, minlength=1).astype(np.float64)
        return cls(steps, np.bincount(rows, log[:, DISTINCT], minlength=1).astype(np.float64))

    def plus(self, other: StepTotals) -> StepTotals:
        size = max(len(self.steps), len(other.steps))
        return StepTotals(*(_padded(a, size) + _padded(b, size) for a, b in zip(self, other, strict=True)))

    @property
    def rows_per_step(self) -> float:
        return float(self._rows @ self.steps / max(float(self.steps.sum()), 1.0))

    @property
    def experts_per_step(self) -> float:
        """Distinct experts of a layer in a decode step, mean over layers and steps."""
        return float(self.distinct.sum() / max(float(self.steps.sum()), 1.0))

    @property
    def experts_by_token(self) -> float:
        """Distinct experts of a layer in a token's decode step: mean over steps, weighted by their rows."""
        return float(self._rows @ self.distinct / max(float(self._rows @ self.steps), 1.0))

    @property
    def _rows(self) -> NDArray[np.float64]:
        return np.arange(len(self.steps), dtype=np.float64)


def experts_ratio(first: StepTotals, other: StepTotals) -> float | None:
    """Return the ratio of distinct experts of `other` to `first` at equal rows; None without a common step size."""
    size = max(len(first.steps), len(other.steps))
    steps, distinct = (np.array([_padded(one[at], size) for one in (first, other)]) for at in (0, 1))
    both = np.flatnonzero((steps[0] > 0) & (steps[1] > 0))
    if not len(both):
        return None
    means = distinct[:, both] / steps[:, both]  # [run, rows]
    weights = both * steps[0, both]
    return float(weights @ means[1] / (weights @ means[0]))


def _padded(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    return np.pad(values, (0, size - len(values)))
