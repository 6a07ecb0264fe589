"""Counting against sets and np.bincount."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coterie.footprints as package
from coterie.errors import ConfigError
from coterie.footprints import accumulate_load, distinct_experts, footprint, footprints


@st.composite
def activations(draw: st.DrawFn) -> tuple[Any, Any]:
    """(expert_ids [token, layer, k], num_experts): distinct within a token and layer."""
    tokens, layers, experts = draw(st.integers(0, 20)), draw(st.integers(1, 4)), draw(st.integers(1, 300))
    k = draw(st.integers(1, min(4, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :k]
    return ids.astype(np.uint8 if experts <= 256 else np.uint16), experts


def brute_load(ids: Any, experts: Any) -> np.ndarray:
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])])


@given(activations())
def test_footprint_and_distinct_match_brute_force(case: tuple[Any, Any]) -> None:
    ids, experts = case
    assert np.array_equal(footprint(ids, experts), brute_load(ids, experts))
    assert footprint(ids, experts).dtype == np.uint32
    expected = [len(set(ids[:, layer].ravel().tolist())) for layer in range(ids.shape[1])]
    assert distinct_experts(ids, experts).tolist() == expected


@given(activations(), st.lists(st.integers(0, 20), max_size=5))
def test_footprints_split_by_request(case: tuple[Any, Any], cuts: list[int]) -> None:
    ids, experts = case
    offsets = np.array([0, *sorted(min(c, len(ids)) for c in cuts), len(ids)])
    counts = footprints(ids, offsets, experts)
    for request, count in enumerate(counts):
        assert np.array_equal(count, brute_load(ids[offsets[request] : offsets[request + 1]], experts))
    assert np.array_equal(counts.sum(axis=0), footprint(ids, experts))


def test_accumulate_adds_in_place_to_any_dtype(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 8, (50, 3, 2)).astype(np.uint8)
    for dtype in (np.uint64, np.float64):
        out = np.ones((3, 8), dtype)
        accumulate_load(ids[:20], out)
        accumulate_load(ids[20:], out)
        assert np.array_equal(out, 1 + brute_load(ids, 8))


def test_bad_ids_and_shapes_are_named() -> None:
    ids = np.array([[[0, 1]], [[1, 9]]], np.uint8)
    for count in (footprint, distinct_experts):
        with pytest.raises(ConfigError, match="token 1 activates expert 9; it must be in 0 … 7"):
            count(ids, 8)
    with pytest.raises(ConfigError, match="token 0 activates expert -1"):
        footprint(np.full((1, 1, 1), -1, np.int32), 8)
    with pytest.raises(ConfigError, match=r"expected \[token, layer, k\]"):
        footprint(ids[0], 8)
    with pytest.raises(ConfigError, match="1 layers; the load has 2"):
        accumulate_load(ids, np.zeros((2, 8)))
    with pytest.raises(ConfigError, match="offsets must rise"):
        footprints(ids, np.array([0, 3]), 16)


def test_public_surface() -> None:
    assert {name for name in package.__all__ if not hasattr(package, name)} == set()
