from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.answers.suites import SuiteOptions
from coterie.errors import ConfigError
from coterie.footprints.counting import footprint, transitions
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.group.serving import GroupPrices, ServeSettings, ServingGroup
from coterie.types import INFINIBAND_400G, NVLINK4, Link, ModelSpec, Placement
from coterie_lab.suites.sem_moe import contenders, latency, serving
from coterie_lab.suites.sem_moe.choosing import CHOSEN, Trial, choose, halves, take
from coterie_lab.suites.sem_moe.contenders import RANKS, Contender, ServingBench, fitted_counts, serving_of
from coterie_lab.suites.sem_moe.published import E2E_P50, TEXT_GAINS, TTFT_P99
from coterie_lab.suites.sem_moe.summaries import summarise_served

SPEC = ModelSpec("small", 3, 16, 2, 2048, 64, 8, 8, 32, 1000, first_moe_layer=1)
LAYERS, ROWS, FIT = 2, 24, 64


def clustered(count: int, rng: np.random.Generator) -> Recordings:
    """Requests of 8 kinds: all tokens of kind g ask for experts g and g + 8, which in order lie on two ranks."""
    kind = rng.permutation(count) % RANKS
    ids = np.stack([kind, kind + RANKS], axis=1).astype(np.uint8)[:, None, None, :]
    first = np.arange(count) * ROWS
    expert_ids = np.ascontiguousarray(np.broadcast_to(ids, (count, ROWS, LAYERS, 2)).reshape(-1, LAYERS, 2))
    return _recordings(expert_ids, first)


def mixed(count: int, rng: np.random.Generator) -> Recordings:
    ids = np.array([[rng.permutation(16)[:2] for _ in range(LAYERS)] for _ in range(count * ROWS)], np.uint8)
    return _recordings(ids, np.arange(count) * ROWS)


def _recordings(ids: Any, first: Any) -> Recordings:
    count = len(first)
    shown = np.array([footprint(ids[row : row + 12], 16) for row in first])
    return Recordings(ids, 16, first, np.full(count, 12), first + 12, np.full(count, ROWS - 12), shown)


def bench(kind: str = "mixed", seed: int = 0) -> ServingBench:
    rng = np.random.default_rng(seed)
    make = clustered if kind == "clustered" else mixed
    return ServingBench("small", seed, SPEC, make(FIT, rng), make(48, rng))


