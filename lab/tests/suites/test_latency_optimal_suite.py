"""The latency-optimal suite: its drift, the arithmetic of its runs, and real parts at a small size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coterie.types import Placement
from coterie_lab.suites.latency_optimal import sweep
from coterie_lab.suites.latency_optimal.domains import DomainSetting, Fleet, rank_shares, serve, shifting
from coterie_lab.suites.latency_optimal.suite import SWEEP, TABLE, _sweep_row, policies
from coterie_lab.suites.latency_optimal.sweep import DriftSetting, Policy, SweepSetting, busiest_rank, run_seed

SMALL = SweepSetting(DriftSetting(experts=32, half_life=60.0), ranks=4, layers=2, warm_up=100, iterations=200, short=20)


def test_the_drift_has_the_half_life_and_balance_it_says() -> None:
    setting = DriftSetting(fast=0.0, half_life=40.0, tokens=1_000_000)
    loads = setting.draw(3, 900, np.random.default_rng(0)).astype(np.float64)
    shape = np.log(loads + 1.0)
    shape -= shape.mean(axis=2, keepdims=True)
    near, far = ((shape[lag:] * shape[: len(shape) - lag]).mean() for lag in (0, 40))
    assert far / near == pytest.approx(0.5, abs=0.08)
    assert np.sqrt(near) == pytest.approx(setting.slow, rel=0.1)
    one = (shape[1:] * shape[:-1]).mean() / near
    assert 1 - one < 0.003, "smooth: next to nothing is lost in one iteration, where rough drift loses 1.7%"


def test_the_paper_s_setting_is_balanced_as_published() -> None:
    loads = DriftSetting().draw(20, 20, np.random.default_rng(0)).sum(axis=0)
    rank_load = Placement.linear(20, 256, 8).rank_load(loads)
    found = (rank_load.mean(axis=1) / rank_load.max(axis=1)).mean()
    assert found == pytest.approx(TABLE["none"]["balance"], abs=0.06)


def test_the_busiest_rank_by_loops() -> None:
    rng = np.random.default_rng(0)
    loads = rng.integers(0, 50, (3, 2, 8)).astype(np.float32)
    placement = Placement(np.array([rng.permutation(8) for _ in range(2)], np.int32), 4, 8)
    expected = [sum(placement.rank_load(load)[layer].max() for layer in range(2)) for load in loads]
    np.testing.assert_allclose(busiest_rank(loads, placement), expected)


def test_rounds_are_planned_on_the_past_and_charged() -> None:
    """EPLB every 50: maps, costs and gain again by hand, each plan from the 50 iterations before it."""
    from coterie.placement.base import Load
    from coterie.placement.planning.eplb import Eplb

    loads = SMALL.drift.draw(SMALL.layers, 300, np.random.default_rng(1))
    policy = Policy("eplb", 50, 0.26, unconditional=True)
    unbalanced = busiest_rank(loads, SMALL.linear())
    found = sweep.run_fixed(loads, SMALL, policy).outcome(unbalanced)
    placement, busy, cost = SMALL.linear(), 0.0, 0.0
    for at in range(50, 300, 50):
        plan = Eplb(objective=SMALL.objective).plan(
            Load(loads[at - 50 : at].sum(axis=0), 50), SMALL.topology, placement
        )
        placement = plan.placement
        if at >= 100:
            cost += plan.movement_s + 0.26 * 2 / 58
            busy += busiest_rank(loads[at : at + 50], placement).sum()
    fixed = SMALL.fixed_s * 2 * 200
    row_s = SMALL.objective.row_s
    expected = (fixed + row_s * unbalanced[100:].sum()) / (fixed + row_s * busy + cost) - 1
    assert found.gain == pytest.approx(expected)
    assert (found.rounds, found.planned) == (4, 4)


def test_every_policy_runs_and_ideal_is_the_most() -> None:
    policies_here = (
        Policy("eplb", 1, 0.26, unconditional=True),
        Policy("latency_optimal", 20, 0.17),
        Policy("latency_optimal", None, 0.025),
    )
    *found, ideal = run_seed(0, SMALL, policies_here)
    assert run_seed(0, SMALL, policies_here)[:-1] == found, "the same seed gives the same numbers"
    assert all(one.gain < ideal.gain and one.processing_gain < ideal.gain for one in found[1:])
    assert found[0].gain < -0.3, "a round after every iteration costs more than it can bring"
    assert found[0].processing_gain > 0
    never = run_seed(0, replace(SMALL, short=20), (Policy("latency_optimal", 1, 10.0),))[0]
    assert (never.gain, never.planned) == (0.0, 0), "what cannot pay is not even planned"


def test_published_figures_stand_beside_the_rows_they_belong_to() -> None:
    values = np.zeros((2, 6))
    assert _sweep_row("eplb", "published", 100, values)["published"] == {"gain_pct": 8.0}
    assert _sweep_row("latency_optimal", "ours", 100, values)["published"] is None
    named = {(policy.planner, policy.interval) for group in policies().values() for policy in group}
    assert {key for key in SWEEP if key[0] != "ideal"} <= named


def two_domains() -> dict[str, np.ndarray]:
    """[shard, 75 layers, 256 experts] each; the second domain uses the experts of the first in reverse."""
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.normal(size=(75, 256)))
    return {
        "a": rng.poisson(40 * popularity, (3, 75, 256)) * 1.0,
        "b": rng.poisson(40 * popularity[:, ::-1], (3, 75, 256)) * 1.0,
    }


def test_traffic_shifts_and_neighbours_share_no_shard() -> None:
    setting = DomainSetting(windows=5, stay=2, base=0.0)
    domains = two_domains()
    shares = shifting(domains, setting)
    np.testing.assert_allclose(shares.sum(axis=2), 1.0)
    first = domains["a"][0] / domains["a"][0].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares[0], first)
    second = domains["b"][2] / domains["b"][2].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares[2], second)
    assert not np.allclose(shares[0], shares[4]), "the first domain leads again, on another shard"


def test_plans_serve_the_window_after_their_own() -> None:
    setting = DomainSetting(windows=3, stay=8)
    shares = shifting(two_domains(), setting)
    fleet = Fleet.of("prefill", 16_384, setting)
    seen: list[str] = []
    kept, eplb = (serve(policy, shares, fleet, setting, seen.append) for policy in ("kept", "eplb"))
    assert seen == ["kept", "kept", "eplb", "eplb"]
    assert len(kept.step_s) == 2
    assert not kept.cost_s.any()
    assert (eplb.cost_s > 0).all()
    assert (eplb.moe_s < kept.moe_s).all()
    parts = rank_shares(shares[2], eplb.last, 0, fleet)
    total = parts.compute_s + parts.communication_s + parts.wait_s
    np.testing.assert_allclose(total, total[0])
    assert parts.wait_s.min() == 0
    assert (parts.communication_s > 0).all()
