"""When a re-fit is put in force, plans are made for the loads that the new router will send, not for the past."""

from __future__ import annotations

import numpy as np
import pytest

from control_traffic import BATCH, NEW, OLD, SETTINGS, SHAPE, band, drive, fitted, made_requests
from coterie.control import AdviceSettings, ControlLoop, LoadSeen, PlacementAdvisor, Scorer
from coterie.control.traffic import Kept, Traffic
from coterie.placement import Load, Objective, planners
from coterie.routing import RouterFit
from coterie.types import Placement, Topology

RANKS = SHAPE.workers
START = Placement.linear(SHAPE.num_layers, SHAPE.num_experts, RANKS)
OBJECTIVE = Objective(row_s=1e-9, expert_bytes=1e3, row_bytes=1e4, horizon=1e6)
ADVICE = AdviceSettings(window_s=10.0, min_steps=1, cooldown_s=50.0)
STEPS = 100
WORKERS = {"w0": 0, "w1": 1}


def kept_of(count: int, seed: int) -> list[Kept]:
    traffic = Traffic(SHAPE, SETTINGS)
    for one in made_requests(np.random.default_rng(seed), NEW, count):
        traffic.add(one)
    return list(traffic.kept)


@pytest.fixture(scope="module")
def fits() -> tuple[RouterFit, RouterFit]:
    """Of requests of before, and of the present ones."""
    return (
        fitted(made_requests(np.random.default_rng(0), OLD, 64)),
        fitted(made_requests(np.random.default_rng(1), NEW, 64)),
    )


def test_a_forecast_has_every_request_once_and_follows_the_router(fits: tuple[RouterFit, RouterFit]) -> None:
    scorer, requests = Scorer(band, BATCH), kept_of(64, 2)
    total = np.sum([kept.prefill + kept.decode for kept in requests], axis=0)
    before, after = (scorer.sent(fit, requests, RANKS) for fit in fits)
    for sent in (before, after):
        np.testing.assert_allclose(sent.sum(axis=0), total)
    apart = [np.abs(sent[0] / sent[0].sum() - sent[1] / sent[1].sum()).sum() for sent in (before, after)]
    assert apart[1] > 2 * apart[0], "the new fit tells the groups apart"


def observe_load(loop: ControlLoop, sent: np.ndarray, at_s: float) -> None:
    for worker, rank in WORKERS.items():
        loop.observe(LoadSeen(at_s, worker, sent[rank] * STEPS / 64, STEPS, 0.5))


def step_s(placement: Placement, sent: np.ndarray) -> float:
    problem = OBJECTIVE.problem(Load(sent.sum(axis=0), 64, sent), Topology(RANKS), START)
    return float(problem.slowest_s(placement.slot_experts).sum())


def test_planning_from_the_past_takes_longer_than_planning_from_the_forecast(fits: tuple[RouterFit, RouterFit]) -> None:
    """The old router's loads are observed until a re-fit is put in force; what it sends from then on is the judge."""
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, START, ADVICE)
    loop = ControlLoop(SHAPE, fits[0], band, SETTINGS, batch=BATCH, advisor=advisor)
    loop.bind(dict(WORKERS), WORKERS)
    past = loop.scorer.sent(fits[0], kept_of(64, 3), RANKS)
    requests = made_requests(np.random.default_rng(4), OLD, 40)
    requests += made_requests(np.random.default_rng(5), NEW, 260, 40)
    until = iter(requests)
    while not loop.counters["swaps"]:
        one = next(until)
        observe_load(loop, past, one.at_s)
        drive(loop, [one])
    future = loop.scorer.sent(loop.fit, kept_of(64, 6), RANKS)

    asked = np.stack([advisor.tracker.worker(rank) for rank in range(RANKS)])
    expected = future / future.sum(axis=0)
    gaps = [np.abs(share - expected).mean() for share in (asked / asked.sum(axis=0), past / past.sum(axis=0))]
    assert gaps[0] < gaps[1] / 2, "the demand of each rank is the new router's"
    assert advisor.advice is None or advisor.advice.plan is None, "no plan from the demand of before stands"

    drive(loop, [next(until) for _ in range(11)])  # the window of the swap ends; requests that run keep their workers
    assert advisor.advice is not None
    assert advisor.advice.plan is not None
    planner = planners["latency_optimal"](objective=OBJECTIVE)
    from_past = planner.plan(Load(past.sum(axis=0), 64, past), Topology(RANKS), START).placement
    assert step_s(from_past, past) <= step_s(advisor.advice.plan.placement, past)
    assert step_s(advisor.advice.plan.placement, future) < 0.8 * step_s(from_past, future)


def test_without_a_row_for_each_rank_the_demand_starts_anew(fits: tuple[RouterFit, RouterFit]) -> None:
    advisor = PlacementAdvisor(SHAPE, Topology(RANKS), OBJECTIVE, START, ADVICE)
    loop = ControlLoop(SHAPE, fits[0], band, SETTINGS, batch=BATCH, advisor=advisor)
    loop.bind(dict(WORKERS), {"w0": 0})
    past = loop.scorer.sent(fits[0], kept_of(64, 3), RANKS)
    for one in made_requests(np.random.default_rng(5), NEW, 300):
        observe_load(loop, past, one.at_s)
        drive(loop, [one])
        if loop.counters["swaps"]:
            break
    assert loop.counters["swaps"] == 1
    assert not any(advisor.tracker.worker(rank).any() for rank in range(RANKS))
