"""What the settings make of a round: the topology, the prices to plan by, and the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import coterie.placement.planning.latency_optimal  # noqa: F401  (the default planner registers itself)
from coterie.costs.presets import step_model
from coterie.engines.vllm.eplb.base import EplbRound
from coterie.engines.vllm.settings import EplbSettings
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement import DEEPSEEK_V3_PREFILL, Load, Objective, Plan, Planner, planners
from coterie.types import INFINIBAND_400G, NVLINK4, Placement, Topology

EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class EplbPrices:
    """Objective, topology and planner of the settings."""

    settings: EplbSettings

    def check(self) -> None:
        """Raise now what is wrong with the settings, not in the first round."""
        self.make_planner(objective=self.objective(Load(np.ones((1, 1))), Topology(1)))

    def topology(self, asked: EplbRound) -> Topology:
        return Topology(
            asked.num_ranks,
            asked.num_ranks // asked.num_nodes,
            NVLINK4._replace(name="intra", bytes_per_s=self.settings.intra_gb_s * 1e9),
            INFINIBAND_400G._replace(name="inter", bytes_per_s=self.settings.inter_gb_s * 1e9),
        )

    def plan(self, load: Load, asked: EplbRound, current: Placement) -> Plan:
        """A plan for `horizon` steps."""
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
        prices = {"horizon": settings.horizon, "target_balance": settings.target_balance}
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
        model = step_model(spec, settings.device, topology=topology)
        return Objective.of(model, max(1, round(step)), settings.movement, **prices)


def checked(planner: str, plan: Plan) -> Plan:
    """The plan, if vLLM can carry it out."""
    _check_split(planner, plan.split)
    return plan


def _check_split(planner: str, split: str) -> None:
    if split != EQUAL:
        raise ConfigError(f"split={split!r} of planner {planner!r} must be {EQUAL!r}: vLLM spreads tokens evenly")
