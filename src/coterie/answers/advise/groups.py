"""Decisions of an expert-parallel group: a placement for this traffic, vLLM's EPLB, and planning again as load moves.

A plan is made and timed on the parts that `coterie plan` divides a recording into, so that both give the same gain. Its
interval comes from the deviation between random halves of these parts. Planning again is played through windows of the
recording in order of arrival: every plan knows only windows before it, and its moves cost time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.advise.decisions import NOT_NOW, ON, Arm, Lever, advice_of, unknown
from coterie.answers.plan.loads import FEWEST_REQUESTS, Division
from coterie.answers.plan.pricing import Placed, Pricing, gain_pct
from coterie.answers.runs import WORTH_PCT, interval, with_ends
from coterie.answers.suites import Report
from coterie.costs.step import StepModel
from coterie.placement import Plan, planners
from coterie.types import Interval, Placement
from coterie.units import counted

Loads = NDArray[np.float64]
OURS, EPLB = "latency_optimal", "eplb"
WINDOWS, HISTORY = 8, 2
"""Windows of a recording, and the windows that a plan is made from."""
EPLB_STEPS = 3000.0
"""Steps between two of vLLM's rearrangements; the length of a window if the recording has no times."""
FEWEST_WINDOWS = 8
"""Fewest windows of a load table for an interval: its parts are halved once more."""
TITLES = {
    "placement": "Placement: which rank holds which experts",
    "live_loop": "Live loop: planning again as the load moves",
}
IN_ORDER = "experts in order"


class Policy(NamedTuple):
    """How often to plan, and with what."""

    name: str
    planner: str
    every: int | None
    """Windows between two plans; None plans once."""


ONCE = Policy("a plan made once", OURS, None)
AS_IT_PAYS = Policy("planning again as it pays", OURS, 1)
REARRANGED = tuple(
    Policy(f"EPLB every {f'{every} windows' if every > 1 else 'window'}", EPLB, every) for every in (1, 2, 4)
)


