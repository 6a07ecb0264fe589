"""Fleets B and C: an expert-parallel group of 8 ranks on a node, or of 32 on four, GLM-5.2 in fp8 with Azure's traffic.

Which rank takes a request, where experts live, and when that is planned anew. Every placement but experts in order is
planned on requests known before the run. Planned anew it is never; periodically, for the last interval, and every
change is made; or as it pays, by the advisor that runs live. Weights move beside steps at the measured contention, and
statistics are a tenth of an interval late. `even` is no placement but a bound: in every step and layer all ranks have
an equal part of the experts' work (:meth:`ServingGroup.serve <coterie.sim.group.serving.ServingGroup.serve>`).

The Gimbal-style pair is a router by pressure with a periodic plan for the ranks that tokens come from. It has no
published code. `LAYERS` of 75 layers are served (:mod:`coterie_lab.suites.drift.traffic`): steps, moves and intervals
are shorter by one factor.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.answers.plan.moving import change_to
from coterie.control import AdviceSettings, LoadSeen, LoopShape, PlacementAdvisor
from coterie.control.advice import MOST_REQUESTS, with_steps
from coterie.control.traffic import Kept
from coterie.costs.presets import step_model
from coterie.placement import Load, Objective, Planner, planners
from coterie.placement.scenarios import steps_of_requests
from coterie.routing import RouterFit, routers
from coterie.sim.fleet.requests import FinishedRequest, FleetRequests
from coterie.sim.group.serving import (
    GroupController,
    GroupLoads,
    GroupPrices,
    GroupServedRun,
    Rebalance,
    ServeSettings,
    ServingGroup,
)
from coterie.types import Placement, Topology
from coterie_lab.suites.drift.traffic import GLM
from coterie_lab.suites.together.outcomes import LIGHT, Outcome, Served, capacity, limits_of, outcome_of
from coterie_lab.suites.together.rows import Compared, Pair
from coterie_lab.suites.together.traffic import Traffic, traffic_of

RANKS = {"B": 8, "C": 32}
PLACES = 64
SCENARIOS, REQUESTS_A_STEP = 32, 16
"""Steps to plan for before the run, and requests in each."""
WINDOWS = 10
"""Intervals of a run, at the rate that the group can serve."""
LATE = 0.1
"""Age at which statistics are seen, in intervals."""
PLANNERS = {"eplb": "eplb", "flashlb": "flashlb", "ours": "latency_optimal"}
LINEAR, EVEN, SOURCES = "linear", "even", "source-aware"
NEVER, PERIODIC, AS_IT_PAYS = WHENS = ("never", "periodic", "as it pays")
ROUTERS = {"shortest queue": "join_shortest_queue", "pressure": "pressure"}
SHORTEST, PRESSURE = ROUTERS
Config = tuple[str, str, str]
"""Placement, when it is planned anew, and router."""
BASELINE: Config = (LINEAR, NEVER, SHORTEST)
GIMBAL: Config = (SOURCES, PERIODIC, PRESSURE)
CONFIGS: dict[str, tuple[Config, ...]] = {
    "B": (
        (EVEN, NEVER, SHORTEST),
        (EVEN, NEVER, PRESSURE),
        *((LINEAR, NEVER, router) for router in ROUTERS),
        *((planner, when, router) for planner in PLANNERS for when in WHENS for router in ROUTERS),
        GIMBAL,
    ),
    "C": (
        (EVEN, NEVER, SHORTEST),
        BASELINE,
        ("eplb", PERIODIC, SHORTEST),
        ("flashlb", PERIODIC, SHORTEST),
        ("ours", NEVER, SHORTEST),
        ("ours", AS_IT_PAYS, SHORTEST),
        (LINEAR, NEVER, PRESSURE),
        ("ours", NEVER, PRESSURE),
        ("ours", AS_IT_PAYS, PRESSURE),
        GIMBAL,
    ),
}


def name_of(config: Config) -> str:
    return ", ".join(config)


class NewestRequests:
    """The newest requests that ended, as the live loop keeps them."""

    def __init__(self, top_k: int) -> None:
        self.kept, self._top_k, self._serial = deque[Kept](maxlen=2 * MOST_REQUESTS), top_k, 0

    def add(self, ended: list[FinishedRequest]) -> None:
        for one in ended:
            tokens = float(one.decode[0].sum()) / self._top_k
            self.kept.append(Kept(self._serial, one.at_s, str(one.worker), one.prefill, one.decode, tokens))
            self._serial += 1


@dataclass(slots=True)
class Periodic:
    """Plans every interval for the last interval's load and makes every change, as engines' EPLB does."""

    planner: Planner
    placement: Placement
    """Placement in force."""
    topology: Topology
    expert_bytes: float
    every_s: float
    late_s: float = 0.0
    contention: Any = None
    """As for `change_to`."""
    by_source: bool = False
    """Whether to plan for the ranks that tokens came from in the last interval."""
    requests: NewestRequests | None = None
    """Plan for single steps drawn from these; None plans for the mean step."""
    moving: bool = False

    def tick(self, _now_s: float, loads: GroupLoads) -> Rebalance | None:
        if self.requests is not None:
            self.requests.add(loads.ended)
        if self.moving or not loads.steps or not loads.sources.any():
            return None
        load = Load(loads.sources.sum(axis=0), loads.steps, loads.sources if self.by_source else None)
        if self.requests is not None:
            load = with_steps(load, tuple(self.requests.kept), np.random.default_rng(0))
        plan = self.planner.plan(load, self.topology, self.placement)
        change = change_to(self.placement, plan.placement, self.topology, self.expert_bytes, self.contention)
        self.moving = bool(change.layers)
        return change if self.moving else None

    def landed(self, _now_s: float, placement: Placement) -> None:
        self.placement, self.moving = placement, False


class AsItPays:
    """Passes loads to the live loop's advisor, none while weights move, and makes the changes that it advises."""

    def __init__(self, advisor: PlacementAdvisor, contention: Any = None, late_s: float = 0.0) -> None:
        self.advisor, self.contention = advisor, contention
        self.every_s, self.late_s = advisor.settings.window_s, late_s
        advisor.bind({str(rank): rank for rank in range(advisor.topology.num_ranks)})
        advisor.tick(0.0)
        self._requests = NewestRequests(advisor.shape.top_k)
        self._moving: int | None = None

    def tick(self, now_s: float, loads: GroupLoads) -> Rebalance | None:
        advisor = self.advisor
        self._requests.add(loads.ended)
        if self._moving is not None:
            return None
        for rank, counted in enumerate(loads.sources if loads.steps else ()):
            advisor.observe(LoadSeen(now_s, str(rank), counted, loads.steps, self.every_s))
        advisor.tick(now_s, tuple(self._requests.kept))
        if (advice := advisor.advice) is None or advice.plan is None:
            return None
        self._moving = advice.id
        then, each = advice.plan.placement, advisor.objective.expert_bytes
        return change_to(advisor.placement, then, advisor.topology, each, self.contention, advice.reason)

    def landed(self, _now_s: float, _placement: Placement) -> None:
        if self._moving is not None:
            self.advisor.applied(self._moving)
        self._moving = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupBench:
    """One traffic on the group, served at any rate under any configuration."""

    traffic: Traffic
    prices: GroupPrices
    objective: Objective
    fitted: RouterFit
    known: Load
    """Requests known before the run, as single steps."""
    seed: int

    @classmethod
    def of(cls, fleet: str, traffic: str, seed: int, requests: int, data: Path) -> GroupBench:
        drawn = traffic_of(GLM, traffic, seed, requests, data)
        model = step_model(drawn.turns.model.spec, "h200", topology=Topology(RANKS[fleet]))
        settings = ServeSettings(places=PLACES, deduplicate=True)
        tokens = settings.chunk_tokens * RANKS[fleet]
        rng = np.random.default_rng([seed, 1])
        footprints = drawn.known.prefill + drawn.known.decode
        steps = steps_of_requests(footprints, REQUESTS_A_STEP, SCENARIOS, rng)
        steps *= tokens * model.spec.top_k / steps.sum(axis=2).mean()
        return cls(
            drawn,
            GroupPrices.of(model, settings),
            Objective.of(model, tokens, "staged", horizon=1000.0),
            RouterFit(RANKS[fleet], batch=PLACES).fit(drawn.known, rng),
            Load.of_scenarios(steps),
            seed,
        )

    @property
    def in_order(self) -> Placement:
        return Placement.linear(self.known.num_layers, self.known.num_experts, self.prices.model.topology.num_ranks)

    def planned(self, placement: str) -> Placement:
        """Return the placement of before the run."""
        if placement in (LINEAR, EVEN):
            return self.in_order
        planner = planners.make(PLANNERS.get(placement, PLANNERS["ours"]), {"objective": self.objective})
        return planner.plan(self.known, self.prices.model.topology, self.in_order).placement

    def controller(self, config: Config, first: Placement, every_s: float) -> GroupController | None:
        placement, when, _ = config
        model, name = self.prices.model, PLANNERS.get(placement, PLANNERS["ours"])
        given: dict[str, Any] = {"late_s": LATE * every_s, "contention": model.contention}
        if when == PERIODIC:
            planner = planners.make(name, {"objective": self.objective})
            return Periodic(
                planner,
                first,
                model.topology,
                self.objective.expert_bytes,
                every_s,
                by_source=placement == SOURCES,
                requests=NewestRequests(model.spec.top_k) if placement == "ours" else None,
                **given,
            )
        if when == AS_IT_PAYS:
            shape = LoopShape(GLM, first.num_layers, first.num_experts, model.spec.top_k, first.num_ranks)
            settings = AdviceSettings(window_s=every_s, min_steps=1, cooldown_s=0.0, planner=name)
            advisor = PlacementAdvisor(shape, model.topology, self.objective, first, settings)
            return AsItPays(advisor, **given)
        return None

    def serve(
        self, requests: FleetRequests, config: Config, first: Placement, every_s: float = math.inf
    ) -> GroupServedRun:
        placement, _, router = config
        group = ServingGroup(self.prices, first, requests)
        return group.serve(
            router=routers.make(ROUTERS[router], {"fitted": self.fitted}),
            fleet=self.fitted.fleet(PLACES),
            controller=self.controller(config, first, every_s),
            even=placement == EVEN,
        )


