"""What staging moves behind steps changes: prices, the rule that skips a plan, and when to rebalance."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from coterie.costs.movement import Contention, Movement
from coterie.costs.presets import step_model
from coterie.costs.step import StepModel
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement.base import Load
from coterie.placement.objective import Objective
from coterie.placement.planning.latency_optimal import LatencyOptimal
from coterie.placement.triggers.rebalancing import Rebalancer, RebalancingSettings
from coterie.types import Link, Placement, Topology

RANKS, LAYERS = 8, 4
MEASURED = {
    "device": Contention(us_per_byte=1e-7, exposed=0.2, largest_exposed=0.3, cells=5),
    "host-to-device": Contention(us_per_byte=2e-8, exposed=0.001, largest_exposed=0.002, cells=5),
}


@pytest.fixture(scope="module")
def model() -> StepModel:
    plain = step_model(get_model("gpt-oss-20b"), "h200", topology=Topology(RANKS))
    return replace(plain, contention=MEASURED)


@pytest.fixture(scope="module")
def load() -> Load:
    tokens = np.random.default_rng(0).lognormal(sigma=0.8, size=(LAYERS, 32))
    return Load(tokens / tokens.sum(axis=1, keepdims=True) * 1024 * 4)


def test_an_engine_that_stages_pays_what_was_measured(model: StepModel) -> None:
    stops, staged = Objective.of(model, 1024), Objective.of(model, 1024, "staged")
    assert stops.exposed == 1.0
    assert staged.exposed == pytest.approx(1e-7 * 1e-6 * model.topology.intra.bytes_per_s)
    assert replace(staged, exposed=1.0) == stops, "nothing else changes"
    assert Objective.of(model, 1024, "staged", exposed=0.5).exposed == 0.5


def test_staged_needs_a_measurement_and_a_known_word(model: StepModel) -> None:
    with pytest.raises(ConfigError, match="contention"):
        Objective.of(replace(model, contention={}), 1024, "staged")
    with pytest.raises(ConfigError, match="movement"):
        Objective.of(model, 1024, "later")  # type: ignore[arg-type]


def test_a_plan_that_stopping_does_not_pay_for_is_carried_out_when_staged(model: StepModel, load: Load) -> None:
    current = Placement.linear(LAYERS, 32, RANKS)
    whole = LatencyOptimal(Objective.of(model, 1024, horizon=1e6)).plan(load, model.topology, current)
    horizon = 0.2 * whole.break_even_steps
    stops, staged = (
        LatencyOptimal(Objective.of(model, 1024, how, horizon=horizon)).plan(load, model.topology, current)
        for how in get_args(Movement)
    )
    assert stops.skip_reason is not None or stops.after_s > staged.after_s
    assert len(staged.moves) > len(stops.moves)
    assert staged.break_even_steps <= horizon


def test_the_rebalancer_acts_sooner_when_moves_are_staged(model: StepModel, load: Load) -> None:
    slow = replace(model, topology=Topology(RANKS, intra=Link("slow", 10e9, 1e-6)))

    def rounds(how: Movement) -> int:
        one = Rebalancer(
            LatencyOptimal,
            Objective.of(slow, 1024, how),
            slow.topology,
            Placement.linear(LAYERS, 32, RANKS),
            RebalancingSettings(first_interval=2.0),
        )
        acted = 0
        for _ in range(3):
            if one.observe(load).plan is not None:
                one.landed()
                acted += 1
        return acted

    assert rounds("staged") > 0
    assert rounds("stops") == 0, "a few steps do not pay for stopping"
