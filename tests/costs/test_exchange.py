"""Locality and time of the all-to-all, against enumeration and arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.costs.exchange import (
    ExchangeTraffic,
    Locality,
    all_to_all_us,
    expected_locality,
    first_rank,
    uniform_locality,
)
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.types import INFINIBAND_400G, NVLINK4, Placement, Topology

SPEC = get_model("deepseek-v3")


def looped(expert_ids: Any, rank_of: Any, homes: Any, topology: Any) -> Locality:
    """The definition, one copy at a time; rank_of [layer][expert], homes [token]."""
    local = remote = ranks = inter = 0
    for token, layers in zip(homes, expert_ids, strict=True):
        for layer, experts in enumerate(layers):
            at = [int(rank_of[layer][expert]) for expert in experts]
            local += sum(rank == token for rank in at)
            remote += sum(rank != token for rank in at)
            ranks += len(set(at) - {token})
            inter += sum(topology.node_of(rank) != topology.node_of(token) for rank in at)
    cells = len(expert_ids) * len(expert_ids[0])
    return Locality(local / cells, remote / cells, ranks / cells, inter / cells)


def enumerated(experts: Any, k: Any, topology: Any) -> Any:
    """Every subset of k experts from every home rank, equally often."""
    blocks = np.array_split(np.arange(experts), topology.num_ranks)
    rank_of = [[rank for rank, block in enumerate(blocks) for _ in block]]
    subsets = list(combinations(range(experts), k))
    ids = [[subset] for _ in range(topology.num_ranks) for subset in subsets]
    homes = [rank for rank in range(topology.num_ranks) for _ in subsets]
    return looped(ids, rank_of, homes, topology)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Any, Any, Topology]:
    experts = draw(st.integers(1, 9))
    k = draw(st.integers(1, min(experts, 4)))
    return experts, k, Topology(draw(st.integers(1, experts)), draw(st.integers(1, 5)))


@given(shapes())
def test_expectation_is_the_mean_over_all_subsets(shape: tuple[Any, Any, Topology]) -> None:
    experts, k, topology = shape
    assert uniform_locality(experts, k, topology) == pytest.approx(enumerated(experts, k, topology), abs=1e-12)


@pytest.mark.parametrize(
    ("experts", "k", "ranks", "per_node"),
    [(8, 2, 8, 8), (8, 2, 4, 2), (12, 4, 4, 8), (12, 3, 6, 4), (10, 3, 4, 3), (7, 2, 3, 2)],
)
def test_expectation_on_chosen_shapes_with_uneven_ranks_and_nodes(
    experts: int, k: int, ranks: int, per_node: int
) -> None:
    topology = Topology(ranks, per_node)
    assert uniform_locality(experts, k, topology) == pytest.approx(enumerated(experts, k, topology), abs=1e-12)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 300), st.integers(1, 320))
def test_expectation_obeys_its_bounds(experts: int, k: int, ranks: int, per_node: int) -> None:
    k, ranks = min(k, experts), min(ranks, experts)
    found = uniform_locality(experts, k, Topology(ranks, per_node))
    assert found.local + found.remote == pytest.approx(k)
    assert 0 <= found.inter_node <= found.remote
    assert 0 <= found.remote_ranks <= min(found.remote, ranks - 1) + 1e-9
    if per_node >= ranks:
        assert found.inter_node == 0.0, "there is no other node; 1e-16 of an expert would pay a latency"
    if per_node == 1:
        assert found.inter_node == found.remote, "every other rank is another node"


def test_one_rank_or_a_single_choice() -> None:
    assert uniform_locality(8, 2, Topology(1)) == Locality(2.0, 0.0, 0.0, 0.0)
    assert uniform_locality(4, 4, Topology(4)) == pytest.approx(Locality(1.0, 3.0, 3.0, 0.0))
    with pytest.raises(ConfigError, match="num_ranks=9 must be at most num_experts=8"):
        uniform_locality(8, 2, Topology(9))


def test_first_ranks_are_those_of_first_slots(rng: np.random.Generator) -> None:
    row = rng.permutation(np.r_[np.arange(8), [0, 3, 3, 7]])
    placement = Placement(row[None].astype(np.int32), 4, 8)
    assert first_rank(placement, 0).tolist() == [row.tolist().index(expert) // 3 for expert in range(8)]


def test_time_by_hand() -> None:
    topology = Topology(8)
    traffic = ExchangeTraffic.of(expected_locality(SPEC, topology), SPEC, 16)
    assert traffic == ExchangeTraffic(16 * 7 * 7168 * 2, 0.0)
    assert all_to_all_us(traffic, topology) == pytest.approx(2 * (2.0 + 1_605_632 / 450e3))
    nodes = Topology(32)
    far = ExchangeTraffic.of(expected_locality(SPEC, nodes), SPEC, 4)
    assert (far.intra_bytes, far.inter_bytes) == (4 * 1.75 * 14336, 4 * 6.0 * 14336)
    assert all_to_all_us(far, nodes) == pytest.approx(2 * (5.0 + 344_064 / 50e3)), "the slower kind of link decides"
    assert all_to_all_us(ExchangeTraffic(0.0, 0.0), nodes) == 0.0
    assert all_to_all_us(ExchangeTraffic.of(expected_locality(SPEC, Topology(1)), SPEC, 4), Topology(1)) == 0.0


def test_a_node_of_any_size_pays_no_latency_between_nodes() -> None:
    spec = replace(SPEC, num_experts=49 * 4)  # 49 x (1 / 49) is not 1 in floating point
    topologies = Topology(49, 49), Topology(49, 64)
    times = [all_to_all_us(ExchangeTraffic.of(expected_locality(spec, t), spec, 1), t) for t in topologies]
    assert times[0] == times[1] < 2 * INFINIBAND_400G.latency_s * 1e6


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 500), st.floats(0.5, 4.0))
def test_traffic_adds_up_and_time_grows_with_it(ranks: int, per_node: int, tokens: int, width: float) -> None:
    topology = Topology(ranks, per_node)
    found = expected_locality(SPEC, topology)
    one, two = (ExchangeTraffic.of(found, SPEC, t, width) for t in (tokens, 2 * tokens))
    assert sum(one) == pytest.approx(tokens * found.remote * SPEC.hidden_size * width)
    assert sum(two) == pytest.approx(2 * sum(one))
    assert all_to_all_us(two, topology) >= all_to_all_us(one, topology)
    floor = 2e6 * max(one.intra_bytes / NVLINK4.bytes_per_s, one.inter_bytes / INFINIBAND_400G.bytes_per_s)
    assert all_to_all_us(one, topology) >= floor
