"""Advice for single steps, drawn from the newest requests, and scored on requests that came later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.control import AdviceSettings, LoadSeen, LoopShape, PlacementAdvisor
from coterie.control.advice import FEWEST, SCENARIOS, with_steps
from coterie.control.traffic import Kept
from coterie.placement import Load, Objective
from coterie.types import Placement, Topology

RANKS, LAYERS, EXPERTS, TOP_K, TOKENS, STEPS = 4, 2, 16, 2, 40, 500
SHAPE = LoopShape("made", LAYERS, EXPERTS, TOP_K, RANKS)
OBJECTIVE = Objective(row_s=1e-4, expert_bytes=1e6)
TASTES = np.random.default_rng(5).dirichlet(np.full(EXPERTS, 0.2), (3, LAYERS))
TOGETHER = 3
"""Requests in a step."""


def requests(count: int, first: int, seed: int) -> list[Kept]:
    """Finished requests, each of one of three subjects."""
    rng = np.random.default_rng(seed)
    kept = []
    for serial in range(first, first + count):
        taste = TASTES[rng.integers(3)]
        counts = np.array([rng.multinomial(TOP_K * TOKENS, layer) for layer in taste], np.uint32)
        kept.append(Kept(serial, 0.0, "w0", np.zeros_like(counts), counts, float(TOKENS)))
    return kept


def load_of(some: list[Kept]) -> np.ndarray:
    """[layer, expert] tokens of one worker's share of STEPS steps."""
    each = np.mean([one.decode / one.tokens for one in some], axis=0)
    return np.asarray(each * TOGETHER * STEPS / RANKS)


def test_steps_have_the_load_s_mean_and_the_requests_spread() -> None:
    some = requests(64, 0, 0)
    load = Load(4 * load_of(some), STEPS)
    sampled = with_steps(load, some, np.random.default_rng(0))
    assert sampled.scenarios is not None
    assert sampled.num_scenarios == SCENARIOS
    np.testing.assert_allclose(sampled.scenarios.mean(axis=0), load.tokens / load.steps)
    spread = sampled.scenarios.std(axis=0).sum()
    many = with_steps(Load(40 * load.tokens, STEPS), some, np.random.default_rng(0))
    assert many.scenarios is not None
    assert spread / sampled.tokens.sum() > 2 * many.scenarios.std(axis=0).sum() / many.tokens.sum(), "more in a step"
    again = with_steps(load, some, np.random.default_rng(0))
    np.testing.assert_array_equal(again.scenarios, sampled.scenarios)


@pytest.mark.parametrize("some", [[], requests(FEWEST - 1, 0, 0)])
def test_few_requests_are_no_sample(some: list[Kept]) -> None:
    load = Load(np.ones((LAYERS, EXPERTS)))
    assert with_steps(load, some, np.random.default_rng(0)) is load


def advised(seen: bool) -> PlacementAdvisor:
    settings = AdviceSettings(window_s=10.0, cooldown_s=1e6)
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, Placement.linear(LAYERS, EXPERTS, RANKS), settings)
    serve(advisor, seen)
    return advisor


def serve(advisor: PlacementAdvisor, seen: bool) -> None:
    """Three windows, with the requests of which they are made if they are `seen`."""
    advisor.tick(0.0)
    kept: list[Kept] = []
    for window in range(3):
        new = requests(80, 80 * window, window)
        kept += new
        for worker in range(RANKS):
            assert advisor.observe(LoadSeen(10.0 * window, f"w{worker}", load_of(new), STEPS, 9.0))
        advisor.tick(10.0 * (window + 1), kept if seen else [])


def test_advice_says_what_single_steps_gain_on_requests_that_came_later() -> None:
    over, mean = advised(True).advice, advised(False).advice
    assert over is not None
    assert over.plan is not None
    assert over.plan.unseen is not None
    score = over.steps
    assert score is not None
    assert (score.requests, score.scenarios) == (80, SCENARIOS)
    assert score.after > score.mean > score.before
    assert f"balancedness is {score.after:.3f}, {score.mean:.3f} with a plan for the mean step" in over.reason
    assert over.gain_next_pct is not None
    assert over.gain_next_pct > 0
    assert mean is not None
    assert mean.plan is not None
    assert mean.steps is None, "without requests the mean load is planned for"
    assert not np.array_equal(over.plan.placement.slot_experts, mean.plan.placement.slot_experts)


def test_the_same_inputs_give_the_same_advice() -> None:
    one, other = advised(True).advice, advised(True).advice
    assert one is not None
    assert other is not None
    assert one.plan is not None
    assert other.plan is not None
    assert one.plan.placement.slot_experts.tobytes() == other.plan.placement.slot_experts.tobytes()
    assert one.steps == other.steps


def loops_loaded() -> set[tuple[str, str]]:
    """Every loop of Coterie that this process has compiled or read from the cache, with its types."""
    from numba.core.dispatcher import Dispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("coterie.")]
    loops = {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {(f"{one.__module__}.{one.__name__}", str(types)) for one in loops for types in one.signatures}


def first_advice(spare: int) -> list[tuple[str, str]]:
    """Loops that the first plans load although the advisor was warmed up."""
    placement = Placement.linear(LAYERS, EXPERTS, RANKS, EXPERTS + spare)
    settings = AdviceSettings(window_s=10.0, cooldown_s=1e6)
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, placement, settings)
    advisor.warm_up()
    warmed = loops_loaded()
    assert any("search_steps" in name for name, _ in warmed)
    assert any("packing" in name for name, _ in warmed) == bool(spare)
    serve(advisor, seen=True)
    assert advisor.advice is not None
    assert advisor.advice.plan is not None
    return sorted(loops_loaded() - warmed)


@pytest.mark.parametrize("spare", [0, RANKS])
def test_an_advisor_that_is_warmed_up_compiles_nothing_when_it_plans(spare: int) -> None:
    # In a process of its own: other tests of this one have used the planners.
    script = f"from test_advice_steps import first_advice; print(first_advice({spare}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
