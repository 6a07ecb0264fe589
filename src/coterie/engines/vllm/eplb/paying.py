"""Decide when a change pays: a Rebalancer sees every round and keeps the map until a change pays.

vLLM calls the policy every `step_interval` steps with the tokens of its last `window_size` steps, summed over all
ranks: one window of the Rebalancer, whose clock advances by the steps between two calls. Its decisions must be equal on
all ranks, so that it only uses inputs that are: the load, the old map, and the planning time of the slowest rank, which
the ranks exchange when they compare their maps.

vLLM's old map shows which moves were applied. If it equals the planned map, all moves were: at once without use_async,
one layer per step with it, and vLLM does not call again before the last layer. If it differs, the Rebalancer continues
from vLLM's map.

A window that is partly empty, or was counted under another map, is not used. vLLM's first call comes after a quarter of
its interval, when a longer window is not full; and the window after a change of ranks was counted before the change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import coterie.placement.planning.latency_optimal  # noqa: F401  (the default planner registers itself)
from coterie.costs.presets import step_model
from coterie.engines.vllm.eplb.base import EplbRound, MapDecision, Slots, as_slots, short_hash
from coterie.engines.vllm.eplb.files import WatchedFile
from coterie.engines.vllm.settings import EplbSettings
from coterie.errors import ConfigError, check
from coterie.models import get_model
from coterie.placement import DEEPSEEK_V3_PREFILL, Load, Objective, Plan, Planner, Rebalancer, planners
from coterie.placement.scenarios import at_mean, load_scenarios
from coterie.types import INFINIBAND_400G, NVLINK4, Placement, Topology

EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class EplbPrices:
    """Builds the objective, topology and planner from the settings."""

    settings: EplbSettings

    def check(self) -> None:
        """Raise ConfigError for invalid settings now, not in the first round."""
        self.make_planner(objective=self.objective(Load(np.ones((1, 1))), Topology(1)))

    def topology(self, asked: EplbRound) -> Topology:
        return Topology(
            asked.num_ranks,
            asked.num_ranks // asked.num_nodes,
            NVLINK4._replace(name="intra", bytes_per_s=self.settings.intra_gb_s * 1e9),
            INFINIBAND_400G._replace(name="inter", bytes_per_s=self.settings.inter_gb_s * 1e9),
        )

    def plan(self, load: Load, asked: EplbRound, current: Placement) -> Plan:
        """Return a plan that is evaluated over `horizon` steps."""
        topology = self.topology(asked)
        return self.make_planner(objective=self.objective(load, topology)).plan(load, topology, current)

    def make_planner(self, *, objective: Objective) -> Planner:
        settings = self.settings
        try:
            planner = planners.make(settings.planner, {"objective": objective}, **settings.options)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"options={settings.options} of planner {settings.planner!r}: {error}") from None
        _check_split(settings.planner, getattr(planner, "split", EQUAL))
        return planner

    def objective(self, load: Load, topology: Topology) -> Objective:
        settings = self.settings
        prices: dict[str, Any] = {"horizon": settings.horizon, "target_balance": settings.target_balance}
        if settings.movement == "stops":
            prices["exposed"] = settings.exposed
        spec = None if settings.model is None else get_model(settings.model)
        if spec is not None:
            prices["expert_bytes"] = spec.expert_bytes()
        if settings.expert_bytes is not None:
            prices["expert_bytes"] = settings.expert_bytes
        if spec is None or settings.device is None:
            return replace(DEEPSEEK_V3_PREFILL, **prices)
        step = load.tokens.sum(axis=1).mean() / load.steps / spec.top_k
        return Objective.of(
            step_model(spec, settings.device, topology=topology), max(1, round(step)), settings.movement, **prices
        )


def checked(planner: str, plan: Plan) -> Plan:
    """Return the plan; raise ConfigError if vLLM cannot apply it."""
    _check_split(planner, plan.split)
    return plan


def _check_split(planner: str, split: str) -> None:
    check(split == EQUAL, f"split={split!r} of planner {planner!r} must be {EQUAL!r}: vLLM spreads tokens evenly")


logger = logging.getLogger("vllm.coterie")


class StepsFile:
    """Single steps to plan for, scaled to the mean step that vLLM reports. `failed` is called if reading fails.

    vLLM's interface passes only the tokens of a window, so that single steps come from a file, written where requests
    are known (`coterie plan --save-scenarios`). The file may be replaced at any time. In every round the ranks compare
    what they have read: unless all have read the same, the round is planned for the mean step.
    """

    def __init__(self, path: str | None, failed: Callable[[str], None]) -> None:
        unusable = f"coterie: {path} cannot be used; plans are for the mean step"
        self._file = None if path is None else WatchedFile(path, load_scenarios, partial(failed, unusable))
        self._use = False
        self._warned: set[str] = set()

    def offered(self) -> int:
        """Read the file if it changed; return 63 bits of its hash, to compare over ranks; 0 without a file."""
        if self._file is None:
            return 0
        self._file.look()
        if self._file.version is None:
            self._warn("does not exist; plans are for the mean step")
        load = self._file.content
        if load is None or load.scenarios is None or load.weights is None:
            return 0
        return short_hash(load.scenarios.tobytes() + load.weights.tobytes() + bytes([load.whole_steps]))

    def agreed(self, same: bool) -> None:
        """Use the file only if all ranks have read the same one."""
        self._use = same
        if not same:
            self._warn("is not the same on all ranks; plans are for the mean step until it is")

    def around(self, load: Load) -> Load:
        """Return the load with the file's steps scaled to its mean step; unchanged if they are unused or do not fit."""
        given = None if self._file is None or not self._use else self._file.content
        if given is None or given.scenarios is None:
            return load
        if given.tokens.shape != load.tokens.shape:
            shapes = f"{given.tokens.shape} layers and experts; vLLM asks for {load.tokens.shape}"
            self._warn(f"has {shapes}: planned for the mean step")
            return load
        return replace(
            load,
            scenarios=at_mean(given.scenarios, given.weights, load.tokens / load.steps),
            weights=given.weights,
            whole_steps=given.whole_steps,
        )

    def _warn(self, problem: str) -> None:
        """Log a problem of the file, once."""
        if self._file is not None and problem not in self._warned:
            self._warned.add(problem)
            logger.warning("coterie: %s %s", self._file.path, problem)


