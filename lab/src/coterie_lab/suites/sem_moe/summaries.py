"""Metrics of a run of a serving group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.errors import check
from coterie.sim.group.serving import GroupServedRun


class ServeSummary(NamedTuple):
    """Metrics of a run. The `…_pct` fields are percentages of the time of all steps."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    e2e_p50_ms: float
    tokens_per_s: float
    """Prompt and decoded tokens per second, over steps that start between the first and the last arrival."""
    local_rate: float
    """Share of activations whose expert is on the token's own rank."""
    all_to_all_pct: float
    ring_pct: float


def summarise_served(run: GroupServedRun) -> ServeSummary:
    """Summarise a run in which every request finished."""
    check(
        run.done >= len(run.arrival_s) and run.done,
        f"{run.done} of {len(run.arrival_s)} requests finished; metrics are of whole runs",
    )
    ttft, e2e = 1e3 * (run.first_s - run.arrival_s), 1e3 * (run.finish_s - run.arrival_s)
    steps, seconds = run.steps, run.steps.seconds
    counted = steps.start_s <= run.arrival_s[-1]
    span = float((steps.start_s + seconds)[counted].max() - run.arrival_s[0])
    total = float(seconds.sum())
    return ServeSummary(
        ttft_p50_ms=float(np.quantile(ttft, 0.5)),
        ttft_p99_ms=float(np.quantile(ttft, 0.99)),
        e2e_p50_ms=float(np.quantile(e2e, 0.5)),
        tokens_per_s=float((steps.prompt + steps.decoded)[counted].sum()) / span,
        local_rate=1.0 - float(steps.remote.sum()) / float(steps.activations.sum()),
        all_to_all_pct=100.0 * float(steps.all_to_all_s.sum()) / total,
        ring_pct=100.0 * float(steps.ring_s.sum()) / total,
    )
