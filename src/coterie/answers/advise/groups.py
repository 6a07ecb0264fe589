"""Decisions of an expert-parallel group: a placement for this traffic, vLLM's EPLB, and planning again as load moves.

Plans are made on one half of the requests and timed on the other, in several splits. Planning again is played through
windows of the recording in order of arrival: every plan knows only windows before it, and its moves cost time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.answers.advise.decisions import NOT_NOW, ON, Arm, Lever, advice_of, unknown
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
FEWEST = 20
"""Fewest requests to halve."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Footprints of the recorded requests, and the group whose placement is in question."""

    counts: Loads
    """[request, layer, expert] activations."""
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
    horizon: float = 10_000.0
    newest: bool = False
    """Whether they are only the newest requests of a fleet, too short a time to rule out that load moves."""
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
        titles = "Placement: which rank holds which experts", "Live loop: planning again as the load moves"
        if len(self.counts) < FEWEST:
            why = f"it takes {FEWEST} requests to plan on some and time on others, and there are {len(self.counts)}"
            yield from map(unknown, ("placement", "live_loop"), titles, repeat(self.where), repeat(why))
            return
        gains: dict[str, list[float]] = {}
        steps = 0.0
        for split in range(self.splits):
            steps = self._split(split, gains)
            self.report("Planning placements", split + 1, self.splits)
        found = {name: interval(values, overlap=1.0) for name, values in gains.items()}
        placement = self._placement(titles[0], found, steps)
        live = self._live_loop(titles[1], found, steps)
        if live.advice == ON:  # a plan made once is overtaken, whatever it gains by moving hot experts apart
            placement = replace(placement, advice=NOT_NOW, opening="A plan made once does not last")
        yield placement
        yield live

    def plan(self, tokens: Loads | None = None, planner: str = OURS, now: Placement | None = None) -> Plan:
        """Plan for a load [layer, expert], by default that of all requests."""
        pricing = self._pricing(self.counts.sum(axis=0) if tokens is None else tokens, self.horizon)
        return self._plan(pricing, planner, now or self.linear)

    def _pricing(self, tokens: Loads, horizon: float) -> Pricing:
        return Pricing(self.model, self.model.topology, tokens, {"horizon": horizon})

    def _plan(self, pricing: Pricing, planner: str, now: Placement) -> Plan:
        made = planners.make(planner, {"objective": pricing.objective(self.batch)})
        return made.plan(pricing.load(self.batch), pricing.topology, now)

    def _split(self, number: int, gains: dict[str, list[float]]) -> float:
        """Add the gains of one split by name; return the steps of a window."""
        rng = np.random.default_rng([self.seed + number, 6])
        count = len(self.counts)
        planned = np.zeros(count, np.bool_)
        planned[rng.permutation(count)[: count // 2]] = True
        order = rng.permutation(count) if self.arrival_s is None else np.argsort(self.arrival_s, kind="stable")
        earlier, later = planned, ~planned
        if self.arrival_s is not None:  # a plan serves what comes after it
            earlier, later = (
                half & np.isin(np.arange(count), rows)
                for half, rows in zip((planned, ~planned), np.array_split(order, 2), strict=True)
            )
        seen, unseen = (self._pricing(self.counts[part].sum(axis=0), self.horizon) for part in (earlier, later))
        now = Placed(self.linear)
        for name, planner in ((OURS, OURS), (EPLB, EPLB)):
            made = Placed.of(self._plan(seen, planner, now.placement))
            gains.setdefault(name, []).append(unseen.gain_pct(self.batch, now, made))
            gains.setdefault(f"{name}, balance", []).append(unseen.balance(self.batch, made))
            gains.setdefault(f"{name}, decode", []).append(unseen.gain_pct(self.decode_batch, now, made))
        gains.setdefault("balance", []).append(unseen.balance(self.batch, now))
        steps = self._window_steps(unseen.step_s(self.batch, now))
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
        return steps

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

    def _placement(self, title: str, found: dict[str, Interval], steps: float) -> Lever:
        gain, once = found[OURS], self.plan()
        policy = max(REARRANGED, key=lambda policy: found[policy.name].mean)
        eplb = found[policy.name]
        worth = "worth it" if advice_of(eplb) == ON else "not worth it"
        every = steps * (policy.every or 1)
        paid = f"{counted(len(once.moves), 'move')} paid for after {counted(round(once.break_even_steps), 'step')}"
        return Lever(
            key="placement",
            title=title,
            advice=advice_of(gain),
            chosen="the plan for this traffic",
            against=f"{IN_ORDER}, on {'later ' if self.arrival_s is not None else ''}requests not planned on",
            metric="the MoE layers' time",
            gain=gain,
            where=self.where,
            facts=(
                f"balancedness {found['balance'].mean:.2f} becomes {found[f'{OURS}, balance'].mean:.2f}",
                f"{found[f'{OURS}, decode'].mean:.1f}% at {self.decode_batch:,} tokens a step, as in decode",
                paid if gain.mean >= WORTH_PCT and once.saving_s > 0 else "",
                f"EPLB is {worth} here: every {every:,.0f} steps it saves {with_ends(eplb, unit='%')}, moves included",
            ),
            do="the placement file, loaded by the plugin's EPLB policy, see docs/engines/vllm.md",
            arms=(
                Arm("plan for this traffic", gain),
                Arm("EPLB, once", found[EPLB]),
                *(Arm(policy.name, found[policy.name]) for policy in REARRANGED),
            ),
            data={
                "eplb": {"advice": advice_of(eplb), "gain_pct": eplb._asdict(), "interval_steps": every},
                "break_even_steps": once.break_even_steps if np.isfinite(once.break_even_steps) else None,
            },
        )

    def _live_loop(self, title: str, found: dict[str, Interval], steps: float) -> Lever:
        if self.arrival_s is None:
            return unknown("live_loop", title, self.where, "the recording has no times, so that no shift shows in it")
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
