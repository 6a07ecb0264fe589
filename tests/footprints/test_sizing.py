"""Memory of the position store: against the store itself, against counts by brute force, and the table in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.tiny import TINY
from coterie.errors import ConfigError
from coterie.footprints.positions import PositionShape
from coterie.footprints.sizing import EPOCH_BYTES, position_bytes
from coterie.models import get_model, models
from coterie.types import ModelSpec
from store_size import H200_BYTES, MAX_COUNT, store_size

DOCS = Path(__file__).parents[2] / "docs" / "engines" / "position-store.md"


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
    size = store_size(get_model("deepseek-v3"), "bf16", 16)
    assert size.position_bytes == 58 * 8 + EPOCH_BYTES
    assert size.kv_bytes == 61 * (512 + 64) * 2
    assert size.share_of_kv == pytest.approx(0.00663, abs=1e-5)
    assert size.block_count_bytes == 58 * 256
    assert size.counts_share_of_kv == pytest.approx(58 * 256 / (16 * 70_272))
    assert store_size(get_model("deepseek-v3"), "fp8").kv_bytes == 61 * 576


def test_ids_of_more_than_256_experts_take_two_bytes() -> None:
    assert position_bytes(spec(num_experts=257)) - EPOCH_BYTES == 2 * (
        position_bytes(spec(num_experts=256)) - EPOCH_BYTES
    )


@given(st.integers(1, 300))
def test_the_largest_count_of_a_block_decides_exactness(block: int) -> None:
    """The worst block there is: every token chooses expert 0. k does not matter, an expert is chosen once a token."""
    choices = np.tile(np.arange(2), (block, 1))  # [token, k]
    largest = int(np.bincount(choices.ravel()).max())
    assert largest == block
    clipped = np.clip(np.bincount(choices.ravel()), None, MAX_COUNT).astype(np.int8)
    assert store_size(spec(), "bf16", block).counts_exact == (int(clipped[0]) == block)


@pytest.mark.parametrize("name", sorted(set(models()) - {TINY}))
def test_every_shape_with_16_bit_kv_stays_under_the_bar(name: str) -> None:
    assert store_size(get_model(name), "bf16").share_of_kv < 0.01


def test_the_shapes_over_the_bar_with_8_bit_kv_are_those_said() -> None:
    over = {name for name, model in models().items() if not store_size(model, "fp8").within_bar}
    assert over == {TINY, "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm-5.2"}
    assert all(models()[name].kv_lora_rank for name in over - {TINY})
    assert get_model(TINY).num_kv_heads * get_model(TINY).head_dim == 64, "its cache is small because the model is"


@given(st.sampled_from(list(models())), st.sampled_from(["bf16", "fp8"]), st.integers(1, 512))
def test_a_device_is_filled_exactly(name: str, kv_dtype: Any, block: int) -> None:
    size = store_size(get_model(name), kv_dtype, block)
    store = size.bytes_beside_kv()
    tokens = store / size.position_bytes
    assert store + tokens * size.kv_bytes == pytest.approx(H200_BYTES)
    assert size.share_of_hbm < size.share_of_kv
    other = store_size(get_model(name), kv_dtype, block + 1)
    assert (other.position_bytes, other.share_of_kv) == (size.position_bytes, size.share_of_kv), (
        "whatever the block size"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(("int4", 16), "kv_dtype='int4' must be one of bf16, fp8"), (("bf16", 0), "block_size=0 must be at least 1")],
)
def test_bad_input(arguments: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        store_size(spec(), *arguments)


def _memory_section() -> list[str]:
    return DOCS.read_text().partition("## Memory")[2].splitlines()


def test_the_table_in_the_docs_is_this() -> None:
    rows = [line.strip("| ").split(" | ") for line in _memory_section() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == list(models())
    for name, store, kv, share, half_share, beside, half_beside, *counts in rows[1:]:
        sizes = {(d, b): store_size(get_model(name), d, b) for d in ("bf16", "fp8") for b in (16, 128)}
        plain, half = sizes["bf16", 16], sizes["fp8", 16]
        assert (int(store), int(kv.replace(",", ""))) == (plain.position_bytes, plain.kv_bytes)
        for cell, size in ((share, plain), (half_share, half)):
            shown = f"{100 * size.share_of_kv:.2f} %"
            assert cell == (shown if size.within_bar else f"**{shown}**")
        assert (beside, half_beside) == tuple(f"{s.bytes_beside_kv() / 1e9:.2f} GB" for s in (plain, half))
        order = (("bf16", 16), ("fp8", 16), ("bf16", 128), ("fp8", 128))
        assert counts == [f"{100 * sizes[key].counts_share_of_kv:.2f} %" for key in order]


def test_the_windowed_shares_in_the_docs() -> None:
    """Contexts much longer than the window: only full layers hold KV. From the shapes' own notes on their windows."""
    text = " ".join(DOCS.read_text().split())
    for name in ("gpt-oss-120b", "gpt-oss-20b"):
        model = get_model(name)
        assert 100 * position_bytes(model) / (model.kv_bytes_per_token / 2) == pytest.approx(0.40, abs=0.005)
    gemma = 100 * position_bytes(get_model("gemma-4-26b-a4b")) / (5 * 2 * 2 * 512 * 2)
    assert f"{gemma:.2f} %, over the bar" in text
    assert f"{100 * position_bytes(get_model('deepseek-v3')) / (61 * 656):.2f} % for DeepSeek-V3" in text
