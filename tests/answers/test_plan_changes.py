"""Changes of a simulated group's placement, and their time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.answers.plan.moving import change_to
from coterie.costs.movement import Contention
from coterie.types import Placement, Topology

RANKS, LAYERS = 4, 2
PATHS = {path: Contention(1e-7, 0.1, 0.1, 1) for path in ("device", "host-to-device")}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 6), st.integers(4, 6))
def test_a_change_moves_what_differs(seed: int, before: int, after: int) -> None:
    """Bytes are those of experts that come to a rank from another; every layer that differs moves."""
    rng = np.random.default_rng(seed)

    def drawn(per_rank: int) -> Placement:
        rest = (per_rank - 4) * RANKS
        slots = [rng.permutation(np.r_[np.arange(16), rng.integers(0, 16, rest)]) for _ in range(LAYERS)]
        return Placement(np.array(slots, np.int32), RANKS, 16)

    current, target = drawn(before), drawn(after)
    change = change_to(current, target, Topology(RANKS), 1e6)
    assert (change.placement.slot_experts == target.slot_experts).all()
    arriving = target.held & ~current.held
    assert change.moved_bytes >= 1e6 * arriving.sum()
    assert set(np.flatnonzero(arriving.any(axis=(0, 2)))) <= set(change.layers)
    assert list(change.moved_s) == sorted(change.moved_s)
    assert change.exposed == 1.0
    assert 0 < change_to(current, target, Topology(RANKS), 1e6, PATHS).exposed < 1.0
