"""The values everything is made of check themselves, and their sums add up."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coterie.errors import ConfigError
from coterie.types import BYTES_PER_WEIGHT, ModelSpec, Placement, Topology, balancedness, check_dtype, narrowest_uint
from coterie.units import shown_s

SHAPE: dict[str, Any] = {
    "name": "tiny",
    "num_layers": 10,
    "num_experts": 16,
    "top_k": 2,
    "hidden_size": 64,
    "expert_intermediate_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


class TestModelSpec:
    def test_moe_layers(self) -> None:
        spec = ModelSpec(**SHAPE, first_moe_layer=3, moe_layer_step=2)
        assert spec.moe_layer_ids == (3, 5, 7, 9)
        assert spec.num_moe_layers == 4

    def test_expert_bytes_follow_the_dtype(self) -> None:
        spec = ModelSpec(**SHAPE, weight_dtype="mxfp4")
        assert spec.expert_params == 3 * 64 * 32
        assert spec.expert_bytes() == spec.expert_params * 17 / 32, "four bits, and a byte for every 32"
        assert spec.expert_bytes("bf16") == 2 * spec.expert_params

    def test_kv_bytes(self) -> None:
        assert ModelSpec(**SHAPE).kv_bytes_per_token == 10 * 2 * (2 * 2 * 16)
        assert ModelSpec(**SHAPE, kv_lora_rank=24, rope_head_dim=8).kv_bytes_per_token == 10 * 2 * 32

    @pytest.mark.parametrize("field", [name for name in SHAPE if name != "name"] + ["moe_layer_step"])
    def test_sizes_are_positive(self, field: str) -> None:
        with pytest.raises(ConfigError, match=f"^tiny: {field}=0 must be at least 1$"):
            ModelSpec(**(SHAPE | {field: 0}))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"top_k": 17}, "top_k=17 must be at most num_experts=16"),
            ({"first_moe_layer": 10}, "first_moe_layer=10 must be in 0 … 9"),
            ({"first_moe_layer": -1}, "first_moe_layer=-1 must be in 0"),
            ({"weight_dtype": "int3"}, "weight_dtype='int3' must be one of fp32, bf16, fp16, fp8, mxfp4"),
        ],
    )
    def test_relations(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ModelSpec(**(SHAPE | change))

    def test_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            ModelSpec(**SHAPE).top_k = 4  # type: ignore[misc]


def test_every_dtype_has_bytes() -> None:
    for dtype, size in BYTES_PER_WEIGHT.items():
        check_dtype(dtype)
        assert 0 < size <= 4


@given(st.integers(0, 2**40))
def test_narrowest_uint_is_wide_enough_and_no_wider(largest: int) -> None:
    dtype = narrowest_uint(largest)
    assert dtype.kind == "u"
    assert np.iinfo(dtype).max >= largest
    if dtype.itemsize > 1:
        assert np.iinfo(f"u{dtype.itemsize // 2}").max < largest


class TestTopology:
    @given(st.integers(1, 300), st.integers(1, 16))
    def test_nodes_cover_the_ranks(self, num_ranks: int, ranks_per_node: int) -> None:
        topology = Topology(num_ranks, ranks_per_node)
        nodes = [topology.node_of(rank) for rank in range(num_ranks)]
        assert nodes == sorted(nodes)
        assert set(nodes) == set(range(topology.num_nodes))
        assert max(nodes.count(node) for node in {nodes[0], nodes[-1]}) <= ranks_per_node

    @pytest.mark.parametrize("field", ["num_ranks", "ranks_per_node"])
    def test_counts_are_positive(self, field: str) -> None:
        with pytest.raises(ConfigError, match=f"{field}=0 must be at least 1"):
            dataclasses.replace(Topology(num_ranks=8), **cast(Any, {field: 0}))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any valid placement: every expert once a layer, then replicas, shuffled."""
    num_ranks, per_rank, num_layers = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_slots = num_ranks * per_rank
    num_experts = draw(st.integers(1, num_slots))
    spare = num_slots - num_experts
    extra = st.lists(st.integers(0, num_experts - 1), min_size=spare, max_size=spare)
    rows = [draw(st.permutations([*range(num_experts), *draw(extra)])) for _ in range(num_layers)]
    return Placement(np.array(rows, np.int32), num_ranks, num_experts)


