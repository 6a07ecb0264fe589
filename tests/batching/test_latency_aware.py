"""latency_aware: what it minimises, when it reorders, and its step cost against the whole step model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.batching import GreedyDotProduct, LatencyAware, Window
from coterie.batching.base import SpreadCost
from coterie.batching.latency_aware import measure_trust
from coterie.costs.lines import StepCost
from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.sim.execution import StepTimer
from coterie.types import Placement, Topology

DEEP = 100_000
STREAMING = StepCost(
    fixed_us=10.0, first_us=10.0, tile_rows=64.0, row_us=0.01, arrival_us=0.0, num_ranks=1, by_tokens=False
)
STRAGGLING = StepCost(
    fixed_us=10.0, first_us=0.1, tile_rows=1.0, row_us=1.0, arrival_us=0.1, num_ranks=4, by_tokens=True
)


def window(loads: np.ndarray, queued: int, skipped: np.ndarray | None = None) -> Window:
    skips = np.zeros(len(loads), np.int64) if skipped is None else skipped
    return Window(np.ascontiguousarray(loads, np.float64), skips, queued)


def two_kinds(each: int, tokens: float) -> np.ndarray:
    """[request, 1, 8]: half of them use the first four experts, then come those that use the others."""
    loads = np.zeros((2 * each, 1, 8))
    loads[:each, 0, :4] = tokens
    loads[each:, 0, 4:] = tokens
    return loads


def kinds(order: np.ndarray, each: int) -> list[int]:
    return [int((order < each).sum()), int((order >= each).sum())]


def test_mixes_the_unlike_where_the_slowest_rank_decides(rng: np.random.Generator) -> None:
    loads = two_kinds(12, 10.0)
    chosen = LatencyAware(cost=STRAGGLING).select(window(loads, DEEP), np.zeros((1, 8)), 8, rng)
    assert kinds(chosen.order, 12) == [4, 4]
    assert "faster" in chosen.reason


def test_groups_the_like_where_streaming_decides(rng: np.random.Generator) -> None:
    loads = two_kinds(12, 0.9)[np.arange(24).reshape(2, 12).T.ravel()]  # in turn, so that order of arrival would mix
    chosen = LatencyAware(cost=STREAMING).select(window(loads, DEEP), np.zeros((1, 8)), 8, rng)
    assert (loads[chosen.order, 0, 0] > 0).all(), "all like the oldest"
    running = np.zeros((1, 8))
    running[0, 4:] = 30.0
    joined = LatencyAware(cost=STREAMING).select(window(loads, DEEP), running, 8, rng)
    assert (loads[joined.order[1:], 0, 4] > 0).all(), "like what runs, but for the oldest"


def test_spread_cost_evens_out_as_the_greedy_strategy_does(rng: np.random.Generator) -> None:
    loads = rng.integers(0, 20, (32, 1, 60)).astype(float)
    ours = LatencyAware(max_skips=None, cost=SpreadCost(), trust=1.0).select(
        window(loads, DEEP), np.zeros((1, 60)), 8, rng
    )
    greedy = GreedyDotProduct(max_skips=None).select(window(loads, DEEP), np.zeros((1, 60)), 8, rng)
    assert ours.order.tolist() == greedy.order.tolist()


@pytest.mark.parametrize("cost", [SpreadCost(), STREAMING, STRAGGLING])
def test_a_shallow_queue_stays_in_order(cost: SpreadCost | StepCost, rng: np.random.Generator) -> None:
    loads = rng.random((9, 1, 8))
    chosen = LatencyAware(cost=cost, trust=0.1).select(window(loads, 9), np.zeros((1, 8)), 8, rng)
    assert chosen.order.tolist() == list(range(8))
    assert "would not pay" in chosen.reason


def test_without_trust_or_sensitivity_it_is_first_come_first_served(rng: np.random.Generator) -> None:
    loads = two_kinds(12, 10.0)
    ways = [
        LatencyAware(cost=SpreadCost(), trust=0.0),
        LatencyAware(cost=SpreadCost(0.0)),
        LatencyAware(cost=STRAGGLING, trust=0.0),
    ]
    for strategy in ways:
        chosen = strategy.select(window(loads, DEEP), np.zeros((1, 8)), 8, rng)
        assert chosen.order.tolist() == list(range(8))


@settings(max_examples=60)
@given(queued=st.integers(32, 400), seed=st.integers(0, 999), trust=st.floats(0.05, 1.0))
def test_nobody_is_passed_over_more_often_than_it_saves(queued: int, seed: int, trust: float) -> None:
    """Whoever has been passed over as often as the whole of `queued x trust` allows is taken, oldest first."""
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 9, (32, 1, 12)).astype(float)
    skipped = np.zeros(32, np.int64)
    overdue = rng.choice(np.arange(1, 32), 3, replace=False)
    skipped[overdue] = int(queued * trust) + 1  # no share of the time is above 1
    for cost in (SpreadCost(), STREAMING):
        chosen = LatencyAware(max_skips=None, cost=cost, trust=trust).select(
            window(loads, queued, skipped), np.zeros((1, 12)), 8, rng
        )
        in_order = chosen.order.tolist() == list(range(8))
        assert in_order or set(overdue.tolist()) <= set(chosen.order.tolist())


@pytest.mark.parametrize("trust", [-0.1, 1.1, float("nan")])
def test_bad_trust(trust: float) -> None:
    with pytest.raises(ConfigError, match="trust="):
        LatencyAware(cost=SpreadCost(), trust=trust)


@pytest.mark.parametrize(("model", "ranks"), [("gpt-oss-20b", 1), ("gpt-oss-20b", 8), ("deepseek-v2-lite", 4)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_step_cost_follows_the_whole_model(model: str, ranks: int, phase: str, rng: np.random.Generator) -> None:
    """Predicted by the linearised cost from whole loads, timed by the whole model: alike in size and in rank."""
    spec = get_model(model)
    placement = Placement.linear(spec.num_moe_layers, spec.num_experts, ranks) if ranks > 1 else None
    priced = step_model(spec, "h200", "bf16", Topology(ranks))
    timer = StepTimer(priced, placement)
    tokens = 512 if phase == "prefill" else 1
    batch = Batch(prefill_tokens=8 * tokens // ranks or 1) if phase == "prefill" else Batch(decode_requests=32 // ranks)
    requests = 8 if phase == "prefill" else 32
    cost = StepCost.of(priced, batch, placement, requests * tokens * spec.top_k / spec.num_experts)
    ours, whole = [], []
    for _ in range(40):
        hot = rng.integers(2, spec.num_experts)
        shares = rng.dirichlet(np.full(hot, rng.uniform(0.2, 3.0)), spec.num_moe_layers)
        load = np.zeros((spec.num_moe_layers, spec.num_experts), np.int64)
        for layer, share in enumerate(shares):
            load[layer, :hot] = rng.multinomial(requests * tokens * spec.top_k, share)
        ours.append(_predicted(cost, load))
        whole.append(timer(load, batch).seconds * 1e6)
    if np.std(whole) < 0.02 * np.mean(whole):  # one GPU's prefill: evenness is free, for both
        assert np.std(ours) < 0.04 * np.mean(ours)
    else:
        assert np.corrcoef(ours, whole)[0, 1] > 0.95
    assert 0.8 < np.mean(ours) / np.mean(whole) < 1.25


def _predicted(cost: StepCost, load: np.ndarray) -> float:
    """The cost of a load that is certain: every expert with a token is touched."""
    slots = cost.slot_loads(load.astype(float)).reshape(len(load), cost.num_ranks, -1)
    experts = (slots > 0).sum(axis=2) * cost.first_us + np.maximum(0, slots - cost.tile_rows).sum(axis=2) * cost.row_us
    return cost.fixed_us + float(experts.max(axis=1).sum() + slots.sum(axis=2).max(axis=1).sum() * cost.arrival_us)


def test_step_cost_of_a_placement_with_replicas(rng: np.random.Generator) -> None:
    spec = get_model("gpt-oss-20b")
    slots = np.stack([np.r_[rng.permutation(32), rng.choice(32, 8, replace=False)] for _ in range(24)])
    placement = Placement(slots.astype(np.int32), 4, 32)
    cost = StepCost.of(step_model(spec, "h200", "bf16", Topology(4)), Batch(prefill_tokens=512), placement)
    load = rng.integers(0, 50, (24, 32)).astype(float)
    spread = cost.slot_loads(load)
    assert spread.shape == (24, 40)
    assert np.allclose(spread.sum(axis=1), load.sum(axis=1)), "replicas share, nothing is lost"
    assert np.allclose(spread.reshape(24, 4, 10).sum(axis=2), placement.rank_load(load))
    chosen = LatencyAware(cost=cost).select(window(rng.random((20, 24, 32)), DEEP), load, 4, rng)
    assert len(set(chosen.order.tolist())) == 4


def test_trust_is_high_where_bursts_are_known_and_none_where_predictions_are_noise(rng: np.random.Generator) -> None:
    truth = np.zeros((240, 1, 8))
    truth[np.arange(240), 0, (np.arange(240) // 24) % 8] = 10.0  # bursts of 24, each on an expert of its own
    stream = np.arange(240)
    known = measure_trust(SpreadCost(), truth, truth, stream)
    noise = measure_trust(SpreadCost(), truth[rng.permutation(240)], truth, stream)
    assert known > 0.1
    assert noise < known
    alike = np.ones((240, 1, 8))
    assert measure_trust(SpreadCost(), alike, alike, stream) == 0.0, "nothing could be saved"


def test_trust_needs_a_stream() -> None:
    loads = np.ones((10, 1, 4))
    with pytest.raises(ConfigError, match=r"10 requests.* 40"):
        measure_trust(SpreadCost(), loads, loads, np.arange(10))
    with pytest.raises(ConfigError, match="must be of the same requests"):
        measure_trust(SpreadCost(), loads, loads[:5], np.arange(50) % 5)
