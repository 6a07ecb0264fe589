"""Plans for few scenarios: `latency_optimal` against EPLB and the greedy, on domains and chunks that no plan has seen.

    COTERIE_DATA=… python lab/benchmarks/few_scenarios.py [--splits 20] [--first-seed 300] [--traffic …] [--paid]

Every split draws the scenarios to plan on and those to score on anew. A line is a cell: the balancedness of the three
plans on the scored scenarios, and the difference to the better of EPLB and the greedy in this cell, with its 95%
interval over splits. Wrong to read as time: only tokens are counted.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.runs import interval
from coterie.placement import Load, Objective, planners
from coterie.types import Placement, Topology
from coterie_lab.suites.placement.cells import EPLB, FREE, GREEDY, PREFILL, prices, score
from coterie_lab.suites.placement.traffic import GLM, GLM_TOKENS, read_chunks, read_recorded, spec_of

Array = NDArray[np.float64]

OURS = "latency_optimal"
PLANNERS = (EPLB, GREEDY, OURS)
RANKS, SCENARIOS = (8, 16, 32), (5, 13, 26, 50)
LAYERS = 12
"""Layers that are planned and scored, evenly spread: planning all 75 of GLM-5.2 takes six times as long."""
SCORED = 30
"""Chunks or subjects that are scored where no domain is left out."""
HORIZON = 10_000.0
"""Steps that a plan serves if moves have a cost."""
LEFT_OUT, CHUNKS, SUBJECTS = "GLM-5.2, domains left out", "GLM-5.2, chunks left out", "gpt-oss-20b, subjects left out"
TRAFFIC = (LEFT_OUT, CHUNKS, SUBJECTS)
FEWEST_REQUESTS = 3
"""Fewest recorded requests of a subject."""
MEAN_BAR, CELL_BAR = -0.3, -1.0
"""Points by which the mean over cells, and a single cell, may be behind the better of EPLB and the greedy."""


class Cell(NamedTuple):
    traffic: str
    paid: bool
    """Whether moves from experts in order have a cost."""
    ranks: int
    spare: int
    scenarios: int


def domains_left_out(data: Path, count: int, seed: int) -> tuple[Array, Array]:
    """Draw chunks of five domains (seven, if more than 40 are needed), in turn; score all chunks of the others."""
    rng = np.random.default_rng([seed, count])
    shares = _glm(data)
    domains, chunks = shares.shape[:2]
    planned = 5 if count <= 5 * chunks else 7
    order = rng.permutation(domains)
    drawn = np.array([rng.permutation(chunks) for _ in range(planned)])  # [domain, turn]
    rows = [shares[order[domain], drawn[domain, turn]] for turn in range(chunks) for domain in range(planned)]
    return np.array(rows[:count]), shares[order[planned:]].reshape(-1, *shares.shape[2:])


def chunks_left_out(data: Path, count: int, seed: int) -> tuple[Array, Array]:
    """Draw chunks of any domains, to plan on and to score."""
    shares = _glm(data)
    return _drawn(shares.reshape(-1, *shares.shape[2:]), count, seed)


def subjects_left_out(data: Path, count: int, seed: int) -> tuple[Array, Array]:
    """Draw subjects, each the tokens of all its recorded requests, to plan on and to score."""
    recorded = read_recorded("gpt-oss-20b", data)
    labels = np.array(recorded.trace.requests.domains)
    names = [name for name in np.unique(labels) if (labels == name).sum() >= FEWEST_REQUESTS]
    tokens = np.array([recorded.footprints[labels == name].sum(axis=0, dtype=np.float64) for name in names])
    return _drawn(tokens / tokens.sum(axis=2, keepdims=True), count, seed)


DRAWS = {LEFT_OUT: domains_left_out, CHUNKS: chunks_left_out, SUBJECTS: subjects_left_out}


def _glm(data: Path) -> Array:
    shares = read_chunks(data).shares
    return shares[:, :, np.linspace(0, shares.shape[2] - 1, LAYERS).round().astype(int)]


def _drawn(steps: Array, count: int, seed: int) -> tuple[Array, Array]:
    order = np.random.default_rng([seed, count]).permutation(len(steps))
    return steps[order[:count]], steps[order[count : count + SCORED]]


def cells_of(traffic: str, paid: bool) -> list[Cell]:
    experts = spec_of(_trace(traffic)).num_experts
    return [
        Cell(traffic, paid, ranks, spare, count)
        for ranks in RANKS
        for spare in (0, max(experts // 8, ranks))
        if experts + spare > ranks
        for count in SCENARIOS
    ]


def _trace(traffic: str) -> str:
    return "gpt-oss-20b" if traffic == SUBJECTS else GLM


def serve(cell: Cell, data: Path, seed: int) -> list[float]:
    """Return the balancedness of every planner's plan on the scored scenarios."""
    tokens = GLM_TOKENS[PREFILL]
    fit, scored = (
        Load.of_scenarios(tokens * spec_of(_trace(cell.traffic)).top_k * steps)
        for steps in DRAWS[cell.traffic](data, cell.scenarios, seed)
    )
    objective: Objective = FREE
    if cell.paid:
        objective = prices(_trace(cell.traffic), PREFILL, cell.ranks, tokens)
        objective = replace(objective, exposed=1.0, horizon=HORIZON)
    current = Placement.linear(fit.num_layers, fit.num_experts, cell.ranks, fit.num_experts + cell.spare)
    plans = [
        planners.make(name, {"objective": objective}).plan(fit, Topology(cell.ranks), current) for name in PLANNERS
    ]
    return [score(scored, plan.placement, FREE).balancedness for plan in plans]