LEARNING = 0.3
"""Weight of the latest plan in the mean planning time, as in the Rebalancer's other means."""


@dataclass(slots=True)
class _State:
    """State of one model: its Rebalancer, and the map that its last plan leads to."""

    rebalancer: Rebalancer
    skips: bool
    """Whether the next window is not used."""
    planned: Slots | None = None
    windows: int = 0

    def fits(self, topology: Topology, placement: Placement) -> bool:
        mine = self.rebalancer
        return mine.topology == topology and mine.placement.num_slots == placement.num_slots

    def catch_up(self, current: Placement) -> None:
        """Update the Rebalancer to the map that vLLM actually has."""
        planned, self.planned = self.planned, None
        slots = as_slots(current)
        if planned is not None and np.array_equal(planned, slots):
            self.rebalancer.landed()
        elif planned is not None or not np.array_equal(as_slots(self.rebalancer.placement), slots):
            self.rebalancer.replace(current)


class Payoff:
    """Decides in every round whether a change pays; a draft model beside the main one has a separate state."""

    def __init__(self, prices: EplbPrices, steps: StepsFile) -> None:
        self._prices, self._steps = prices, steps
        self._rebalancing = prices.settings.rebalancing_settings()
        self._states: dict[tuple[int, ...], _State] = {}  # by layers and experts
        # vLLM's step counter starts at three quarters of its interval, so its first window may be partly empty.
        self._skip = prices.settings.window > prices.settings.horizon // 4
        self._planning_s: float | None = None

    @property
    def planning_s(self) -> float:
        """Assumed planning time in seconds: the setting, else the mean of the slowest rank's times."""
        given = self._prices.settings.planning_s
        return given if given is not None else self._planning_s or 0.0

    def fingerprint(self) -> tuple[int, ...]:
        """Return counts that are equal if the ranks' states are; no floats, whose last bit may differ by processor."""
        return tuple(
            number
            for shape, state in sorted(self._states.items())
            for number in (*shape, state.windows, len(state.rebalancer.rounds))
        )

    def learn(self, slowest_s: float) -> None:
        """Update the mean planning time with the slowest rank's time of a round; 0 if the round did not plan."""
        if slowest_s > 0:
            known = self._planning_s
            self._planning_s = slowest_s if known is None else known + LEARNING * (slowest_s - known)

    def forget(self) -> None:
        """Drop all states, because they differ between ranks or may differ."""
        self._states.clear()
        self._skip = False

    def ranks_changed(self) -> None:
        """Drop all states and skip the next window, on remaining ranks and on new ones."""
        self.forget()
        self._skip = True

    def decide(self, asked: EplbRound, current: Placement) -> MapDecision:
        """Return the round's decision; `current` is vLLM's old map with every slot filled."""
        settings = self._prices.settings
        # Scale the tokens of `window` steps to the `horizon` steps since the last call.
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
        rebalancer.objective = replace(self._prices.objective(load, rebalancer.topology), planning_s=self.planning_s)
        began = time.perf_counter()
        outcome = rebalancer.observe(load)
        took_s = time.perf_counter() - began if outcome.planned else 0.0
        if outcome.plan is None:
            return MapDecision(as_slots(current), outcome.reason, outcome.kind, planning_s=took_s)
        plan = checked(settings.planner, outcome.plan)
        state.planned = as_slots(plan.placement)
        return MapDecision(state.planned, outcome.reason, "moved", plan, outcome.gain_s, took_s)

    def _state(self, load: Load, asked: EplbRound, current: Placement) -> _State:
        shape, topology = load.tokens.shape, self._prices.topology(asked)
        state = self._states.get(shape)
        if state is None or not state.fits(topology, current):
            rebalancer = Rebalancer(
                self._prices.make_planner, self._prices.objective(load, topology), topology, current, self._rebalancing
            )
            self._states[shape] = state = _State(rebalancer, self._skip)
        return state
