"""How long one selection takes, for every strategy there is, plugins included."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.suites import Report
from coterie.batching import Window, strategies
from coterie.batching.base import SpreadCost
from coterie.costs.lines import StepCost
from coterie_lab.benches.timing import Row, median_us

SIZES = ((32, 8, 60, 4), (256, 64, 256, 8))
"""Window, batch, experts and top-k: the published setting, and that of a large model."""
STEP_COST = "latency_aware, step cost"
"""`latency_aware` with its other cost to minimise; the other rows have the default."""
REPEATS = 201
"""Runs of which the median is taken: a selection takes microseconds."""


def prompt_loads(rng: Generator, waiting: int, experts: int, top_k: int) -> NDArray[np.float64]:
    """Draw prompts of 16 to 512 tokens, of six kinds that prefer different experts: tokens [request, 1, expert]."""
    tastes = rng.dirichlet(np.full(experts, 0.5), size=6)
    tokens = np.exp(rng.uniform(np.log(16), np.log(512), waiting)).astype(np.int64)
    kinds = rng.integers(6, size=waiting)
    return rng.multinomial(tokens * top_k, tastes[kinds])[:, None, :].astype(np.float64)


def bench_batching(report: Report) -> list[Row]:
    """Time one call of `select`, in one layer, with nothing running, no request passed over and a long queue."""
    rows: list[Row] = []
    for waiting, batch, experts, top_k in SIZES:
        loads = prompt_loads(np.random.default_rng(0), waiting, experts, top_k)
        window = Window(loads, np.zeros(waiting, np.int64), 10 * waiting)  # so that reordering pays
        # As in decode on one device: a request touches an expert by chance, and every touched expert is streamed.
        decoding = window._replace(loads=loads / loads.sum(axis=2, keepdims=True) * top_k)
        cost = StepCost(
            fixed_us=100.0, first_us=10.0, tile_rows=64.0, row_us=0.1, arrival_us=0.0, num_ranks=1, by_tokens=False
        )
        timed = [(name, strategies.make(name, {"cost": SpreadCost()}), window) for name in strategies]
        timed.append((STEP_COST, strategies.make("latency_aware", {"cost": cost}, trust=1.0), decoding))
        for name, strategy, seen in timed:
            report(name, len(rows), len(SIZES) * len(timed))
            select = partial(strategy.select, seen, window.no_load(), batch, np.random.default_rng(0))
            spent = median_us(select, REPEATS)
            rows.append({"strategy": name, "window": waiting, "batch": batch, "experts": experts, "median_us": spent})
    return rows
