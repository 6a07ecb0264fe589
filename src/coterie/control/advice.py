"""Placement advice from the loads of all workers: a plan that would pay, or the reason to keep the placement.

    loads in windows ──► Rebalancer (drift, interval, cooldown) ──► Plan ──► Advice ──► scored on the next window
    demand by rank   ──► ActionManager, within a memory budget ──► replicas and swaps, as advice too
    newest requests  ──► single steps, for which plans are made and on which they are scored (:func:`with_steps`)

The advisor never applies a plan: the caller does, and then calls `applied`. A plan that gains nothing on the window
after the one it was made from is withdrawn. Wrong if the workers are not the ranks of one expert-parallel group: the
advice then holds for a group that would serve the same requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from coterie.control.base import ControlEvent, LoadSeen, LoopShape
from coterie.control.traffic import Kept
from coterie.errors import ConfigError, check_at_least, check_not_negative, check_positive
from coterie.placement import Load, MemoryBudget, Objective, PlacementMap, Plan, Rebalancer, planners
from coterie.placement.holdings import DemandTracker, held_by
from coterie.placement.maps.formats import replace_map
from coterie.placement.objective import Problem
from coterie.placement.scenarios import at_mean, steps_of_requests
from coterie.placement.triggers.actions import ActionEvent, ActionManager, ActionSettings
from coterie.placement.triggers.rebalancing import DEFAULTS, RebalancingSettings
from coterie.types import Placement, Topology

SCENARIOS = 32
"""Number of single steps that are drawn."""
FEWEST = 16
"""Least number of requests from which steps are drawn."""
MOST_REQUESTS = 256
"""Largest number of requests from which steps are drawn: the newest."""


def with_steps(load: Load, requests: Sequence[Kept], rng: Generator) -> Load:
    """Return the load with scenarios added: single steps drawn from the requests, for planning and scoring placements.

    A request that decodes n tokens is in n steps and brings 1/n of its footprint to each, on average. A step is drawn
    with as many requests as give the tokens per step that the workers report; the steps are then scaled to the reported
    mean load. Wrong if similar requests arrive together: requests are drawn independently of their order. With too few
    requests the load is returned unchanged.
    """
    newest = requests[-MOST_REQUESTS:]
    if len(newest) < FEWEST:
        return load
    # Added as integers, then converted to float32: float64 would double the memory of hundreds of footprints.
    shares = np.stack([(kept.prefill + kept.decode).astype(np.float32) / max(1.0, kept.tokens) for kept in newest])
    mean = load.tokens / load.steps
    per_request, total = float(shares.sum(dtype=np.float64)) / len(newest), float(mean.sum())
    if per_request <= 0 or total <= 0:
        return load
    steps = steps_of_requests(shares, max(1, round(total / per_request)), SCENARIOS, rng)
    return replace(load, scenarios=at_mean(steps, None, mean))


MOST_ACTIONS = 64
"""Largest number of actions in an advice."""
OVERLAP = 2.0
"""Loads of a worker that cover more than this many windows of time are ignored."""


class StepsScore(NamedTuple):
    """Balancedness on single steps of requests that finished after a plan was made."""

    requests: int
    scenarios: int
    before: float
    """Balancedness of the current placement."""
    mean: float
    """Balancedness of a plan for the mean load of the same window, without single steps."""
    after: float
    """Balancedness of the advised plan."""

    @property
    def words(self) -> str:
        return (
            f"on steps of {self.requests} newer requests balancedness is {self.after:.3f}, {self.mean:.3f} with a plan "
            f"for the mean step, {self.before:.3f} now"
        )


class Advice(NamedTuple):
    """A recommendation for the placement. The loop never applies it itself."""

    id: int
    at_s: float
    reason: str
    plan: Plan | None = None
    """Recommended plan; None to keep the placement, for the stated `reason`."""
    gain_pct: float = 0.0
    """Predicted saving of a step's MoE time, in percent, on the load that was planned for."""
    gain_next_pct: float | None = None
    """The same saving on the next window, which the plan has not seen; None until that window ends."""
    steps: StepsScore | None = None
    """Score on single steps of the next window; None until that window ends, or if it has too few requests."""
    moves: int = 0
    moved_bytes: float = 0.0
    movement_s: float = 0.0
    planning_s: float = 0.0
    """Measured planning time."""
    actions: Sequence[ActionEvent] = ()
    """Replicas and swaps recommended by the demand of each rank."""
    rank_s_before: tuple[float, ...] = ()
    """[rank] seconds per layer in one step, mean over layers, with the current placement."""
    rank_s_after: tuple[float, ...] = ()
    model: str = "unknown"

    def write(self, path: str | Path) -> None:
        """Write the placement map that vLLM's policy loads; an existing file is replaced atomically."""
        if self.plan is None:
            raise ConfigError(f"advice {self.id} keeps the placement ({self.reason}); there is no map to write")
        replace_map(path, PlacementMap(self.plan.placement, self.model), "vllm")


