"""Footprints: which experts a request's tokens activated, counted, and compared; the slot store that keeps them."""

from coterie.footprints.counting import accumulate_load, distinct_experts, footprint, footprints
from coterie.footprints.slots import SlotRows, SlotShape, SlotStore, block_slots

__all__ = [
    "SlotRows",
    "SlotShape",
    "SlotStore",
    "accumulate_load",
    "block_slots",
    "distinct_experts",
    "footprint",
    "footprints",
]
