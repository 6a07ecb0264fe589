"""Co-clustering: how long planning takes at a real size, and how even the ranks are.

Items are drawn: token ids with Zipf frequencies, each of a theme that prefers some experts of every layer.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.random import Generator, default_rng

from coterie.answers.suites import Report
from coterie.placement import DEEPSEEK_V3_PREFILL, Items, Load, planners
from coterie.types import Placement, Topology
from coterie_lab.benches.timing import Row
from coterie_lab.suites.shared import median_imbalance

ITEMS, LAYERS, EXPERTS, TOP_K, RANKS = 20_000, 26, 64, 6, 8
"""DeepSeek-V2-Lite, with as many distinct token ids as a few million tokens of text have."""
THEMES = 40


def bench_co_clustering(report: Report) -> list[Row]:
    """Time planners that co-cluster, at DeepSeek-V2-Lite's size."""
    rows: list[Row] = []
    sizes = (LAYERS, EXPERTS, TOP_K, THEMES)
    warm, items = themed_items(default_rng(0), 100, *sizes), themed_items(default_rng(1), ITEMS, *sizes)
    load, current, topology = Load(items.load(EXPERTS)), Placement.linear(LAYERS, EXPERTS, RANKS), Topology(RANKS)
    for done, name in enumerate(("sem_moe", "co_cluster")):
        report(f"{name}, {ITEMS:,} items", done, 2)
        offers = {"objective": DEEPSEEK_V3_PREFILL}
        planners.make(name, offers, items=warm).plan(load, topology, current)  # compile, or load the machine code
        started = perf_counter()
        plan = planners.make(name, offers, items=items).plan(load, topology, current)
        spent, imbalance = perf_counter() - started, median_imbalance(plan.placement.rank_load(load.tokens))
        row = {"name": f"{name} plan", "items": ITEMS, "layers": LAYERS, "experts": EXPERTS, "ranks": RANKS}
        rows.append(row | {"median_ms": round(1e3 * spent, 1), "imbalance": round(float(imbalance.mean()), 3)})
    return rows


def themed_items(rng: Generator, count: int, layers: int, experts: int, top_k: int, themes: int) -> Items:
    """Draw token ids with Zipf frequencies."""
    tokens = np.ceil(100.0 * count / np.arange(1, count + 1))
    kept = min(2 * top_k, experts)
    ids, weights = np.empty((count, layers, kept), np.int32), np.empty((count, layers, kept))
    theme = rng.integers(0, themes, count)
    for layer in range(layers):
        score = rng.gumbel(size=(count, experts)) + 1.5 * rng.gumbel(size=(themes, experts))[theme]
        ids[:, layer] = np.argsort(-score, axis=1)[:, :kept]
        share = np.exp(np.take_along_axis(score, ids[:, layer].astype(np.int64), axis=1))
        weights[:, layer] = np.minimum(top_k * share / share.sum(axis=1, keepdims=True), 1.0)
    return Items(tokens, ids, weights)
