"""The expert-parallel group in lockstep: a step against plain Python and the step model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.costs.exchange import ExchangeTraffic, all_to_all_us
from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.errors import ConfigError
from coterie.sim.group import LockstepGroup
from coterie.types import ModelSpec, Placement, Topology

SMALL = ModelSpec("small", 3, 8, 2, 64, 32, 4, 2, 16, 1000, first_moe_layer=1)


def small_model(ranks: int = 4) -> Any:
    return step_model(SMALL, "h200", "bf16", Topology(ranks))


@st.composite
def placements(draw: st.DrawFn, ranks: int = 4) -> Placement:
    """Every expert somewhere, replicas anywhere, at most one on a rank."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extra = draw(st.integers(0, 3))
    layers = []
    for _ in range(2):
        order = rng.permutation(8).reshape(ranks, 2)
        layers.append([[*row, *rng.permutation(np.setdiff1d(np.arange(8), row))[:extra]] for row in order])
    return Placement(np.array(layers, np.int32).reshape(2, -1), ranks, 8)


@st.composite
def steps(draw: st.DrawFn, ranks: int = 4) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = draw(st.integers(1, 40))
    ids = np.array([[rng.permutation(8)[:2] for _ in range(2)] for _ in range(tokens)], np.uint8)
    return ids, rng.integers(0, ranks, tokens), rng.integers(1, 500, tokens)


@settings(max_examples=40, deadline=None)
@given(placements(), steps())
def test_a_step_by_brute_force(placement: Placement, step: tuple[Any, Any, Any]) -> None:
    """Who computes what, what crosses, and each part's time, token by token in plain Python."""
    (ids, home, context), model = step, small_model()
    found = LockstepGroup(model, placement).step(ids, home, context)
    each, experts_us, exchange_us, remote = placement.slots_per_rank, 0.0, 0.0, 0
    tokens = np.bincount(home, minlength=4)
    for layer, slots in enumerate(placement.slot_experts):
        rows, sent, received, turn = np.zeros(len(slots)), np.zeros(4), np.zeros(4), dict.fromkeys(range(8), 0)
        for token, rank in enumerate(home):
            for expert in ids[token, layer].tolist():
                holders = np.flatnonzero(slots == expert)
                mine = holders[holders // each == rank]
                if len(mine):
                    rows[mine[0]] += 1
                    continue
                slot = holders[turn[expert] % len(holders)]
                turn[expert] += 1
                rows[slot] += 1
                sent[rank] += 1
                received[slot // each] += 1
                remote += 1
        experts_us += max(model.experts_us(rows.reshape(4, -1)[rank], int(tokens[rank])) for rank in range(4))
        busiest = max(sent.max(), received.max())
        exchange_us += all_to_all_us(ExchangeTraffic(busiest * 64 * 2.0, 0.0), model.topology)
    rest = []
    for rank in range(4):
        n = int(tokens[rank])
        if n:
            routing = model.routing.us(n) * 1e-6 * 2 if model.routing else 0.0
            own = Batch(decode_requests=n, decode_context=int(context[home == rank].sum()))
            rest.append(model.attention_s(own) + model.dense_s(n) + routing)
    assert found.remote == remote
    assert found.activations == ids.size
    assert found.experts_s == pytest.approx(1e-6 * experts_us)
    assert found.all_to_all_s == pytest.approx(1e-6 * exchange_us)
    assert found.rest_s == pytest.approx(max(rest))


def test_without_replicas_it_is_the_step_model() -> None:
    """As many tokens on every rank: attention, dense, routing and experts are those of StepModel.step."""
    model, placement, rng = small_model(), Placement.linear(2, 8, 4), np.random.default_rng(0)
    ids = np.array([[rng.permutation(8)[:2] for _ in range(2)] for _ in range(32)], np.uint8)
    found = LockstepGroup(model, placement).step(ids, np.arange(32) % 4, np.full(32, 100))
    load = np.stack([np.bincount(ids[:, layer].ravel(), minlength=8) for layer in range(2)])
    whole = model.step(load, Batch(decode_requests=8, decode_context=800), placement)
    assert found.experts_s == pytest.approx(whole.moe_s.sum())
    assert found.rest_s == pytest.approx(whole.attention_s + whole.dense_s + whole.routing_s)


@settings(max_examples=25, deadline=None)
@given(placements(), steps())
def test_what_crosses_is_what_ranks_ask_for_and_lack(placement: Placement, step: tuple[Any, Any, Any]) -> None:
    group = LockstepGroup(small_model(), placement)
    found = group.step(*step)
    assert group.asked.sum() == found.activations
    assert group.asked[~group.held].sum() == found.remote
    bits = group.local
    for rank, layer, expert in np.argwhere(group.held):
        assert bits[rank, layer, 0] >> np.uint64(expert) & np.uint64(1)
    assert np.bitwise_count(bits).sum() == group.held.sum()


def test_nothing_crosses_where_all_hold_all() -> None:
    everywhere = Placement(np.tile(np.arange(8, dtype=np.int32), (2, 4)), 4, 8)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 8, (12, 2, 2)).astype(np.uint8)
    found = LockstepGroup(small_model(), everywhere).step(ids, np.arange(12) % 4, np.full(12, 10))
    assert found.remote == 0
    assert found.all_to_all_s == 0


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 of 8"):
        LockstepGroup(small_model(), Placement.linear(3, 8, 4))
    with pytest.raises(ConfigError, match=r"num_ranks=2 must equal topology\.num_ranks=4"):
        LockstepGroup(small_model(), Placement.linear(2, 8, 2))
    group = LockstepGroup(small_model(), Placement.linear(2, 8, 4))
    with pytest.raises(ConfigError, match=r"expected \[3, 2, k\]"):
        group.step(np.zeros((2, 2, 2), np.uint8), np.zeros(3, int), np.ones(3, int))
