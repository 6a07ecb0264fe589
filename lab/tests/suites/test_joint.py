from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement.holdings import held_by
from coterie.routing.fleet import Fleet
from coterie.routing.joint import Joint
from coterie.types import INFINIBAND_400G
from coterie_lab.suites.eldr.synthetic import SyntheticSize
from coterie_lab.suites.joint import cells as joint_cells
from coterie_lab.suites.joint import published as joint_published
from coterie_lab.suites.joint import suite as joint
from coterie_lab.suites.joint.cells import CHAIN, RANKS, REPLICATION, ROUTING, STANDARD, GroupBench, JointCell, Served
from coterie_lab.suites.joint.decode_batch import DecodeBatcher, DecodePrices
from coterie_lab.suites.joint.loop import GroupOutcome, summarise_group
from coterie_lab.suites.joint.notes import TABLES, notes_of, verdict

FIELDS = (
    "part trace routing configuration router tbt_mean_ms tbt_p99_ms tokens_per_s all_to_all_pct remote_pct published"
)
TINY = SyntheticSize(recordings=60, fitted=28, prompt_tokens=8, output_tokens=8)


@pytest.fixture(scope="module")
def bench(data_dir: Path) -> GroupBench:
    return joint_cells.bench_of(JointCell("deepseek-v2-lite", 4, 0), data_dir, 110)


def test_the_loop_is_full_and_every_token_comes_once(bench: GroupBench) -> None:
    loop = bench.served
    run = loop.serve(bench.in_order, bench.router("round_robin"))
    assert (run.tokens == loop.in_flight).all()
    for start, after, part in zip(run.start_s, run.start_s[1:], run.parts, strict=False):
        assert after - start == pytest.approx(part.total_s)
    for gaps, part in zip(run.gaps, run.parts, strict=True):
        np.testing.assert_allclose(gaps, part.total_s)  # nobody is ever held back
    assert run.arrived[0] == loop.in_flight
    assert run.arrived[-1] <= (run.ranks >= 0).sum() <= len(loop.requests)
    served = np.flatnonzero(run.ranks >= 0)
    assert run.tokens.sum() <= loop.requests.output_tokens[served].sum()
    found = summarise_group(run, loop.in_flight, RANKS)
    assert found.tokens_per_s * found.tbt_mean_ms == pytest.approx(1e3 * loop.in_flight)
    assert found.all_to_all_pct + found.experts_pct < 100
    with pytest.raises(ConfigError, match="not replaced once"):
        summarise_group(run, len(loop.requests), RANKS)


