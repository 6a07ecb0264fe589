"""Activations to slots: own replicas first, others in turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.dispatch.slots import SlotTable, choose_slots
from coterie.errors import ConfigError


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_right_expert_own_rank_first_and_even_turns(ranks: int, experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = -(-(experts + int(rng.integers(0, 5))) // ranks) * ranks
    row = np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)])
    rng.shuffle(row)
    table = SlotTable.of(row, experts, ranks)
    ids = rng.integers(0, experts, (int(rng.integers(0, 30)), 2))
    for rank in range(ranks):
        chosen = choose_slots(ids, rank, table)
        np.testing.assert_array_equal(row[chosen], ids)
        held = set(row[rank * table.per_rank : (rank + 1) * table.per_rank].tolist())
        own = np.isin(ids, list(held))
        assert (chosen[own] // table.per_rank == rank).all()
        for expert in set(ids[~own].tolist()):
            turns = np.bincount(chosen[ids == expert], minlength=slots)[row == expert]
            assert turns.max() - turns.min() <= 1


def test_a_row_without_an_expert_is_refused() -> None:
    with pytest.raises(ConfigError, match="every expert in 0 … 2"):
        SlotTable.of([0, 1, 1, 0], 3, 2)
    with pytest.raises(ConfigError, match="multiple of num_ranks=2"):
        SlotTable.of([0, 1, 2], 3, 2)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_what_is_no_expert_is_refused(wrong: int) -> None:
    table = SlotTable.of([0, 1, 2, 0], 3, 2)
    with pytest.raises(ConfigError, match=rf"experts holds {wrong}; it must be in 0 … 2"):
        choose_slots(np.array([[0, wrong]]), 0, table)
