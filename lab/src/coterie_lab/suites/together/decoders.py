"""Fleet A: eight decoders of one GPU and prefill workers beside them, gpt-oss-20b in mxfp4 with Mooncake's traffic.

Every router is served with the batching of the engine, in order of arrival, and with `latency_aware`, which chooses
from a decoder's queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.batching import strategies
from coterie.costs.lines import DecodeStepPrices, StepCost
from coterie.costs.presets import step_model
from coterie.costs.step import StepModel
from coterie.models import get_model
from coterie.routing import RouterFit, routers
from coterie.sim import Batching
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import FleetRequests
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie.types import INFINIBAND_400G
from coterie_lab.suites.drift.traffic import GPT_OSS
from coterie_lab.suites.joint.prefixes import home_experts, kv_tokens
from coterie_lab.suites.together.outcomes import LIGHT, Outcome, Served, capacity, limits_of, outcome_of
from coterie_lab.suites.together.rows import Compared, Pair
from coterie_lab.suites.together.traffic import Traffic, traffic_of

WORKERS, PLACES, PREFILL_WORKERS = 8, 16, 8
ROUTERS = {
    "shortest queue": "join_shortest_queue",
    "KV only": "joint:experts=0",
    "locality band": "locality_band",
    "joint": "joint",
    "latency_aware": "latency_aware",
}
FCFS, LATENCY_AWARE = BATCHINGS = ("fcfs", "latency_aware")
BASELINE = "shortest queue", FCFS
Config = tuple[str, str]
"""Router and batching."""
CONFIGS: tuple[Config, ...] = tuple((router, batching) for router in ROUTERS for batching in BATCHINGS)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderBench:
    """One traffic on the fleet, served at any rate under any configuration."""

    traffic: Traffic
    model: StepModel
    fitted: RouterFit
    config: FleetConfig
    seed: int

    @classmethod
    def of(cls, traffic: str, seed: int, requests: int, data: Path) -> DecoderBench:
        drawn = traffic_of(GPT_OSS, traffic, seed, requests, data)
        model = step_model(get_model(GPT_OSS), "h200", "mxfp4")
        fitted = RouterFit(WORKERS, batch=PLACES).fit(drawn.known, np.random.default_rng([seed, 1]))
        kept = kv_tokens(model)
        config = FleetConfig(
            decode_workers=WORKERS,
            prefill_workers=PREFILL_WORKERS,
            places=PLACES,
            kv_tokens=kept,
            prefill_kv_tokens=kept,
            link=INFINIBAND_400G,
        )
        return cls(drawn, model, fitted, config, seed)

    def serve(self, requests: FleetRequests, config: Config = BASELINE) -> FleetRun:
        router, batching = config
        context = int(requests.prompt_tokens.mean())
        fleet = self.fitted.fleet(PLACES)
        fleet.local = home_experts(self.fitted)
        prices = DecodeStepPrices.of(self.model, PLACES, context, float(requests.output_tokens.mean()))
        cost = StepCost.for_phase(self.model, "decode", PLACES, context)
        chosen = None if batching == FCFS else Batching(strategies.make(batching, {"cost": cost}), seed=self.seed)
        return run_fleet(
            requests,
            self.model,
            routers.make(ROUTERS[router], {"fitted": self.fitted, "cost": prices, "seed": self.seed}),
            self.config,
            fleet=fleet,
            duplicates="allow",
            batching=chosen,
        )

    def capacity(self) -> float:
        """Return the requests a second that the baseline serves when all requests wait."""
        return capacity(self.serve(self.traffic.at_rate(np.inf)).finish_s)


def serve_decoders(
    load: float, traffic: str, seed: int, requests: int, data: Path, configs: tuple[Config, ...] = CONFIGS
) -> dict[str, Outcome]:
    """Serve the same requests under every configuration."""
    bench = DecoderBench.of(traffic, seed, requests, data)
    rate = bench.capacity()
    limits = limits_of(_served(bench.serve(bench.traffic.at_rate(LIGHT * rate))))
    offered = bench.traffic.at_rate(load * rate)
    outcomes: dict[str, Outcome] = {}
    for config in configs:
        run = bench.serve(offered, config)
        served = _served(run)
        decoding = run.step_decoding * (run.step_prefill == 0)
        outcomes[name_of(config)] = outcome_of(
            served, bench.traffic.minority, limits, experts=float(np.average(run.step_distinct, weights=decoding))
        )
    return outcomes


def name_of(config: Config) -> str:
    return " + ".join(config)


def _served(run: FleetRun) -> Served:
    return Served(run.arrival_s, run.first_token_s - run.arrival_s, run.tpot_s)


SHORTEST, AWARE = "shortest queue", "latency_aware"
COMPARED = Compared(
    baseline=name_of(BASELINE),
    beside=name_of(BASELINE),
    whole=name_of((AWARE, LATENCY_AWARE)),
    published={
        "ELDR": name_of(("locality band", FCFS)),
        "KV routing": name_of(("KV only", FCFS)),
        "the Dynamo article": name_of(("joint", FCFS)),
    },
    gimbal=None,
    pairs=(
        Pair(
            "routing",
            "batching",
            name_of(BASELINE),
            name_of((AWARE, FCFS)),
            name_of((SHORTEST, LATENCY_AWARE)),
            name_of((AWARE, LATENCY_AWARE)),
        ),
    ),
)