def test_no_recording_is_in_flight_twice(bench: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[int] = set()
    admit, finish, recorded = Fleet.admit, Fleet.finish, bench.served.requests.recorded

    def admitted(self: Fleet, request_id: Any, *arguments: Any) -> None:
        assert recorded[int(request_id)] not in there
        there.add(recorded[int(request_id)])
        admit(self, request_id, *arguments)

    def finished(self: Fleet, request_id: Any) -> None:
        there.remove(recorded[int(request_id)])
        finish(self, request_id)

    monkeypatch.setattr(Fleet, "admit", admitted)
    monkeypatch.setattr(Fleet, "finish", finished)
    run = bench.served.serve(bench.in_order, Joint())
    assert run.arrived[-1] > 2 * bench.served.in_flight


def test_calibration_requests_are_not_served(bench: GroupBench) -> None:
    known, served = (loop.requests.recordings for loop in (bench.known, bench.served))
    assert known.footprint is not None
    assert served.footprint is not None
    rows = {row.tobytes() for row in known.footprint}
    assert not rows & {row.tobytes() for row in served.footprint}
    assert len(known) + len(served) == 213


def test_who_is_held_back_waits_and_nobody_starves(bench: GroupBench) -> None:
    loop, prices = bench.served, DecodePrices(0.0, 100.0, 0.0)
    batcher = DecodeBatcher(prices, budget_us=200.0, max_skips=3)
    run = loop.serve(bench.in_order, bench.router("join_shortest_queue"), batcher)
    assert run.tokens.max() <= 2 * RANKS
    longest = max(float(gaps.max()) for gaps in run.gaps)
    slowest = max(part.total_s for part in run.parts)
    assert slowest < longest < (3 + 4) * slowest
    found = summarise_group(run, loop.in_flight, RANKS)
    assert found.decoding_pct < 100
    assert found.tbt_p99_ms > found.tbt_mean_ms


def test_a_wide_budget_changes_nothing(bench: GroupBench) -> None:
    plain = bench.outcome(bench.in_order, Joint())
    wide = bench.outcome(
        bench.in_order, Joint(), DecodeBatcher(joint_cells.decode_prices(bench, bench.in_order).prices)
    )
    assert plain == wide


def test_prices_meet_the_calibrated_step(bench: GroupBench) -> None:
    found = joint_cells.decode_prices(bench, bench.in_order)
    loop, spec = bench.known, bench.spec
    parts = loop.serve(bench.in_order, Joint()).parts
    remote = np.mean([part.remote / part.activations for part in parts]) * spec.top_k * spec.num_moe_layers
    each = loop.in_flight / RANKS
    told = found.prices.fixed_us + each * (found.prices.request_us + found.prices.remote_us * remote)
    assert told == pytest.approx(found.step_us)
    assert found.step_us == pytest.approx(1e6 * np.mean([part.total_s for part in parts]))


def test_a_slower_link_lengthens_the_exchange_alone(bench: GroupBench) -> None:
    near, far = (one.served.serve(one.in_order, Joint()).parts for one in (bench, bench.linked(INFINIBAND_400G)))
    assert [part.remote for part in near] == [part.remote for part in far]
    assert [part.experts_s for part in near] == [part.experts_s for part in far]
    assert all(a.all_to_all_s < b.all_to_all_s for a, b in zip(near, far, strict=True))


def test_replicas_go_to_who_asks(bench: GroupBench) -> None:
    spec, asked = bench.spec, bench.known.serve(bench.in_order, Joint()).asked
    before, remote = held_by(bench.in_order), []
    for extra in (1, 2, 8):
        held = held_by(joint_cells.replicated(spec, asked, extra))
        assert (held | ~before).all(), "experts stay where they were"
        assert held.sum(axis=0).max() <= 3
        assert held.sum(axis=2).max() == spec.num_experts // RANKS + extra
        remote.append(asked[~held].sum())
    assert asked[~before].sum() > remote[0] > remote[1] > remote[2]
    assert joint_cells.evened(spec, asked, 2).slots_per_rank == spec.num_experts // RANKS + 2
    clusters = held_by(joint_cells.by_cluster(spec, bench.served.fitted))
    assert (clusters.sum(axis=0) == 1).all()
    assert (clusters.sum(axis=2) == spec.num_experts // RANKS).all()


def test_what_memory_allows() -> None:
    v3 = get_model("deepseek-v3")
    assert joint_cells.slots_that_fit(v3, "bf16", 0) == 0  # its experts alone do not fit
    few, many = joint_cells.slots_that_fit(v3, "fp8", 0), joint_cells.slots_that_fit(v3, "fp8", 300_000)
    assert few >= 8 > many >= 0
    assert joint_cells.slots_that_fit(get_model("gpt-oss-20b"), "bf16", 0) == 28  # all that a rank lacks


def test_too_few_recordings_are_refused(data_dir: Path) -> None:
    with pytest.raises(ConfigError, match="8 x 14 in flight need as many recordings"):
        joint_cells.bench_of(JointCell("deepseek-v2-lite", 14, 0), data_dir)
    with pytest.raises(ConfigError, match="needs the folder of real data"):
        joint_cells.bench_of(JointCell("gpt-oss-20b", 16, 0), None)


def made(tbt: float, exchange: float = 3.0) -> GroupOutcome:
    return GroupOutcome(tbt, tbt * 1.1, 1e3 / tbt, exchange, 50.0, 87.5, 1.1, 100.0, 10)


def made_cell(times: tuple[float, ...]) -> dict[Served, GroupOutcome]:
    steps = dict(zip(CHAIN, times, strict=True))
    cell = {Served("main", STANDARD, "join_shortest_queue"): made(10.0)}
    cell[Served("main", ROUTING, "latency_aware")] = made(9.0)
    for name, tbt in steps.items():
        for part in ("main", "slow link"):
            cell[Served(part, name, "round_robin" if name == STANDARD else "joint")] = made(tbt)
    cell[Served("locality", ROUTING, "joint, no load")] = made(9.5)
    cell[Served("locality", ROUTING, "locality_band", 0, "clusters")] = made(9.5)
    return cell


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((10.0, 9.0, 8.0, 7.0), "the published order: every step is below the one before"),
        ((10.0, 9.0, 12.0, 12.0), "not the published order; from the shortest mean TBT to the longest: + expert-aware"),
    ],
)
def test_steps_are_compared_with_the_one_before(times: tuple[float, ...], words: str) -> None:
    cells = {JointCell("gpt-oss-20b", 16, seed): made_cell(tuple(t + seed / 100 for t in times)) for seed in range(3)}
    rows = joint.rows_of(cells)
    chain = [row for row in rows if row["published"] is not None]
    assert [row["configuration"] for row in chain] == list(CHAIN)
    for (before, after), row in zip(pairwise(times), chain[1:], strict=True):
        assert row["step_tbt_mean_saving_pct"] == pytest.approx(100 * (1 - after / before), abs=0.2)
        assert row["tbt_mean_saving_pct"] == pytest.approx(100 * (1 - after / times[0]), abs=0.2)
    assert chain[1]["shortest_tbt_mean_saving_pct"] == pytest.approx(100 * (1 - times[1] / 10), abs=0.2)
    assert any(words in note for note in notes_of(rows))
    json.dumps(rows)


