"""How long a batch takes: CAPS's model against plain NumPy, the fast step timer against the model it copies."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.costs.presets import step_model
from coterie.costs.replicas import Slots, slot_tokens
from coterie.costs.step import Batch, CostOptions, StepModel
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.sim import PrefillExecution, SpreadExecution, StepTimer
from coterie.types import Placement, Topology

SPEC = get_model("gpt-oss-20b")
MODEL = step_model(SPEC)
LAYERS, EXPERTS = SPEC.num_moe_layers, SPEC.num_experts


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 20), st.floats(0, 5))
def test_caps_model_is_base_times_one_plus_cv(seed: int, layers: int, experts: int, sensitivity: float) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 6, (12, layers, experts)).astype(np.float64) * rng.integers(0, 2)
    rows = rng.choice(12, rng.integers(1, 13), replace=False)
    ran = SpreadExecution(loads, 0.05, sensitivity)(rows)
    batch = loads[rows].sum(axis=0)
    factor = 1 + sensitivity * (batch.std() / batch.mean() if batch.any() else 0.0)
    assert ran.imbalance == pytest.approx(factor, rel=1e-12)
    assert ran.seconds == pytest.approx(0.05 * factor, rel=1e-12)
    assert ran.distinct == pytest.approx((batch > 0).sum() / layers)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"base_s": 0.0}, "base_s=0.0 must be a finite number above 0"),
        ({"base_s": math.nan}, "base_s=nan must be a finite number above 0"),
        ({"sensitivity": -0.5}, "sensitivity=-0.5 must be a finite number of at least 0"),
        ({"sensitivity": math.nan}, "sensitivity=nan must be a finite number of at least 0"),
        ({"sensitivity": math.inf}, "sensitivity=inf must be a finite number of at least 0"),
        ({"loads": np.zeros((3, 4))}, "loads has shape (3, 4); expected [request, layer, expert]"),
    ],
)
def test_bad_settings_of_caps_model_are_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        SpreadExecution(**{"loads": np.zeros((3, 1, 4)), "base_s": 1.0, "sensitivity": 1.0, **setting})


@pytest.mark.parametrize("row", [3, -1])
def test_a_request_without_a_load_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match="a request has no load"):
        SpreadExecution(np.zeros((3, 1, 4)), 1.0, 1.0)(np.array([0, row]))


# The calibrated step ------------------------------------------------------------------------------------------------


def replicated(rng: np.random.Generator, ranks: int, extra: int) -> Placement:
    """Every expert somewhere, `extra` slots a rank for replicas of any, all in random order."""
    slots = [
        rng.permutation(np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, extra * ranks)]))
        for _ in range(LAYERS)
    ]
    return Placement(np.array(slots, np.int32), ranks, EXPERTS)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepModel, Placement | None, np.ndarray, Batch]:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ranks = draw(st.sampled_from([1, 2, 8]))
    options = CostOptions(
        cache_resident=draw(st.booleans()),
        graph_sizes=draw(st.sampled_from([(), (1, 8, 64)])),
        overlap=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    topology = Topology(ranks, ranks_per_node=draw(st.sampled_from([1, 2, 4, 8])))
    model = replace(MODEL, topology=topology, options=options)
    extra = draw(st.sampled_from([0, 1, 4]))
    placement = replicated(rng, ranks, extra) if ranks > 1 or extra else None
    high = draw(st.sampled_from([1, 2, 9, 900]))  # none at all, a token here and there, decode, prefill
    load = rng.integers(0, high, (LAYERS, EXPERTS)) * rng.integers(0, 2, (LAYERS, EXPERTS))
    if draw(st.booleans()):
        batch = Batch(decode_requests=int(rng.integers(1, 100)), decode_context=int(rng.integers(0, 9999)))
    else:
        batch = Batch(prefill_tokens=int(rng.integers(1, 5000)), prefill_requests=int(rng.integers(1, 9)))
    return model, placement, load, batch


@given(steps())
@settings(max_examples=100)
def test_imbalance_and_distinct_experts_of_a_step(step: tuple[StepModel, Placement | None, np.ndarray, Batch]) -> None:
    model, placement, load, batch = step
    timer = StepTimer(model, placement)
    ran = timer(load, batch)
    assert timer(load, batch) == ran, "also from what it remembers"
    assert ran.distinct == pytest.approx((load > 0).sum(axis=1).mean())
    if placement is None:
        assert ran.imbalance == 1.0
    else:
        per_rank = slot_tokens(load, Slots.of(placement)).reshape(LAYERS, placement.num_ranks, -1).sum(axis=2)
        mean = per_rank.mean(axis=1)
        expected = np.divide(per_rank.max(axis=1), mean, out=np.ones(LAYERS), where=mean > 0)
        assert ran.imbalance == pytest.approx(expected.mean(), rel=1e-12)


def test_a_step_of_nothing_takes_no_time() -> None:
    nothing = np.zeros((LAYERS, EXPERTS), np.int64)
    assert StepTimer(MODEL)(nothing, Batch()).seconds == MODEL.step(nothing, Batch()).total_s == 0.0


def test_the_timer_refuses_what_does_not_fit_its_model() -> None:
    with pytest.raises(ConfigError, match="load has 2 layers; gpt-oss-20b has 24"):
        StepTimer(MODEL)(np.zeros((2, 32), np.int64), Batch(1))
    with pytest.raises(ConfigError, match=r"placement\.num_ranks=4 .*=8"):
        StepTimer(replace(MODEL, topology=Topology(8)), Placement.linear(LAYERS, EXPERTS, 4))
    with pytest.raises(ConfigError, match="placement is for 24 layers of 64 experts; gpt-oss-20b has 24 of 32"):
        StepTimer(MODEL, Placement.linear(LAYERS, 64, 1))
    with pytest.raises(ConfigError, match="placement is for 3 layers of 32 experts"):
        StepTimer(MODEL, Placement.linear(3, EXPERTS, 1))


@pytest.mark.parametrize("ranks", [1, 8])
def test_prompts_of_a_batch_are_one_step(ranks: int, rng: np.random.Generator) -> None:
    placement = Placement.linear(LAYERS, EXPERTS, ranks) if ranks > 1 else None
    model = replace(MODEL, topology=Topology(ranks))
    loads = rng.integers(0, 50, (10, LAYERS, EXPERTS))
    prompts = rng.integers(1, 900, 10)
    execution = PrefillExecution(StepTimer(model, placement), loads, prompts, ranks)
    for rows in (np.array([3]), np.array([9, 0, 4]), np.arange(10)):
        tokens = int(sum(prompts[row] for row in rows))
        batch = Batch(prefill_tokens=math.ceil(tokens / ranks), prefill_requests=math.ceil(len(rows) / ranks))
        expected = model.step(sum(loads[row] for row in rows), batch, placement).total_s
        assert execution(rows).seconds == pytest.approx(expected, rel=1e-12)


def test_prefill_refuses_prompts_without_loads_and_no_ranks() -> None:
    timer = StepTimer(MODEL)
    with pytest.raises(ConfigError, match=r"2 loads must be as many as prompt_tokens \(3\)"):
        PrefillExecution(timer, np.zeros((2, LAYERS, EXPERTS), np.int64), np.ones(3, np.int64))
    with pytest.raises(ConfigError, match="ranks=0 must be at least 1"):
        PrefillExecution(timer, np.zeros((2, LAYERS, EXPERTS), np.int64), np.ones(2, np.int64), ranks=0)
