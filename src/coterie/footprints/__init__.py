"""Footprints: which experts a request's tokens activated, counted, and compared."""

from coterie.footprints.counting import accumulate_load, distinct_experts, expected_distinct, footprint, footprints

__all__ = ["accumulate_load", "distinct_experts", "expected_distinct", "footprint", "footprints"]
