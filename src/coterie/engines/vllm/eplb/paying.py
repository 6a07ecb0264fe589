"""When a change pays: a Rebalancer that is asked in every round and keeps the map until one does.

vLLM asks every `step_interval` steps with the tokens of its last `window_size` steps, added up over all ranks: one
window of the Rebalancer, whose clock moves by the steps between two calls. What it decides must be equal on all ranks,
so it only sees what is: the load, the old map, and the planning time of the slowest rank, which the ranks exchange when
they compare their maps.

vLLM's old map is the truth about what landed. If it is the planned one, the moves landed: at once without use_async,
a layer a step with it, and vLLM does not ask again before the last. If it is another, the Rebalancer goes on from it.

A window that is part empty, or was counted under another map, is not used. vLLM first asks after a quarter of its
interval, when a window longer than that is not full; and the window after ranks came or went was counted before.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coterie.engines.vllm.eplb.base import EplbRound, MapDecision, Slots, as_slots
from coterie.engines.vllm.eplb.prices import EplbPrices, checked
from coterie.engines.vllm.eplb.steps import StepsFile
from coterie.placement import Load, Rebalancer
from coterie.types import Placement, Topology

LEARNING = 0.3
"""Weight of the latest plan in the mean planning time, as in the Rebalancer's other means."""


class _Shape(NamedTuple):
    layers: int
    experts: int


class _State:
    """What is known of one model: its Rebalancer, and the map that its last plan leads to."""

    def __init__(self, rebalancer: Rebalancer, skips: bool) -> None:
        self.rebalancer = rebalancer
        self.skips = skips
        self.planned: Slots | None = None
        self.windows = 0

    def fits(self, topology: Topology, placement: Placement) -> bool:
        mine = self.rebalancer
        return mine.topology == topology and mine.placement.num_slots == placement.num_slots

    def catch_up(self, current: Placement) -> None:
        """Take over the map that vLLM really has."""
        planned, self.planned = self.planned, None
        slots = as_slots(current)
        if planned is not None and np.array_equal(planned, slots):
            self.rebalancer.landed()
        elif planned is not None or not np.array_equal(as_slots(self.rebalancer.placement), slots):
            self.rebalancer.replace(current)


class Payoff:
    """Decides in every round whether a change pays; a draft model beside the main one has a state of its own."""

    def __init__(self, prices: EplbPrices, steps: StepsFile) -> None:
        self._prices = prices
        self._steps = steps
        self._rebalancing = prices.settings.rebalancing_settings()
        self._states: dict[_Shape, _State] = {}
        # vLLM begins at three quarters of its interval.
        self._skip = prices.settings.window > prices.settings.horizon // 4
        self._planning_s: float | None = None

    @property
    def planning_s(self) -> float:
        """What planning is taken to cost: the setting, else the mean of the slowest rank's times."""
        given = self._prices.settings.planning_s
        return given if given is not None else self._planning_s or 0.0

    def fingerprint(self) -> tuple[int, ...]:
        """Counts that are equal on all ranks whose states are; no float, whose last bit may differ by processor."""
        return tuple(
            number
            for shape, state in sorted(self._states.items())
            for number in (*shape, state.windows, len(state.rebalancer.rounds))
        )

    def learn(self, slowest_s: float) -> None:
        """The slowest rank's planning time of a round that planned."""
        if slowest_s > 0:
            known = self._planning_s
            self._planning_s = slowest_s if known is None else known + LEARNING * (slowest_s - known)

    def forget(self) -> None:
        """Begin anew: states were not equal, or may not be."""
        self._states.clear()
        self._skip = False

    def ranks_changed(self) -> None:
        """Begin anew after a window that cannot be used, on the ranks that stayed as on those that came."""
        self.forget()
        self._skip = True

    def decide(self, asked: EplbRound, current: Placement) -> MapDecision:
        """The round's decision; `current` is vLLM's old map, whole."""
        settings = self._prices.settings
        # Tokens of `window` steps, at the rate of the `horizon` steps that have passed since the last call.
        load = self._steps.around(Load(asked.tokens * (settings.horizon / settings.window), settings.horizon))
        state = self._state(load, asked, current)
        state.windows += 1
        if state.skips:
            state.skips = False
            return MapDecision(
                as_slots(current), "the first window may be part empty, or of another map", "first_window"
            )
        state.catch_up(current)
        rebalancer = state.rebalancer
        objective = self._prices.objective(load, rebalancer.topology)
        rebalancer.objective = replace(objective, planning_s=self.planning_s)
        began = time.perf_counter()
        found = rebalancer.observe(load)
        took_s = time.perf_counter() - began if found.planned else 0.0
        if found.plan is None:
            return MapDecision(as_slots(current), found.reason, found.kind, planning_s=took_s)
        plan = checked(settings.planner, found.plan)
        state.planned = as_slots(plan.placement)
        return MapDecision(state.planned, found.reason, "moved", plan, found.gain_s, took_s)

    def _state(self, load: Load, asked: EplbRound, current: Placement) -> _State:
        shape, topology = _Shape(*load.tokens.shape), self._prices.topology(asked)
        state = self._states.get(shape)
        if state is None or not state.fits(topology, current):
            objective = self._prices.objective(load, topology)
            rebalancer = Rebalancer(self._prices.make_planner, objective, topology, current, self._rebalancing)
            self._states[shape] = state = _State(rebalancer, self._skip)
        return state
