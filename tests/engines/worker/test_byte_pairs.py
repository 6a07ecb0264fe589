"""Merging a word's bytes: the result of the plain loop, in work that does not grow with the square of the word."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.tiny import tiny_model_path
from coterie.engines.worker.numpy_model import CACHED_WORDS, LONGEST_CACHED, BytePairs, _byte_letters

FOLDER = tiny_model_path()
PAIRS = BytePairs(FOLDER)
ABOUT: dict[str, Any] = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
RANKS = {tuple(pair): rank for rank, pair in enumerate(ABOUT["merges"])}
LETTERS = _byte_letters()


def merged_plainly(word: str) -> tuple[int, ...]:
    """Look at all neighbours, merge every one that equals the pair learned first, and again."""
    parts = [LETTERS[byte] for byte in word.encode("utf-8", "surrogatepass")]
    while len(parts) > 1:
        pair = min(pairwise(parts), key=lambda two: RANKS.get(two, len(RANKS)))
        if pair not in RANKS:
            break
        joined, at = [], 0
        while at < len(parts):
            both = tuple(parts[at : at + 2]) == pair
            joined.append(parts[at] + parts[at + 1] if both else parts[at])
            at += 2 if both else 1
        parts = joined
    return tuple(ABOUT["vocab"][part] for part in parts)


@given(
    st.one_of(
        st.text(min_size=1, max_size=40),
        st.text("etaoinshrdlu", min_size=1, max_size=200),
        st.text("ab", min_size=1, max_size=200),
        st.text("e日é😀 \ud800", min_size=1, max_size=60),
    )
)
def test_equals_the_plain_loop(word: str) -> None:
    assert PAIRS._merged(word) == merged_plainly(word)


class CountedRanks(dict[tuple[int, int], int]):
    lookups = 0

    def get(self, pair: Any, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(pair, default)


@pytest.mark.parametrize("word", ["etaoinshrdlu" * 8_000, "a" * 100_000])
def test_the_work_grows_with_the_length_of_a_word(word: str) -> None:
    """n pairs at first, and at most two more per merge: 3n come off the heap, and n merges look up two pairs each."""
    pairs = BytePairs(FOLDER)
    pairs._ranks = ranks = CountedRanks(pairs._ranks)
    assert len(pairs.encode(word)) > 1000
    assert ranks.lookups <= 6 * len(word)


def test_the_cache_of_words_is_bounded() -> None:
    pairs = BytePairs(FOLDER)
    pairs.encode(" ".join("x" * length for length in range(1, 100)))
    kept = pairs._word.cache_info()
    assert kept.maxsize == CACHED_WORDS
    assert kept.currsize <= LONGEST_CACHED + 1
