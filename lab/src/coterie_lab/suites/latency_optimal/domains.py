"""Real loads as traffic shifts from one domain to the next: every plan is made on one window and serves the next.

GLM-5.2's counts come in ten domains of eight shards. A window mixes the domains by weights that shift, and takes from
each domain another shard than the windows before and after it, so no plan serves the tokens it was made from. The step
time is the calibrated model's, whole steps; planners decide by the straight-line prices of :meth:`Objective.of`.

Wrong where a step's own load matters: all steps of a window have its mean load, so the scatter from step to step, which
slows all placements alike, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.costs.step import Batch, StepModel
from coterie.errors import TraceError
from coterie.models import get_model
from coterie.placement import Load, Objective, Plan, Planner, Rebalancer, RebalancingSettings, planners
from coterie.traces.load import LoadTable
from coterie.traces.readers import read_trace
from coterie.types import Placement, Topology, balancedness

Array = NDArray[np.float64]
Advance = Callable[[str], None]

MODEL = "glm-5.2"


@dataclass(frozen=True, slots=True)
class DomainSetting:
    windows: int = 40
    steps: int = 100
    """Steps per window."""
    stay: int = 4
    """Windows until the next domain leads."""
    base: float = 0.2
    """Share of the traffic drawn evenly from all domains."""
    ranks: int = 8
    slots: int = 288
    tokens: tuple[tuple[str, int], ...] = (("prefill", 16_384), ("decode", 1_024))
    """Tokens per step, summed over all ranks."""
    context: int = 4_096
    """Tokens cached by each decoding request."""


class Served(NamedTuple):
    """One policy over all windows but the first, which has no load to plan on."""

    step_s: Array
    """[window] seconds of the whole step, by the calibrated model."""
    moe_s: Array
    """[window] part of it spent on the slowest rank's experts."""
    cost_s: Array
    """[window] seconds of planning and movement at its start."""
    balance: Array
    """[window]"""
    moves: list[int]
    """Moves of each round that moved something."""
    planning_s: float
    """Seconds of one plan: measured beforehand, charged per plan, known to the planner."""
    last: Placement


class RankShare(NamedTuple):
    """Time of each rank in one layer, by the planners' prices."""

    compute_s: Array
    """[rank]"""
    communication_s: Array
    wait_s: Array
    """Seconds of waiting for the slowest rank."""


def domain_loads(path: Path) -> dict[str, Array]:
    """Read tokens [shard, layer, expert] by domain; merged tables, which hold the same tokens, are skipped."""
    table = read_trace(path)
    if not isinstance(table, LoadTable) or table.labels is None:
        raise TraceError(path, "kind", "expected load tables with labels")
    shards: dict[str, list[Array]] = {}
    for label, tokens in zip(table.labels, table.counts, strict=True):
        domain, slash, _ = label.rpartition("/")  # domain/shard; a merged table has no shard
        if slash:
            shards.setdefault(domain, []).append(tokens.astype(np.float64))
    if len(shards) < 2:
        raise TraceError(path, "labels", f"name {len(shards)} domains with shards; at least 2 are needed")
    return {name: np.array(tables) for name, tables in shards.items()}


def shifting(domains: dict[str, Array], setting: DomainSetting) -> Array:
    """Return shares of a layer's tokens [window, layer, expert] as traffic shifts between domains."""
    count = len(domains)
    windows = []
    for window in range(setting.windows):
        lead = (window / setting.stay) % count
        away = np.abs(np.arange(count) - lead)
        near = np.maximum(0.0, 1.0 - np.minimum(away, count - away))
        weight = setting.base / count + (1 - setting.base) * near / near.sum()
        mixed = sum(
            part * _shares(shards[window % len(shards)]) for part, shards in zip(weight, domains.values(), strict=True)
        )
        windows.append(np.asarray(mixed))
    return np.array(windows)


def _shares(tokens: Array) -> Array:
    total = tokens.sum(axis=1, keepdims=True)
    return np.asarray(tokens / np.where(total > 0, total, 1.0))


