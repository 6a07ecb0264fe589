"""The greedy over scenarios: what it says it does, step by step, and bounds that any greedy keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.placement import Eplb, FlashLb, Load
from coterie.placement.planning.flashlb import greedy
from coterie.types import Placement, Topology, layer_balance
from v3_prices import v3_prices

Array = NDArray[np.float64]


def subjects(seed: int, scenarios: int, layers: int, experts: int) -> Array:
    """[scenario, layer, expert] tokens of steps of one subject each."""
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(experts, 0.4), (3, layers))
    return rng.poisson(500 * taste[np.arange(scenarios) % 3]).astype(np.float64)


def max_over_mean(slots: NDArray[np.integer], tokens: Array, ranks: int) -> Array:
    """[layer] mean over scenarios."""
    placement = Placement(np.asarray(slots, np.int32), ranks, tokens.shape[2])
    return np.asarray(np.mean([1 / layer_balance(placement.rank_load(step)) for step in tokens], axis=0))


def reference(tokens: Array, ranks: int, slots: int) -> list[set[int]]:
    """The rule in plain words, for one layer of [scenario, expert] tokens whose ranks never lack room elsewhere."""
    share = tokens / tokens.sum(axis=1, keepdims=True)
    mean, count = tokens.mean(axis=0), np.ones(tokens.shape[1], int)
    for _ in range(slots - tokens.shape[1]):
        count[np.argmax(np.where(count < ranks, mean / count, -1.0))] += 1
    items = sorted(np.repeat(np.arange(len(count)), count), key=lambda e: -mean[e] / count[e])
    held: list[set[int]] = [set() for _ in range(ranks)]

    def price(rank: int, expert: int) -> tuple[float, float]:
        trial = [
            sum((share[:, e] / count[e] for e in [*own, *([expert] if r == rank else [])]), np.zeros(len(share)))
            for r, own in enumerate(held)
        ]
        return float(np.round(np.max(trial, axis=0).mean(), 12)), sum(mean[e] / count[e] for e in held[rank])

    for expert in items:
        open_ = [rank for rank in range(ranks) if len(held[rank]) < slots // ranks and expert not in held[rank]]
        held[min(open_, key=lambda rank: price(rank, int(expert)))].add(int(expert))
    return held


@pytest.mark.parametrize("slots", [12, 16])
def test_follows_the_rule(slots: int) -> None:
    tokens = subjects(4, 6, 3, 12) + np.linspace(0.1, 0.9, 12)  # no two alike
    found = greedy(Load.of_scenarios(tokens), slots, np.ones(4))
    for layer in range(3):
        placed = found[layer].reshape(4, -1)
        assert {frozenset(row) for row in placed.tolist()} == {
            frozenset(row) for row in reference(tokens[:, layer], 4, slots)
        }


@given(
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 3, 4]),
    per_rank=st.integers(4, 12),
    scenarios=st.integers(1, 5),
)
def test_holds_every_expert_and_none_twice_on_a_rank(seed: int, ranks: int, per_rank: int, scenarios: int) -> None:
    experts = min(12, ranks * per_rank)
    tokens = subjects(seed, scenarios, 2, experts) * (seed % 5 > 0)
    slots = greedy(Load.of_scenarios(tokens), ranks * min(per_rank, experts), np.ones(ranks))
    placement = Placement(slots, ranks, experts)
    assert placement.duplicates == 0
    assert (placement.replicas >= 1).all()


@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([2, 4]))
def test_is_evener_than_experts_in_order_on_average(seed: int, ranks: int) -> None:
    tokens = subjects(seed, 6, 16, 24)
    placed = greedy(Load.of_scenarios(tokens), 24, np.ones(ranks))
    in_order = np.tile(np.arange(24), (16, 1))
    assert max_over_mean(placed, tokens, ranks).mean() < max_over_mean(in_order, tokens, ranks).mean()


def test_without_scenarios_it_is_as_even_as_eplb() -> None:
    tokens = np.random.default_rng(0).lognormal(3.0, 1.0, (4, 64))
    topology, current = Topology(8), Placement.linear(4, 64, 8, 80)
    balance = {
        planner: planner(v3_prices()).plan(Load(tokens), topology, current).balance_after for planner in (FlashLb, Eplb)
    }
    assert balance[FlashLb] > balance[Eplb] - 0.01


def test_spreads_what_is_hot_together() -> None:
    steps = np.array([[[9.0, 9, 1, 1]], [[1, 1, 9, 9]]])  # experts of a step's subject, although all are equally hot
    placed = greedy(Load.of_scenarios(steps), 4, np.ones(2)).reshape(2, 2)
    assert all(len({0, 1} & set(row)) == 1 for row in placed.tolist())


def test_a_fast_rank_takes_the_hot_ones() -> None:
    tokens = np.array([[30.0, 20.0, 9.0, 8.0]])
    assert set(greedy(Load(tokens), 4, np.array([1.0, 3.0]))[0, 2:]) == {0, 1}
