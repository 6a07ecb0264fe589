"""Decide when to rebalance: the interval follows from how fast the load drifts and how much moving costs.

A plan ages. Let r(age) be the correlation of the present load with the load that the plan was made for
(:mod:`coterie.placement.triggers.drift`). The imbalance that has come back at this age is

    s(age) = sqrt(ground + 1 - r(age)^2) - sqrt(ground)

as a share of the imbalance of a map that ignores the load (experts in order of index). `ground` is the measured
imbalance of a fresh plan, squared, on the same scale. Rounds every n steps then cost per step

    regret(n) = full x mean of s over the first n steps + (planning + movement x sqrt(s(n) / s(age))) / n

`full` is the seconds per step lost by a map that ignores the load. `movement` is the average movement cost of past
rounds, which replaced maps of age `age`: the less a map has aged, the less must be moved. (The square root was observed
in simulation, not derived.) The interval is the n with the least regret, found by a search over n.

The value of a round is its saving, summed over the steps that follow. At step t after the round, the saving left is

    saving(t) = saving x (s(age + t) - s(t)) / s(age)     if the replaced map had this age

The sum of saving(t) / saving over a few intervals, multiplied by `trust`, is the horizon passed to the planner. Trust
is realised ÷ predicted saving of earlier rounds, measured only on windows after the one a plan was made from.

To avoid flapping, the gain of a round must exceed its cost by a margin, and the interval changes by bounded factors. No
round starts while moves of the last round are in flight. If they still are when the next round is due, the interval
widens.

If windows carry scenarios, rounds are planned and scored over the newest scenarios, scaled to the forecast of the mean.
No map is balanced in every step, so the imbalance left by the last round is not counted as a possible gain. A plan
overfits its sample, so only the share of its predicted saving that holds on held-out scenarios counts.

Wrong if the load jumps: after a sudden change the next round may be up to an interval away, unless the growth of the
imbalance is clearly worth an early round (`urgent`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check, check_not_negative, check_positive_share
from coterie.placement.base import Load, Plan, Planner
from coterie.placement.objective import Objective, Problem
from coterie.placement.scenarios import RecentSteps
from coterie.placement.triggers.drift import Array, DriftEstimate, DriftEstimator, Forecast
from coterie.types import Placement, Topology
from coterie.units import counted, shown_s


@dataclass(frozen=True, slots=True)
class RebalancingSettings:
    """Settings of a :class:`Rebalancer`."""

    first_interval: float = 100.0
    """Steps between rounds until the drift is known."""
    min_interval: float = 1.0
    """Shortest interval, in steps."""
    max_interval: float = 100_000.0
    """Longest interval, in steps; also the longest time between plans if no drift shows."""
    factor: float = 2.0
    """Largest factor by which the interval changes from one round to the next."""
    lasting: float = 4.0
    """Intervals for which a move is expected to stay useful, unless drift ends its use sooner: the next round keeps
    most of its experts in place. With higher values, planners move experts for gains that are only noise."""
    margin: float = 0.2
    """Margin by which the expected gain of a round must exceed its cost, as a share of the cost."""
    urgent: float = 4.0
    """A round is due early if the growth of the imbalance would pay for the round this many times in an interval."""
    learning: float = 0.3
    """Weight of the latest round in the moving averages of cost and trust."""
    memory: float = 256.0
    """Time constant of the drift estimate, in windows."""

    def __post_init__(self) -> None:
        check(
            0 < self.min_interval <= self.first_interval <= self.max_interval < np.inf,
            f"min_interval={self.min_interval}, first_interval={self.first_interval} and "
            f"max_interval={self.max_interval} must rise from above 0",
        )
        check(1 < self.factor < np.inf, f"factor={self.factor} must be above 1")
        check_positive_share(learning=self.learning)
        check_not_negative(lasting=self.lasting, margin=self.margin, urgent=self.urgent)


DEFAULTS = RebalancingSettings()


Kind = Literal["moved", "not_due", "planning_costs_more", "nothing_found", "does_not_pay", "still_moving"]
"""Outcome of a decision. `moved`: a plan is carried out. `not_due`: the interval has not passed. `planning_costs_more`:
a balanced load would save less than planning costs. `nothing_found`: the planner found no better map. `does_not_pay`:
the moves would cost more than they save. `still_moving`: moves of the last round are in flight."""


class RebalancingDecision(NamedTuple):
    """Decision after a window."""

    plan: Plan | None
    """Plan to carry out now; report its finished moves with :meth:`Rebalancer.landed`. None: keep the map."""
    reason: str
    kind: Kind
    interval: float
    """Current number of steps between rounds."""
    gain_s: float = 0.0
    """Expected gain over the horizon in seconds, before the cost; 0 if no planner ran."""
    cost_s: float = 0.0
    planned: bool = False
    """Whether a planner ran; its planning time is then spent even if nothing moves."""
    horizon: float = 0.0
    """Horizon of the plan that is carried out, in steps; 0 without one."""


@dataclass(slots=True)
class RebalancingRound:
    """A round that was carried out, and its effect."""

    step: float
    """Time of the round, in steps of the windows."""
    interval: float
    """Steps until the next round, as chosen at this round."""
    moves: int
    cost_s: float
    """Seconds of movement and planning."""
    steps: float = 0.0
    """Steps scored so far, in windows after the one the plan was made from."""
    predicted_s: float = 0.0
    """Saving over the scored steps as predicted by the plan and the drift, in seconds, not multiplied by trust."""
    realised_s: float = 0.0
    carried_over: int = 0
    """Moves still in flight when the next round was due."""


class _Map(NamedTuple):
    placement: Placement
    shares: Array | None = None
    """[layer, slot] shares in force; None for equal shares."""

    def busy_s(self, problem: Problem) -> Array:
        """Return the seconds of the slowest rank of each layer, [layer]."""
        return problem.slowest_s(self.placement.slot_experts, self.shares)


class Rebalancer:
    """Decides after every window whether to rebalance. It reads no clock: time is counted in steps of the windows.

    `make` builds the planner from the keyword `objective`; every entry of :data:`~coterie.placement.base.planners` can
    be used. `objective.planning_s` is the cost of planning, which decides whether planning is worthwhile. If windows
    carry source ranks, these are forecast with a filter of the same kind; windows without them leave that forecast
    unchanged. Likewise the newest scenarios are kept, and windows without scenarios leave them unchanged.
    """

    def __init__(
        self,
        make: Callable[..., Planner],
        objective: Objective,
        topology: Topology,
        placement: Placement,
        settings: RebalancingSettings = DEFAULTS,
    ) -> None:
        self.make = make
        self.objective = objective
        self.topology = topology
        self.settings = settings
        self.interval = settings.first_interval
        self.trust = 1.0
        self.rounds: list[RebalancingRound] = []
        self.step = 0.0
        self.pending = 0
        """Number of moves of the last round that are still in flight."""
        self.drift = DriftEstimator(placement.num_layers, placement.num_experts, memory=settings.memory)
        self.forecast = Forecast()
        self.recent = RecentSteps()
        self._sources: Forecast | None = None
        self._lasting: float | None = None
        """Share of the difference between source ranks that the next window has again; None until it was seen."""
        self._due = 0.0
        self._window = 0.0
        self._now = self._previous = _Map(placement)
        self._next: _Map | None = None
        self._ignorant = _Map(
            Placement.linear(placement.num_layers, placement.num_experts, placement.num_ranks, placement.num_slots)
        )
        self._saving_s = 0.0
        self._known: DriftEstimate = self.drift.estimate()
        self._fitted_at: float | None = None
        self._age_then = np.inf
        self._excess_then_s = 0.0
        self._left_share = 0.0  # excess left by the last round in its scenarios ÷ seconds of a balanced step
        self._ground = 0.0
        self._full_s: float | None = None
        self._movement_s: float | None = None
        self._moved_at: float | None = None
        self._cost_s: float | None = None

    @property
    def placement(self) -> Placement:
        """Placement that serves now; a plan's placement replaces it when all moves of the plan have landed."""
        return self._now.placement

    def observe(self, load: Load) -> RebalancingDecision:
        """Add the window that just passed, and decide whether to rebalance now."""
        load.check_fits(self.topology, self.placement)
        self.step += load.steps
        self._window = load.steps if not self._window else 0.9 * self._window + 0.1 * load.steps
        self._score(load)
        self.drift.update(load.tokens)
        self._known = self.drift.estimate()
        self.recent.update(load, self.forecast.update(load.tokens / load.steps, self._known))
        if load.sources is not None:
            self._see_sources(load.sources / load.steps)
        if self.pending:
            return self._still_moving()
        weight = self._worth_steps()
        expected = self.recent.around(self._expected())
        problem = self.objective.problem(expected, self.topology, self.placement, self._now.shares)
        if problem.lost:
            return self._plan(expected, problem, weight, "an expert is on no living rank: ", must=True)
        excess_s = _excess_s(self._now, problem)
        grown_s = (excess_s - self._excess_then_s) * self.interval
        urgent = self._cost_s is not None and grown_s > self.settings.urgent * self._cost_s
        if self.step < self._due and not (urgent and self._age() >= self.settings.min_interval):
            return self._wait("not_due", f"next look in {counted(self._due - self.step, 'step')}")
        to_gain_s = max(0.0, excess_s - self._left_share * float(problem.even.sum()))
        if to_gain_s * weight <= (1 + self.settings.margin) * self.objective.planning_s:
            self._settle_interval()
            best = "steps as even as after the last round" if self._left_share else "an even load"
            return self._wait(
                "planning_costs_more",
                f"{best} would save {shown_s(to_gain_s * weight)} in {counted(weight, 'step')}; planning alone costs "
                f"{shown_s(self.objective.planning_s)}",
            )
        return self._plan(expected, problem, weight, "early: " if self.step < self._due else "")

    def landed(self, moves: int | None = None) -> None:
        """Report that this many moves of the last plan have landed (None: all). The map changes with the last move."""
        done = self.pending if moves is None else moves
        check(0 <= done <= self.pending, f"moves={moves} must be in 0 … {self.pending}, those under way")
        self.pending -= done
        if not self.pending and self._next is not None:
            self._now, self._next = self._next, None

    def replace(
        self, placement: Placement, topology: Topology | None = None, shares: NDArray[np.floating] | None = None
    ) -> None:
        """Set the actual placement after a round was given up or a rank joined or left. The next window may rebalance.

        `shares` [layer, slot] are the shares in force; None: equal shares.
        """
        given = None if shares is None else np.asarray(shares, np.float64)
        self._now, self.topology = _Map(placement, given), topology or self.topology
        self.pending, self._next, self._fitted_at, self._due = 0, None, None, self.step

    def forecast_sources(self, sources: NDArray[np.float64] | None) -> None:
        """Forget by which rank tokens came, as after a change of the router.

        `sources` [rank, layer, expert] are the tokens that each rank is expected to get; None: they are not known.
        """
        self._sources = self._lasting = None
        if sources is not None:
            self._sources, self._lasting = Forecast(), 1.0
            self._sources.update(sources, self._known)

    # ------------------------------------------------------------------------------------------------ a round

    def _plan(
        self, expected: Load, problem: Problem, weight: float, why: str, must: bool = False
    ) -> RebalancingDecision:
        planner = self.make(objective=replace(self.objective, horizon=weight))
        in_force = () if self._now.shares is None else (self._now.shares,)
        plan = planner.plan(expected, self.topology, self.placement, *in_force)
        cost_s = plan.movement_s + self.objective.planning_s
        moves = len(plan.moves)
        saving_s = plan.saving_s * _held_share(plan)
        gain_s = saving_s * weight
        self._learn_prices(plan, cost_s, _excess_s(self._ignorant, problem))
        self._excess_then_s = _excess_s(self._now, problem)  # excess already planned for does not count as urgent again
        if saving_s <= 0 and not must:
            return self._in_vain("nothing_found", _no_saving(plan), 0.0, cost_s)
        # Planning time is already spent: compare with the movement alone.
        if gain_s <= (1 + self.settings.margin) * plan.movement_s and not must:
            why += (
                f"{moves} moves would gain {shown_s(gain_s)} in {counted(weight, 'step')} "
                f"and take {shown_s(plan.movement_s)}, not {self.settings.margin:.0%} less"
            )
            return self._in_vain("does_not_pay", why, gain_s, cost_s)
        self._close_round()
        self._settle_interval()
        self._age_then, self._fitted_at = self._age(), self.step
        shares = None if plan.split == "equal" else plan.shares
        self._previous, self._next, self.pending = self._now, _Map(plan.placement, shares), moves
        self._saving_s = saving_s
        self._excess_then_s = _excess_s(self._next, problem)
        if problem.steps is not None:
            self._left_share = self._excess_then_s / max(float(problem.even.sum()), 1e-300)
        self.landed(0)  # a plan without moves (new shares only) takes effect at once
        self.rounds.append(RebalancingRound(self.step, self.interval, moves, cost_s))
        why += f"{moves} moves gain {shown_s(gain_s)} in {counted(weight, 'step')} and cost {shown_s(cost_s)}"
        reason = f"{why}; {self._known.reason}"
        return RebalancingDecision(plan, reason, "moved", self.interval, gain_s, cost_s, True, weight)

    def _in_vain(self, kind: Kind, reason: str, gain_s: float, cost_s: float) -> RebalancingDecision:
        """Return the decision after a plan that is not carried out; the interval widens, since planning costs time."""
        self._widen(self.step)
        return RebalancingDecision(None, reason, kind, self.interval, gain_s, cost_s, True)

    def _widen(self, since: float) -> None:
        self.interval = min(self.interval * self.settings.factor, self.settings.max_interval)
        self._due = since + self.interval

    def _still_moving(self) -> RebalancingDecision:
        late = self.step >= self._due
        if late:
            self.rounds[-1].carried_over = max(self.rounds[-1].carried_over, self.pending)
            self._widen(self.rounds[-1].step)
        left = f"{self.pending} of {self.rounds[-1].moves} moves are still under way"
        return self._wait("still_moving", f"{left}; the interval widens" if late else left)

    def _wait(self, kind: Kind, reason: str) -> RebalancingDecision:
        return RebalancingDecision(None, reason, kind, self.interval)

    # ------------------------------------------------------------------------------------------------ expectations

    def _expected(self) -> Load:
        """Return the expected load of a step, with source ranks as far as their differences last."""
        tokens, sources = self.forecast.tokens, None
        if self._sources is not None and self._lasting:
            seen = self._sources.tokens
            total, even = seen.sum(axis=0), 1 / len(seen)
            share = np.where(total > 0, seen / np.where(total > 0, total, 1.0), even)
            sources = (even + self._lasting * (share - even)) * tokens
        return Load(tokens, sources=sources)

    def _see_sources(self, per_step: Array) -> None:
        """Add a window's tokens per step by source rank, and learn how much of the forecast's differences it has.

        Ranks that get requests by load alone differ by chance. A plan for such differences would pay for moves, give up
        balance, and find other differences in the next window.
        """
        if self._sources is None:
            self._sources = Forecast()
        else:
            before, now = (seen - seen.mean(axis=0) for seen in (self._sources.tokens, per_step))
            if (own := float(np.vdot(before, before))) > 0:
                self._lasting = self._learned(self._lasting, float(np.clip(np.vdot(before, now) / own, 0.0, 1.0)))
        self._sources.update(per_step, self._known)

    def _age(self) -> float:
        """Return the steps since the current map was planned; infinite if this rebalancer did not plan it."""
        return np.inf if self._fitted_at is None else self.step - self._fitted_at

    def _aged(self, age: Array | float) -> Array:
        """Return 1 - r(age)^2 [age]: the share of the load's variance unknown to a map of this age, in steps."""
        decay, age = self._known.cautious, np.asarray(age, np.float64)
        known = np.isfinite(age)
        left = 1.0 if decay is None else decay.left(np.where(known, age, 0.0) / self._window)
        return np.asarray(1.0 - np.where(known, left, 0.0) ** 2)

    def _uneven(self, age: Array | float) -> Array:
        """Return s(age) [age in steps]: the imbalance that age adds to a map; see the top of this file."""
        return np.asarray(np.sqrt(self._ground + self._aged(age)) - np.sqrt(self._ground))

    def _left(self, ages: Array, age: float) -> Array:
        """Return the share of a plan's saving left at `ages` [age of the plan]; the replaced map had age `age`."""
        before, again = float(self._uneven(age)), self._uneven(age + ages) - self._uneven(ages)
        return np.asarray(np.clip(again / before, 0.0, 1.0)) if before > 0 else np.ones(len(ages))

    def _worth_steps(self) -> float:
        """Return the planner's horizon: the number of full-saving steps that a plan made now is worth."""
        decay = self._known.cautious
        if decay is None:
            return self.settings.first_interval * self.trust
        # The next round starts from this placement, so moves stay useful beyond one interval: drift limits their use.
        life = min(8.0 * decay.half_life * self._window, self.settings.lasting * self.interval)
        middle = (np.arange(256) + 0.5) / 256 * life
        return float(self._left(middle, self._age()).mean()) * life * self.trust

    # ------------------------------------------------------------------------------------------------ learning

    def _score(self, load: Load) -> None:
        """Score the last plan on a window that was observed after it."""
        if not self.rounds or self._fitted_at is None or self.pending:
            return
        problem = self.objective.problem(load, self.topology, self.placement)
        old, new = (float(map.busy_s(problem).sum()) for map in (self._previous, self._now))
        last = self.rounds[-1]
        age = np.array([self.step - load.steps / 2 - self._fitted_at])
        last.steps += load.steps
        last.predicted_s += self._saving_s * float(self._left(age, self._age_then)[0]) * load.steps
        last.realised_s += (old - new) * load.steps
        if self._full_s:
            excess = (new - float(problem.even.sum())) / self._full_s
            seen = max(0.0, excess**2 - float(self._aged(age)[0]))
            self._ground += 0.1 * self.settings.learning * (seen - self._ground)

    def _close_round(self) -> None:
        """Update trust with the realised ÷ predicted saving of the round that ends now."""
        if self.rounds and (last := self.rounds[-1]).predicted_s > 0:
            ratio = float(np.clip(last.realised_s / last.predicted_s, 0.0, 1.5))
            # Trust never falls below 0.1: at 0, no round would be tried again, and none could restore it.
            self.trust = max(self._learned(self.trust, ratio), 0.1)

    def _learn_prices(self, plan: Plan, cost_s: float, full_s: float) -> None:
        self._full_s = self._learned(self._full_s, full_s)
        if len(plan.moves):
            self._cost_s = self._learned(self._cost_s, cost_s)
            self._movement_s = self._learned(self._movement_s, plan.movement_s)
            self._moved_at = self._learned(self._moved_at, float(self._uneven(self._age())))

    def _learned(self, known: float | None, seen: float) -> float:
        return seen if known is None else known + self.settings.learning * (seen - known)

    def _settle_interval(self) -> None:
        """Move the interval towards the best interval and set when the next round is due."""
        settings, before = self.settings, self.interval
        wanted = np.clip(self._best_interval() or before, before / settings.factor, before * settings.factor)
        self.interval = float(np.clip(wanted, settings.min_interval, settings.max_interval))
        self._due = self.step + self.interval

    def _best_interval(self) -> float | None:
        """Return the interval of least regret, in steps; None until drift and costs are known."""
        if self._known.decay is None or self._full_s is None or self._movement_s is None:
            return None
        n = np.geomspace(self.settings.min_interval, self.settings.max_interval, 257)
        share = (np.arange(64) + 0.5) / 64
        aged = np.sqrt(self._uneven(n) / max(self._moved_at or 1.0, 0.02))
        cost = self.objective.planning_s + self._movement_s * aged
        regret = self._full_s * self._uneven(n[:, None] * share).mean(axis=1) + cost / n
        return float(n[np.argmin(regret)])


def _excess_s(map: _Map, problem: Problem) -> float:
    """Return the seconds per step that a perfectly balanced load would save."""
    return float((map.busy_s(problem) - problem.even).clip(0.0).sum())


def _held_share(plan: Plan) -> float:
    """Return the share of the predicted saving that holds on held-out scenarios; 1 without them."""
    unseen = plan.unseen
    if unseen is None:
        return 1.0
    fitted = unseen.fitted - unseen.before
    return float(np.clip((unseen.after - unseen.before) / fitted, 0.0, 1.0)) if fitted > 0 else 0.0


def _no_saving(plan: Plan) -> str:
    """Return the reason why a plan saves nothing."""
    unseen = plan.unseen
    if plan.skip_reason is not None or unseen is None or unseen.after > unseen.before:
        return plan.skip_reason or "the planner finds nothing"
    would = f"on {unseen.scenarios} steps held out balancedness would be {unseen.after:.3f}"
    return f"{would}; the map that serves has {unseen.before:.3f}"
