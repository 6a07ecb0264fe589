"""Memory of the position store: against the store itself, and the table in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.tiny import TINY
from coterie.footprints.positions import PositionShape
from coterie.footprints.sizing import EPOCH_BYTES, position_bytes
from coterie.models import get_model, models
from coterie.types import ModelSpec

MAX_SHARE_OF_KV = 0.01
"""Largest acceptable size of the store, as a share of the KV cache: the bar of the page."""
H200_BYTES = 141e9
DOCS = Path(__file__).parents[2] / "docs" / "engines" / "position-store.md"


def kv_bytes(model: ModelSpec, dtype: str) -> int:
    """Bytes of a token's KV as the page counts them: every layer caches every token, and 8-bit KV has no scales."""
    return model.kv_bytes_per_token // (2 if dtype == "fp8" else 1)


def share_of_kv(model: ModelSpec, dtype: str) -> float:
    return position_bytes(model) / kv_bytes(model, dtype)


def counts_share_of_kv(model: ModelSpec, dtype: str, block: int) -> float:
    """Share of the published alternative: one byte by block, layer and expert."""
    return model.num_moe_layers * model.num_experts / block / kv_bytes(model, dtype)


def spec(**change: int) -> ModelSpec:
    shape: dict[str, Any] = {
        "num_layers": 4,
        "num_experts": 16,
        "top_k": 2,
        "hidden_size": 8,
        "expert_intermediate_size": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 10,
        **change,
    }
    return ModelSpec("m", **shape)


@given(
    st.integers(1, 80),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([2, 256, 257, 65536]),
    st.integers(1, 2),
    st.integers(1, 10_000),
)
def test_is_what_the_store_allocates(
    layers: int, first: int, step: int, experts: int, top_k: int, positions: int
) -> None:
    """Position by position: the store's bytes grow by position_bytes, but for the header that does not grow."""
    model = spec(
        num_layers=layers, first_moe_layer=min(first, layers - 1), moe_layer_step=step, num_experts=experts, top_k=top_k
    )
    store = PositionShape(8 * positions, model.num_moe_layers, top_k, experts)
    twice = store._replace(num_positions=16 * positions)
    assert twice.nbytes - store.nbytes == 8 * positions * position_bytes(model)


def test_by_hand() -> None:
    """DeepSeek-V3: 58 layers of 8 one-byte ids; 61 layers of a 512-wide latent and a 64-wide rotary part."""
    model = get_model("deepseek-v3")
    assert position_bytes(model) == 58 * 8 + EPOCH_BYTES
    assert kv_bytes(model, "bf16") == 61 * (512 + 64) * 2
    assert share_of_kv(model, "bf16") == pytest.approx(0.00663, abs=1e-5)
    assert counts_share_of_kv(model, "bf16", 16) == pytest.approx(58 * 256 / (16 * 70_272))


def test_ids_of_more_than_256_experts_take_two_bytes() -> None:
    assert position_bytes(spec(num_experts=257)) - EPOCH_BYTES == 2 * (
        position_bytes(spec(num_experts=256)) - EPOCH_BYTES
    )


@pytest.mark.parametrize("name", sorted(set(models()) - {TINY}))
def test_every_shape_with_16_bit_kv_stays_under_the_bar(name: str) -> None:
    assert share_of_kv(get_model(name), "bf16") < MAX_SHARE_OF_KV


def test_the_shapes_over_the_bar_with_8_bit_kv_are_those_said() -> None:
    over = {name for name, model in models().items() if share_of_kv(model, "fp8") >= MAX_SHARE_OF_KV}
    assert over == {TINY, "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm-5.2"}
    assert all(models()[name].kv_lora_rank for name in over - {TINY})
    assert get_model(TINY).num_kv_heads * get_model(TINY).head_dim == 64, "its cache is small because the model is"


def _memory_section() -> list[str]:
    return DOCS.read_text().partition("## Memory")[2].splitlines()


def test_the_table_in_the_docs_is_this() -> None:
    rows = [line.strip("| ").split(" | ") for line in _memory_section() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == list(models())
    for name, store, kv, share, half_share, beside, half_beside, *counts in rows[1:]:
        model = get_model(name)
        assert (int(store), int(kv.replace(",", ""))) == (position_bytes(model), kv_bytes(model, "bf16"))
        for cell, dtype in ((share, "bf16"), (half_share, "fp8")):
            shown = f"{100 * share_of_kv(model, dtype):.2f} %"
            assert cell == (shown if share_of_kv(model, dtype) < MAX_SHARE_OF_KV else f"**{shown}**")
        for cell, dtype in ((beside, "bf16"), (half_beside, "fp8")):
            filled = position_bytes(model) / (position_bytes(model) + kv_bytes(model, dtype))
            assert cell == f"{filled * H200_BYTES / 1e9:.2f} GB"
        order = (("bf16", 16), ("fp8", 16), ("bf16", 128), ("fp8", 128))
        assert counts == [f"{100 * counts_share_of_kv(model, *key):.2f} %" for key in order]


def test_the_windowed_shares_in_the_docs() -> None:
    """Contexts much longer than the window: only full layers hold KV. From the shapes' own notes on their windows."""
    text = " ".join(DOCS.read_text().split())
    for name in ("gpt-oss-120b", "gpt-oss-20b"):
        model = get_model(name)
        assert 100 * position_bytes(model) / (model.kv_bytes_per_token / 2) == pytest.approx(0.40, abs=0.005)
    gemma = 100 * position_bytes(get_model("gemma-4-26b-a4b")) / (5 * 2 * 2 * 512 * 2)
    assert f"{gemma:.2f} %, over the bar" in text
    assert f"{100 * position_bytes(get_model('deepseek-v3')) / (61 * 656):.2f} % for DeepSeek-V3" in text