def serve_groups(fleet: str, load: float, traffic: str, seed: int, requests: int, data: Path) -> dict[str, Outcome]:
    """Serve the same requests under every configuration."""
    bench = GroupBench.of(fleet, traffic, seed, requests, data)
    firsts = {placement: bench.planned(placement) for placement in dict.fromkeys(c[0] for c in CONFIGS[fleet])}
    at_rate = bench.traffic.at_rate
    rate = capacity(bench.serve(at_rate(np.inf), BASELINE, bench.in_order).finish_s)
    limits = limits_of(_served(bench.serve(at_rate(LIGHT * rate), BASELINE, bench.in_order), bench.traffic))
    every_s = requests / rate / WINDOWS
    outcomes: dict[str, Outcome] = {}
    for config in CONFIGS[fleet]:
        run = bench.serve(at_rate(load * rate), config, firsts[config[0]], every_s)
        served = _served(run, bench.traffic)
        tokens = run.steps.decoded + run.steps.prompt
        outcomes[name_of(config)] = outcome_of(
            served,
            bench.traffic.minority,
            limits,
            experts=float(np.average(run.steps.distinct, weights=tokens)),
            balancedness=float(np.average(run.steps.balancedness, weights=tokens)),
            moved_bytes=sum(change.moved_bytes for change in run.changes),
        )
    return outcomes


