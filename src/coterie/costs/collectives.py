"""Ring collectives of tensor parallelism: reduce-scatter, all-gather, and the all-reduce that is both.

A ring of R ranks passes R - 1 times a part of 1/R of the bytes to the next rank:

    reduce-scatter = all-gather = (R - 1) x (latency + bytes / R / bandwidth)        all-reduce = both

Wrong for switches that add on the way (NVLS halves an all-reduce) and for trees, which have fewer latencies.
"""

from __future__ import annotations

from typing import NamedTuple

from coterie.types import Topology


class RingTime(NamedTuple):
    """Time of one pass around a ring: a straight line in the bytes of the whole tensor."""

    fixed_us: float
    byte_us: float

    def us(self, nbytes: float) -> float:
        """A reduce-scatter or an all-gather; an all-reduce takes two."""
        return self.fixed_us + self.byte_us * nbytes


def ring_time(topology: Topology) -> RingTime:
    """A ring over all ranks. Between nodes its slowest link decides."""
    ranks = topology.num_ranks
    links = [topology.intra] if topology.num_nodes == 1 else [topology.intra, topology.inter]
    return RingTime(
        fixed_us=1e6 * (ranks - 1) * max(link.latency_s for link in links),
        byte_us=1e6 * (ranks - 1) / ranks / min(link.bytes_per_s for link in links),
    )