class BestEplb(NamedTuple):
    """The best way to use vLLM's EPLB."""

    gain: Interval
    interval_steps: float | None
    """Steps between two plans; None plans once."""

    @property
    def sentence(self) -> str:
        worth = "worth it" if advice_of(self.gain) == ON else "not worth it"
        often = "once" if self.interval_steps is None else f"every {self.interval_steps:,.0f} steps"
        moves = "" if self.interval_steps is None else ", moves included"
        return f"EPLB is {worth} here: {often} it saves {with_ends(self.gain, unit='%')}{moves}"


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Footprints of the recorded requests or windows, and the group whose placement is in question."""

    counts: Loads
    """[request, layer, expert] activations, or those of [window, layer, expert]."""
    division: Division | None
    """Rows to plan on and to score on; None if there are too few."""
    arrival_s: NDArray[np.float64] | None
    """[request] arrival times; None if the recording has none."""
    model: StepModel
    """Prices on the ranks of the group."""
    batch: int
    """Tokens of a step over all ranks."""
    decode_batch: int
    """Tokens of a decode step over all ranks."""
    splits: int = 6
    seed: int = 0
    horizon: float | None = None
    """Steps that a plan serves; None for the default of `coterie plan`."""
    newest: bool = False
    """Whether they are only the newest requests of a fleet, too short a time to rule out that load moves."""
    table: bool = False
    """Whether they are windows of a load table, not requests."""
    report: Report = lambda *_: None

    @property
    def where(self) -> str:
        spec, ranks = self.model.spec, self.model.topology.num_ranks
        return f"for {spec.name} in {self.model.dtype} on {ranks} ranks, {self.batch:,} tokens a step"

    @property
    def linear(self) -> Placement:
        _, layers, experts = self.counts.shape
        return Placement.linear(layers, experts, self.model.topology.num_ranks)

    def decisions(self) -> Iterator[Lever]:
        count = len(self.counts)
        if self.division is None or (count < FEWEST_REQUESTS and not self.table):
            fewest, what = (2, "windows") if self.table else (FEWEST_REQUESTS, "requests")
            why = f"it takes {fewest} {what} to plan on some and time on others, and there are {count}"
            yield from map(unknown, TITLES, TITLES.values(), repeat(self.where), repeat(why))
            return
        yield from self._levers(self._gains(self.division))

    def _levers(self, found: dict[str, Interval]) -> tuple[Lever, Lever]:
        if self.table:
            why = "it takes arrival times, and a load table has none"
            return self._placement(found, 0.0), unknown("live_loop", TITLES["live_loop"], self.where, why)
        gains: dict[str, list[float]] = {}
        steps = self._window_steps(found["step_s"].mean)
        for split in range(self.splits):
            self._play(split, steps, gains)
            self.report("Planning again", split + 1, self.splits)
        found |= {name: interval(values, overlap=1.0) for name, values in gains.items()}
        placement, live = self._placement(found, steps), self._live_loop(found, steps)
        if live.advice == ON:  # a plan made once is overtaken, whatever it gains by moving hot experts apart
            placement = replace(placement, advice=NOT_NOW, opening="A plan made once does not last")
        return placement, live

    def _gains(self, division: Division) -> dict[str, Interval]:
        """Return what plans gain on the part to score on; intervals are of plans on random halves of the parts."""
        whole = self._scored(division.planned, division.scored)
        halves: dict[str, list[float]] = {name: [] for name in whole}
        divisible = not self.table or len(self.counts) >= FEWEST_WINDOWS
        for split in range(self.splits if divisible else 0):
            rng = np.random.default_rng([self.seed + split, 6])
            parts = (rng.permutation(rows)[: len(rows) // 2] for rows in (division.planned, division.scored))
            for name, value in self._scored(*parts).items():
                halves[name].append(value)
            self.report("Planning placements", split + 1, self.splits)
        return {name: _around(value, halves[name]) for name, value in whole.items()}

    def plan(self, tokens: Loads | None = None, planner: str = OURS, now: Placement | None = None) -> Plan:
        """Plan for a load [layer, expert], by default that of all requests."""
        pricing = self._pricing(self.counts.sum(axis=0) if tokens is None else tokens, self.horizon)
        return self._plan(pricing, planner, now or self.linear)

    def _pricing(self, tokens: Loads, horizon: float | None) -> Pricing:
        settings = {} if horizon is None else {"horizon": horizon}
        return Pricing(self.model, self.model.topology, tokens, settings)

    def _plan(self, pricing: Pricing, planner: str, now: Placement) -> Plan:
        made = planners.make(planner, {"objective": pricing.objective(self.batch)})
        return made.plan(pricing.load(self.batch), pricing.topology, now)

    def _scored(self, planned: NDArray[np.int64], scored: NDArray[np.int64]) -> dict[str, float]:
        """Plan on some rows, and return gains and balance on others by name."""
        seen, unseen = (self._pricing(self.counts[rows].sum(axis=0), self.horizon) for rows in (planned, scored))
        now = Placed(self.linear)
        gains = {"balance": unseen.balance(self.batch, now), "step_s": unseen.step_s(self.batch, now)}
        for name in (OURS, EPLB):
            made = Placed.of(self._plan(seen, name, now.placement))
            gains[name] = unseen.gain_pct(self.batch, now, made)
            gains[f"{name}, balance"] = unseen.balance(self.batch, made)
            gains[f"{name}, decode"] = unseen.gain_pct(self.decode_batch, now, made)
        return gains

    def _play(self, split: int, steps: float, gains: dict[str, list[float]]) -> None:
        """Plan again and again through the windows of the recording; add the gains of one split by name.

        Plans are made from one half of the requests, and timed on the other.
        """
        rng = np.random.default_rng([self.seed + split, 6])
        count = len(self.counts)
        planned = np.zeros(count, np.bool_)
        planned[rng.permutation(count)[: count // 2]] = True
        order = rng.permutation(count) if self.arrival_s is None else np.argsort(self.arrival_s, kind="stable")
        edges = np.linspace(0, count, WINDOWS + 1).astype(int)
        parts = [
            [self.counts[rows[half[rows]]].sum(axis=0) for half in (planned, ~planned)]
            for rows in (order[first:end] for first, end in pairwise(edges.tolist()))
        ]
        loads = np.array(parts)
        never = self._walk(loads, steps, None)
        once = self._walk(loads, steps, ONCE)
        for policy in (AS_IT_PAYS, *REARRANGED):
            walked = self._walk(loads, steps, policy)
            gains.setdefault(policy.name, []).append(gain_pct(never, walked))
            gains.setdefault(f"{policy.name}, once", []).append(gain_pct(once, walked))
        gains.setdefault(ONCE.name, []).append(gain_pct(never, once))

    def _window_steps(self, moe_s: float) -> float:
        """Return the steps of a window for a group that is always busy."""
        if self.arrival_s is None:
            return EPLB_STEPS
        each = max(1, self.batch // self.model.topology.num_ranks)
        return max(1.0, float(np.ptp(self.arrival_s)) / WINDOWS / (moe_s + self.model.dense_s(each)))

    def _walk(self, loads: Loads, steps: float, policy: Policy | None) -> float:
        """Return the seconds of MoE layers and moves, over all windows but the first ones.

        `loads` are [window, half, layer, expert]: plans are made from the first half, times are of the second.
        """
        placed, seconds = Placed(self.linear), 0.0
        for window in range(HISTORY, len(loads)):
            since = window - HISTORY
            if policy is not None and not (since if policy.every is None else since % policy.every):
                horizon = steps * (policy.every or len(loads) - HISTORY)
                pricing = self._pricing(loads[since:window, 0].sum(axis=0), horizon)
                plan = self._plan(pricing, policy.planner, placed.placement)
                if plan.skip_reason is None:
                    placed, seconds = Placed.of(plan), seconds + plan.movement_s
            seconds += steps * self._pricing(loads[window, 1], self.horizon).step_s(self.batch, placed)
        return seconds

    def _placement(self, found: dict[str, Interval], steps: float) -> Lever:
        assert self.division is not None
        gain, once = found[OURS], self.plan()
        played = [policy for policy in REARRANGED if policy.name in found]
        paid = ""
        if gain.mean >= WORTH_PCT and once.saving_s > 0:
            steps_paid = max(1, math.ceil(once.break_even_steps))
            paid = f"{counted(len(once.moves), 'move')} paid for after {counted(steps_paid, 'step')}"
        eplb = self._eplb(found, played, steps)
        return Lever(
            key="placement",
            title=TITLES["placement"],
            advice=advice_of(gain),
            chosen="the plan for this traffic",
            against=f"{IN_ORDER}, {self.division.what}",
            metric="the MoE layers' time",
            gain=gain,
            where=self.where,
            facts=(
                f"balancedness {found['balance'].mean:.2f} becomes {found[f'{OURS}, balance'].mean:.2f}",
                f"{found[f'{OURS}, decode'].mean:.1f}% at {self.decode_batch:,} tokens a step, as in decode",
                paid,
                eplb.sentence,
            ),
            do="the placement file, loaded by the plugin's EPLB policy, see docs/engines/vllm.md",
            arms=(
                Arm("plan for this traffic", gain),
                Arm("EPLB, once", found[EPLB]),
                *(Arm(policy.name, found[policy.name]) for policy in played),
            ),
            data={
                "eplb": {
                    "advice": advice_of(eplb.gain),
                    "gain_pct": eplb.gain._asdict(),
                    "interval_steps": eplb.interval_steps,
                },
                "break_even_steps": once.break_even_steps if np.isfinite(once.break_even_steps) else None,
            },
        )

    def _eplb(self, found: dict[str, Interval], played: list[Policy], steps: float) -> BestEplb:
        if not played:
            return BestEplb(found[EPLB], None)
        policy = max(played, key=lambda policy: found[policy.name].mean)
        return BestEplb(found[policy.name], steps * (policy.every or 1))

    def _live_loop(self, found: dict[str, Interval], steps: float) -> Lever:
        title = TITLES["live_loop"]
        if self.arrival_s is None:
            return unknown("live_loop", title, self.where, "it takes arrival times, and the recording has none")
        arms = [Arm(policy.name, found[f"{policy.name}, once"]) for policy in (AS_IT_PAYS, *REARRANGED)]
        best = arms[0]
        if self.newest and advice_of(best.gain) == NOT_NOW:
            seconds = float(np.ptp(self.arrival_s))
            why = f"the gateway keeps only the newest requests, of {seconds:,.0f} s, where no slower shift shows"
            return unknown("live_loop", title, self.where, why)
        return Lever(
            key="live_loop",
            title=title,
            advice=advice_of(best.gain),
            chosen=best.name,
            against="a plan made once",
            metric="the MoE layers' time",
            gain=best.gain,
            where=self.where,
            facts=(f"a window is {steps:,.0f} steps of a group that is always busy; moves are included",),
            do="control: {advise: …, apply: true, map: placement.json} in the gateway's config",
            arms=tuple(arms),
            data={"window_steps": steps},
        )


def _around(value: float, halves: list[float]) -> Interval:
    """Return the interval of a value by the deviation between halves of the recording; none without halves."""
    if len(halves) < 2:
        return Interval(value, None, None)
    mean, low, _ = interval(halves, overlap=1.0)
    assert low is not None
    return Interval(value, value - (mean - low), value + (mean - low))
