"""Counts per block beside the slot store: equal where they can be, and the cases where they cannot."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.footprints import SlotShape, SlotStore, block_slots, footprint
from coterie.footprints.block_counts import MOST, BlockCounts

LAYERS, EXPERTS, TOP_K, BLOCK = 2, 6, 2, 4


def experts_of(history: tuple[int, ...]) -> np.ndarray:
    """The experts of a sequence's last token depend on all tokens up to it."""
    rng = np.random.default_rng(abs(hash(history)) % (1 << 32))
    return np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)])


def stores(blocks: int, block_size: int = BLOCK) -> tuple[BlockCounts, SlotStore]:
    return (
        BlockCounts(blocks, block_size, LAYERS, EXPERTS),
        SlotStore.create(SlotShape(blocks * block_size, LAYERS, TOP_K, EXPERTS)),
    )


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 20), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(requests)
def test_slots_equal_recomputation_and_blocks_only_without_one(sequence: list[tuple[list[int], int, bool]]) -> None:
    """Requests one after the other: cached blocks are hit, others computed into the block freed longest ago.

    A request may be interrupted after some tokens and begin again: its blocks stay its own, and tokens of the one it
    was in are computed a second time.
    """
    counts, slots = stores(8)
    free: OrderedDict[int, None] = OrderedDict.fromkeys(range(8))
    cached: dict[tuple[int, ...], int] = {}
    recomputed: set[int] = set()
    for tokens, stop, again in sequence:
        blocks: list[int] = []
        while (len(blocks) + 1) * BLOCK <= len(tokens) - 1:
            block = cached.get(tuple(tokens[: (len(blocks) + 1) * BLOCK]))
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            free.pop(block)
        start = len(blocks) * BLOCK
        while len(blocks) * BLOCK < len(tokens):
            block, _ = free.popitem(last=False)
            for prefix in [prefix for prefix, owner in cached.items() if owner == block]:
                del cached[prefix]
            recomputed.discard(block)
            counts.clear(np.array([block]))
            blocks.append(block)
        ids = np.stack([experts_of(tuple(tokens[: p + 1])) for p in range(len(tokens))])
        runs = [(start, len(tokens))]
        if again and start < stop < len(tokens):
            begin = stop // BLOCK * BLOCK
            runs = [(start, stop), (max(begin, start), len(tokens))]
            if begin < stop:
                recomputed.add(blocks[begin // BLOCK])
        for first, last in runs:
            at = block_slots(blocks, BLOCK, first, last)
            counts.add(at, ids[first:last])
            slots.write(at, ids[first:last])
        truth = footprint(ids, EXPERTS)
        found, known = slots.footprint(block_slots(blocks, BLOCK, 0, len(tokens)))
        assert known == len(tokens)
        np.testing.assert_array_equal(found, truth)
        summed = counts.footprint(np.array(blocks))
        assert (summed >= truth).all()
        assert (summed == truth).all() == (not recomputed & set(blocks))
        for index in range(len(tokens) // BLOCK):
            cached.setdefault(tuple(tokens[: (index + 1) * BLOCK]), blocks[index])
        for block in reversed(blocks):
            free[block] = None


def test_a_large_block_clips() -> None:
    counts, slots = stores(1, block_size=200)
    ids = np.tile(np.array([0, 1]), (200, LAYERS, 1))
    counts.add(np.arange(200), ids)
    slots.write(np.arange(200), ids)
    assert counts.footprint(np.array([0]))[0, :2].tolist() == [MOST, MOST]
    assert slots.footprint(np.arange(200))[0][0, :2].tolist() == [200, 200]


def test_a_block_not_cleared_keeps_its_last_owner() -> None:
    counts, slots = stores(1)
    first, second = np.zeros((4, LAYERS, TOP_K), int), np.full((4, LAYERS, TOP_K), 3)
    for ids in (first, second):
        counts.add(np.arange(4), ids)
        slots.write(np.arange(4), ids)
    assert counts.footprint(np.array([0]))[0, 0] > 0
    assert slots.footprint(np.arange(4))[0][0, 0] == 0


def test_pads_are_skipped_and_memory_is_a_byte_a_cell() -> None:
    counts, slots = stores(8)
    counts.add(np.array([-1, 5]), np.zeros((2, LAYERS, TOP_K), int))
    assert counts.footprint(np.array([1]))[0, 0] == TOP_K
    assert counts.nbytes == 8 * LAYERS * EXPERTS
    wide = SlotShape(16, 48, 8, 128)
    assert wide.nbytes - wide.epochs_at == 16 * (48 * 8 + 2)
    assert BlockCounts(1, 16, 48, 128).nbytes == 48 * 128
    assert slots.shape.num_slots == 8 * BLOCK


def test_wrong_blocks_and_rows_are_refused() -> None:
    counts, _ = stores(2)
    with pytest.raises(ConfigError, match=r"0 … 1"):
        counts.footprint(np.array([2]))
    with pytest.raises(ConfigError, match=r"0 … 5"):
        counts.add(np.array([0]), np.full((1, LAYERS, TOP_K), 6))
    with pytest.raises(ConfigError, match="k\\]"):
        counts.add(np.array([0, 1]), np.zeros((1, LAYERS, TOP_K), int))
    with pytest.raises(ConfigError, match="at least 1"):
        BlockCounts(0, 1, 1, 1)
