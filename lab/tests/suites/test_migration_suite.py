"""The migration suite: traffic by domain, the strategies on it, and the published tables."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.errors import ConfigError, TraceError
from coterie.models import get_model
from coterie.placement.holdings import held_by
from coterie.placement.migration.rounds import MigrationLimits, schedule_moves
from coterie.placement.triggers.actions import ActionManager, ActionSettings
from coterie.traces.activations import ActivationWriter, TraceMeta
from coterie.traces.load import LoadTable
from coterie.types import Placement, Topology
from coterie_lab.suites.held import cheapest_homes, placement_from_held
from coterie_lab.suites.migration import memory as migration_memory
from coterie_lab.suites.migration import suite as migration
from coterie_lab.suites.migration.memory import PUBLISHED_BUDGET, Case, Steps, memory_rows, published_step_s
from coterie_lab.suites.migration.suite import ORDER, PUBLISHED, RANKS, Bench, run
from coterie_lab.suites.migration.traffic import Domains, by_rank, make_windows, read_domains
from simulate_traces import quiet


def save(
    path: Path, rng: np.random.Generator, domains: int = 4, requests: int = 6, experts: int = 16, layers: int = 2
) -> Any:
    """Requests whose tokens mostly choose among a quarter of the experts, one after the other by domain."""
    with ActivationWriter(path, TraceMeta("demo", experts, layers, 2)) as out:
        for request in range(requests):
            for domain in range(domains):
                weight = np.where(np.arange(experts) % domains == domain, 8.0, 1.0)
                ids = (rng.random((40, layers, experts)) ** (1 / weight)).argpartition(-2, axis=2)[:, :, -2:]
                out.append(ids, np.ones(40, np.uint8), domain=f"d{domain}", id=f"{domain}-{request}")
    return path


def test_what_a_cycle_decides_can_be_migrated(rng: np.random.Generator) -> None:
    held = held_by(Placement.linear(2, 16, 4))
    cycle = ActionManager(Topology(4), settings=ActionSettings(min_mismatch=0.0, min_saving_s=0.0)).cycle(
        rng.gamma(0.3, 100.0, (4, 2, 16)), held
    )
    current, target = placement_from_held(held, 12), placement_from_held(cycle.held, 12, placement_from_held(held, 12))
    assert (held_by(target) == cycle.held).all()
    schedule = schedule_moves(current, target, Topology(4), MigrationLimits(44e6))
    assert schedule.moved_bytes == sum(event.moved_bytes for event in cycle.actions)
    assert not schedule.refusals
    with pytest.raises(ConfigError, match=r"rank 0 .*4 .*layer 0.*slots_per_rank=3"):
        placement_from_held(held, 3)


def test_ranks_take_equal_parts_of_the_traffic_in_order() -> None:
    domains = np.eye(3)[:, None, :]  # domain d asks for expert d only
    found = by_rank(domains, np.array([2.0, 1.0, 1.0]), 4)[:, 0]
    assert found == pytest.approx(np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]))
    uneven = by_rank(domains, np.array([1.0, 1.0, 1.0]), 2)[:, 0]
    assert uneven == pytest.approx(np.array([[2, 1, 0], [0, 1, 2]]) / 3)


def test_requests_planned_on_are_not_scored_on_and_the_seed_decides(rng: np.random.Generator) -> None:
    own = np.zeros((4, 1, 4))
    own[[0, 1, 2, 3], 0, [0, 1, 0, 1]] = 1.0  # every other request asks for expert 1 instead of 0
    domains = Domains("demo", {"a": own, "b": own}, 0)
    windows = make_windows(domains, 2, 5, 0.5, seed=3)
    assert windows.planned_on[..., 0] == pytest.approx(1.0)
    assert windows.scored_on[..., 1] == pytest.approx(1.0)
    real = Domains("demo", {name: rng.random((6, 2, 8)) for name in "abc"}, 0)
    one, again, other = (make_windows(real, 4, 6, 0.5, seed) for seed in (1, 1, 2))
    assert (one.scored_on == again.scored_on).all()
    assert (one.scored_on != other.scored_on).any()
    assert one.scored_on.sum(axis=3) == pytest.approx(1.0)


def test_a_trace_of_ones_own(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "WINDOWS", 8)
    found = run(SuiteOptions(trace=save(tmp_path / "t", rng)), quiet)
    remote = [row for row in found.rows if row["table"] == "remote"]
    assert [row["strategy"] for row in remote] == list(ORDER) * 3
    by = {(row["traffic"], row["strategy"]): row for row in remote}
    for strategy in ("static", "popularity", "swap"):
        assert by["at random", strategy]["remote_pct"] == pytest.approx(100 * (1 - 1 / RANKS))
    steady = [by["steady", name]["remote_pct"] for name in ORDER]
    assert steady[0] > 85
    assert steady[1] < 75, "a quarter of the experts takes most of a domain's tokens, and two ranks share it"
    assert steady[3] < steady[1]
    assert by["steady", "static"]["published"]["remote_pct"] == 87.5
    assert by["at random", "static"]["published"] is None
    assert by["steady", "both"]["memory_overhead_pct"] > 0 == by["steady", "swap"]["memory_overhead_pct"]
    execution = [row for row in found.rows if row["table"] == "execution"]
    assert [row["refused_layers"] for row in execution][-1] == 0
    assert any("ublished order, demo" in note or "Same order as published, demo" in note for note in found.notes)


def test_without_data_the_published_tables_are_still_checked(tmp_path: Path) -> None:
    found = run(SuiteOptions(), quiet)
    assert [row["table"] for row in found.rows] == ["memory"] * 5
    for row in found.rows:
        assert round(row["kv_gb"], 1) == row["published"]["kv_gb"]
        assert round(row["sessions"], 1) == row["published"]["sessions"]
    ratios = [row["formula_ratio"] and round(row["formula_ratio"], 3) for row in found.rows]
    assert ratios == [1.0, 1.001, 1.002, 1.003, None]
    assert any("COTERIE_DATA" in note for note in found.notes)
    assert any("does not exist" in note for note in run(SuiteOptions(data=tmp_path), quiet).notes)
    # All-to-all times and "throughput" of the published rows follow from its remote share.
    for remote, time_us, throughput, _ in PUBLISHED.values():
        assert 8.2 * remote / 87.5 == pytest.approx(time_us, abs=0.1)
        assert 100 * (1 - time_us / 8.2) == pytest.approx(throughput, abs=0.6)


def test_our_memory_table(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_memory, "CASES", (Case(8, 8192, None),))
    popularity = rng.gamma(2.0, 100.0, (3, 256))
    steps = Steps(popularity, Case(8, 2048, 16), seed=0)
    none, two = steps.locality(0), steps.locality(2)
    assert none.local == pytest.approx(1.0)
    assert none.inter_node == 0.0
    assert two.local > none.local
    assert steps.placement(2).duplicates == 0
    assert steps(0, 16.5) == pytest.approx((steps(0, 16) + steps(0, 17)) / 2)
    wide = Steps(popularity, Case(32, 2048, 16), seed=0).locality(0)
    assert wide.inter_node == pytest.approx(6.0), "three of four nodes"
    mine = [row for row in memory_rows(popularity, 0) if row["sizes"] == "ours"]
    totals = [row["kv_gb"] + row["replicas"] * row["replica_gb"] for row in mine]
    assert totals == pytest.approx([mine[0]["kv_gb"]] * len(mine)), "what replicas take, the cache loses"
    (best,) = [row for row in mine if row["replicas"] == row["best"]]
    assert best["throughput_ratio"] == max(row["throughput_ratio"] for row in mine)


def test_the_published_order_on_real_routing(data_dir: Path) -> None:
    domains = read_domains(data_dir / "activations" / "deepseek-v2-lite", SuiteOptions())
    assert set(domains.requests) == {"intent", "law", "summary", "translation"}
    windows = make_windows(domains, RANKS, 10, 0.6, seed=0)
    found = Bench(windows, 128, get_model(domains.model)).strategies()
    shares = [found[name].remote for name in ORDER]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.875, abs=0.01)
    assert shares[1] < 0.82
    assert shares[4] < 0.75


def test_bad_traces(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(TraceError, match="domains: found 1 of at least 4 requests, expected 2 or more"):
        run(SuiteOptions(trace=save(tmp_path / "one", rng, domains=1)), quiet)
    LoadTable(np.ones((4, 2, 8), np.uint64), labels=list("abcd")).save(tmp_path / "load")
    with pytest.raises(TraceError, match="domains: found 0"):
        run(SuiteOptions(trace=tmp_path / "load"), quiet)


def test_lost_sessions_cost_more_throughput_than_the_published_replicas_save() -> None:
    counts = (0, 4, 8, 12, 16)
    points = [PUBLISHED_BUDGET.point(n, published_step_s) for n in counts]
    assert [p.tokens_per_s / points[0].tokens_per_s for p in points] == pytest.approx(
        [1.0, 0.7394, 0.4782, 0.2164, 0.0], abs=1e-4
    ), "with the sessions that are lost, each replica costs throughput"
    assert PUBLISHED_BUDGET.best(published_step_s, 16).replicas == 0


def test_cheapest_homes_are_the_best_of_all_assignments() -> None:
    rng, start = np.random.default_rng(2), held_by(Placement.linear(2, 4, 2))
    manager = ActionManager(Topology(2), row_bytes=1e3)
    demand = rng.gamma(0.4, 50.0, (2, 2, 4))
    homes = cheapest_homes(manager, demand, start)
    local = [(demand[:, layer] * homes[:, layer]).sum() for layer in range(2)]
    for layer, asked in enumerate(demand.swapaxes(0, 1)):
        every = (asked[0, list(first)].sum() + np.delete(asked[1], first).sum() for first in combinations(range(4), 2))
        assert local[layer] == pytest.approx(max(every))
    assert (homes.sum(axis=0) == 1).all()
