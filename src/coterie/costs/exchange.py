"""The exchange of expert parallelism, an all-to-all: bytes that ranks send, and the time to send them.

A token whose expert lives on another rank is sent there once per remote expert (or once per remote rank if the
dispatcher deduplicates, as DeepEP does), and its result is sent back. Traffic is the expectation for uniform routing,
or follows from the mean number of a token's remote experts, as counted on a trace.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.errors import check
from coterie.types import Link, ModelSpec, Placement, Topology

Array = NDArray[np.float64]

BYTES_PER_VALUE = 2.0
"""Bytes per value of a hidden state in transfer."""


class Locality(NamedTuple):
    """Mean number of a token's experts by location, per token and layer."""

    local: float
    """Experts on the token's own rank."""
    remote: float
    """Experts on other ranks."""
    remote_ranks: float
    """Distinct other ranks that hold at least one of the experts: the copies that a deduplicating dispatcher sends."""
    inter_node: float
    """Experts on another node; `remote` includes them."""


def expected_locality(spec: ModelSpec, topology: Topology) -> Locality:
    """Return the expected locality of uniform random routing, top-k without repetition, over evenly placed experts."""
    return uniform_locality(spec.num_experts, spec.top_k, topology)


def uniform_locality(num_experts: int, top_k: int, topology: Topology) -> Locality:
    """Return :func:`expected_locality` without a ModelSpec; the first ranks hold the remainder of the experts."""
    ranks, per_node = topology.num_ranks, topology.ranks_per_node
    check(ranks <= num_experts, f"num_ranks={ranks} must be at most num_experts={num_experts}")
    each, left = divmod(num_experts, ranks)
    held = [each + (rank < left) for rank in range(ranks)]  # [rank] experts
    hits = sum(_hit_probability(num_experts, n, top_k) for n in held)
    blocks = [held[start : start + per_node] for start in range(0, ranks, per_node)]
    near = sum(len(block) * sum(block) for block in blocks)  # pairs (home rank, expert) within a node
    # Integers up to the single division: a sum of rounded shares would leave 1e-16 of an expert on a second node that
    # does not exist, and traffic above 0 is charged a latency.
    pairs = ranks * num_experts
    return Locality(
        local=top_k / ranks,
        remote=top_k * (ranks - 1) / ranks,
        remote_ranks=(ranks - 1) / ranks * hits,
        inter_node=top_k * (pairs - near) / pairs,
    )


def _hit_probability(experts: int, on_rank: int, k: int) -> float:
    """Return the probability that at least one of k distinct random experts is among the `on_rank` on a rank."""
    return 1.0 - math.prod(max(0.0, (experts - on_rank - draw) / (experts - draw)) for draw in range(k))


def first_rank(placement: Placement, layer: int) -> NDArray[np.int64]:
    """Return [expert] the rank of the expert's first slot."""
    experts = placement.slot_experts[layer]
    slot = np.full(placement.num_experts, placement.num_slots, np.int64)
    np.minimum.at(slot, experts, np.arange(placement.num_slots))
    return slot // placement.slots_per_rank


class ExchangeTraffic(NamedTuple):
    """Bytes one rank moves in one direction of one all-to-all, over each kind of link.

    An expected traffic is the mean over ranks; one counted from a load is that of the busiest rank.
    """

    intra_bytes: float
    inter_bytes: float

    @classmethod
    def arriving(
        cls, rows: float, spec: ModelSpec, topology: Topology, bytes_per_value: float = BYTES_PER_VALUE
    ) -> ExchangeTraffic:
        """Return the traffic of `rows` token-and-expert pairs computed on a rank, from tokens spread over all ranks."""
        ranks, near = topology.num_ranks, min(topology.ranks_per_node, topology.num_ranks)
        row = spec.hidden_size * bytes_per_value / ranks
        return cls(rows * (near - 1) * row, rows * (ranks - near) * row)

    @classmethod
    def of(
        cls, locality: Locality, spec: ModelSpec, tokens: float, bytes_per_value: float = BYTES_PER_VALUE
    ) -> ExchangeTraffic:
        """Return the traffic of `tokens` tokens on every rank."""
        row = spec.hidden_size * bytes_per_value
        return cls(tokens * (locality.remote - locality.inter_node) * row, tokens * locality.inter_node * row)


def all_to_all_us(traffic: ExchangeTraffic, topology: Topology) -> float:
    """Return microseconds of dispatch and combine in one layer. Links inside and between nodes work in parallel."""
    return exchange_us(traffic_links(traffic, topology), 1.0)


@helper()
def there_and_back(intra_latency: float, intra: float, inter_latency: float, inter: float) -> float:
    """Return the time of both directions over the slower kind of link: latency plus transfer, 0 without traffic."""
    near = intra_latency + intra if intra > 0.0 else 0.0
    far = inter_latency + inter if inter > 0.0 else 0.0
    return 2.0 * max(near, far)


