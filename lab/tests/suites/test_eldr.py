"""The ELDR suite: splits apart, steady windows, formed batches, limit and rows, on real runs of small fleets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.fleet.bench import Bench, bench_of, split, steady
from coterie.answers.fleet.simulation import FleetSettings, simulate_fleet
from coterie.answers.suites import SuiteOptions
from coterie.costs.presets import step_model
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.routing.locality_band import LocalityBand
from coterie.sim.fleet.requests import split_recordings
from coterie_lab.suites.eldr import fleets, synthetic
from coterie_lab.suites.eldr import published as eldr_published
from coterie_lab.suites.eldr import suite as eldr
from coterie_lab.suites.eldr.analysis import analyse, domain_unions, phase_correlation
from coterie_lab.suites.eldr.cells import LIMIT_ROUTER, Assigned, Cell, CellResult, find_limit, serve_cell
from coterie_lab.suites.eldr.figures import draw_figures
from coterie_lab.suites.eldr.fleets import (
    ROUTERS,
    Outcome,
    closed_bench,
    compare_routers,
    recorded_source,
    with_clusters,
)
from coterie_lab.suites.eldr.notes import notes_of
from coterie_lab.suites.eldr.rows import best_balancer, fleet_row, limit_rows, main_rows
from coterie_lab.suites.eldr.synthetic import SyntheticCell, SyntheticSize, language_source, serve_synthetic

FIELDS = "trace router decoders in_flight active_experts saving_pct tpot_p50_ms tpot_p99_ms published part"
TINY = SyntheticSize(recordings=72, fitted=24, prompt_tokens=8, output_tokens=8, requests=60)


@pytest.fixture(scope="module")
def source(data_dir: Path) -> Any:
    return recorded_source(data_dir, "gpt-oss-20b")


@pytest.fixture(scope="module")
def bench(source: Any) -> Bench:
    return closed_bench(source, 4, 4, 0, 150)


@pytest.fixture(scope="module")
def served(bench: Bench) -> Any:
    return bench.serve(bench.router("latency_aware"))


def outcomes(experts: float, p50: float, p99: float) -> Outcome:
    return Outcome(experts, experts, experts, experts / 20, p50, p99, p50, p50, p50, 100, 0.1)


pytestmark = pytest.mark.long


def test_the_steady_part_is_full_and_begins_after_one_replacement(served: Any) -> None:
    window = steady(served, 16)
    for time in np.linspace(window.since_s, window.until_s, 50, endpoint=False):
        there = int(((served.arrival_s <= time) & (served.finish_s > time)).sum())
        assert there == 16
    first = np.sort(served.arrival_s)[:16]
    assert (first == 0).all()
    assert int((served.arrival_s <= window.since_s).sum()) >= 32
    with pytest.raises(ConfigError, match="twice the 100 in flight"):
        steady(served, 100)


def test_experts_of_a_run_by_steps_tokens_and_time(served: Any) -> None:
    window = steady(served, 16)
    found = fleets.outcome(served, window, fleets.experts_by_rows(served, window))
    inside = (served.step_start_s >= window.since_s) & (served.step_start_s < window.until_s)
    distinct = served.step_distinct[inside]
    assert found.active_experts == pytest.approx(distinct.mean())
    assert found.active_experts_by_token == pytest.approx(np.average(distinct, weights=served.step_decoding[inside]))
    assert found.active_experts_by_time == pytest.approx(np.average(distinct, weights=served.step_s[inside]))
    assert found.experts_at_rows == pytest.approx(1.0, abs=0.02)  # against itself
    halved = fleets.outcome(
        served._replace(step_distinct=served.step_distinct / 2), window, fleets.experts_by_rows(served, window)
    )
    assert halved.experts_at_rows == pytest.approx(found.experts_at_rows / 2)


def test_assigned_requests_go_where_they_were_assigned(bench: Bench) -> None:
    workers = np.arange(len(bench.requests), dtype=np.int64) % 4
    run = bench.serve(Assigned(workers))
    np.testing.assert_array_equal(run.decoder, workers)


def test_the_limit_is_above_what_routers_reach(source: Any, bench: Bench) -> None:
    limit, labels = find_limit(source, split(source, 0), bench)
    assert 0 < limit.cosine <= limit.limit
    assert 0 < limit.union <= limit.limit
    assert np.bincount(labels).max() <= -(-len(labels) // 4)


def test_other_signatures_and_clusters_are_routed_by(source: Any, bench: Bench) -> None:
    halves = split(source, 0)
    for weighting in ("gate", "binary"):
        other = with_clusters(bench, source.counts, halves, weighting)
        assert other.fitted.learned.signature.weighting == weighting
        assert np.isfinite(other.serve(LocalityBand(other.fitted)).finish_s).all()
    gates = with_clusters(bench, source.counts, halves, "gate").requests.recordings.footprint
    assert gates is not None
    assert bench.requests.recordings.footprint is not None
    assert not np.array_equal(gates, bench.requests.recordings.footprint)


def test_a_cell_serves_every_router_and_makes_whole_rows(data_dir: Path, tmp_path: Path) -> None:
    found = [serve_cell(Cell("gpt-oss-20b", 3, 16, seed), data_dir, 260) for seed in (0, 1)]
    assert set(found[0].outcomes) == {*ROUTERS, LIMIT_ROUTER}
    rows = main_rows("gpt-oss-20b", 3, 16, [one.outcomes for one in found]) + limit_rows(3, found)
    assert all(set(row) >= set(FIELDS.split()) for row in rows)
    by = {row["router"]: row for row in rows if row["part"] == "main"}
    assert by["round_robin"]["saving_pct"] == 0
    assert by["latency_aware"]["saving_by_token_pct"] > by["join_shortest_queue"]["saving_by_token_pct"]
    limit = next(row for row in rows if row.get("clusters") == "limit")
    assert limit["share"] == 1
    json.dumps(rows)
    assert any("union clusters reach" in note for note in notes_of(rows))
    assert [path.name for path in draw_figures(tmp_path, rows)] == ["eldr_loads.pdf", "eldr_loads.png"]


def test_more_in_flight_than_recordings_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="as many recordings"):
        closed_bench(source, 12, 18, 0)


def test_savings_are_paired_and_held_against_the_best_balancer() -> None:
    runs = [
        {name: outcomes(20.0 + seed, 10.0 + seed, 12.0) for name in ("round_robin", "random", "locality_band")}
        | {"join_shortest_queue": outcomes(21.0, 10.5 + seed, 11.0), "latency_aware": outcomes(18.0, 9.0 + seed, 10.0)}
        for seed in (0, 1)
    ]
    assert best_balancer(runs, "tpot_p50_ms") in ("round_robin", "random")
    assert best_balancer(runs, "tpot_p99_ms") == "join_shortest_queue"
    ours = next(row for row in main_rows("gpt-oss-20b", 8, 16, runs) if row["router"] == "latency_aware")
    assert ours["saving_pct"] == pytest.approx(50 * ((1 - 18 / 20) + (1 - 18 / 21)))
    assert ours["tpot_p99_saving_over_balancer_pct"] == pytest.approx(100 * (1 - 10 / 11))
    assert ours["tpot_p99_saving_ahead_pct"] == pytest.approx(100 * (1 - 10 / 12))


@pytest.mark.parametrize(("p50", "word"), [(9.0, "surely)"), (11.0, "surely not")])
def test_notes_tell_when_latency_aware_is_not_ahead(p50: float, word: str) -> None:
    runs = [
        {name: outcomes(20.0, 10.0 + seed / 100, 12.0) for name in ROUTERS}
        | {"latency_aware": outcomes(18.0, p50 + seed / 90, 14.0)}
        for seed in (0, 1, 2)
    ]
    notes = notes_of(main_rows("gpt-oss-20b", 8, 16, runs))
    (told,) = [note for note in notes if "ahead of locality_band" in note]
    median = told.split("p50")[1].split("p99")[0]
    assert word in median + ")"
    assert any("latency_aware's p99 is 16.7% above the shortest queue's" in note for note in notes)


def test_unions_against_the_mean_over_all_pairs(source: Any) -> None:
    """Two tokens of two requests share what their probabilities say: 4 + 4 less the shared, in each layer."""
    labels = np.array(source.trace.requests.domains)
    known, counts = np.unique(labels, return_counts=True)
    pool = np.flatnonzero(np.isin(labels, known[counts >= 2]))
    p = np.asarray(source.counts.probabilities[1][pool], np.float64)
    shared = (p @ p.T) / 24
    other = ~np.eye(len(pool), dtype=bool)
    alike = other & (labels[pool][:, None] == labels[pool][None])
    found = domain_unions(source, 2, 4000, np.random.default_rng(0))
    assert found.domains == (counts >= 2).sum()
    assert found.mixed == pytest.approx(8 - shared[other].mean(), abs=0.03)
    same = np.mean([8 - shared[row][alike[row]].mean() for row in range(len(pool))])
    assert found.same == pytest.approx(same, abs=0.03)


def test_correlation_by_numpy(source: Any) -> None:
    before, after = source.counts.probabilities
    expected = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(before, after, strict=True)])
    assert phase_correlation(source) == pytest.approx(expected, abs=1e-4)


def test_signatures_are_scored_on_requests_they_were_not_fitted_on(data_dir: Path) -> None:
    found = analyse(("deepseek-v2-lite", 0), data_dir)
    assert set(found.rho) == {"count_idf", "count", "gate", "binary"}
    assert all(0 < value < 1 for value in found.rho.values())
    assert found.rho["binary"] < found.rho["count_idf"]


def test_synthetic_languages_are_alike_within() -> None:
    source = language_source("qwen3-30b-a3b", 0, TINY)
    assert source.trace.requests.domains is not None
    assert set(source.trace.requests.domains) <= {"en", "zh", "ru", "fr", "es", "de"}
    found = serve_synthetic(SyntheticCell("topology", 2, 4, 0), TINY)
    assert set(found.outcomes) >= {"round_robin", "latency_aware"}
    assert found.unions.same < found.unions.mixed


def test_a_placement_spreads_decoders_over_ranks() -> None:
    whole, spread = (serve_synthetic(SyntheticCell(part, 2, 4, 0), TINY) for part in ("topology", "expert_parallel"))
    assert spread.outcomes["round_robin"].step_ms != whole.outcomes["round_robin"].step_ms


def test_without_data_only_synthetic_parts_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("coterie_lab.suites.running.os.cpu_count", lambda: 1)
    monkeypatch.setattr(synthetic, "POOLS", (8,))
    monkeypatch.setattr(
        eldr, "serve_synthetic", lambda cell: serve_synthetic(cell._replace(decoders=2, per_decoder=4), TINY)
    )
    found = eldr.run(SuiteOptions(data=None, seeds=(0,), out=tmp_path), lambda *_: None)
    assert {row["part"] for row in found.rows} == {"topology", "expert_parallel"}
    assert {row["routing"] for row in found.rows} == {"synthetic"}
    assert all(set(row) >= set(FIELDS.split()) for row in found.rows)
    assert "COTERIE_DATA" in found.notes[0]
    assert list(tmp_path.iterdir()) == [], "the figure is of recorded routing"


def test_jobs_that_differ_in_their_seed_alone_make_one_row(data_dir: Path) -> None:
    jobs = eldr.jobs_of(data_dir, (0, 1, 2, 3))
    assert len(set(jobs)) == len(jobs)
    runs = {name: outcomes(20.0, 10.0, 12.0) for name in ROUTERS}
    cells: dict[Any, Any] = {
        Cell("deepseek-v2-lite", *load, seed): CellResult(runs, None) for load in ((4, 16), (5, 3)) for seed in (0, 1)
    }
    rows = eldr.rows_of(cells)
    loads = [(row["decoders"], row["in_flight"], row["seeds"]) for row in rows if row["router"] == "random"]
    assert sorted(loads) == [(4, 16, 2), (5, 3, 2)]


def test_published_figures_are_those_of_the_paper() -> None:
    assert eldr_published.plain(eldr_published.TOPOLOGY)[24] == {"tpot_p50": 10.2, "tpot_p99": 1.1}
    assert str(eldr_published.EXPERT_PARALLEL["tpot_p50"]) == "2.7 to 4.3"
    row = fleet_row("topology", "x", "random", 8, 16, [{name: outcomes(1.0, 1.0, 1.0) for name in ROUTERS}])
    assert row["saving_pct"] == 0


def test_the_same_savings_as_the_suite(data_dir: Path) -> None:
    """On recorded routing, at one load and with the suite's splits, the verb and the suite agree to the last digit."""
    names = ("latency_aware",)
    source = recorded_source(data_dir, "gpt-oss-20b")
    model = step_model(get_model("gpt-oss-20b"), "h200", "bf16")
    settings = FleetSettings(4, 8, routers=names, base="round_robin", splits=2, requests=100)
    found = {row.router: row for row in simulate_fleet(source.trace, model, settings).rows}
    saved: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(2):
        halves = split(source, seed)
        bench = bench_of(source, halves, split_recordings(source.trace, halves.test), 4, 8, seed, 100)
        outcomes = compare_routers(bench, {name: bench.router(name) for name in names})
        for name in names:
            saved[name].append(100 * (1 - outcomes[name].tpot_mean_ms / outcomes["round_robin"].tpot_mean_ms))
    for name in names:
        assert found[name].saved_pct.mean == pytest.approx(np.mean(saved[name]), abs=1e-9)
