"""One composition of a step: every caller's time is the sum of the terms, written out here in plain NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.costs.exchange import ExchangeTraffic, all_to_all_us
from coterie.costs.experts import TILES, rank_us, tile_size
from coterie.costs.presets import step_model
from coterie.costs.replicas import Slots, slot_tokens
from coterie.costs.step import Batch, CostOptions, StepModel
from coterie.sim.execution import StepTimer
from coterie.sim.fleet._steps import MOST_DECODING, step_counts
from coterie.sim.group import LockstepGroup
from coterie.types import Placement, Topology
from fleet_steps import SPEC, by_bits, counted_us

LAYERS, EXPERTS = SPEC.num_moe_layers, SPEC.num_experts
MODEL = step_model(SPEC, "h200")


def composed_s(
    model: StepModel, placement: Placement, rows: np.ndarray, batches: list[Batch], busiest: list[ExchangeTraffic]
) -> float:
    """Attention, dense layers and routing of the slowest rank; then, layer by layer, experts and exchange.

    rows [layer, slot], batches [rank], busiest [layer] traffic of the busiest rank.
    """
    computed, padding = (np.empty((3, TILES, 0)), np.empty(0)), model.touched_by_padding(batches)
    rest = []
    for batch in batches:
        tokens = model.running_tokens(batch)
        routing = model.routing_us(tokens) * 1e-6 * LAYERS
        rest.append(model.attention_s(batch) + model.dense_s(tokens, batch.outputs) + routing if batch.tokens else 0.0)
    total = max(rest)
    for layer in range(LAYERS):
        by_rank = rows[layer].reshape(placement.num_ranks, -1).astype(float)
        size = tile_size(model.expert_prices(), rows[layer].mean())
        experts = max(
            rank_us(model.expert_prices(), *computed, own, float(model.running_tokens(batch)), size, padding)
            for own, batch in zip(by_rank, batches, strict=True)
        )
        exchange = all_to_all_us(busiest[layer], model.topology) if placement.num_ranks > 1 else 0.0
        total += 1e-6 * (experts + max(0.0, exchange - model.options.overlap * experts))
    return total


@st.composite
def cases(draw: st.DrawFn) -> tuple[StepModel, Placement, np.ndarray, Batch]:
    """A model, a placement of it with replicas, the tokens of a step [token, layer, k], and one rank's batch."""
    rng, ranks = np.random.default_rng(draw(st.integers(0, 2**16))), draw(st.sampled_from([1, 2, 4]))
    options = CostOptions(
        graph_sizes=draw(st.sampled_from([(), (1, 8, 64)])),
        padding=draw(st.sampled_from([0.0, 0.5, 1.0])),
        overlap=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    topology = Topology(ranks, ranks_per_node=draw(st.sampled_from([1, 2, 4])))
    model = replace(MODEL, topology=topology, options=options)
    spare = rng.integers(0, EXPERTS, (LAYERS, draw(st.sampled_from([0, 4]))))
    slots = np.concatenate([np.tile(np.arange(EXPERTS), (LAYERS, 1)), spare], axis=1)
    placement = Placement(rng.permuted(slots, axis=1).astype(np.int32), ranks, EXPERTS)
    prefill = draw(st.sampled_from([0, 0, 300]))
    batch = Batch(draw(st.integers(0 if prefill else 1, 60)), 900, prefill, 17 if prefill else 0, 2 if prefill else 1)
    ids = rng.random((batch.tokens * ranks, LAYERS, EXPERTS)).argsort(axis=2)[:, :, : SPEC.top_k]
    return model, placement, ids, batch


def load_of(ids: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])


@given(cases(), st.booleans())
@settings(max_examples=60)
def test_model_timer_and_fleet_compose_alike(
    case: tuple[StepModel, Placement, np.ndarray, Batch], resident: bool
) -> None:
    model, placement, ids, batch = case
    load, ranks = load_of(ids), placement.num_ranks
    rows = slot_tokens(load, Slots.of(placement))
    arriving = rows.reshape(LAYERS, ranks, -1).sum(axis=2).max(axis=1)
    busiest = [ExchangeTraffic.arriving(count, SPEC, model.topology) for count in arriving]
    expected = composed_s(model, placement, rows, [batch] * ranks, busiest)
    assert model.step(load, batch, placement).total_s == pytest.approx(expected, rel=1e-12)
    assert StepTimer(model, placement)(load, batch).seconds == pytest.approx(expected, rel=1e-12)
    whole = Batch(*(ranks * size for size in batch))
    tables = model.tables(2000), step_counts(model, placement)
    assert counted_us(*tables, load.astype(np.uint32), whole)[0] * 1e-6 == pytest.approx(expected, rel=1e-7)
    alone = ranks == 1 and placement.num_slots == EXPERTS
    if alone and not batch.prefill_tokens and batch.tokens <= min(MOST_DECODING, *model.moe.tile_rows):
        assert by_bits(*tables, ids, EXPERTS, 900)[0] * 1e-6 == pytest.approx(expected, rel=1e-7)
    if resident:  # only where times are computed: tables refuse it
        model = replace(model, options=replace(model.options, cache_resident=True))
        expected = composed_s(model, placement, rows, [batch] * ranks, busiest)
        assert StepTimer(model, placement)(load, batch).seconds == pytest.approx(expected, rel=1e-12)


@given(cases())
@settings(max_examples=30)
def test_the_group_composes_alike(case: tuple[StepModel, Placement, np.ndarray, Batch]) -> None:
    """A token uses a slot of its own rank, else those of other ranks in turn."""
    model, placement, ids, batch = case
    ranks = placement.num_ranks
    model = replace(model, topology=Topology(ranks))
    home = np.repeat(np.arange(ranks), batch.tokens)
    group = LockstepGroup(model, placement)
    step = group.mixed_step(ids, home, [batch] * ranks)
    rank_at = np.arange(placement.num_slots) // placement.slots_per_rank
    rows, busiest = np.zeros((LAYERS, placement.num_slots), np.int64), []
    turns = np.zeros((LAYERS, EXPERTS), np.int64)
    for layer in range(LAYERS):
        crossing = np.zeros((2, ranks))
        for token, rank in enumerate(home):
            for expert in ids[token, layer]:
                holders = np.flatnonzero(placement.slot_experts[layer] == expert)
                first = [holders[rank_at[holders] == other][0] for other in np.unique(rank_at[holders])]
                own = [slot for slot in first if rank_at[slot] == rank]
                slot = own[0] if own else first[turns[layer, expert] % len(first)]
                rows[layer, slot] += 1
                if not own:
                    turns[layer, expert] += 1
                    crossing[0, rank] += 1
                    crossing[1, rank_at[slot]] += 1
        busiest.append(ExchangeTraffic(crossing.max() * SPEC.hidden_size * 2.0, 0.0))
    assert step.total_s == pytest.approx(composed_s(model, placement, rows, [batch] * ranks, busiest), rel=1e-12)