def measured(cell: Cell, data: Path, seeds: range) -> dict[str, Any]:
    """Return the row of a cell: means over splits, and the points to the better baseline, split by split."""
    balancedness = np.array([serve(cell, data, seed) for seed in seeds])  # [split, planner]
    means = balancedness.mean(axis=0)
    best = int(means[:2].argmax())
    points = 100.0 * (balancedness[:, 2] - balancedness[:, best])
    return {**cell._asdict(), **dict(zip(PLANNERS, means.tolist(), strict=True)), "points": points.tolist()}


def shown(points: Array) -> str:
    mean, low, high = interval(points)
    return f"{mean:+.2f}" if low is None else f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Say whether the mean over cells and the worst cell hold the bars."""
    each = np.array([row["points"] for row in rows])  # [cell, split]
    worst = rows[int(each.mean(axis=1).argmin())]
    held = each.mean() >= MEAN_BAR and each.mean(axis=1).min() >= CELL_BAR
    cell = "{ranks} ranks with {spare} spare slots and {scenarios} scenarios".format(**worst)
    return (
        f"{'Held' if held else 'NOT held'}: over {len(rows)} cells and {each.shape[1]} splits "
        f"{shown(each.mean(axis=0))} points to the better of EPLB and the greedy (bar {MEAN_BAR}); "
        f"the worst cell, {cell}, {shown(np.array(worst['points']))} (bar {CELL_BAR})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=300)
    parser.add_argument("--traffic", choices=TRAFFIC, nargs="+", default=TRAFFIC)
    parser.add_argument("--paid", action="store_true", help=f"moves have a cost, and a plan serves {HORIZON:g} steps")
    options = parser.parse_args()
    data = Path(os.environ["COTERIE_DATA"])
    for traffic in options.traffic:
        print(f"{traffic}{', moves paid' if options.paid else ''}\nranks spare scenarios  EPLB  greedy  ours  points")
        rows = []
        for cell in cells_of(traffic, options.paid):
            rows.append(measured(cell, data, range(options.first_seed, options.first_seed + options.splits)))
            three = "  ".join(f"{rows[-1][name]:.3f}" for name in PLANNERS)
            print(cell.ranks, cell.spare, cell.scenarios, three, shown(np.array(rows[-1]["points"])), flush=True)
        print(verdict(rows), flush=True)


if __name__ == "__main__":
    main()
