"""Placement advice from the loads of all workers: a plan that would pay, or the reason to keep the placement.

    loads in windows ──► Rebalancer (drift, interval, cooldown) ──► Plan ──► Advice ──► scored on the next window
    demand by rank   ──► ActionManager ──► replicas and swaps, as advice too
    newest requests  ──► single steps, for which plans are made and on which they are scored (:func:`with_steps`)
    reported maps    ──► the current placement, and whether a written plan was taken

The advisor never applies a plan: the caller does, and then calls `applied`, or `written` where workers report the map
that they loaded. A plan that gains nothing on the window after the one it was made from is withdrawn. Wrong if the
workers are not the ranks of one expert-parallel group: the advice then holds for a group that would serve the same
requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.control.base import ControlEvent, LoadSeen, LoopShape
from coterie.control.traffic import Kept
from coterie.control.written import ReportedMap, WrittenPlan, differing
from coterie.errors import check_given
from coterie.placement import Load, Objective, PlacementMap, Plan, Problem, Rebalancer, planners, replace_map
from coterie.placement.holdings import DemandTracker, Held, held_by, placed
from coterie.placement.maps.targets import Target
from coterie.placement.scenarios import at_mean, steps_of_requests
from coterie.placement.triggers.actions import ActionEvent, ActionManager, ActionSettings
from coterie.placement.triggers.rebalancing import DEFAULTS, RebalancingDecision, RebalancingSettings
from coterie.types import Placement, Topology
from coterie.units import counted, shown_s

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


ENGINE = "vllm"
"""Map format of the engine that loads written plans. They are priced by the split that it executes, equal shares."""
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
    source: Literal["planner", "actions"] = "planner"
    """What the plan consists of: a planner's placement, or the `actions`."""
    state: Literal["advised", "pending", "applied", "not_taken"] = "advised"
    """`pending`: written, and workers have not reported it yet."""
    map_version: int = 0
    """Version of the reported map that confirmed or refuted the plan; 0 without one."""

    def write(self, path: str | Path) -> None:
        """Write the placement map that vLLM's policy loads; an existing file is replaced atomically."""
        nothing = f"advice {self.id} keeps the placement ({self.reason}); there is no map to write"
        plan = check_given(self.plan, nothing)
        Target.parse(ENGINE).check_split(plan.split)
        replace_map(path, PlacementMap(plan.placement, self.model), ENGINE)


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


