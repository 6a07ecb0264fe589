"""Rebalancing every n iterations, or when it pays: what MoE layers cost as their load drifts.

The load has two time scales. Popularity drifts slowly and smoothly, as traffic shifts from one kind of request to
another; single iterations scatter around it, as the few requests of a batch happen to use this expert or that. So the
sum over many iterations, which planners see, is not the load of any single one, and is outdated once it is known.

    log popularity = slow x z(t) + fast x f(t)      z: two filters of the same time constant in a row; f: one filter
    iteration      = fixed + row_s x tokens of the busiest rank, per layer, + planning and movement when they happen

Drift without the second filter is rough: a plan then loses much of its worth in the first ten iterations, which the
published gain at n = 10 rules out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.placement import DEEPSEEK_V3_PREFILL, Load, Objective, Rebalancer, RebalancingSettings, planners
from coterie.types import Link, Placement, Topology
from coterie_lab.suites.shared import one_thread

Array = NDArray[np.float64]

XGMI = Link("xgmi, as used", 287e9, 2e-6)
"""What 13,036 moves of 44 MB, 28 a layer and rank, need to take as long as the 0.26 s of planning: published is that
each is about half of a round. Seven links of 64 GB/s each way are the hardware's."""


@dataclass(frozen=True, slots=True)
class DriftSetting:
    """A load that drifts."""

    experts: int = 256
    top_k: int = 8
    tokens: int = 8192
    """Tokens per iteration: SGLang's default prefill chunk."""
    half_life: float = 450.0
    """Iterations until the slow part correlates with itself by half."""
    slow: float = 1.75
    """Deviation of log popularity; leaves experts in their own order balanced to 0.65."""
    most: float = 2.3
    """Deviations at which popularity is clipped: else some expert would have more than a rank's share, and no map
    without replicas could reach the published balance of 0.996."""
    fast_half_life: float = 3.0
    fast: float = 0.15

    def draw(self, layers: int, iterations: int, rng: Generator) -> NDArray[np.float32]:
        """Draw tokens [iteration, layer, expert]."""
        shape = (layers, self.experts)
        # Two filters in a row correlate as (1 + x) e^-x, which is a half at x = 1.678.
        a = float(np.exp(-1.678 / self.half_life))
        b = 2.0 ** (-1.0 / self.fast_half_life)
        inner, scatter = rng.normal(size=shape), rng.normal(size=shape)
        gain = (1 - a * a) / np.sqrt(1 + a * a)  # keeps the variance of z at 1
        shared = a * gain / (1 - a * a)  # correlation of z with its input, as it is in the long run
        z = shared * inner + np.sqrt(1 - shared**2) * rng.normal(size=shape)
        rows = self.tokens * self.top_k
        loads = np.empty((iterations, *shape), np.float32)
        for load in loads:
            popularity = np.exp(self.slow * np.clip(z, -self.most, self.most) + self.fast * scatter)
            load[:] = rng.poisson(popularity / popularity.sum(axis=1, keepdims=True) * rows)
            z = a * z + gain * inner
            inner = a * inner + np.sqrt(1 - a * a) * rng.normal(size=shape)
            scatter = b * scatter + np.sqrt(1 - b * b) * rng.normal(size=shape)
        return loads


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """DeepSeek-V3 on 8 ranks of one node."""

    drift: DriftSetting = field(default=DriftSetting())
    ranks: int = 8
    model_layers: int = 58
    layers: int = 4
    """Layers simulated; planning is charged in proportion."""
    warm_up: int = 1000
    """Warm-up iterations."""
    iterations: int = 3000
    """Measured iterations."""
    short: int = 100
    """Measured iterations where a round follows every iteration."""
    fixed_s: float = 1.55e-3
    """Fixed time per layer: fitted to the published gain of ideal balance, 25%."""
    objective: Objective = DEEPSEEK_V3_PREFILL
    link: Link = XGMI
    window: int = 10
    """Iterations of a window that the automatic interval looks at."""

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, ranks_per_node=self.ranks, intra=self.link)

    def priced(self, planning_s: float, horizon: float) -> Objective:
        share = self.layers / self.model_layers
        return replace(self.objective, planning_s=planning_s * share, horizon=horizon)

    def linear(self) -> Placement:
        return Placement.linear(self.layers, self.drift.experts, self.ranks)


class Policy(NamedTuple):
    planner: str
    """Planner's name in the registry."""
    interval: int | None
    """Iterations between rounds; None is automatic."""
    planning_s: float
    """Planning seconds for all layers of the model."""
    unconditional: bool = False
    """Rebalance even if that cannot pay."""
    by_start: bool = False
    """Judge by the first map whether a round may pay, as if n were set once; else by the current map, which saves
    planning while the last round still holds."""


class Outcome(NamedTuple):
    gain: float
    """Time without balancing ÷ time with this policy, less 1, over the measured iterations."""
    processing_gain: float
    """The same without planning and movement."""
    moves: float
    """Mean moves per round that moved something, over all layers of the model."""
    rounds: int
    """Rounds that moved something."""
    planned: int
    """Number of plans made."""
    interval: float
    """Mean iterations between rounds."""


