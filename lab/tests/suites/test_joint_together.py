"""Requests that arrive together are assigned once each, those that share experts to one rank, none swamped."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.routing import Fleet, Request
from coterie.routing.joint import Joint
from coterie_lab.suites.joint.together import route_together

LAYERS, EXPERTS = 3, 8


def held(experts: list[list[int]]) -> np.ndarray:
    """[worker, layer, word] from the experts each worker holds, the same in every layer."""
    return np.array([[[sum(1 << e for e in mine)]] * LAYERS for mine in experts], np.uint64)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 999))
def test_a_batch_is_assigned_once_each_and_nobody_is_swamped(requests: int, workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fleet = Fleet([100] * workers)
    fleet.local = held([sorted(rng.choice(EXPERTS, 3, replace=False).tolist()) for _ in range(workers)])
    counts = rng.multinomial(240, rng.dirichlet(np.full(EXPERTS, 0.3)), (requests, LAYERS))
    decisions = route_together(Joint(), [Request(str(n), 100, counts[n]) for n in range(requests)], fleet)
    assert len(decisions) == requests
    load = np.bincount([d.worker for d in decisions], minlength=workers)
    assert load.max() <= max(2 * requests / workers, max(1, int(1.5 * requests / workers)))


def test_a_batch_puts_those_that_share_experts_together_and_keeps_capacity() -> None:
    fleet = Fleet([3, 3])
    fleet.local = held([list(range(EXPERTS)), list(range(EXPERTS))])
    counts = np.zeros((4, LAYERS, EXPERTS), np.int64)
    counts[[0, 2]] += np.isin(np.arange(EXPERTS), [0, 1])
    counts[[1, 3]] += np.isin(np.arange(EXPERTS), [6, 7])
    batch = [Request(str(n), 100, counts[n]) for n in (0, 2, 1, 3)]
    chosen = [d.worker for d in route_together(Joint(), batch, fleet)]
    assert chosen[0] == chosen[1]
    assert chosen[2] == chosen[3]
    full = Fleet([1, 1, 1])
    assert sorted(d.worker for d in route_together(Joint(), batch[:3], full)) == [0, 1, 2]
