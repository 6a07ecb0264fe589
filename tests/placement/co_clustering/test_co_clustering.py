"""Co-clusters: the cost, the alternating algorithm against brute force, and the descent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.typing import NDArray

from co_cluster_cases import brute_force, some_items
from coterie.errors import ConfigError
from coterie.placement import CoCluster, Items, Load, SemMoe, planners
from coterie.placement.co_clustering import cost, local_activations
from coterie.placement.co_clustering.alternating import AlternatingSettings, alternate
from coterie.placement.co_clustering.descent import descend_ranks
from coterie.placement.planning.packing import fill_spare, pack_even, room_of
from coterie.types import Placement, Topology
from v3_prices import v3_prices

sizes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "count": st.integers(1, 30),
        "ranks": st.sampled_from([1, 2, 4]),
        "layers": st.integers(1, 3),
        "one_rank": st.booleans(),
    }
)


def drawn(size: dict[str, Any]) -> tuple[Items, int]:
    rng = default_rng(size["seed"])
    return some_items(rng, size["count"], 8, size["layers"], one_rank=size["one_rank"], themes=2), size["ranks"]


# The cost.


def test_the_cost_of_a_case_worked_by_hand() -> None:
    items = Items(np.array([10.0, 2.0]), np.array([[[0, 1]], [[2, 3]]]), np.array([[[1.0, 0.5]], [[1.0, 1.0]]]))
    placed, ranks = np.array([[0, 0, 1, 0]]), np.array([[0, 1]])
    # Tokens 10 and 2 against an even 6; expert 3 of the second item is remote.
    assert cost(items, placed, ranks, 2, 0.25) == pytest.approx([0.25 * 8 + 0.75 * 2])
    local, total = local_activations(items, placed, ranks)
    assert local.tolist() == [[1.5, 1.0]]
    assert total.tolist() == [[1.5, 2.0]]


@settings(deadline=None, max_examples=30)
@given(sizes)
def test_names_of_items_experts_and_ranks_do_not_change_the_cost(size: dict[str, Any]) -> None:
    items, num_ranks = drawn(size)
    rng = default_rng(size["seed"] + 1)
    placed = np.stack([rng.permutation(8) % num_ranks for _ in range(items.num_layers)])
    ranks = rng.integers(0, num_ranks, (items.groups, len(items)))
    before = cost(items, placed, ranks, num_ranks, 0.3)
    order, expert, rank = rng.permutation(len(items)), rng.permutation(8), rng.permutation(num_ranks)
    renamed = expert[items.experts[order]].astype(np.int32)
    shuffled = Items(items.frequency[order], renamed, items.weights[order], items.one_rank)
    moved = np.empty_like(placed)
    moved[:, expert] = rank[placed]
    assert cost(shuffled, moved, rank[ranks[:, order]], num_ranks, 0.3) == pytest.approx(before)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ((np.ones(2), np.zeros((2, 1)), np.ones((2, 1))), "must be \\[item, layer, kept\\]"),
        ((np.ones(3), np.zeros((2, 1, 1)), np.ones((2, 1, 1))), "frequency"),
        ((np.ones(2), np.full((2, 1, 1), -1), np.ones((2, 1, 1))), "must not be negative"),
        ((np.ones(2), np.zeros((2, 1, 1)), np.full((2, 1, 1), np.nan)), "weights of items must be finite"),
    ],
)
def test_items_that_make_no_sense_are_refused(arrays: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Items(*arrays)


# The alternating algorithm.


def test_the_alternating_algorithm_is_near_the_optimum_on_average() -> None:
    over = []
    for seed in range(8):
        items = some_items(default_rng(seed), 6, 4, themes=2 * (seed % 2))
        best = brute_force(items, 4, 2, 0.5)
        found = alternate(items, 4, 2, default_rng(0), AlternatingSettings(theta=0.5, starts=4))
        over.append(float(cost(items, *found, 2, 0.5)[0]) / best)
    assert min(over) >= 1 - 1e-6, "nothing is below the optimum"
    assert np.mean(over) < 1.05


@settings(deadline=None, max_examples=25)
@given(sizes)
def test_ranks_hold_equal_numbers_of_experts_and_seeds_decide(size: dict[str, Any]) -> None:
    items, num_ranks = drawn(size)
    placed, ranks = alternate(items, 8, num_ranks, default_rng(1))
    again = alternate(items, 8, num_ranks, default_rng(1))
    assert np.array_equal(placed, again[0])
    assert np.array_equal(ranks, again[1])
    assert ranks.shape == (1 if items.one_rank else items.num_layers, len(items))
    assert ((ranks >= 0) & (ranks < num_ranks)).all()
    for row in placed:
        assert np.bincount(row, minlength=num_ranks).tolist() == [8 // num_ranks] * num_ranks


def test_more_iterations_are_never_worse() -> None:
    items = some_items(default_rng(5), 40, 8, layers=2, themes=4)
    costs = []
    for turns in (1, 4, 8):
        chosen = AlternatingSettings(iterations=turns, starts=1, swaps=0)
        costs.append(cost(items, *alternate(items, 8, 4, default_rng(0), chosen), 4, 0.5))
    assert (costs[1] <= costs[0] + 1e-9).all()
    assert (costs[2] <= costs[1] + 1e-9).all()


# The descent.


def counted(items: Items, trust: NDArray[np.float64], placed: NDArray[np.int64], ranks: NDArray[np.int64]) -> float:
    local, _ = local_activations(items, placed, ranks)
    return float((local @ (items.frequency * trust)).sum())


@settings(deadline=None, max_examples=25)
@given(sizes)
def test_a_descent_is_never_worse_than_its_start(size: dict[str, Any]) -> None:
    items, num_ranks = drawn(size)
    load, trust = items.load(8), np.ones(len(items))
    start = np.tile(np.arange(8) % num_ranks, (items.num_layers, 1))
    free = np.full((items.num_layers, num_ranks), np.inf)
    slack = float(num_ranks)  # a rank may take all items: their best ranks are known
    placed, ranks = descend_ranks(items, load, free, [start], trust, slack)
    best = np.zeros((items.groups, len(items), num_ranks))
    for rank in range(num_ranks):
        best[:, :, rank] = local_activations(items, start, np.full((items.groups, len(items)), rank))[0]
    before = float((best.max(axis=2) @ items.frequency).sum())
    assert counted(items, trust, placed, ranks) >= before * (1 - 1e-6) - 1e-9
    for row in placed:
        assert np.bincount(row, minlength=num_ranks).tolist() == [8 // num_ranks] * num_ranks


def test_a_descent_finds_planted_clusters() -> None:
    rng = default_rng(6)
    theme = np.arange(64) % 4
    counts = np.where((np.arange(16) % 4)[None] == theme[:, None], 20.0, 0.0) * rng.uniform(0.5, 1.0, (64, 16))
    items = Items.of_counts(counts[:, None], np.full(64, 40.0))
    planner = CoCluster(objective=v3_prices(), items=items)
    found = planner.cluster(Load(items.load(16)), Topology(4), Placement.linear(1, 16, 4))
    assert found.confidence.min() == pytest.approx(1.0)
    assert len({*found.ranks[0, :4].tolist()}) == 4


def test_a_rank_keeps_to_its_load() -> None:
    items = some_items(default_rng(7), 300, 32, layers=3, themes=4)
    load = Load(items.load(32))
    current, topology = Placement.linear(3, 32, 4), Topology(4)
    even = {}
    for slack in (0.02, 1.0):
        planner = CoCluster(objective=v3_prices(), items=items, load_slack=slack)
        busy = planner.plan(load, topology, current).placement.rank_load(load.tokens)
        even[slack] = busy.max(axis=1) / busy.mean(axis=1)
    assert (even[0.02] <= 1.02 + 1e-9).all()
    assert even[1.0].mean() > even[0.02].mean()


# Planners.


def test_planners_refuse_what_they_cannot_learn_from() -> None:
    for name in ("sem_moe", "co_cluster"):
        with pytest.raises(ConfigError, match="items"):
            planners.make(name, {"objective": v3_prices()})
    with pytest.raises(ConfigError, match="transitions"):
        planners.make("moetuner", {"objective": v3_prices()})
    items = some_items(default_rng(8), 5, 8)
    with pytest.raises(ConfigError, match=r"items .*1 layers"):
        SemMoe(objective=v3_prices(), items=items).plan(Load(np.ones((2, 8))), Topology(2), Placement.linear(2, 8, 2))
    with pytest.raises(ConfigError, match=r"transitions .*\(1, 8, 8\).*\(2, 8, 8\)"):
        planners.make("moetuner", {"objective": v3_prices(), "transitions": np.ones((1, 8, 8))}).plan(
            Load(np.ones((3, 8))), Topology(2), Placement.linear(3, 8, 2)
        )


@pytest.mark.parametrize("make", [SemMoe, CoCluster])
def test_a_second_round_moves_nothing(make: Any) -> None:
    """Clusters are numbered by the ranks that have their experts."""
    items = some_items(default_rng(9), 60, 8, layers=2, themes=4)
    planner, load, topology = make(objective=v3_prices(), items=items), Load(items.load(8)), Topology(4)
    first = planner.plan(load, topology, Placement.linear(2, 8, 4))
    second = planner.plan(load, topology, first.placement)
    assert len(second.moves) == 0
    assert second.skip_reason == "experts are beside their items already"
    found = planner.cluster(load, topology, first.placement)
    assert np.array_equal(found.placement.slot_experts, second.placement.slot_experts)
    local, total = local_activations(items, found.expert_ranks, found.ranks)
    assert found.confidence == pytest.approx(local / total)


def test_items_get_no_rank_that_is_gone() -> None:
    items = some_items(default_rng(10), 20, 6, themes=2)
    topology = Topology(3, speeds=(1.0, 0.0, 1.0))
    planner = CoCluster(objective=v3_prices(), items=items)
    found = planner.cluster(Load(items.load(6)), topology, Placement.linear(1, 6, 3, 9))
    assert {*found.ranks.ravel().tolist()} == {0, 2}


def test_moetuner_keeps_tokens_where_they_are() -> None:
    """Each expert of a layer feeds one of the next, in a drawn order: all can stay."""
    rng = default_rng(11)
    flows = np.stack([np.eye(8)[rng.permutation(8)] * 100.0 for _ in range(3)])
    planner = planners.make("moetuner", {"objective": v3_prices(), "transitions": flows})
    plan = planner.plan(Load(np.full((4, 8), 100.0)), Topology(4), Placement.linear(4, 8, 4))
    ranks = np.argsort(plan.placement.slot_experts, axis=1) // 2
    for layer, flow in enumerate(flows):
        assert np.array_equal(ranks[layer], ranks[layer + 1][flow.argmax(axis=1)])


# Slots.


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_expert_has_room(experts: int, ranks: int) -> None:
    room = room_of(experts, ranks)
    assert room.sum() == experts
    assert room.max() - room.min() <= 1
    placed = pack_even(np.arange(experts, dtype=float), np.ones(ranks))
    assert (np.bincount(placed, minlength=ranks) <= room.max()).all()


def test_spare_slots_get_what_is_worth_most_and_not_held() -> None:
    worth = np.array([[[9.0, 9.0], [8.0, 1.0], [1.0, 2.0], [0.0, 3.0]]])  # [layer, expert, rank]
    slots = fill_spare(np.array([[0, 0, 1, 1]]), worth, 3, 2)
    assert slots.tolist() == [[0, 1, 2, 0, 2, 3]]
