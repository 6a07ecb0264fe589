"""Masks of ranks: bit by bit what the placement says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.gateway.signals.masks import local_masks, mask_of, read_placement
from coterie.placement import PlacementMap, write_map
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
    ranks = [None, *range(placement.num_ranks)]
    masks = local_masks(placement, ranks)
    assert masks.dtype == np.uint64
    assert masks.shape == (len(ranks), placement.num_layers, -(-placement.num_experts // 64))
    held = placement.held
    for worker, rank in enumerate(ranks):
        for layer in range(placement.num_layers):
            for expert in range(64 * masks.shape[2]):
                bit = bool(int(masks[worker, layer, expert // 64]) >> (expert % 64) & 1)
                right = expert < placement.num_experts and (rank is None or held[rank, layer, expert])
                assert bit == right


def test_joint_prefers_the_rank_that_holds_the_experts(tmp_path: Path) -> None:
    write_map(tmp_path / "map.json", PlacementMap(Placement.linear(2, 8, 4)))
    placement = read_placement(tmp_path / "map.json")
    fleet = Fleet([4] * 4)
    fleet.local = local_masks(placement, range(4))
    counts = np.zeros((2, 8), np.int64)
    counts[:, 4:6] = 10
    assert routers.make("joint").route(Request(prompt_tokens=10, footprint=counts), fleet).worker == 2


def test_wrong_rank() -> None:
    with pytest.raises(ConfigError, match="rank=4 must be at least 0 and below num_ranks=4"):
        mask_of(Placement.linear(1, 8, 4), 4)
