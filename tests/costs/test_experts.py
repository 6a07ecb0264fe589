"""The MoE layer's law: its physics, and that a fit predicts cells by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.costs import fit
from coterie.costs.cells import MoeCell, expert_tokens
from coterie.costs.experts import TILES, MoeParams, Waves, blend_table, expert_table, layer_us, rank_us

NBYTES, FLOPS = 9.4e6, 9.4e6


def params(**changes: Any) -> MoeParams:
    base = {
        "overhead_us": 25.0,
        "token_us": 0.01,
        "stream_bytes_per_us": 3e6,
        "row_us": 0.004,
        "tile_flops_per_us": (5e8, 6.5e8),
        "tile_rows": (128, 256),
        "switch_rows": 128.0,
        "sharpness": 6.0,
        "fill_penalty": 0.3,
        "partial_penalty": 0.4,
        "overlap": 0.2,
        "cache_bytes": 6e7,
        "cache_bytes_per_us": 9e6,
    }
    return MoeParams(**{**base, **changes})


def time_of(p: MoeParams, counts: Any, tokens: int = 64, nbytes: Any = NBYTES, resident: bool = False) -> float:
    return layer_us(p.array(nbytes, FLOPS, resident), np.asarray(counts, float), float(tokens))


def spread(tokens: int, active: int, experts: int = 128, k: int = 8) -> np.ndarray:
    counts = np.zeros(experts)
    counts[:active] = expert_tokens(tokens, k, active)
    return counts


def test_no_tokens_cost_nothing() -> None:
    assert time_of(params(), np.zeros(128), tokens=0) == 0.0


def test_decode_is_set_by_distinct_experts_and_not_by_tokens() -> None:
    few, many = time_of(params(), spread(64, 16)), time_of(params(), spread(64, 128))
    assert many > 4 * few
    same = [time_of(params(token_us=1e-6), spread(tokens, 128), tokens) for tokens in (16, 64, 256)]
    assert max(same) < 1.25 * min(same)


def test_prefill_is_set_by_tokens() -> None:
    assert time_of(params(), spread(8192, 128), 8192) > 1.7 * time_of(params(), spread(4096, 128), 4096)


def test_streaming_follows_bytes() -> None:
    p = params(overhead_us=0.01, token_us=1e-6, row_us=1e-7)
    counts = spread(16, 128)
    full, half = time_of(p, counts), time_of(p, counts, nbytes=NBYTES / 2)
    assert half < full / 1.4, "halving the weight dtype must pay where weights are streamed"


def test_a_partly_filled_tile_costs_at_least_a_full_one() -> None:
    p = params(overlap=0.0, fill_penalty=1e-4)
    assert time_of(p, [129.0, 0.0], 129) > time_of(p, [128.0, 0.0], 128) + 0.99 * 128 * FLOPS / 5e8


def test_residency_pays_only_what_fits() -> None:
    p = params(tile_flops_per_us=(5e9, 5e9))
    small, large = spread(4, 8), spread(64, 128)
    assert time_of(p, small, 4, nbytes=5e6, resident=True) < time_of(p, small, 4, nbytes=5e6) - 5
    assert abs(time_of(p, large, resident=True) / time_of(p, large) - 1) < 0.01


@given(st.lists(st.integers(0, 300), min_size=1, max_size=24), st.integers(0, 23), st.integers(1, 100))
def test_another_active_expert_is_never_free(drawn: list[int], where: int, rows: int) -> None:
    p = params(switch_rows=1e9)  # one tile size: changing over may be faster
    counts = np.array(drawn, float)
    where %= len(counts)
    if counts[where]:
        counts[where] = 0
    before = time_of(p, counts)
    counts[where] = rows
    assert time_of(p, counts) > before


@given(st.permutations(list(range(12))))
def test_the_order_of_experts_does_not_matter(order: list[Any]) -> None:
    counts = np.array([0, 1, 5, 17, 128, 129, 300, 0, 2, 2, 64, 9], float)
    np.testing.assert_allclose(time_of(params(), counts[order]), time_of(params(), counts), rtol=1e-12)


@given(
    tokens=st.integers(1, 3000),
    share=st.floats(0, 1),
    zipf=st.sampled_from([0.0, 0.7, 1.5]),
    warm=st.booleans(),
    overlap=st.floats(0.001, 1),
    sharpness=st.floats(1, 30),
    tiles=st.sampled_from([(16, 64), (128, 256), (128, 512)]),
    switch=st.sampled_from([2.0, 128.0]),
)
def test_a_fit_predicts_cells_by_the_law(
    tokens: int,
    share: float,
    zipf: float,
    warm: bool,
    overlap: float,
    sharpness: float,
    tiles: tuple[int, int],
    switch: float,
) -> None:
    k, experts = 4, 32
    active = int(k + share * (min(experts, tokens * k) - k))
    p = params(overlap=overlap, sharpness=sharpness, tile_rows=tiles, switch_rows=switch)
    cell = MoeCell(tokens, active, 1.0, zipf, warm)
    table = fit._table([cell], k, experts, NBYTES, FLOPS, float("inf"))
    x = np.array(
        [
            p.overhead_us,
            p.token_us,
            p.stream_bytes_per_us,
            p.row_us,
            *p.tile_flops_per_us,
            p.sharpness,
            p.fill_penalty,
            p.partial_penalty,
            p.overlap,
            p.cache_bytes,
            p.cache_bytes_per_us,
        ]
    )
    fitted = fit._predict(x, table, fit._Shape(tiles, switch, True))[0]
    counts = np.zeros(experts)
    counts[:active] = expert_tokens(tokens, k, active, zipf)
    np.testing.assert_allclose(time_of(p, counts, tokens, resident=warm), fitted, rtol=1e-9)


@pytest.mark.parametrize("waves", [None, Waves((3.0,), (23, 12), 132, 2)])
@pytest.mark.parametrize("looked_up", [False, True])
def test_padding_rows_cost_one_more_row_on_idle_experts(waves: Waves | None, looked_up: bool) -> None:
    """A share of the idle experts costs what as many experts with a row each do; one tile size, as in small batches."""
    small = params(tile_rows=(16,), tile_flops_per_us=(8e6,), waves=waves)
    p = small.array(NBYTES, FLOPS)
    tables = np.zeros((3, TILES, 8)), blend_table(small.sharpness)
    expert_table(p, tables[0])
    prices = tables if looked_up else (np.empty((3, TILES, 0)), np.empty(0))
    rows = np.array([5, 0, 1, 0, 0, 2, 0, 0, 0, 7])
    for more in range(7):
        filled = rows.copy()
        filled[np.flatnonzero(rows == 0)[:more]] = 1
        expected = rank_us(p, *prices, filled, 16.0, 0, 0.0)
        assert rank_us(p, *prices, rows, 16.0, 0, more / 6) == pytest.approx(expected, rel=1e-9)
    assert rank_us(p, *prices, 0 * rows, 16.0, 0, 0.0) == 0.0 < rank_us(p, *prices, 0 * rows, 16.0, 0, 0.5)