@dataclass(frozen=True, slots=True)
class AdviceSettings:
    """Settings of the advisor."""

    window_s: float = 30.0
    """Length of a window of loads, in seconds."""
    min_steps: int = 64
    """Least number of steps, summed over workers, for a window to be used."""
    cooldown_s: float = 120.0
    """Time after which a plan that was not applied is replaced by a new one."""
    planner: str = "latency_optimal"
    rebalancing: RebalancingSettings = DEFAULTS
    actions: ActionSettings = field(default_factory=ActionSettings)

    def __post_init__(self) -> None:
        check_positive(window_s=self.window_s)
        check_at_least(1, min_steps=self.min_steps)
        check_not_negative(cooldown_s=self.cooldown_s)


class PlacementAdvisor:
    """Turns loads into advice. Has no clock: windows end by the times of ticks."""

    def __init__(
        self,
        shape: LoopShape,
        topology: Topology,
        objective: Objective,
        placement: Placement | None = None,
        settings: AdviceSettings | None = None,
        *,
        budget: MemoryBudget | None = None,
    ) -> None:
        """`placement` is the current one; None is experts in order. `budget` limits replicas, as do the `settings`."""
        self.shape, self.topology, self.objective = shape, topology, objective
        self.settings = settings or AdviceSettings()
        self.placement = placement or Placement.linear(shape.num_layers, shape.num_experts, topology.num_ranks)
        self.rebalancer = Rebalancer(
            planners[self.settings.planner], objective, topology, self.placement, self.settings.rebalancing
        )
        actions = self.settings.actions
        if budget is not None:
            actions = replace(actions, extra_slots=min(actions.extra_slots, budget.max_replicas))
        self.manager = ActionManager(topology, objective.row_bytes, objective.expert_bytes, actions)
        self.tracker = DemandTracker(shape.num_layers, shape.num_experts, topology.num_ranks, decay=actions.decay)
        self._kept: Advice | None = None
        self._made: Advice | None = None
        self._actions: Sequence[ActionEvent] = ()
        self._actions_s = -math.inf
        self._claims: dict[str, int] = {}
        """Worker → rank that it claims to be, false claims included."""
        self._ranks: dict[str, int] = {}
        """Worker that has reported → its rank; -1 for one that is no rank of the group."""
        self._since_s: float | None = None
        self._tokens = np.zeros((topology.num_ranks + 1, shape.num_layers, shape.num_experts))
        self._steps: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._ids = 0
        self._last_kind = ""
        self._windows = 0
        self._newest = -1  # serial number of the newest request when the current plan was made
        self._for_mean: Placement | None = None

    @property
    def advice(self) -> Advice | None:
        """The current plan, or else the reason to keep the placement; None before the first window."""
        return self._made or self._kept

    def warm_up(self) -> None:
        """Plan for a synthetic load of one layer, so that compilation happens now.

        Compilation takes about a minute, once per machine; during that time a loop in service could not react.
        """
        some = Placement(self.placement.slot_experts[:1], self.placement.num_ranks, self.placement.num_experts)
        experts, scenarios = np.arange(self.shape.num_experts), np.arange(SCENARIOS)
        # The first half of the experts is hot in even scenarios, the second half in odd ones.
        halves = (2 * experts < len(experts))[None] == (scenarios % 2 == 0)[:, None]
        steps = np.where(halves, 1e7, 1e5)[:, None]  # [scenario, layer, expert] tokens, so many that every move pays
        for load in (Load.of_scenarios(steps), Load(steps.mean(axis=0))):
            planner = planners[self.settings.planner](objective=self.objective)
            placement = planner.plan(load, self.topology, some).placement
            self.objective.problem(load, self.topology, some).balanced(placement.slot_experts)
        manager = ActionManager(
            self.topology, self.objective.row_bytes, self.objective.expert_bytes, self.manager.settings
        )
        manager.cycle(np.ones((self.topology.num_ranks, 1, self.shape.num_experts)), held_by(some), 0.0)

    def bind(self, ranks: Mapping[str, int]) -> dict[str, str]:
        """Set which rank of the group each worker is; return, by worker, why a claim is ignored.

        A rank outside the group, or one that two workers claim, is nobody's: demand at the wrong rank is worse than
        none. If no worker claims a rank, workers are numbered in the order of their first reports.
        """
        if ranks == self._claims:
            return {}
        self._claims = dict(ranks)
        self._tokens[-1] = self._tokens.sum(axis=0)  # the open window was counted by other ranks
        self._tokens[:-1] = 0
        self.tracker = DemandTracker(*self._tokens.shape[1:], self.topology.num_ranks, decay=self.tracker.decay)
        claimed, last = Counter(ranks.values()), self.topology.num_ranks - 1
        wrong = {
            worker: f"worker {worker!r} claims placement_rank={rank}: "
            + (f"the group has ranks 0 … {last}" if claimed[rank] == 1 else "another worker claims it too")
            for worker, rank in ranks.items()
            if claimed[rank] > 1 or not 0 <= rank <= last
        }
        self._ranks = dict.fromkeys(wrong, -1)
        return wrong

    def observe(self, seen: LoadSeen) -> bool:
        """Add a checked load; return False if the worker's loads cover more than `OVERLAP` windows of time."""
        used = self._seconds.get(seen.worker, 0.0) + seen.seconds
        if used > OVERLAP * self.settings.window_s and seen.worker in self._seconds:
            return False
        self._seconds[seen.worker] = used
        self._steps[seen.worker] += int(seen.steps)
        reported = len(self._ranks)
        free = reported if reported < self.topology.num_ranks else -1
        rank = self._ranks.setdefault(seen.worker, self._claims.get(seen.worker, -1) if self._claims else free)
        self._tokens[rank] += seen.tokens  # the last row, -1, holds the load of no rank
        if rank >= 0:
            self.tracker.record(rank, seen.tokens / seen.steps)
        return True

    def tick(self, now_s: float, requests: Sequence[Kept] = ()) -> list[ControlEvent]:
        """Close the window if its time is over, and decide. `requests` are the newest finished ones, oldest first."""
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < self.settings.window_s:
            return []
        self._since_s = now_s
        load, total = self._close()
        if load is None:
            words = f"{total} steps in {self.settings.window_s:g} s; {self.settings.min_steps} make a window of loads"
            return self._told(ControlEvent(now_s, "too_little", words, {"steps": float(total)}))
        self._windows += 1
        events = self._score(load, now_s, [kept for kept in requests if kept.serial > self._newest])
        events += self._act(now_s)
        return events + self._plan(with_steps(load, requests, self._rng()), now_s, requests)

    def applied(self, plan_id: int) -> bool:
        """Record that the plan of an advice was carried out; return False if it is not the current plan."""
        if self._made is None or self._made.plan is None or plan_id != self._made.id:
            return False
        self.rebalancer.landed()
        self.placement, self._made = self._made.plan.placement, None
        return True

    def _close(self) -> tuple[Load | None, int]:
        total = self._steps.total()
        tokens, steps = self._tokens, total / max(1, len(self._steps))
        self._tokens, self._steps, self._seconds = np.zeros_like(tokens), Counter(), {}
        if total < self.settings.min_steps:
            return None, total
        return Load(tokens.sum(axis=0), steps, None if tokens[-1].any() else tokens[:-1]), total

    def _rng(self) -> np.random.Generator:
        """Return a generator seeded by the window, so that a replay draws the same steps."""
        return np.random.default_rng(self._windows)

    def _problem(self, load: Load) -> Problem:
        return self.objective.problem(load, self.topology, self.placement)

    def _score(self, load: Load, now_s: float, newer: Sequence[Kept]) -> list[ControlEvent]:
        """Score the current plan on a window that it was not made from; withdraw it if it gains nothing."""
        made = self._made
        if made is None or made.plan is None or made.gain_next_pct is not None:
            return []
        problem = self._problem(with_steps(load, newer, self._rng()))
        now, then = self.placement.slot_experts, made.plan.placement.slot_experts
        shares = None if made.plan.split == "equal" else made.plan.shares
        before, after = float(problem.slowest_s(now).sum()), float(problem.slowest_s(then, shares).sum())
        gain = 100.0 * (1.0 - after / before) if before > 0 else 0.0
        score = None
        if problem.steps is not None and self._for_mean is not None:
            score = StepsScore(
                requests=min(len(newer), MOST_REQUESTS),
                scenarios=len(problem.steps.weights),
                before=problem.balanced(now),
                mean=problem.balanced(self._for_mean.slot_experts),
                after=problem.balanced(then, shares),
            )
        reason = made.reason if score is None else f"{made.reason}; {score.words}"
        self._made = made._replace(gain_next_pct=gain, steps=score, reason=reason)
        if gain > 0:
            return []
        self.rebalancer.replace(self.placement)
        self._made = None
        return self._keep(now_s, f"plan {made.id} gains {gain:.2f}% on the next window: withdrawn", tell=True)

    def _plan(self, load: Load, now_s: float, requests: Sequence[Kept]) -> list[ControlEvent]:
        if self._made is not None and now_s >= self._made.at_s + self.settings.cooldown_s:
            self.rebalancer.replace(self.placement)  # the plan was not applied: plan again from the current placement
        elif self._made is not None:
            self.rebalancer.observe(load)
            return []
        decision = self.rebalancer.observe(load)
        if decision.plan is None:
            self._made = None
            return self._keep(now_s, decision.reason, tell=decision.planned)
        self._newest = requests[-1].serial if requests else -1
        self._for_mean = None
        if load.scenarios is not None:
            planner = planners[self.settings.planner](objective=replace(self.objective, horizon=decision.horizon))
            self._for_mean = planner.plan(load.mean, self.topology, self.placement).placement
        return self._make(load, decision.plan, decision.reason, now_s)

    def _make(self, load: Load, plan: Plan, reason: str, now_s: float) -> list[ControlEvent]:
        problem, moves = self._problem(load), len(plan.moves)
        gain = 100.0 * plan.saving_s / plan.before_s if plan.before_s > 0 else 0.0
        shares = None if plan.split == "equal" else plan.shares
        self._ids += 1
        self._made = Advice(
            self._ids,
            now_s,
            reason,
            plan,
            gain,
            moves=moves,
            moved_bytes=moves * self.objective.expert_bytes,
            movement_s=plan.movement_s,
            planning_s=plan.planning_s,
            actions=self._actions,
            rank_s_before=tuple(problem.rank_s(self.placement.slot_experts).mean(axis=0).tolist()),
            rank_s_after=tuple(problem.rank_s(plan.placement.slot_experts, shares).mean(axis=0).tolist()),
            model=self.shape.model,
        )
        values = {"id": float(self._ids), "gain_pct": gain, "moves": float(moves)}
        return self._told(ControlEvent(now_s, "plan_made", reason, values))

    def _keep(self, now_s: float, reason: str, tell: bool) -> list[ControlEvent]:
        self._ids += 1
        self._kept = Advice(self._ids, now_s, reason, actions=self._actions, model=self.shape.model)
        told = tell or self._last_kind != "plan_kept"
        return self._told(ControlEvent(now_s, "plan_kept", reason)) if told else []

    def _act(self, now_s: float) -> list[ControlEvent]:
        """Recommend replicas and swaps from the demand of each rank; only if the workers are the ranks."""
        ranks = self.topology.num_ranks
        if (
            sorted(self._ranks.values()) != list(range(ranks))
            or now_s < self._actions_s + self.settings.actions.interval_s
        ):
            return []
        self._actions_s = now_s
        demand = np.stack([self.tracker.worker(rank) for rank in range(ranks)])
        cycle = self.manager.cycle(demand, held_by(self.placement), now_s)
        self._actions = cycle.actions[:MOST_ACTIONS]
        if not self._actions:
            return []
        best = max(self._actions, key=lambda action: action.saving_s)
        words = f"{len(cycle.actions)} actions would pay, the best: {best.kind} expert {best.expert}, {best.reason}"
        saving_us = 1e6 * sum(action.saving_s for action in cycle.actions)
        values = {"actions": float(len(cycle.actions)), "saving_us": saving_us}
        return self._told(ControlEvent(now_s, "action", words, values))

    def _told(self, event: ControlEvent) -> list[ControlEvent]:
        repeated = event.kind == "too_little" and self._last_kind == "too_little"
        self._last_kind = event.kind
        return [] if repeated else [event]