def together(one: ServingBench, _link: Link) -> tuple[list[Contender], list[str]]:
    """Vanilla, and experts g and g + 8 on rank g with their requests."""
    slots = np.tile(np.arange(16).reshape(2, 8).T.ravel().astype(np.int32), (LAYERS, 1))
    placement = Placement(slots, RANKS, 16)
    beside = Contender(
        "beside",
        placement,
        contenders.affinity_to(placement, one.test),
        "least_busy",
        contenders.best_token_ranks(placement, one.test),
        baseline=False,
    )
    return [Contender("vanilla", one.linear), beside], []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_affinity_and_masks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    records = mixed(10, rng)
    placement = Placement(np.array([rng.permutation(16) for _ in range(LAYERS)], np.int32), RANKS, 16)
    affinity = contenders.affinity_to(placement, records)
    assert affinity.sum(axis=1) == pytest.approx(1.0), "every activation is on one rank"
    recorded = rng.integers(0, 10, 40)
    requests = FleetRequests(records, recorded, np.full(40, 8), np.full(40, 2))
    ranks = serving_of(Contender("x", placement, affinity), requests).ranks
    assert ranks is not None
    for start in range(0, 40, RANKS):
        assert sorted(ranks[start : start + RANKS]) == list(range(RANKS)), "a round takes every rank once"
        assert ranks[start] == affinity[recorded[start]].argmax(), "the first of a round goes where it likes"
    best = contenders.best_token_ranks(placement, records)
    for layer in range(LAYERS):
        where = {int(expert): slot // 2 for slot, expert in enumerate(placement.slot_experts[layer])}
        for row in rng.integers(0, len(records.expert_ids), 20):
            counts = np.bincount([where[int(expert)] for expert in records.expert_ids[row, layer]], minlength=RANKS)
            assert counts[best[layer, row]] == counts.max()
    assert serving_of(Contender("x", placement), requests).ranks is not None
    assert serving_of(Contender("x", placement, affinity, "least_busy"), requests).ranks is None


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_requests_go_to_the_least_busy_rank(seed: int) -> None:
    """Prompts that arrive together spread out, affinity decides among idle ranks, and no rank runs far ahead."""
    rng, one = np.random.default_rng(seed), bench()
    requests = one.requests(one.test, 48, 40, 4)
    group = ServingGroup(GroupPrices.of(one.model(NVLINK4), ServeSettings(8, 64, 16)), one.linear, requests)
    router = contenders.LeastBusy(rng.random((48, RANKS)))
    together = group.serve(np.zeros(48), router=router)
    assert np.ptp(np.bincount(together.rank, minlength=RANKS)) <= contenders.MOST_AHEAD, "equal prompts, equal queues"
    alone = group.serve(np.linspace(0.0, 470.0, 48), router=router)
    assert alone.rank.tolist() == router.affinity.argmax(axis=1).tolist()


def test_a_run_is_summarised() -> None:
    one = bench()
    requests = one.requests(one.test, 16, 40, 4)
    group = ServingGroup(GroupPrices.of(one.model(NVLINK4), ServeSettings()), one.linear, requests)
    run = group.serve(np.linspace(0.0, 1.0, 16))
    summary = summarise_served(run)
    assert summary.e2e_p50_ms == pytest.approx(1e3 * np.median(run.finish_s - run.arrival_s))
    assert 0.0 < summary.all_to_all_pct + summary.ring_pct < 100.0
    assert 0.0 < summary.local_rate < 1.0
    with pytest.raises(ConfigError, match="requests finished; metrics are of whole runs"):
        summarise_served(group.serve(np.zeros(16), until_s=0.0))


def test_what_planners_learn_from() -> None:
    one = bench()
    counts, flows = fitted_counts(one), transitions(one.fit.expert_ids, 16)
    assert counts.sum() == one.fit.expert_ids.size
    assert np.array_equal(counts.sum(axis=0), one.load.tokens)
    assert flows.sum() == len(one.fit.expert_ids) * (LAYERS - 1) * 2 * 2
    assert np.array_equal(flows[0].sum(axis=1), 2 * one.load.tokens[0])


def test_default_contenders_serve_what_is_registered() -> None:
    made, notes = contenders.default_contenders(bench(), NVLINK4)
    names = [one.name for one in made]
    assert names[0] == "vanilla"
    assert "popularity" in names
    for name in ("moetuner", "sem_moe", "co_cluster"):
        assert name in names or any(name in note for note in notes), "served, or a note says why not"


def test_halves_share_no_request() -> None:
    one = bench()
    first, second = halves(one)
    assert len(first.fit) + len(first.test) == len(one.fit) == FIT
    assert np.array_equal(first.fit.expert_ids, second.test.expert_ids)
    assert fitted_counts(first).sum() + fitted_counts(second).sum() == one.fit.expert_ids.size
    part = take(one.fit, np.array([3, 7]))
    assert np.array_equal(part.expert_ids[ROWS:], one.fit.expert_ids[7 * ROWS : 8 * ROWS])
    assert part.footprint is not None
    assert one.fit.footprint is not None
    assert np.array_equal(part.footprint[1], one.fit.footprint[7])


def test_co_scheduling_is_chosen_where_it_pays() -> None:
    """Clear clusters on a slow link pay; what gains less than the margin does not, and a baseline is kept."""
    prices = GroupPrices.of(bench().model(INFINIBAND_400G), ServeSettings())
    one = bench("clustered")
    trials = [Trial(half, together(half, NVLINK4)[0]) for half in halves(one)]
    assert choose(trials, prices, serving.PROMPT_TOKENS, 8)["ttft"] == "beside"
    same = [Contender("vanilla", one.linear), Contender("other", one.linear, baseline=False)]
    assert set(choose([Trial(one, same)], prices, serving.PROMPT_TOKENS, 8).values()) == {"vanilla"}


def test_a_limit_is_where_the_latency_crosses() -> None:
    one = bench()
    limits = []
    for link in (NVLINK4, INFINIBAND_400G):
        prices = GroupPrices.of(one.model(link), ServeSettings())
        curve = serving.Curve(one, Contender("vanilla", one.linear), prices)
        slo = 5.0 * curve.at(serving.LIGHTEST).ttft_p99_ms
        guess = 2000.0 / curve.serve(np.zeros(2000)).end_s
        found = curve.limit("ttft_p99_ms", slo, guess, 2000)
        assert curve.at(found.rate / serving.GRID, 2000).ttft_p99_ms <= slo * 1.05
        assert curve.at(found.rate * serving.GRID, 2000).ttft_p99_ms >= slo / 1.05
        assert found.tokens_per_s == pytest.approx(found.rate * (serving.PROMPT_TOKENS + serving.OUTPUT_TOKENS))
        limits.append(found.rate)
    assert limits[0] > limits[1], "a faster link holds a higher rate"


def test_rows_and_words() -> None:
    one = bench("clustered")
    result = serving.serve_bench(one, together, (10.0,))
    rows = serving.rows_of("small", [result, result])
    assert json.loads(json.dumps(rows)) == rows, "plain values"
    assert {row["planner"] for row in rows} == {"vanilla", "beside", CHOSEN}
    assert len({(row["link"], row["dispatch"]) for row in rows}) == 4
    for row in rows:
        if row["planner"] == "vanilla":
            assert row["ttft_over_vanilla_pct"] == row["ttft_over_best_pct"] == 0.0
        if row["planner"] == "beside":
            assert row["local_activation_rate"] > 0.5
        if row["planner"] == CHOSEN:
            for limit, name in row["chosen"][0].items():
                same = [one for one in rows if (one["link"], one["dispatch"]) == (row["link"], row["dispatch"])]
                picked = next(one for one in same if one["planner"] == name)
                assert row[f"{limit}_rate"] == picked[f"{limit}_rate"], "it serves what it chose"
    slow = [row for row in rows if row["link"] == INFINIBAND_400G.name and row["planner"] == "beside"]
    assert all(row["ttft_over_vanilla_pct"] > 2.0 for row in slow)
    assert any("vanilla holds" in note for note in serving.serving_notes(rows))


def test_without_data_nothing_is_served() -> None:
    assert serving.serving_rows(SuiteOptions(), lambda *_: None) == []
    assert latency.latency_rows(SuiteOptions(), lambda *_: None) == []
    assert "COTERIE_DATA" in serving.serving_notes([])[0]


def test_latency_rows_keep_the_scatter_and_the_shuffle_apart() -> None:
    one = replace(bench("clustered"), trace="deepseek-v2-lite")
    found = latency.serve_bench(one, together(one, NVLINK4)[0])
    rows = [latency._row(one.trace, served, [found]) for served in found]
    assert json.loads(json.dumps(rows)) == rows
    by = {(row["link"], row["prompt_tokens"], row["planner"], row["collectives"]): row for row in rows}
    for (link, prompt, planner, collectives), row in by.items():
        base = by[link, prompt, "vanilla", "all_reduce"]
        scatter = by[link, prompt, "vanilla", "reduce_scatter"]
        assert base["ttft_saved_pct"] == scatter["ttft_saved_by_shuffle_pct"] == 0.0
        assert scatter["ttft_p50_ms"] < base["ttft_p50_ms"], "one pass around the ring less"
        if (planner, collectives) == ("vanilla", "replicated"):
            assert row["all_to_all_pct"] == 0.0
        if planner == latency.ORACLE:
            assert row["local_rate"] > scatter["local_rate"]
        assert row["published"]["ttft_p99_ms"] == TTFT_P99["deepseek-v2-lite", prompt].sem_moe
    assert len(latency.latency_notes(rows)) == 2 + 2 * len(latency.PROMPTS)


def test_both_readings_of_the_published_table() -> None:
    better = [one.gain_pct(worse=False) for one in TTFT_P99.values()]
    assert (round(min(better), 1), round(max(better), 1)) == (3.4, 17.7)
    for key, one in TTFT_P99.items():
        assert one.ratio_pct == pytest.approx(TEXT_GAINS[key], abs=0.11), "the text divides the worse by Sem-MoE's"
        assert one.gain_pct(worse=True) >= one.gain_pct(worse=False)
    assert all(one.gain_pct(worse=False) < 1.2 for one in E2E_P50.values())
    assert "3.4 to 17.7%" in latency.latency_notes([])[0]
