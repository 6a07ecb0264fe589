"""Tables of the compiled fleet: the times of the step model, whichever way a step is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.costs.presets import step_model
from coterie.costs.step import Batch, CostOptions
from coterie.models import get_model
from coterie.sim.execution import StepTimer
from coterie.sim.fleet._steps import MOST_DECODING, step_counts
from coterie.types import Placement, Topology
from fleet_steps import SPEC, by_bits, counted_us

MODELS = {
    "gpt-oss-20b": ("gpt-oss-20b", "h200", 1, CostOptions()),
    "in vLLM": ("gpt-oss-20b", "h200", 1, CostOptions()),
    "in vLLM, in waves": ("gpt-oss-20b", "h200", 1, CostOptions()),
    "in vLLM on 4 ranks": ("qwen3-30b-a3b", "h200", 4, CostOptions()),
    "padded": ("qwen3-30b-a3b", "h200", 1, CostOptions(graph_sizes=(1, 2, 4, 8, 16, 32, 64, 128))),
    "padding rows": ("qwen3-30b-a3b", "h200", 1, CostOptions(graph_sizes=(4, 20, 64), padding=1.0)),
    "padding rows in vLLM, in waves": ("gpt-oss-20b", "h200", 1, CostOptions(graph_sizes=(4, 20, 64), padding=0.5)),
    "another device": ("qwen3-30b-a3b", "rtx-pro-6000", 1, CostOptions()),
    "latent attention": ("deepseek-v2-lite", "h200", 1, CostOptions()),
    "4 ranks with replicas": ("gpt-oss-20b", "h200", 4, CostOptions(overlap=0.3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_tables_give_the_times_of_the_step_model(name: str) -> None:
    model_name, preset, ranks, options = MODELS[name]
    rng, spec = np.random.default_rng(0), get_model(model_name)
    dtype, engine = "mxfp4" if "waves" in name else "bf16", "vllm" if "vLLM" in name else None
    model = step_model(spec, preset, dtype, Topology(ranks), options, engine)  # type: ignore[arg-type]
    layers, experts = spec.num_moe_layers, spec.num_experts
    placement = Placement.linear(layers, experts, ranks, experts + 8) if ranks > 1 else None
    tables, timer = (model.tables(3000), step_counts(model, placement)), StepTimer(model, placement)
    for decoding, prefill, prompts in ((1, 0, 1), (16, 0, 1), (61, 0, 1), (0, 1, 1), (7, 300, 2), (0, 2900, 3)):
        tokens = rng.random((decoding + prefill, layers, experts)).argpartition(spec.top_k, axis=2)[:, :, : spec.top_k]
        load = np.zeros((layers, experts), np.int64)
        for layer in range(layers):
            np.add.at(load[layer], tokens[:, layer].ravel(), 1)
        context, before = 1000 * decoding, 17 * prefill
        batch = Batch(
            -(-decoding // ranks), context // ranks, -(-prefill // ranks), before // ranks, -(-prompts // ranks)
        )
        expected = timer(load, batch)
        counts = load.astype(np.uint32)
        us, distinct = counted_us(*tables, counts, Batch(decoding, context, prefill, before, prompts))
        assert us * 1e-6 == pytest.approx(expected.seconds, rel=1e-7)
        assert distinct == expected.distinct
        most = min(model.moe.tile_rows) if model.moe.overlap or model.moe.waves else MOST_DECODING
        if not prefill and ranks == 1 and decoding <= min(MOST_DECODING, most):
            by_words, found = by_bits(*tables, tokens, experts, context)
            assert by_words == pytest.approx(us, rel=1e-9)
            assert found == distinct


@given(st.integers(0, 2**32), st.integers(1, MOST_DECODING), st.sampled_from([5, 12, 32, 60, 64, 100, 128]))
def test_bits_count_as_plain_counting_does(seed: int, tokens: int, experts: int) -> None:
    """Any number of tokens, and layers whose experts begin anywhere in a word."""
    rng = np.random.default_rng(seed)
    layers, top_k = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    popular = rng.dirichlet(np.full(experts, 0.3), size=layers) + 1e-9
    keys = rng.exponential(size=(tokens, layers, experts)) / popular
    ids = keys.argsort(axis=2)[:, :, :top_k]
    spec = replace(SPEC, num_layers=layers, first_moe_layer=0, num_experts=experts, top_k=top_k)
    model = step_model(spec, "h200")
    tables = model.tables(64), step_counts(model)
    load = np.zeros((layers, experts), np.uint32)
    for layer in range(layers):
        np.add.at(load[layer], ids[:, layer].ravel(), 1)
    us, distinct = counted_us(*tables, load, Batch(tokens, 100 * tokens, 0, 0, 1))
    by_words, found = by_bits(*tables, ids, experts, 100 * tokens)
    assert by_words == pytest.approx(us, rel=1e-9)
    assert found == distinct