class _Run:
    """Simulate one policy on one series of loads."""

    def __init__(self, loads: NDArray[np.float32], setting: SweepSetting, begin: int, end: int) -> None:
        self.loads, self.setting, self.begin, self.end = loads, setting, begin, end
        self.busiest = np.empty(end)  # [iteration] tokens of the busiest rank, summed over layers
        self.cost_s = np.zeros(end)
        self.moves: list[int] = []
        self.planned = 0

    def serve(self, begin: int, end: int, placement: Placement) -> None:
        self.busiest[begin:end] = busiest_rank(self.loads[begin:end], placement)

    def charge(self, iteration: int, planned_s: float, movement_s: float, moves: int) -> None:
        if iteration < self.end:
            self.cost_s[iteration] += planned_s + movement_s
        if self.begin <= iteration < self.end:
            self.planned += 1
            if moves:
                self.moves.append(moves)

    def outcome(self, unbalanced: Array) -> Outcome:
        setting, counted = self.setting, slice(self.begin, self.end)
        fixed = setting.fixed_s * setting.layers * (self.end - self.begin)
        row_s = setting.objective.row_s
        before = fixed + row_s * float(unbalanced[counted].sum())
        after = fixed + row_s * float(self.busiest[counted].sum())
        scale = setting.model_layers / setting.layers
        moved = scale * float(np.mean(self.moves)) if self.moves else 0.0
        every = (self.end - self.begin) / max(1, len(self.moves))
        total = after + float(self.cost_s[counted].sum())
        return Outcome(
            gain=before / total - 1,
            processing_gain=before / after - 1,
            moves=moved,
            rounds=len(self.moves),
            planned=self.planned,
            interval=every,
        )


def busiest_rank(loads: NDArray[np.float32], placement: Placement) -> Array:
    """Return the tokens of the busiest rank, summed over layers, of a map without replicas: [iteration]."""
    at = np.broadcast_to(placement.slot_experts.astype(np.int64), (len(loads), *placement.slot_experts.shape))
    by_slot = np.take_along_axis(loads, at, axis=2)
    by_rank = by_slot.reshape(*by_slot.shape[:2], placement.num_ranks, -1).sum(axis=3, dtype=np.float64)
    return np.asarray(by_rank.max(axis=2).sum(axis=1))


def run_fixed(loads: NDArray[np.float32], setting: SweepSetting, policy: Policy) -> _Run:
    """Run a round after every n iterations, planned on the last n for the next n."""
    n = policy.interval
    assert n is not None
    begin = setting.warm_up
    end = begin + (setting.short if n == 1 else setting.iterations)
    run = _Run(loads, setting, begin, end)
    objective = setting.priced(policy.planning_s, float(n))
    planner = planners.make(policy.planner, {"objective": objective})
    topology, placement = setting.topology, setting.linear()
    # One round before the measured iterations is enough to be where a run of any length would be, n = 1 included.
    for at in range(max(0, begin - max(n, 100)), end, n):
        if at >= n:
            load = Load(loads[at - n : at].sum(axis=0, dtype=np.float64), n)
            judged = setting.linear() if policy.by_start else placement
            if policy.unconditional or _may_pay(objective, load, topology, judged):
                plan = planner.plan(load, topology, placement)
                placement = plan.placement
                run.charge(at, objective.planning_s, plan.movement_s, len(plan.moves))
        run.serve(at, min(at + n, end), placement)
    return run


def _may_pay(objective: Objective, load: Load, topology: Topology, placement: Placement) -> bool:
    """Whether an even load would pay for planning at all, which is known before planning."""
    problem = objective.problem(load, topology, placement)
    excess = problem.rank_s(placement.slot_experts).max(axis=1) - problem.even
    return objective.horizon * float(excess.sum()) > objective.planning_s


def run_automatic(loads: NDArray[np.float32], setting: SweepSetting, policy: Policy) -> _Run:
    """Run Coterie's rebalancer, which observes one window at a time."""
    end = setting.warm_up + setting.iterations
    run = _Run(loads, setting, setting.warm_up, end)
    objective = setting.priced(policy.planning_s, 1.0)
    settings = RebalancingSettings(min_interval=setting.window, max_interval=10_000.0)
    make = partial(planners.make, "latency_optimal")
    rebalancer = Rebalancer(make, objective, setting.topology, setting.linear(), settings)
    for at in range(0, end, setting.window):
        until = min(at + setting.window, end)
        run.serve(at, until, rebalancer.placement)
        decision = rebalancer.observe(Load(loads[at:until].sum(axis=0, dtype=np.float64), until - at))
        if decision.planned:
            plan = decision.plan
            run.charge(until, objective.planning_s, plan.movement_s if plan else 0.0, len(plan.moves) if plan else 0)
        rebalancer.landed()  # movement blocks, as in the paper: it is over before the next iteration
    return run


@one_thread
def run_seed(seed: int, setting: SweepSetting, policies: tuple[Policy, ...]) -> list[Outcome]:
    """Run every policy on the same iterations, and ideal balance last."""
    rng = np.random.default_rng([seed, 5])
    loads = setting.drift.draw(setting.layers, setting.warm_up + setting.iterations, rng)
    unbalanced = busiest_rank(loads, setting.linear())
    runs = [(run_automatic if one.interval is None else run_fixed)(loads, setting, one) for one in policies]
    ideal = _Run(loads, setting, setting.warm_up, setting.warm_up + setting.iterations)
    ideal.busiest[:] = loads.sum(axis=(1, 2), dtype=np.float64) / setting.ranks
    return [run.outcome(unbalanced) for run in (*runs, ideal)]
