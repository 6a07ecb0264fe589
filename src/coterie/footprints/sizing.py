"""How much memory the slot store takes, against the KV cache it lies beside and against counts per block.

The store keeps expert ids [layer, k] and a 2-byte epoch for every KV slot, whatever the block size. The published
alternative keeps one int8 count per block, layer and expert: cheaper with large blocks, dearer with small ones, and a
count past 127 is clipped. KV bytes are those of :class:`~coterie.types.ModelSpec`: every layer caches every token, and
8-bit KV has no scales. Sliding windows therefore make the true share of KV larger than the one computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from coterie.errors import ConfigError
from coterie.types import ModelSpec, narrowest_uint

KVDtype = Literal["bf16", "fp8"]

EPOCH_BYTES = 2
"""Beside the ids of each slot: whether they are valid."""
MAX_SHARE_OF_KV = 0.01
"""What the store may take at most of the KV cache's size."""
MAX_COUNT = 127
"""Largest count an int8 holds."""
H200_BYTES = 141e9


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Bytes for one token of context, over all layers."""

    model: str
    kv_dtype: KVDtype
    block_size: int
    """Tokens of a KV block."""
    slot_bytes: int
    """Of the store."""
    kv_bytes: int
    """Of the KV cache."""
    block_count_bytes: int
    """Of the published alternative, a whole block."""

    @property
    def share_of_kv(self) -> float:
        return self.slot_bytes / self.kv_bytes

    @property
    def within_bar(self) -> bool:
        return self.share_of_kv < MAX_SHARE_OF_KV

    @property
    def share_of_hbm(self) -> float:
        """Of a device filled by KV cache and store alone: an upper bound, weights lower both."""
        return self.slot_bytes / (self.slot_bytes + self.kv_bytes)

    def bytes_beside_kv(self, device_bytes: float = H200_BYTES) -> float:
        """The store's size on that device."""
        return self.share_of_hbm * device_bytes

    @property
    def counts_share_of_kv(self) -> float:
        return self.block_count_bytes / self.block_size / self.kv_bytes

    @property
    def counts_exact(self) -> bool:
        """A token chooses an expert once a layer at most, so a block's count reaches its size and no more."""
        return self.block_size <= MAX_COUNT


def slot_bytes(spec: ModelSpec) -> int:
    """Expert ids of one token in the narrowest dtype, and their epoch."""
    return spec.num_moe_layers * spec.top_k * narrowest_uint(spec.num_experts - 1).itemsize + EPOCH_BYTES


def store_size(spec: ModelSpec, kv_dtype: KVDtype = "bf16", block_size: int = 16) -> StoreSize:
    """The store of a model whose KV cache has this dtype and block size."""
    if kv_dtype not in get_args(KVDtype):
        raise ConfigError(f"kv_dtype={kv_dtype!r} must be one of {', '.join(get_args(KVDtype))}")
    if block_size < 1:
        raise ConfigError(f"block_size={block_size} must be at least 1")
    kv_bytes = spec.kv_bytes_per_token // (2 if kv_dtype == "fp8" else 1)
    counts = spec.num_moe_layers * spec.num_experts
    return StoreSize(spec.name, kv_dtype, block_size, slot_bytes(spec), kv_bytes, counts)
