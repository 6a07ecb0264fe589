"""Footprints: counts of the experts that a request's tokens activate, signatures, and the store beside a KV cache."""

from coterie.footprints.counting import accumulate_load, distinct_experts, footprint, footprints
from coterie.footprints.positions import PositionRows, PositionShape, PositionStore, StepLog, block_positions

__all__ = [
    "PositionRows",
    "PositionShape",
    "PositionStore",
    "StepLog",
    "accumulate_load",
    "block_positions",
    "distinct_experts",
    "footprint",
    "footprints",
]