class TestPlacement:
    @given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
    def test_linear_holds_each_expert_once(self, num_layers: int, per_rank: int, num_ranks: int) -> None:
        num_experts = per_rank * num_ranks
        placement = Placement.linear(num_layers, num_experts, num_ranks)
        assert (placement.num_layers, placement.num_slots, placement.slots_per_rank) == (
            num_layers,
            num_experts,
            per_rank,
        )
        assert (placement.slot_experts == np.arange(num_experts)).all()
        even = placement.rank_load(np.full((num_layers, num_experts), 3))
        assert (even == 3 * per_rank).all()
        assert balancedness(even) == 1.0

    def test_linear_needs_experts_that_divide(self) -> None:
        with pytest.raises(ConfigError, match=r"num_slots=10 .*num_ranks=4 \(remainder 2\)"):
            Placement.linear(1, 10, 4)

    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            ([0, 1], r"slot_experts has shape \(2,\); it must be \[layer, slot\]"),
            ([[0, 4]], "slot_experts holds 4; it must be in 0 … 1"),
            ([[-1, 0]], "slot_experts holds -1"),
            ([[0, 1], [0, 0]], r"layer 1 has no slot for expert 1 \(1 missing\)"),
        ],
    )
    def test_what_it_refuses(self, slots: list[Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Placement(np.array(slots, np.int32), 2, 2)

    @given(placements(), st.data())
    def test_rank_load_conserves_tokens(self, placement: Placement, data: st.DataObject) -> None:
        shape = (placement.num_layers, placement.num_experts)
        load = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 10**6)))
        ranks = placement.rank_load(load)
        assert ranks.shape == (placement.num_layers, placement.num_ranks)
        assert (ranks >= 0).all()
        np.testing.assert_allclose(ranks.sum(axis=1), load.sum(axis=1), rtol=1e-12)

    @given(placements(), st.data())
    def test_rank_load_matches_a_plain_loop(self, placement: Placement, data: st.DataObject) -> None:
        load = data.draw(
            hnp.arrays(np.int64, (placement.num_layers, placement.num_experts), elements=st.integers(0, 99))
        )
        expected = np.zeros((placement.num_layers, placement.num_ranks))
        for layer, row in enumerate(placement.slot_experts.tolist()):
            for slot, expert in enumerate(row):
                expected[layer, slot // placement.slots_per_rank] += load[layer, expert] / row.count(expert)
        np.testing.assert_allclose(placement.rank_load(load), expected)

    def test_replicas_share_equally(self) -> None:
        placement = Placement(np.array([[0, 1, 0, 2]], np.int32), 2, 3)
        assert placement.rank_load(np.array([[10, 1, 3]])).tolist() == [[6.0, 8.0]]


class TestBalancedness:
    @given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2), elements=st.floats(0, 1e9)))
    def test_is_above_zero_and_at_most_one(self, ranks: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        value = balancedness(ranks)
        assert 1 / ranks.shape[1] - 1e-9 <= value <= 1 + 1e-9, "one rank with all of it is the worst case"

    def test_of_known_loads(self) -> None:
        assert balancedness(np.array([[1.0, 3.0]])) == pytest.approx(2 / 3)
        assert balancedness(np.array([[4.0, 0.0, 0.0, 0.0]])) == 0.25
        assert balancedness(np.array([[0.0, 0.0], [1.0, 3.0]])) == pytest.approx((1 + 2 / 3) / 2), "no load is even"


def test_seconds_are_shown_in_a_unit_that_reads_well() -> None:
    values = (0.0, 2.81e-05, -0.0042, 0.5, 12.345)
    assert [shown_s(one) for one in values] == ["0 s", "28.1 µs", "-4.2 ms", "500 ms", "12.3 s"]