@helper()
def exchange_us(links: Array, rows: float) -> float:
    """Return :func:`all_to_all_us` for the busiest rank's `rows`; `links` is from :func:`traffic_links`."""
    latency, intra = links[0], rows * links[1]
    if len(links) > 5 and links[5] + rows * links[6] < latency + intra:
        latency, intra = links[5], rows * links[6]
    return there_and_back(latency, intra, links[2], rows * links[3])


def traffic_links(traffic: ExchangeTraffic, topology: Topology, overlap: float = 0.0, copies: float = 1.0) -> Array:
    """Return [5] link prices for rows that each cause `traffic`; [7] if the exchange was measured.

    Microseconds of latency and microseconds per row inside a node, the same two between nodes, then `overlap`: the
    share of the experts' time behind which the exchange can hide. Then the first two for a kernel for many rows, of
    which it sends the share `copies`; the faster kernel counts.
    """
    sizes = (traffic.intra_bytes, traffic.inter_bytes, copies * traffic.intra_bytes)
    links = zip(topology.exchange or (topology.intra, topology.inter), sizes, strict=False)
    near, far, *bulk = [(link.latency_s * 1e6, nbytes / link.bytes_per_s * 1e6) for link, nbytes in links]
    return np.array([*near, *far, overlap, *(value for pair in bulk for value in pair)])


def arrival_links(spec: ModelSpec, topology: Topology, overlap: float = 0.0) -> Array:
    """Return :func:`traffic_links` per token-and-expert pair, by :meth:`ExchangeTraffic.arriving`."""
    locality = expected_locality(spec, topology) if topology.exchange and topology.num_ranks > 1 else None
    copies = locality.remote_ranks / locality.remote if locality else 1.0
    return traffic_links(ExchangeTraffic.arriving(1.0, spec, topology), topology, overlap, copies)


def crossing_links(spec: ModelSpec, topology: Topology, overlap: float = 0.0) -> Array:
    """Return :func:`traffic_links` for rows that each cross a link: with several nodes, to any other rank alike."""
    others, near = max(1, topology.num_ranks - 1), min(topology.ranks_per_node, topology.num_ranks)
    row = spec.hidden_size * BYTES_PER_VALUE
    traffic = ExchangeTraffic(row * (near - 1) / others, row * (topology.num_ranks - near) / others)
    return traffic_links(traffic, topology, overlap)


def row_us(spec: ModelSpec, link: Link, bytes_per_value: float = BYTES_PER_VALUE) -> float:
    """Return the microseconds to send a token's hidden state over a link in one direction, without latency."""
    return 1e6 * spec.hidden_size * bytes_per_value / link.bytes_per_s


class ArrivalLine(NamedTuple):
    """A layer's exchange as a straight line in the rows of the busiest rank."""

    fixed_s: float
    row_s: float

    @classmethod
    def of(cls, spec: ModelSpec, topology: Topology, rows: float) -> ArrivalLine:
        """Return the line that touches :func:`exchange_us` at `rows` token-and-expert pairs on the busiest rank."""
        links = arrival_links(spec, topology)
        whole, step = exchange_us(links, rows), 1e-3 * rows
        slope = (exchange_us(links, rows + step) - whole) / step
        return cls(1e-6 * (whole - slope * rows), 1e-6 * slope)


def row_trips_s(topology: Topology, row_bytes: float) -> Array:
    """Return [source, rank] seconds to send a row to a rank and back, without latency, as measured where it was."""
    rates = topology.rates
    if topology.exchange is not None and not topology.bytes_per_s:
        near, far, _ = topology.exchange
        rates = np.where(topology.near, near.bytes_per_s, far.bytes_per_s)
    byte_s = 1 / rates
    np.fill_diagonal(byte_s, 0.0)
    return np.asarray(row_bytes * (byte_s + byte_s.T))


# Ring collectives of tensor parallelism: reduce-scatter, all-gather, and all-reduce, which is one after the other. In a
# ring of R ranks each rank passes 1/R of the bytes to the next rank, R - 1 times:
#
#     reduce-scatter = all-gather = (R - 1) x (latency + bytes / R / bandwidth)        all-reduce = both
#
# Wrong for switches that reduce in the network (NVLS halves an all-reduce) and for tree algorithms, which pay fewer
# latencies.


class RingTime(NamedTuple):
    """Time of one pass around a ring: a straight line in the bytes of the whole tensor."""

    fixed_us: float
    byte_us: float

    def us(self, nbytes: float) -> float:
        """Return microseconds of a reduce-scatter or an all-gather; an all-reduce takes twice as long."""
        return self.fixed_us + self.byte_us * nbytes


def ring_time(topology: Topology) -> RingTime:
    """Return the time of a ring over all ranks; the slowest link decides."""
    ranks = topology.num_ranks
    links = [topology.intra] if topology.num_nodes == 1 else [topology.intra, topology.inter]
    return RingTime(
        fixed_us=1e6 * (ranks - 1) * max(link.latency_s for link in links),
        byte_us=1e6 * (ranks - 1) / ranks / min(link.bytes_per_s for link in links),
    )
