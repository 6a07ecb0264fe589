"""The step: its parts, its switches, and that it never loses a token."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coterie.costs.exchange import ExchangeTraffic
from coterie.costs.presets import step_model
from coterie.costs.replicas import Slots, slot_tokens
from coterie.costs.step import Batch, CostOptions
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.types import NVLINK4, Placement, Topology

SPEC = get_model("qwen3-30b-a3b")
MODEL = step_model(SPEC)


def even_load(tokens: int) -> np.ndarray:
    return np.full((SPEC.num_moe_layers, 128), tokens * 8 // 128)


def test_parts_add_up_and_grow() -> None:
    short = MODEL.step(even_load(64), Batch(decode_requests=64, decode_context=64 * 128))
    long = MODEL.step(even_load(64), Batch(decode_requests=64, decode_context=64 * 8192))
    assert short.total_s == pytest.approx(
        short.attention_s + short.dense_s + short.routing_s + short.moe_s.sum() + short.all_to_all_s.sum()
    )
    assert long.attention_s > 5 * short.attention_s
    assert long.dense_s == short.dense_s
    assert short.all_to_all_s.sum() == 0.0, "one device exchanges nothing"


def test_the_slowest_rank_decides() -> None:
    even = even_load(4096)
    skewed = even.copy()
    skewed[:, :16] *= 4
    skewed[:, 16:] = (even.sum(axis=1)[0] - skewed[0, :16].sum()) // 112
    placement = Placement.linear(SPEC.num_moe_layers, 128, 8)
    spread = replace(MODEL, topology=Topology(8))
    batch = Batch(prefill_tokens=512)
    assert spread.step(skewed, batch, placement).total_s > 1.2 * spread.step(even, batch, placement).total_s


def test_graph_padding_counts_the_batch_that_runs() -> None:
    padded = replace(MODEL, options=CostOptions(graph_sizes=(1, 8, 64, 256)))
    assert padded.options.padded(65) == 256
    assert padded.options.padded(257) == 257
    batch = Batch(decode_requests=65, decode_context=6500)
    assert padded.step(even_load(64), batch).dense_s == MODEL.dense_s(256, 65)
    assert MODEL.step(even_load(64), batch).dense_s == MODEL.dense_s(65, 65)


def test_padding_rows_touch_as_many_experts_as_random_tokens_do() -> None:
    """Mean over all choices of three padding rows: 2 of 5 experts each, of which the batch has touched 2."""
    spec = replace(SPEC, num_experts=5, top_k=2)
    model = replace(MODEL, spec=spec, options=CostOptions(graph_sizes=(1, 4, 8), padding=1.0))
    rows = list(combinations(range(5), 2))
    further = np.mean([len({*a, *b, *c} - {0, 1}) for a in rows for b in rows for c in rows])
    assert 3 * model.touched_by_padding([Batch(5)]) == pytest.approx(further)
    assert model.touched_by_padding([Batch(5), Batch(3)]) == pytest.approx(1 - 0.6**4)
    assert model.touched_by_padding([Batch(4), Batch(3, prefill_tokens=2)]) == 0.0
    assert replace(model, options=CostOptions(graph_sizes=(8,))).touched_by_padding([Batch(5)]) == 0.0


def test_padding_rows_make_the_experts_of_a_step_dearer() -> None:
    load = np.zeros((SPEC.num_moe_layers, SPEC.num_experts), np.int64)
    load[:, : 9 * SPEC.top_k : 2] = 2
    times = {}
    for padding in (0.0, 0.5, 1.0):
        model = replace(MODEL, options=CostOptions(graph_sizes=(8, 16), padding=padding))
        times[padding] = model.step(load, Batch(9, 9 * 512))
    assert times[0.0].moe_s.sum() < times[0.5].moe_s.sum() < times[1.0].moe_s.sum()
    assert times[0.0].dense_s == times[1.0].dense_s
    everything = model.step(np.maximum(load, 1), Batch(16, 9 * 512)).moe_s.sum()
    assert times[1.0].moe_s.sum() < everything


def test_overlap_hides_the_exchange_behind_the_experts() -> None:
    placement = Placement.linear(SPEC.num_moe_layers, 128, 8)
    batch = Batch(prefill_tokens=512)
    times = []
    for overlap in (0.0, 0.5, 1.0):
        model = replace(MODEL, topology=Topology(8), options=CostOptions(overlap=overlap))
        times.append(float(model.step(even_load(4096), batch, placement).all_to_all_s.sum()))
    assert times[0] > times[1] >= times[2] >= 0.0


def test_prompts_attend_to_themselves_alone() -> None:
    one = MODEL.attention_s(Batch(prefill_tokens=16384))
    many = MODEL.attention_s(Batch(prefill_tokens=16384, prefill_requests=32))
    assert many < one / 4
    assert MODEL.attention_s(Batch(prefill_tokens=1, prefill_context=4096)) == pytest.approx(
        MODEL.attention_s(Batch(decode_requests=1, decode_context=4096)), rel=0.01
    )


def test_only_outputs_pass_the_head() -> None:
    assert MODEL.dense_s(16384, 32) < MODEL.dense_s(16384) - 0.005


def test_nothing_to_do_takes_no_time() -> None:
    assert MODEL.step(np.zeros((48, 128), int), Batch()).total_s == 0.0


@pytest.mark.parametrize(
    ("load", "placement", "message"),
    [
        (np.ones((3, 128), int), None, "load has 3 layers; qwen3-30b-a3b has 48"),
        (-np.ones((48, 128), int), None, "load holds -1; tokens must not be negative"),
        (np.ones((48, 128), int), Placement.linear(48, 128, 8), "num_ranks=8 must equal topology.num_ranks=1"),
    ],
)
def test_what_does_not_belong_together_is_refused(load: np.ndarray, placement: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODEL.step(load, Batch(decode_requests=8), placement)


def test_a_busier_rank_makes_the_exchange_longer() -> None:
    placement = Placement.linear(48, 128, 8)
    model = replace(MODEL, topology=Topology(8))
    skewed = even_load(4096)
    skewed[:, :16] *= 3
    batch = Batch(prefill_tokens=512)
    even = model.step(even_load(4096), batch, placement).all_to_all_s
    assert (model.step(skewed, batch, placement).all_to_all_s > 1.5 * even).all()


def test_given_traffic_is_used() -> None:
    placement = Placement.linear(SPEC.num_moe_layers, 128, 8)
    model = replace(MODEL, topology=Topology(8))
    step = model.step(even_load(64), Batch(decode_requests=8), placement, ExchangeTraffic(45e6, 0.0))
    assert step.all_to_all_s[0] == pytest.approx(2 * (NVLINK4.latency_s + 45e6 / NVLINK4.bytes_per_s))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 1.5}, "overlap=1.5 must be in 0 … 1"),
        ({"graph_sizes": (8, 4)}, "must rise"),
        ({"graph_sizes": (0, 4)}, "must rise from at least 1"),
        ({"padding": 1.5}, "padding=1.5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostOptions(**options)


def test_load_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"load has shape \(48, 64\); expected \[layer, 128\]"):
        MODEL.moe_s(np.ones((48, 64), int), 8)


@given(hnp.arrays(np.int64, (2, 6), elements=st.integers(0, 1000)), st.permutations([0, 1, 2, 3, 4, 5, 0, 3, 3]))
def test_replicas_share_every_token_once(load: Any, slots: list[Any]) -> None:
    placement = Placement(np.array([slots, slots[::-1]], np.int32), 3, 6)
    shared = slot_tokens(load, Slots.of(placement))
    back = np.zeros(load.shape)
    for layer in range(2):
        np.add.at(back[layer], placement.slot_experts[layer], shared[layer])
        for expert in range(6):
            mine = shared[layer][placement.slot_experts[layer] == expert]
            assert mine.max() - mine.min() <= 1, "replicas share evenly"
    np.testing.assert_array_equal(back, load)
