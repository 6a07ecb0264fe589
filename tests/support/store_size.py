"""Memory of the position store, compared with the KV cache and with counts per block.

The store keeps expert ids [layer, k] and a 2-byte epoch for every KV position, whatever the block size. The published
alternative keeps one int8 count per block, layer and expert: smaller with large blocks, larger with small ones, and a
count above 127 is clipped. KV bytes are those of :class:`~coterie.types.ModelSpec`: every layer caches every token, and
8-bit KV has no scales. Sliding windows therefore make the true share of KV larger than the one computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from coterie.errors import check_at_least, check_one_of
from coterie.footprints.sizing import position_bytes
from coterie.types import ModelSpec

KVDtype = Literal["bf16", "fp8"]

MAX_SHARE_OF_KV = 0.01
"""Largest acceptable size of the store, as a share of the KV cache."""
MAX_COUNT = 127
"""Largest count an int8 holds."""
H200_BYTES = 141e9


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Bytes per token of context, over all layers."""

    model: str
    kv_dtype: KVDtype
    block_size: int
    """Tokens per KV block."""
    position_bytes: int
    """Bytes of the position store."""
    kv_bytes: int
    """Bytes of the KV cache."""
    block_count_bytes: int
    """Bytes of the published alternative, counts per block; for a whole block, not per token."""

    @property
    def share_of_kv(self) -> float:
        return self.position_bytes / self.kv_bytes

    @property
    def within_bar(self) -> bool:
        return self.share_of_kv < MAX_SHARE_OF_KV

    @property
    def share_of_hbm(self) -> float:
        """Store's share of a device filled by KV cache and store alone: an upper bound, since weights lower both."""
        return self.position_bytes / (self.position_bytes + self.kv_bytes)

    def bytes_beside_kv(self, device_bytes: float = H200_BYTES) -> float:
        """Return the bytes of the store on a device of `device_bytes` filled by KV cache and store alone."""
        return self.share_of_hbm * device_bytes

    @property
    def counts_share_of_kv(self) -> float:
        return self.block_count_bytes / self.block_size / self.kv_bytes

    @property
    def counts_exact(self) -> bool:
        """Whether int8 counts per block never clip: a token activates an expert at most once, so a count is at most the
        block size."""
        return self.block_size <= MAX_COUNT


def store_size(spec: ModelSpec, kv_dtype: KVDtype = "bf16", block_size: int = 16) -> StoreSize:
    """Return the size of the store for a model whose KV cache has this dtype and block size."""
    check_one_of(get_args(KVDtype), kv_dtype=kv_dtype)
    check_at_least(1, block_size=block_size)
    kv_bytes = spec.kv_bytes_per_token // (2 if kv_dtype == "fp8" else 1)
    return StoreSize(
        model=spec.name,
        kv_dtype=kv_dtype,
        block_size=block_size,
        position_bytes=position_bytes(spec),
        kv_bytes=kv_bytes,
        block_count_bytes=spec.num_moe_layers * spec.num_experts,
    )
