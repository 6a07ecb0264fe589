"""Expert masks of workers that are ranks of a placement: what `joint` needs to prefer local experts.

A mask is [layer, word] bits: bit e of a layer is set if the worker's rank has a slot of expert e. It is a row of
``Fleet.local``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement import read_map
from coterie.types import Placement

Mask = NDArray[np.uint64]
"""[layer, word] bits"""


def rank_masks(placement: Placement) -> NDArray[np.uint64]:
    """[rank, layer, word] experts that each rank holds."""
    words = -(-placement.num_experts // 64)
    held = np.zeros((placement.num_ranks, placement.num_layers, 64 * words), np.bool_)
    held[:, :, : placement.num_experts] = placement.held
    packed = np.packbits(held, axis=2, bitorder="little")
    return np.ascontiguousarray(packed).view("<u8").astype(np.uint64)


def mask_of(placement: Placement, rank: int | None) -> Mask:
    """Mask of a worker: of one rank, or of all experts if it is no single rank (None)."""
    if rank is not None and not 0 <= rank < placement.num_ranks:
        raise ConfigError(f"rank={rank} must be at least 0 and below num_ranks={placement.num_ranks}")
    every = rank_masks(placement)
    return np.asarray(np.bitwise_or.reduce(every, axis=0) if rank is None else every[rank], np.uint64)


def local_masks(placement: Placement, ranks: Sequence[int | None]) -> NDArray[np.uint64]:
    """[worker, layer, word] masks of workers by their ranks, for ``Fleet.local``."""
    return np.stack([mask_of(placement, rank) for rank in ranks])


def read_placement(path: str | Path, num_ranks: int | None = None, model: str | None = None) -> Placement:
    """A placement from a file of any known format; ranks and model where the file does not name them."""
    return read_map(path, model=model, num_ranks=num_ranks).placement
