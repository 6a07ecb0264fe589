"""Statistics of a placement: replicas, duplicates, and balance under a load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement.maps.formats import PlacementMap
from coterie.types import balancedness, layer_balance


@dataclass(frozen=True, slots=True)
class MapInspection:
    """Statistics of one placement."""

    model: str
    layers: int
    layer_ids: list[int]
    """[layer] index in the model if known, else the row."""
    experts: int
    slots: int
    ranks: int
    duplicates: int
    """Number of slots whose expert another slot of the same rank also holds: wasted memory."""
    replicas: list[int]
    """[n] number of experts with n + 1 slots, over all layers."""
    same_layers: int
    """Number of layers with the same placement as the first layer, which counts."""
    balancedness: float | None
    """Mean over layers of mean ÷ max rank load; None without a load."""
    worst_layer: int | None
    """Layer id of the least even layer; None without a load."""
    rank_load: list[list[float]] | None
    """[layer, rank] tokens; None without a load."""


def inspect_map(map: PlacementMap, load: NDArray[np.float64] | None = None) -> MapInspection:
    """Inspect a placement; `load` [layer, expert] tokens of the same layers."""
    placement = map.placement
    if load is not None and load.shape != (placement.num_layers, placement.num_experts):
        raise ConfigError(
            f"the load is for {load.shape[0]} layers of {load.shape[1]} experts; "
            f"the placement for {placement.num_layers} of {placement.num_experts}"
        )
    replicas = placement.replicas
    ids = list(range(placement.num_layers) if map.layer_ids is None else map.layer_ids)
    busy = None if load is None else _rank_load(map, load)
    return MapInspection(
        model=map.model,
        layers=placement.num_layers,
        layer_ids=ids,
        experts=placement.num_experts,
        slots=placement.num_slots,
        ranks=placement.num_ranks,
        duplicates=placement.duplicates,
        replicas=np.bincount(replicas.ravel())[1:].tolist(),
        same_layers=int((placement.slot_experts == placement.slot_experts[0]).all(axis=1).sum()),
        balancedness=None if busy is None else balancedness(busy),
        worst_layer=None if busy is None else ids[worst_layer(busy)],
        rank_load=None if busy is None else busy.tolist(),
    )


def worst_layer(rank_load: NDArray[np.float64]) -> int:
    """Return the row of the least even layer of a rank load [layer, rank]."""
    return int(np.argmin(layer_balance(rank_load)))


def _rank_load(map: PlacementMap, load: NDArray[np.float64]) -> NDArray[np.float64]:
    placement = map.placement
    if map.shares is None:
        return placement.rank_load(load)
    per_slot = np.take_along_axis(load, placement.slot_experts.astype(np.int64), axis=1) * map.shares
    return np.asarray(per_slot.reshape(placement.num_layers, placement.num_ranks, -1).sum(axis=2))
