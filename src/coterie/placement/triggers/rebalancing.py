"""When to rebalance: an interval that follows from how fast the load drifts and what moving costs.

A plan ages. Where the load of now correlates with the load it was made for by r(age)
(:mod:`coterie.placement.triggers.drift`), what it left even is uneven again by

    s(age) = sqrt(ground + 1 - r(age)^2) - sqrt(ground)

of what a map that knows nothing suffers; `ground` is what even a fresh plan leaves uneven, measured. Rounds every n
steps then cost per step

    regret(n) = full x mean of s over the first n steps + (planning + movement x sqrt(s(n) / s(age))) / n

where `full` is what a map that knows nothing would cost, and `movement` what rounds at their present age did: the less
a map has aged, the less must be moved. (That it is the square root was seen in simulation, not derived.) The interval
is the n with the least regret, by a search over n. A round itself is worth its saving times the steps that will see
it, each weighted with what is left of it at that age:

    saving(t) = saving x (s(age + t) - s(t)) / s(age)     for a map of this age

The sum of those weights, over a few intervals and tempered by trust, is the horizon the planner gets. Trust is
realised ÷ predicted saving of earlier rounds, measured on the windows after the one a plan was made from, never on
that one.

Against flapping a round must be worth its cost with a margin, and the interval changes by bounded factors. While moves
of the last round are still on their way there is no new one; what is left over when the next is due widens the
interval.

Where windows carry scenarios, rounds are planned and scored over the newest of them, about the forecast of the mean.
No map is even in every step, so what the last round left uneven is not counted as something to gain; and a plan fits
its sample, so of its predicted saving only the share counts that held on scenarios it was not made for.

Wrong where drift comes in jumps: a load that is steady for long and then another is met after up to an
interval, unless the excess has grown by enough to be plainly worth a round (`urgent`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check_not_negative, check_positive_share
from coterie.placement.base import Load, Plan, Planner
from coterie.placement.objective import Objective, Problem
from coterie.placement.scenarios import RecentSteps
from coterie.placement.triggers.drift import DriftEstimate, DriftEstimator, Forecast
from coterie.types import Placement, Topology
from coterie.units import shown_s

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RebalancingSettings:
    """How a :class:`Rebalancer` decides."""

    first_interval: float = 100.0
    """Steps to the next round, as long as no drift is known."""
    min_interval: float = 1.0
    """Shortest interval, in steps."""
    max_interval: float = 100_000.0
    """Longest interval, in steps; also the longest time between plans where no drift shows."""
    factor: float = 2.0
    """Largest factor by which the interval changes from one round to the next."""
    lasting: float = 4.0
    """Intervals for which a move is expected to stay useful, unless drift ends it sooner: the next round starts from
    it. With more, planners move for the last bit of balance, which is noise."""
    margin: float = 0.2
    """A round is carried out where its expected gain exceeds its cost by this share."""
    urgent: float = 4.0
    """A round is due early where the growth of the excess would pay its cost this many times in an interval."""
    learning: float = 0.3
    """Weight of the latest round in what is learned from rounds: cost, trust."""
    memory: float = 256.0
    """Windows that the drift estimate looks back."""

    def __post_init__(self) -> None:
        if not 0 < self.min_interval <= self.first_interval <= self.max_interval < np.inf:
            raise ConfigError(
                f"min_interval={self.min_interval}, first_interval={self.first_interval} and "
                f"max_interval={self.max_interval} must rise from above 0"
            )
        if not 1 < self.factor < np.inf:
            raise ConfigError(f"factor={self.factor} must be above 1")
        check_positive_share(learning=self.learning)
        check_not_negative(lasting=self.lasting, margin=self.margin, urgent=self.urgent)


DEFAULTS = RebalancingSettings()


Kind = Literal["moved", "not_due", "planning_costs_more", "nothing_found", "does_not_pay", "still_moving"]
"""What a decision came to. Not due: the interval has not passed. Planning costs more: an even load would save less
than planning costs. Nothing found: the planner knows no better map. Does not pay: its moves would cost more than they
save. Still moving: the last round has not landed."""


class RebalancingDecision(NamedTuple):
    """Decision after a window."""

    plan: Plan | None
    """Plan to carry out now; report its moves with :meth:`Rebalancer.landed`. None keeps the map."""
    reason: str
    kind: Kind
    interval: float
    """Current number of steps between rounds."""
    gain_s: float = 0.0
    """Expected gain over the interval, before cost; 0 where nothing was planned."""
    cost_s: float = 0.0
    planned: bool = False
    """Whether a planner ran: planning is then paid for even if nothing moves."""
    horizon: float = 0.0
    """Steps that the plan was weighed for."""


@dataclass(slots=True)
class RebalancingRound:
    """A round that was carried out, and its effect."""

    step: float
    """Time of the round, in steps of the windows."""
    interval: float
    """Steps until the next round, as chosen then."""
    moves: int
    cost_s: float
    """Movement and planning."""
    steps: float = 0.0
    """Steps scored so far, in windows after the one the plan was made from."""
    predicted_s: float = 0.0
    """Saving over those steps, as the plan and the drift known then say, without trust."""
    realised_s: float = 0.0
    carried_over: int = 0
    """Moves not yet landed when the next round was due."""


class _Map(NamedTuple):
    placement: Placement
    shares: Array | None = None
    """[layer, slot] shares in force; None for equal shares."""

    @classmethod
    def of(cls, plan: Plan) -> _Map:
        return cls(plan.placement, None if plan.split == "equal" else plan.shares)

    def busy_s(self, problem: Problem) -> Array:
        """[layer] seconds of the slowest rank."""
        return problem.slowest_s(self.placement.slot_experts, self.shares)


class Rebalancer:
    """Decides after every window whether to rebalance. Pure state: the clock is the steps of the windows given to it.

    `make` builds the planner with the keyword `objective`; a name of :data:`~coterie.placement.base.planners` looked
    up is one. `objective.planning_s` is what planning costs; it decides whether planning is worth while. Where windows
    say which ranks tokens came from, that is forecast too, by the same weights; windows that do not say it change
    nothing about it. The same holds for windows with scenarios, of which the newest are kept.
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
        """Moves of the last round that have not landed."""
        self.drift = DriftEstimator(placement.num_layers, placement.num_experts, memory=settings.memory)
        self.forecast = Forecast()
        self.recent = RecentSteps()
        self._sources: Forecast | None = None
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
        self._left_share = 0.0  # excess that the last round left in its scenarios, over the even load
        self._ground = 0.0
        self._full_s: float | None = None
        self._movement_s: float | None = None
        self._moved_at: float | None = None
        self._cost_s: float | None = None

    @property
    def placement(self) -> Placement:
        """Placement that serves now. A plan's replaces it when all its moves have landed."""
        return self._now.placement

    def observe(self, load: Load) -> RebalancingDecision:
        """The window that just passed."""
        load.check_fits(self.topology, self.placement)
        self.step += load.steps
        self._window = load.steps if not self._window else 0.9 * self._window + 0.1 * load.steps
        self._score(load)
        self.drift.update(load.tokens)
        self._known = self.drift.estimate()
        self.recent.update(load, self.forecast.update(load.tokens / load.steps, self._known))
        if load.sources is not None:
            self._sources = self._sources or Forecast()
            self._sources.update(load.sources / load.steps, self._known)
        if self.pending:
            return self._still_moving()
        weight = self._worth_steps()
        expected = self.recent.around(self._expected())
        problem = self.objective.problem(expected, self.topology, self.placement, self._now.shares)
        if self._unreachable():
            return self._plan(expected, problem, weight, "an expert is on no living rank: ", must=True)
        excess_s = _excess_s(self._now, problem)
        grown_s = (excess_s - self._excess_then_s) * self.interval
        urgent = self._cost_s is not None and grown_s > self.settings.urgent * self._cost_s
        if self.step < self._due and not (urgent and self._age() >= self.settings.min_interval):
            return self._wait("not_due", f"next look in {self._due - self.step:g} steps")
        to_gain_s = max(0.0, excess_s - self._left_share * float(problem.even.sum()))
        if to_gain_s * weight <= (1 + self.settings.margin) * self.objective.planning_s:
            self._settle_interval()
            best = "steps as even as after the last round" if self._left_share else "an even load"
            return self._wait(
                "planning_costs_more",
                f"{best} would save {shown_s(to_gain_s * weight)} in {self.interval:g} steps; planning alone costs "
                f"{shown_s(self.objective.planning_s)}",
            )
        return self._plan(expected, problem, weight, "early: " if self.step < self._due else "")

    def landed(self, moves: int | None = None) -> None:
        """So many moves of the last plan arrived; None is all that were left. The map changes with the last."""
        done = self.pending if moves is None else moves
        if not 0 <= done <= self.pending:
            raise ConfigError(f"moves={moves} must be in 0 … {self.pending}, those under way")
        self.pending -= done
        if not self.pending and self._next is not None:
            self._now, self._next = self._next, None

    def replace(
        self, placement: Placement, topology: Topology | None = None, shares: NDArray[np.floating] | None = None
    ) -> None:
        """Set the actual placement after a round was given up or a rank joined or left; the next may act at once.

        `shares` [layer, slot] are those in force; None is equal ones.
        """
        given = None if shares is None else np.asarray(shares, np.float64)
        self._now, self.topology = _Map(placement, given), topology or self.topology
        self.pending, self._next, self._fitted_at, self._due = 0, None, None, self.step

    # ------------------------------------------------------------------------------------------------ a round

    def _plan(
        self, expected: Load, problem: Problem, weight: float, why: str, must: bool = False
    ) -> RebalancingDecision:
        settings = self.settings
        planner = self.make(objective=replace(self.objective, horizon=weight))
        in_force = () if self._now.shares is None else (self._now.shares,)
        plan = planner.plan(expected, self.topology, self.placement, *in_force)
        cost_s = plan.movement_s + self.objective.planning_s
        saving_s = plan.saving_s * _held_share(plan)
        gain_s = saving_s * weight
        moves = len(plan.moves)
        self._learn_prices(plan, cost_s, _excess_s(self._ignorant, problem))
        self._excess_then_s = _excess_s(self._now, problem)  # what was looked at and left is not urgent again
        if saving_s <= 0 and not must:
            return self._in_vain("nothing_found", _no_saving(plan), 0.0, cost_s)
        # Planning is paid for by now: only the movement can still be saved.
        if gain_s <= (1 + settings.margin) * plan.movement_s and not must:
            why += (
                f"{moves} moves would gain {shown_s(gain_s)} in {weight:.3g} steps "
                f"and take {shown_s(plan.movement_s)}, not {settings.margin:.0%} less"
            )
            return self._in_vain("does_not_pay", why, gain_s, cost_s)
        self._close_round()
        self._settle_interval()
        self._age_then, self._fitted_at = self._age(), self.step
        self._previous, self._next, self.pending = self._now, _Map.of(plan), moves
        self._saving_s = saving_s
        self._excess_then_s = _excess_s(self._next, problem)
        if problem.steps is not None:
            self._left_share = self._excess_then_s / max(float(problem.even.sum()), 1e-300)
        self.landed(0)  # a plan that only shares tokens anew is in force at once
        self.rounds.append(RebalancingRound(self.step, self.interval, moves, cost_s))
        why += f"{moves} moves gain {shown_s(gain_s)} in {weight:.3g} steps and cost {shown_s(cost_s)}; "
        why += self._known.reason
        return RebalancingDecision(plan, why, "moved", self.interval, gain_s, cost_s, True, weight)

    def _in_vain(self, kind: Kind, reason: str, gain_s: float, cost_s: float) -> RebalancingDecision:
        """Planned without a move that pays: planning costs time, so the next round is later."""
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

    # ------------------------------------------------------------------------------------------------ what it knows

    def _expected(self) -> Load:
        """Expected load of a step, by source rank where sources were ever seen."""
        tokens = self.forecast.tokens
        if self._sources is None:
            return Load(tokens)
        seen = self._sources.tokens
        total = seen.sum(axis=0)
        return Load(tokens, sources=np.where(total > 0, seen / np.where(total > 0, total, 1.0), 1 / len(seen)) * tokens)

    def _age(self) -> float:
        """Steps since the current map was made; without end for a map that is not ours."""
        return np.inf if self._fitted_at is None else self.step - self._fitted_at

    def _aged(self, age: Array | float) -> Array:
        """[age in steps] share of the load's shape, in variance, that a map of this age does not know of."""
        decay = self._known.cautious
        age = np.asarray(age, np.float64)
        if decay is None:
            return np.where(np.isfinite(age), 0.0, 1.0)
        left = np.where(np.isfinite(age), decay.left(np.where(np.isfinite(age), age, 0.0) / self._window), 0.0)
        return np.asarray(1.0 - left**2)

    def _uneven(self, age: Array | float) -> Array:
        """[age in steps] s(age): what age adds to the unevenness of a map."""
        return np.asarray(np.sqrt(self._ground + self._aged(age)) - np.sqrt(self._ground))

    def _left(self, ages: Array, age: float) -> Array:
        """[age of the plan] share of its saving over a map that was `age` old when it was made."""
        before = float(self._uneven(age))
        if before <= 0:
            return np.ones(len(ages))
        return np.asarray(np.clip((self._uneven(age + ages) - self._uneven(ages)) / before, 0.0, 1.0))

    def _worth_steps(self) -> float:
        """Steps that the saving of a plan made now is worth: the horizon of the planner."""
        decay = self._known.cautious
        if decay is None:
            return self.settings.first_interval * self.trust
        # What is moved now stays of use after the next round, which starts from it: only drift ends it.
        life = min(8.0 * decay.half_life * self._window, self.settings.lasting * self.interval)
        middle = (np.arange(256) + 0.5) / 256 * life
        return float(self._left(middle, self._age()).mean()) * life * self.trust

    def _unreachable(self) -> bool:
        """Whether some expert has no living rank, so that saving time is not the point."""
        alive = np.repeat(self.topology.rank_speeds > 0, self.placement.slots_per_rank)
        if alive.all():
            return False
        held = np.sort(self.placement.slot_experts[:, alive], axis=1)
        distinct = 1 + (held[:, 1:] != held[:, :-1]).sum(axis=1)
        return bool((distinct < self.placement.num_experts).any())

    # ------------------------------------------------------------------------------------------------ what it learns

    def _score(self, load: Load) -> None:
        """The last plan on a window that came after it."""
        if not self.rounds or self._fitted_at is None or self.pending:
            return
        problem = self.objective.problem(load, self.topology, self.placement)
        old, new = (float(one.busy_s(problem).sum()) for one in (self._previous, self._now))
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
        """Trust follows what the round that ends now gave."""
        if not self.rounds or self.rounds[-1].predicted_s <= 0:
            return
        last = self.rounds[-1]
        ratio = float(np.clip(last.realised_s / last.predicted_s, 0.0, 1.5))
        # A little trust always stays, else no round would ever be tried again and none could restore it.
        self.trust = max(self.trust + self.settings.learning * (ratio - self.trust), 0.1)

    def _learn_prices(self, plan: Plan, cost_s: float, full_s: float) -> None:
        self._full_s = self._learned(self._full_s, full_s)
        if len(plan.moves):
            self._cost_s = self._learned(self._cost_s, cost_s)
            self._movement_s = self._learned(self._movement_s, plan.movement_s)
            self._moved_at = self._learned(self._moved_at, float(self._uneven(self._age())))

    def _learned(self, known: float | None, seen: float) -> float:
        return seen if known is None else known + self.settings.learning * (seen - known)

    def _settle_interval(self) -> None:
        """Move the interval towards the best one and set when the next round is due."""
        settings, before = self.settings, self.interval
        wanted = self._best_interval() or before
        wanted = np.clip(wanted, before / settings.factor, before * settings.factor)
        self.interval = float(np.clip(wanted, settings.min_interval, settings.max_interval))
        self._due = self.step + self.interval

    def _best_interval(self) -> float | None:
        """The n of least regret; None as long as drift or prices are not known."""
        if self._known.decay is None or self._full_s is None or self._movement_s is None:
            return None
        n = np.geomspace(self.settings.min_interval, self.settings.max_interval, 257)
        share = (np.arange(64) + 0.5) / 64
        cost = self.objective.planning_s + self._movement_s * np.sqrt(
            self._uneven(n) / max(self._moved_at or 1.0, 0.02)
        )
        regret = self._full_s * self._uneven(n[:, None] * share).mean(axis=1) + cost / n
        return float(n[np.argmin(regret)])


def _excess_s(one: _Map, problem: Problem) -> float:
    """What a step would save at most, were the load even."""
    return float((one.busy_s(problem) - problem.even).clip(0.0).sum())


def _held_share(plan: Plan) -> float:
    """Share of the predicted saving that holds on scenarios the plan was not made for."""
    unseen = plan.unseen
    if unseen is None:
        return 1.0
    fitted = unseen.fitted - unseen.before
    return float(np.clip((unseen.after - unseen.before) / fitted, 0.0, 1.0)) if fitted > 0 else 0.0


def _no_saving(plan: Plan) -> str:
    """Why a plan saves nothing."""
    unseen = plan.unseen
    if plan.skip_reason is not None or unseen is None or unseen.after > unseen.before:
        return plan.skip_reason or "the planner finds nothing"
    would, now = f"{unseen.after:.3f}", f"{unseen.before:.3f}"
    return f"on {unseen.scenarios} steps held out balancedness would be {would}; the map that serves has {now}"
