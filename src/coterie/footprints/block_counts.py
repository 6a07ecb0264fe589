"""Counts per KV block: the published way to keep signatures beside a KV cache, for comparison with the slot store.

One int8 for every block, MoE layer and expert: how many of the block's tokens activated it. A request's footprint is
the sum over its blocks, whether it computed them or found them in the cache.

Where it is not exact, and :class:`~coterie.footprints.slots.SlotStore` is:

- a count past 127 stays 127: blocks of more than 127 tokens may clip;
- a token computed twice in one block (a preempted or rejected one, without the block being taken anew) counts twice;
- a block must be cleared when it is given to someone else, or the last owner's counts stay: the allocator must say so;
- a request that shares only part of a block cannot be told from one that has all of it.

It takes layers x experts bytes a block, whatever k; the slot store takes layers x k bytes (and 2) a token. Blocks of
16 tokens of Qwen3-30B-A3B (48 layers, top-8 of 128) take 6,144 and 6,176 bytes; of 128 tokens 6,144 and 49,408.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import ConfigError

MOST = 127
"""The largest count of a cell."""


class BlockCounts:
    """Activation counts by KV block, [block, layer, expert] int8."""

    def __init__(self, num_blocks: int, block_size: int, num_layers: int, num_experts: int) -> None:
        if min(num_blocks, block_size, num_layers, num_experts) < 1:
            raise ConfigError(
                f"num_blocks={num_blocks}, block_size={block_size}, num_layers={num_layers} and "
                f"num_experts={num_experts} must be at least 1"
            )
        self.block_size = block_size
        self.counts = np.zeros((num_blocks, num_layers, num_experts), np.int8)

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes

    def clear(self, blocks: NDArray[np.integer]) -> None:
        """Blocks that the allocator gives to a new owner."""
        self.counts[self._check(blocks)] = 0

    def add(self, slots: NDArray[np.integer], expert_ids: NDArray[np.integer]) -> None:
        """Tokens computed into slots: ids [token, layer, k]; a slot below 0 pads."""
        _, layers, experts = self.counts.shape
        if expert_ids.ndim != 3 or expert_ids.shape[:2] != (len(slots), layers):
            raise ConfigError(f"expert_ids {expert_ids.shape} must be [{len(slots)}, {layers}, k]")
        if expert_ids.size and not 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < experts:
            raise ConfigError(f"expert_ids must be in 0 … {experts - 1}")
        kept = slots >= 0
        blocks = self._check(np.asarray(slots[kept], np.int64) // self.block_size)
        _add(blocks, np.asarray(expert_ids[kept], np.int64), self.counts)

    def footprint(self, blocks: NDArray[np.integer]) -> NDArray[np.int64]:
        """[layer, expert] sum over a request's blocks."""
        return np.asarray(self.counts[self._check(blocks)].sum(axis=0, dtype=np.int64))

    def _check(self, blocks: NDArray[np.integer]) -> NDArray[np.int64]:
        last = len(self.counts) - 1
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) <= last:
            raise ConfigError(f"blocks {int(blocks.min())} … {int(blocks.max())} must be in 0 … {last}")
        return np.asarray(blocks, np.int64)


@njit()
def _add(blocks: NDArray[np.int64], ids: NDArray[np.int64], counts: NDArray[Any]) -> None:
    _, layers, k = ids.shape
    for token in range(len(blocks)):
        for layer in range(layers):
            for j in range(k):
                expert = ids[token, layer, j]
                if counts[blocks[token], layer, expert] < MOST:
                    counts[blocks[token], layer, expert] += 1