class PlacementAdvisor:
    """Turns loads into advice. Has no clock: windows end by the times of ticks."""

    def __init__(
        self,
        shape: LoopShape,
        topology: Topology,
        objective: Objective,
        placement: Placement | None = None,
        settings: AdviceSettings | None = None,
    ) -> None:
        """`placement` is the current one; None is experts in order."""
        self.shape, self.topology, self.objective = shape, topology, objective
        self.settings = settings or AdviceSettings()
        self.placement = placement or Placement.linear(shape.num_layers, shape.num_experts, topology.num_ranks)
        self.rebalancer = self._rebalancer(self.placement)
        actions = self.settings.actions
        self.manager = ActionManager(topology, objective.row_bytes, objective.expert_bytes, actions)
        self.tracker = DemandTracker(shape.num_layers, shape.num_experts, topology.num_ranks, decay=actions.decay)
        self._kept: Advice | None = None
        self._made: Advice | None = None
        self.ended: Advice | None = None
        """The last advice that was applied or not taken; None before the first."""
        self.reports: dict[str, ReportedMap] = {}
        """Worker → the map in force there, by its newest report; the newest last."""
        self._written: WrittenPlan | None = None
        self._after_actions: Held | None = None
        self._per_step: NDArray[np.float64] | None = None
        """[layer, expert] tokens of a step in the last window."""
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

    def bind(self, workers: Mapping[str, int | None]) -> dict[str, str]:
        """Set the workers and which rank of the group each is, if any; return, by worker, why a claim is ignored.

        A rank outside the group, or one that two workers claim, is nobody's: demand at the wrong rank is worse than
        none. If no worker claims a rank, workers are numbered in the order of their first reports.
        """
        self.reports = {worker: seen for worker, seen in self.reports.items() if worker in workers}
        ranks = {worker: rank for worker, rank in workers.items() if rank is not None}
        if ranks == self._claims:
            return {}
        self._claims = ranks
        self._forget_ranks()
        claimed, last = Counter(ranks.values()), self.topology.num_ranks - 1
        wrong = {
            worker: f"worker {worker!r} claims placement_rank={rank}: "
            + (f"the group has ranks 0 … {last}" if claimed[rank] == 1 else "another worker claims it too")
            for worker, rank in ranks.items()
            if claimed[rank] > 1 or not 0 <= rank <= last
        }
        self._ranks = dict.fromkeys(wrong, -1)
        return wrong

    def _forget_ranks(self) -> None:
        """Forget the demand of each rank; the tokens of the open window then count for no rank."""
        self._tokens[-1] = self._tokens.sum(axis=0)
        self._tokens[:-1] = 0
        self.tracker = DemandTracker(*self._tokens.shape[1:], self.topology.num_ranks, decay=self.tracker.decay)

    def rerouted(self, sent: Mapping[str, NDArray[np.float64]], now_s: float) -> list[ControlEvent]:
        """Take a change of the decode router: the demand of each rank before it is no longer what will come.

        `sent` [layer, expert] are the tokens that the new router is expected to send to each worker. If they are known
        for all ranks, plans are made for them; else demand by rank starts anew.
        """
        self._forget_ranks()
        ranks = self.topology.num_ranks
        by_rank = {self._ranks.get(name, self._claims.get(name, -1)): tokens for name, tokens in sent.items()}
        sources = np.stack([by_rank[rank] for rank in range(ranks)]) if set(range(ranks)) <= set(by_rank) else None
        self.rebalancer.forecast_sources(sources)
        if sources is not None and self._per_step is not None:
            total = sources.sum(axis=0)
            shares = np.where(total > 0, sources / np.where(total > 0, total, 1.0), 1.0 / ranks)
            for rank, share in enumerate(shares):
                self.tracker.record(rank, share * self._per_step / (1.0 - self.tracker.decay))
        how = "was made for the ranks to which the router before sent requests"
        return self._withdraw(now_s, how)

    def _withdraw(self, now_s: float, why: str) -> list[ControlEvent]:
        """Withdraw the plan that stands, if any; one that was written stays pending."""
        if self._made is None or self._written is not None:
            return []
        made, self._made = self._made, None
        self.rebalancer.replace(self.placement)
        return self._keep(now_s, f"plan {made.id} {why}: withdrawn", tell=True)

    def follow(self, worker: str, seen: ReportedMap, now_s: float) -> list[ControlEvent]:
        """Take the map in force at a worker of the group; one of another shape is ignored, with an event."""
        if self._claims and self._ranks.get(worker, self._claims.get(worker, -1)) < 0:
            return []
        shape = seen.placement.num_layers, seen.placement.num_experts, seen.placement.num_ranks
        expected = self.shape.num_layers, self.shape.num_experts, self.topology.num_ranks
        if shape != expected:
            words = f"map {seen.version} of worker {worker!r}: {shape} layers, experts and ranks, expected {expected}"
            return [ControlEvent(now_s, "ignored", words, {"reason": "map", "worker": worker})]
        self.reports.pop(worker, None)
        self.reports[worker] = seen
        if self._written is not None:
            return self._settle(now_s)
        differs = differing(seen.placement, self.placement)
        if not differs.any():
            return []
        words = f"worker {worker!r} reports map {seen.version}: {int(differs.sum())} x [layer, rank] hold other experts"
        self._set_placement(seen.placement)
        followed = ControlEvent(now_s, "map_followed", words, {"worker": worker, "version": float(seen.version)})
        return [followed, *self._withdraw(now_s, "was made from another map")]

    def _set_placement(self, placement: Placement) -> None:
        """Plan from this placement on; the engine may have other slots than were assumed."""
        if placement.num_slots != self.placement.num_slots:
            self.rebalancer = self._rebalancer(placement)
        else:
            self.rebalancer.replace(placement)
        self.placement = placement

    def _rebalancer(self, placement: Placement) -> Rebalancer:
        planner = planners[self.settings.planner]
        return Rebalancer(planner, self.objective, self.topology, placement, self.settings.rebalancing)

    def written(self, plan_id: int, path: str, wait_s: float, now_s: float) -> list[ControlEvent]:
        """Record that a plan was written to `path` for its engine to load.

        It is applied once workers report it; if none reports any map, at once. A plan that is not reported within
        `wait_s`, or instead of which another map is, was not taken.
        """
        made = self._made
        if made is None or made.plan is None or plan_id != made.id or self._written is not None:
            return []
        words, applied = f"plan {plan_id} was written to {path}", not self.reports
        if applied:
            words += "; no worker reports its map"
            self.ended = made._replace(state="applied")
            self.applied(plan_id)
        else:
            words += f"; workers have {wait_s:g} s to report it"
            self._made = made._replace(state="pending")
            self._written = WrittenPlan(made.plan.placement, dict(self.reports), self.placement, now_s, wait_s)
        values = {"id": float(plan_id), "moves": float(made.moves), "applied": float(applied)}
        return [ControlEvent(now_s, "plan_written", words, values)]

    def _settle(self, now_s: float) -> list[ControlEvent]:
        """Decide what became of the written plan."""
        outcome = None if self._written is None else self._written.outcome(self.reports, now_s)
        made = self._made
        if outcome is None or made is None:
            return []
        self._written = None
        self.ended = made._replace(state="applied" if outcome.taken else "not_taken", map_version=outcome.version)
        values = {"id": float(made.id), "version": float(outcome.version), "applied": float(outcome.taken)}
        if outcome.taken:
            self.applied(made.id)
            return [ControlEvent(now_s, "plan_confirmed", f"plan {made.id} is in force: {outcome.reason}", values)]
        self.ended = self.ended._replace(reason=f"not taken: {outcome.reason}; it was: {made.reason}")
        self._made = None
        newest = list(self.reports.values())[-1:]
        self._set_placement(newest[0].placement if newest else self.placement)
        return [ControlEvent(now_s, "plan_not_taken", f"plan {made.id} was not taken: {outcome.reason}", values)]

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
        return self._settle(now_s) + self._close_window(now_s, requests)

    def _close_window(self, now_s: float, requests: Sequence[Kept]) -> list[ControlEvent]:
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < self.settings.window_s:
            return []
        self._since_s = now_s
        load, total = self._close()
        if load is None:
            words = f"{total} steps in {self.settings.window_s:g} s; {self.settings.min_steps} make a window of loads"
            return self._told(ControlEvent(now_s, "too_little", words, {"steps": float(total)}))
        self._windows += 1
        self._per_step = load.tokens / load.steps
        events = self._score(load, now_s, [kept for kept in requests if kept.serial > self._newest])
        events += self._act(now_s)
        return events + self._plan(with_steps(load, requests, self._rng()), now_s, requests)

    def applied(self, plan_id: int) -> bool:
        """Record that the plan of an advice was carried out; return False if it is not the current plan."""
        if self._made is None or self._made.plan is None or plan_id != self._made.id:
            return False
        self.placement = self._made.plan.placement
        if self._made.source == "planner":
            self.rebalancer.landed()
        else:
            self.rebalancer.replace(self.placement)
        self._made = None
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
        return [] if gain > 0 else self._withdraw(now_s, f"gains {gain:.2f}% on the next window")

    def _plan(self, load: Load, now_s: float, requests: Sequence[Kept]) -> list[ControlEvent]:
        if self._made is not None and (self._written or now_s < self._made.at_s + self.settings.cooldown_s):
            if self._made.source == "planner":  # the rebalancer, whose plan it is, waits for it; else it would plan
                self.rebalancer.observe(load)
            return []
        if self._made is not None:
            self.rebalancer.replace(self.placement)  # the plan was not applied: plan again from the current placement
        decision = self.rebalancer.observe(load)
        by_actions = self._weigh_actions(load, decision)
        if by_actions is not None:
            self.rebalancer.replace(self.placement)
            self._newest, self._for_mean = requests[-1].serial if requests else -1, None
            return self._make(load, *by_actions, now_s, "actions")
        if decision.plan is None:
            self._made = None
            return self._keep(now_s, decision.reason, tell=decision.planned)
        self._newest = requests[-1].serial if requests else -1
        self._for_mean = None
        if load.scenarios is not None:
            planner = planners[self.settings.planner](objective=replace(self.objective, horizon=decision.horizon))
            self._for_mean = planner.plan(load.mean, self.topology, self.placement).placement
        return self._make(load, decision.plan, decision.reason, now_s)

    def _weigh_actions(self, load: Load, decision: RebalancingDecision) -> tuple[Plan, str] | None:
        """Return the actions as a plan, and the reason, if they pay and take less time than the rebalancer's plan.

        Both are priced on this window, over the same steps, moves included. Actions follow the demand of each rank, so
        a window that lacks it decides nothing for them.
        """
        held, self._after_actions = self._after_actions, None
        after = None if held is None or load.sources is None else placed(self.placement, held)
        if after is None:
            return None
        steps, problem = decision.horizon or self.objective.horizon, self._problem(load)
        plan = problem.plan(after.slot_experts)
        gain_s, needed_s = steps * plan.saving_s, (1 + self.settings.rebalancing.margin) * plan.movement_s
        if plan.saving_s <= 0 or gain_s <= needed_s:
            return None
        actions_s = steps * plan.after_s + plan.movement_s
        cost = shown_s(plan.movement_s)
        gain = f"{shown_s(gain_s)} in {counted(steps, 'step')}"
        words = f"{len(plan.moves)} moves of single actions gain {gain} and cost {cost}"
        if decision.plan is not None:
            rival = decision.plan
            shares = None if rival.split == "equal" else rival.shares
            plan_s = steps * float(problem.slowest_s(rival.placement.slot_experts, shares).sum()) + rival.movement_s
            if plan_s <= actions_s:
                return None
            words += f"; {len(rival.moves)} moves of a plan would take {shown_s(plan_s - actions_s)} more"
        return plan, words

    def _make(
        self, load: Load, plan: Plan, reason: str, now_s: float, source: Literal["planner", "actions"] = "planner"
    ) -> list[ControlEvent]:
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
            source=source,
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
        manager = self.manager
        if self.reports:  # the engine's slots are known: replicas must fit into them
            spare = self.placement.slots_per_rank - -(-self.shape.num_experts // ranks)
            settings = replace(manager.settings, extra_slots=min(spare, manager.settings.extra_slots))
            manager = replace(manager, settings=settings)
        demand = np.stack([self.tracker.worker(rank) for rank in range(ranks)])
        cycle = manager.cycle(demand, held_by(self.placement), now_s)
        self._actions = cycle.actions[:MOST_ACTIONS]
        if not self._actions:
            return []
        self._after_actions = cycle.held
        best = max(self._actions, key=lambda action: action.saving_s)
        words = f"{len(cycle.actions)} actions would pay, the best: {best.kind} expert {best.expert}, {best.reason}"
        saving_us = 1e6 * sum(action.saving_s for action in cycle.actions)
        values = {"actions": float(len(cycle.actions)), "saving_us": saving_us}
        return self._told(ControlEvent(now_s, "action", words, values))

    def _told(self, event: ControlEvent) -> list[ControlEvent]:
        repeated = event.kind == "too_little" and self._last_kind == "too_little"
        self._last_kind = event.kind
        return [] if repeated else [event]