def _served(run: GroupServedRun, traffic: Traffic) -> Served:
    after = traffic.requests.output_tokens - 1
    tpot_s = np.where(after > 0, (run.finish_s - run.first_s) / np.maximum(after, 1), np.nan)
    return Served(run.arrival_s, run.first_s - run.arrival_s, tpot_s)


COMPARED = Compared(
    baseline=name_of(BASELINE),
    beside=name_of((EVEN, NEVER, SHORTEST)),
    whole=name_of(("ours", AS_IT_PAYS, PRESSURE)),
    published={"EPLB": name_of(("eplb", PERIODIC, SHORTEST)), "FlashLB": name_of(("flashlb", PERIODIC, SHORTEST))},
    gimbal=name_of(GIMBAL),
    pairs=tuple(
        Pair(first, second, *(name_of(config) for config in configs))
        for first, second, *configs in (
            (
                "placement",
                "routing",
                BASELINE,
                ("ours", NEVER, SHORTEST),
                (LINEAR, NEVER, PRESSURE),
                ("ours", NEVER, PRESSURE),
            ),
            (
                "planning anew",
                "routing",
                ("ours", NEVER, SHORTEST),
                ("ours", AS_IT_PAYS, SHORTEST),
                ("ours", NEVER, PRESSURE),
                ("ours", AS_IT_PAYS, PRESSURE),
            ),
            (
                "planning for steps",
                "planning anew",
                ("eplb", NEVER, SHORTEST),
                ("ours", NEVER, SHORTEST),
                ("eplb", AS_IT_PAYS, SHORTEST),
                ("ours", AS_IT_PAYS, SHORTEST),
            ),
        )
    ),
)