def test_a_verdict_needs_an_interval() -> None:
    def row(low: float | None, high: float | None, gain: float = 0.0) -> dict[str, float | None]:
        return {"x_pct": gain, "x_low": low, "x_high": high}

    assert verdict(row(0.1, 0.4), "x") == "helps"
    assert verdict(row(-0.4, -0.1), "x") == "hurts"
    assert verdict(row(-0.1, 0.1), "x") == "not told apart from nothing"
    assert verdict(row(0.0, 0.0), "x") == verdict(row(None, None), "x") == "does nothing"
    assert verdict(row(None, None, 0.3), "x") == "helps (one seed: no interval)"


def test_published_figures_and_their_arithmetic() -> None:
    found = joint_published.published_of(REPLICATION)
    assert (found["tbt_mean_ms"], found["tbt_p99_ms"], found["all_to_all_pct"]) == (34.2, 52.8, 24.0)
    assert found["step_tbt_mean_saving_pct"] == pytest.approx(11.6, abs=0.05)
    for one in joint_published.TABLE.values():
        assert one.tokens_per_s == pytest.approx(1e3 * joint_published.BATCH / one.tbt_mean_ms, rel=0.01)


@pytest.mark.long
def test_without_data_synthetic_routing_alone_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie_lab.suites.running.os.cpu_count", lambda: 1)
    monkeypatch.setitem(joint_cells.DTYPES, "qwen3-30b-a3b", "bf16")

    def serve_tiny(cell: Any, data: Any, requests: Any) -> Any:
        return joint_cells.serve_cell(JointCell("qwen3-30b-a3b", 2, cell.seed), data, requests, TINY)

    monkeypatch.setattr(joint, "serve_cell", serve_tiny)
    monkeypatch.setattr(joint, "prefix_jobs_of", lambda *_: [])
    monkeypatch.setattr(joint_cells, "STEP_TOKENS", (64,))
    told = []
    found = joint.run(SuiteOptions(data=None, seeds=(0,)), lambda *seen: told.append(seen))
    assert told == [("Serving", 0, 1), ("Serving", 1, 1)]
    assert {row["routing"] for row in found.rows} == {"synthetic"}
    assert all(set(row) >= set(FIELDS.split()) for row in found.rows)
    main = {(row["configuration"], row["router"]) for row in found.rows if row["part"] == "main"}
    joined = {(step, "joint") for step in CHAIN if step != STANDARD}
    others = {(STANDARD, "round_robin"), (STANDARD, "join_shortest_queue"), (ROUTING, "latency_aware")}
    assert main == joined | others
    assert "COTERIE_DATA" in found.notes[0]
    shown = {table.title: [row for row in found.rows if table.shows(row)] for table in TABLES}
    assert sum(len(rows) for rows in shown.values()) == len(found.rows)
    for table in TABLES:
        assert all(column.value(row) is not None for row in shown[table.title] for column in table.columns)
    json.dumps(found.rows)
