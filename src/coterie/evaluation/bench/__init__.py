"""Benchmarks of Coterie itself, in named groups: importing this package registers them all."""

from coterie.evaluation.bench import batching, co_clustering, placement, routing, sim
from coterie.evaluation.bench.base import benches

__all__ = ["batching", "benches", "co_clustering", "placement", "routing", "sim"]
