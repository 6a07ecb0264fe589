"""Memory that the position store takes for a token."""

from __future__ import annotations

from coterie.types import ModelSpec, narrowest_uint

EPOCH_BYTES = 2
"""Bytes of a position's epoch, which says whether its ids are valid."""


def position_bytes(spec: ModelSpec) -> int:
    """Return the bytes of one token's expert ids, in the narrowest dtype, and of their epoch."""
    return spec.num_moe_layers * spec.top_k * narrowest_uint(spec.num_experts - 1).itemsize + EPOCH_BYTES
