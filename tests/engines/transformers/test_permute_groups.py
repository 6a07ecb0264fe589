"""Placements of models with group-limited routing: what is admissible, and the nearest placement that is."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.transformers.permute.tensors import keep_groups, routing_groups, rows_by_layer
from coterie.errors import ConfigError
from coterie.types import Placement


def staying(one: np.ndarray, other: np.ndarray, per_rank: int) -> int:
    """Experts that are on one rank in both."""
    return int((np.argsort(one) // per_rank == np.argsort(other) // per_rank).sum())


@pytest.mark.parametrize(("experts", "groups", "ranks"), [(6, 3, 2), (6, 2, 3), (6, 3, 6), (6, 2, 2), (6, 1, 3)])
@given(seed=st.integers(0, 10_000))
def test_no_admissible_placement_leaves_more_experts_on_their_ranks(
    experts: int, groups: int, ranks: int, seed: int
) -> None:
    row = np.random.default_rng(seed).permutation(experts)
    near = keep_groups(Placement(row[None].astype(np.int32), ranks, experts), groups).slot_experts[0]
    size, per_rank = experts // groups, experts // ranks
    best = 0
    for every in permutations(range(experts)):
        other = np.array(every)
        if ((other // size).reshape(groups, size) == (other // size).reshape(groups, size)[:, :1]).all():
            best = max(best, staying(row, other, per_rank))
    assert staying(row, near, per_rank) == best


@given(seed=st.integers(0, 10_000), groups=st.sampled_from([1, 2, 4, 8]), ranks=st.sampled_from([1, 2, 4, 8, 16]))
def test_the_nearest_is_admissible_and_an_admissible_one_is_its_own(seed: int, groups: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    asked = Placement(np.stack([rng.permutation(16) for _ in range(2)]).astype(np.int32), ranks, 16)
    near = keep_groups(asked, groups)
    rows = rows_by_layer(near, None, [3, 4], 16, groups)
    assert list(rows) == [3, 4]
    np.testing.assert_array_equal(keep_groups(near, groups).slot_experts, near.slot_experts)
    if groups == 1:
        np.testing.assert_array_equal(near.slot_experts, asked.slot_experts)


def test_groups_are_read_from_the_config() -> None:
    assert routing_groups({"num_experts": 8}) == 1
    assert routing_groups({"n_group": 8, "topk_group": 4}) == 8
    assert routing_groups({"n_group": 8, "topk_group": 8}) == 1, "all groups may be chosen: they limit nothing"
    assert routing_groups({"n_group": None, "topk_group": None}) == 1
    assert routing_groups({"n_group": 8, "topk_group": 3, "topk_method": "greedy"}) == 1
    assert routing_groups({"text_config": {"n_group": 8, "topk_group": 4}}) == 8


def test_groups_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of n_group=3"):
        rows_by_layer(Placement.linear(1, 8, 2), None, [0], 8, 3)
    with pytest.raises(ConfigError, match="multiple of n_group=3"):
        keep_groups(Placement.linear(1, 8, 2), 3)
