"""Masks of ranks: bit by bit what the placement says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.gateway.exchange.knowledge import mask_of
from coterie.routing import Fleet, Request, routers
from coterie.types import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    experts, ranks, layers = draw(st.integers(1, 150)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    slots = np.stack([rng.permutation(np.arange(per_rank * ranks) % experts) for _ in range(layers)])
    return Placement(slots.astype(np.int32), ranks, experts)


@given(placements())
def test_bits_are_what_ranks_hold(placement: Placement) -> None:
    for rank in range(placement.num_ranks):
        mask = mask_of(placement, rank)
        assert mask.dtype == np.uint64
        assert mask.shape == (placement.num_layers, -(-placement.num_experts // 64))
        for layer in range(placement.num_layers):
            for expert in range(64 * mask.shape[1]):
                bit = bool(int(mask[layer, expert // 64]) >> (expert % 64) & 1)
                assert bit == (expert < placement.num_experts and placement.held[rank, layer, expert])


def test_joint_prefers_the_rank_that_holds_the_experts() -> None:
    placement = Placement.linear(2, 8, 4)
    fleet = Fleet([4] * 4)
    fleet.local = np.stack([mask_of(placement, rank) for rank in range(4)])
    counts = np.zeros((2, 8), np.int64)
    counts[:, 4:6] = 10
    assert routers.make("joint").route(Request(prompt_tokens=10, footprint=counts), fleet).worker == 2


def test_wrong_rank() -> None:
    with pytest.raises(ConfigError, match="rank=4 must be at least 0 and below num_ranks=4"):
        mask_of(Placement.linear(1, 8, 4), 4)
