"""Experts that ranks hold, as bits."""

from __future__ import annotations

import numpy as np

from coterie.placement.holdings import bit_words


def test_bit_words_are_the_experts_held() -> None:
    held = np.random.default_rng(0).random((3, 2, 130)) < 0.5
    words = bit_words(held)
    assert words.shape == (3, 2, 3)
    for rank, layer, expert in np.ndindex(held.shape):
        assert (
            bool(words[rank, layer, expert // 64] >> np.uint64(expert % 64) & np.uint64(1)) == held[rank, layer, expert]
        )
