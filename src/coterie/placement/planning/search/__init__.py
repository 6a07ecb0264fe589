"""Compiled loops of the latency-optimal planner: see :mod:`coterie.placement.planning.search.layers`."""