class Fleet(NamedTuple):
    """The serving setup of one phase."""

    model: StepModel
    objective: Objective
    batch: Batch
    rows: int
    """Activations of a step in a layer."""

    @classmethod
    def of(cls, phase: str, tokens: int, setting: DomainSetting) -> Fleet:
        spec, topology = get_model(MODEL), Topology(setting.ranks)
        model = step_model(spec, "h200", topology=topology)
        per_rank = -(-tokens // setting.ranks)
        batch = Batch(prefill_tokens=per_rank) if phase == "prefill" else Batch(per_rank, per_rank * setting.context)
        return cls(model, Objective.of(model, tokens, horizon=setting.steps), batch, tokens * spec.top_k)


def serve(policy: str, shares: Array, fleet: Fleet, setting: DomainSetting, advance: Advance) -> Served:
    """Serve under `kept`, `eplb`, `every window` (latency_optimal after each) or `automatic`."""
    placement = Placement.linear(shares.shape[1], shares.shape[2], setting.ranks, setting.slots)
    first = Load(shares[0] * fleet.rows * setting.steps, setting.steps)
    planning_s = 0.0 if policy == "kept" else _planning_s(_planner(policy, fleet.objective), first, placement, fleet)
    fleet = fleet._replace(objective=replace(fleet.objective, planning_s=planning_s))
    decide = _decider(policy, placement, fleet, setting)
    step_s, moe_s, cost_s, balance = np.zeros((4, len(shares) - 1))
    served = Served(step_s, moe_s, cost_s, balance, [], planning_s, placement)
    for window in range(len(shares) - 1):
        decision = decide(Load(shares[window] * fleet.rows * setting.steps, setting.steps), placement)
        if decision.planned:
            served.cost_s[window] = planning_s
        if decision.plan is not None:
            placement = decision.plan.placement
            served.cost_s[window] += decision.plan.movement_s
            if len(decision.plan.moves):
                served.moves.append(len(decision.plan.moves))
        share = shares[window + 1]
        step = fleet.model.step(np.rint(share * fleet.rows).astype(np.int64), fleet.batch, placement)
        served.step_s[window], served.moe_s[window] = step.total_s, float(step.moe_s.sum())
        served.balance[window] = balancedness(placement.rank_load(share))
        advance(policy)
    return served._replace(last=placement)


class _Decided(NamedTuple):
    plan: Plan | None
    planned: bool


def _planner(policy: str, objective: Objective) -> Planner:
    return planners.make(PLANNERS[policy], {"objective": objective})


def _planning_s(planner: Planner, load: Load, placement: Placement, fleet: Fleet) -> float:
    """Return the minimum of a few runs, to exclude other load on the machine."""
    return min(planner.plan(load, fleet.model.topology, placement).planning_s for _ in range(4))


def _decider(
    policy: str, first: Placement, fleet: Fleet, setting: DomainSetting
) -> Callable[[Load, Placement], _Decided]:
    topology = fleet.model.topology
    if policy == "kept":
        return lambda _load, _placement: _Decided(None, False)
    if policy != "automatic":
        planner = _planner(policy, fleet.objective)
        return lambda load, placement: _Decided(planner.plan(load, topology, placement), True)
    steps = float(setting.steps)
    settings = RebalancingSettings(first_interval=steps, min_interval=steps, max_interval=100 * steps)
    make = partial(planners.make, "latency_optimal")
    rebalancer = Rebalancer(make, fleet.objective, topology, first, settings)

    def decide(load: Load, _placement: Placement) -> _Decided:
        decision = rebalancer.observe(load)
        rebalancer.landed()
        return _Decided(decision.plan, decision.planned)

    return decide


def rank_shares(share: Array, placement: Placement, layer: int, fleet: Fleet) -> RankShare:
    """Return the rank times of one layer in one window."""
    load, topology = Load(share * fleet.rows), fleet.model.topology
    both = fleet.objective.problem(load, topology, placement).rank_s(placement.slot_experts)[layer]
    alone = replace(fleet.objective, row_bytes=0.0).problem(load, topology, placement)
    compute = alone.rank_s(placement.slot_experts)[layer]
    return RankShare(compute, both - compute, both.max() - both)


def domain_rows(path: Path, setting: DomainSetting, advance: Advance) -> tuple[list[dict[str, Any]], Array]:
    """Make a row for each phase and policy and for each rank of one layer, and curves [policy, window] of prefill."""
    shares = shifting(domain_loads(path), setting)
    rows: list[dict[str, Any]] = []
    curves: list[Array] = []
    for phase, tokens in setting.tokens:
        fleet = Fleet.of(phase, tokens, setting)
        served = {policy: serve(policy, shares, fleet, setting, advance) for policy in POLICIES}
        rows += [_row(phase, tokens, policy, served, setting) for policy in POLICIES]
        if not curves:
            curves = [run.step_s + run.cost_s / setting.steps for run in served.values()]
            rows += _rank_rows(shares[-1], served, fleet)
    return rows, np.array(curves)


POLICIES = ("kept", "eplb", "every window", "automatic")
PLANNERS = {"eplb": "eplb", "every window": "latency_optimal", "automatic": "latency_optimal"}
"""The planner of each policy that plans."""


def _row(phase: str, tokens: int, policy: str, served: dict[str, Served], setting: DomainSetting) -> dict[str, Any]:
    run, base = served[policy], served["kept"].step_s
    per_step = run.cost_s / setting.steps
    total = run.step_s + per_step
    return {
        "part": "domains",
        "phase": phase,
        "tokens": tokens,
        "policy": policy,
        "step_ms": 1e3 * float(run.step_s.mean()),
        "moe_ms": 1e3 * float(run.moe_s.mean()),
        "cost_ms_per_step": 1e3 * float(per_step.mean()),
        "gain_pct": 100 * float(base.sum() / total.sum() - 1),
        "gain_without_cost_pct": 100 * float(base.sum() / run.step_s.sum() - 1),
        "balance": float(run.balance.mean()),
        "rounds": len(run.moves),
        "moves_per_round": float(np.mean(run.moves)) if run.moves else 0.0,
        "planning_ms": 1e3 * run.planning_s,
        "windows_slower_than_kept": int((total > base).sum()),
        "windows": len(total),
        "published": None,
    }


def _rank_rows(share: Array, served: dict[str, Served], fleet: Fleet) -> list[dict[str, Any]]:
    """Make rows of the layer with median balance under the kept map, in the last window."""
    kept = served["kept"].last.rank_load(share)
    layer = int(np.argsort(kept.max(axis=1) / kept.mean(axis=1))[len(kept) // 2])
    rows: list[dict[str, Any]] = []
    for policy in ("kept", "automatic"):
        part = rank_shares(share, served[policy].last, layer, fleet)
        for rank, seconds in enumerate(zip(*part, strict=True)):
            times = zip(("compute_us", "communication_us", "wait_us"), seconds, strict=True)
            row = {"part": "ranks", "policy": policy, "layer": layer, "rank": rank}
            rows.append(row | {key: 1e6 * float(value) for key, value in times} | {"published": None})
    return rows
