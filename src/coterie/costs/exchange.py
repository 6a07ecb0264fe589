"""The exchange of expert parallelism, an all-to-all: bytes that ranks send, and their time.

A token whose expert lives on another rank is sent there once per remote expert (or once per remote rank, where the
dispatcher deduplicates, as DeepEP does), and its result comes back. Counted exactly from activations where a trace is
at hand, else by expectation for uniform routing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper
from coterie.errors import ConfigError
from coterie.types import Link, ModelSpec, Placement, Topology

Array = NDArray[np.float64]

BYTES_PER_VALUE = 2.0
"""Bytes per value of a hidden state in transfer."""


class Locality(NamedTuple):
    """Where a token's experts are, per token and layer."""

    local: float
    """Expected experts on the token's own rank."""
    remote: float
    remote_ranks: float
    """Expected distinct other ranks that hold one: the copies a deduplicating dispatcher sends."""
    inter_node: float
    """Remote experts on another node."""


def expected_locality(spec: ModelSpec, topology: Topology) -> Locality:
    """Uniform random routing over evenly placed experts, top-k without repetition."""
    return uniform_locality(spec.num_experts, spec.top_k, topology)


def uniform_locality(num_experts: int, top_k: int, topology: Topology) -> Locality:
    """:func:`expected_locality` of a shape without a model; what experts are left over go to the first ranks."""
    ranks, per_node = topology.num_ranks, topology.ranks_per_node
    if ranks > num_experts:
        raise ConfigError(f"num_ranks={ranks} must be at most num_experts={num_experts}")
    each, left = divmod(num_experts, ranks)
    held = [each + (rank < left) for rank in range(ranks)]  # [rank] experts
    hits = sum(_hit_probability(num_experts, n, top_k) for n in held)
    blocks = [held[start : start + per_node] for start in range(0, ranks, per_node)]
    near = sum(len(block) * sum(block) for block in blocks)  # pairs (home rank, expert) within a node
    # Whole numbers up to the one division: a sum of rounded shares would leave 1e-16 of an expert on a node that does
    # not exist, and that would pay a latency.
    pairs = ranks * num_experts
    return Locality(
        local=top_k / ranks,
        remote=top_k * (ranks - 1) / ranks,
        remote_ranks=(ranks - 1) / ranks * hits,
        inter_node=top_k * (pairs - near) / pairs,
    )


def _hit_probability(experts: int, on_rank: int, k: int) -> float:
    """Chance that at least one of k distinct experts lies among `on_rank` of them."""
    miss = 1.0
    for draw in range(k):
        miss *= max(0.0, (experts - on_rank - draw) / (experts - draw))
    return 1.0 - miss


def counted_locality(expert_ids: NDArray[np.integer], placement: Placement, topology: Topology) -> Locality:
    """Exact count on activations [token, layer, k]: token t lives on rank t mod ranks, an expert in its first slot."""
    if expert_ids.ndim != 3 or expert_ids.shape[1] != placement.num_layers:
        raise ConfigError(f"expert_ids has shape {expert_ids.shape}; expected [token, {placement.num_layers}, k]")
    if not len(expert_ids):
        raise ConfigError("expert_ids has no tokens; locality is an average over at least one")
    ranks = topology.num_ranks
    if placement.num_ranks != ranks:
        raise ConfigError(f"placement.num_ranks={placement.num_ranks} must equal topology.num_ranks={ranks}")
    home = np.arange(len(expert_ids)) % ranks
    nodes = topology.rank_nodes
    far = nodes[:, None] != nodes[None, :]
    local = remote_ranks = inter = 0
    for layer in range(placement.num_layers):
        rows = rows_between(first_rank(placement, layer)[expert_ids[:, layer].astype(np.int64)], home, ranks)
        local += int(np.trace(rows.activations))
        inter += int(rows.activations[far].sum())
        remote_ranks += crossing(rows.copies)
    cells = len(expert_ids) * placement.num_layers
    remote = expert_ids.size - local
    return Locality(local / cells, remote / cells, remote_ranks / cells, inter / cells)


class RowsBetween(NamedTuple):
    """Rows of hidden states that tokens' ranks send to experts' ranks in one dispatch; as many come back."""

    activations: NDArray[np.int64]
    """[source, rank] where each activation is sent by itself."""
    copies: NDArray[np.int64]
    """[source, rank] where a token is sent once to each distinct rank."""


def rows_between(to: NDArray[np.integer], home: NDArray[np.integer], num_ranks: int) -> RowsBetween:
    """Rows of tokens on ranks `home` [token] whose activations are computed on ranks `to` [token, k]."""
    pairs = home[:, None].astype(np.int64) * num_ranks + to
    activations = np.bincount(pairs.ravel(), minlength=num_ranks**2).reshape(num_ranks, num_ranks)
    held = np.zeros((len(to), num_ranks), np.int64)
    np.put_along_axis(held, to.astype(np.int64), 1, axis=1)
    copies = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(copies, home, held)
    return RowsBetween(activations, copies)


def crossing(rows: NDArray[np.int64]) -> int:
    """Rows [source, rank] that leave their rank."""
    return int(rows.sum() - np.trace(rows))


def first_rank(placement: Placement, layer: int) -> NDArray[np.int64]:
    """[expert] the rank of its first slot."""
    experts = placement.slot_experts[layer]
    slot = np.full(placement.num_experts, placement.num_slots, np.int64)
    np.minimum.at(slot, experts, np.arange(placement.num_slots))
    return slot // placement.slots_per_rank


class ExchangeTraffic(NamedTuple):
    """Bytes one rank moves in one direction of one all-to-all, over each kind of link.

    By expectation that is a mean over ranks; counted from a load, the busiest rank's.
    """

    intra_bytes: float
    inter_bytes: float

    @classmethod
    def expected(
        cls, spec: ModelSpec, tokens: int, topology: Topology, bytes_per_value: float = BYTES_PER_VALUE
    ) -> ExchangeTraffic:
        """`tokens` tokens on every rank, uniform routing."""
        return cls.of(expected_locality(spec, topology), spec, tokens, bytes_per_value)

    @classmethod
    def arriving(
        cls, rows: float, spec: ModelSpec, topology: Topology, bytes_per_value: float = BYTES_PER_VALUE
    ) -> ExchangeTraffic:
        """`rows` token-and-expert pairs computed on a rank, their tokens spread evenly over all ranks."""
        ranks, near = topology.num_ranks, min(topology.ranks_per_node, topology.num_ranks)
        row = spec.hidden_size * bytes_per_value / ranks
        return cls(rows * (near - 1) * row, rows * (ranks - near) * row)

    @classmethod
    def of(
        cls, locality: Locality, spec: ModelSpec, tokens: float, bytes_per_value: float = BYTES_PER_VALUE
    ) -> ExchangeTraffic:
        row = spec.hidden_size * bytes_per_value
        return cls(tokens * (locality.remote - locality.inter_node) * row, tokens * locality.inter_node * row)


def all_to_all_us(traffic: ExchangeTraffic, topology: Topology) -> float:
    """Dispatch and combine: both directions of one layer. Links of a kind work at once; intra and inter overlap."""
    return exchange_us(traffic_links(traffic, topology), 1.0)


@helper()
def there_and_back(intra_latency: float, intra: float, inter_latency: float, inter: float) -> float:
    """Both directions over the slower kind of link: latency plus transfer; a link without traffic takes no time."""
    near = intra_latency + intra if intra > 0.0 else 0.0
    far = inter_latency + inter if inter > 0.0 else 0.0
    return 2.0 * max(near, far)


@helper()
def exchange_us(links: Array, rows: float) -> float:
    """:func:`all_to_all_us` of the rows of the busiest rank; links as :func:`arrival_links` gives them."""
    return there_and_back(links[0], rows * links[1], links[2], rows * links[3])


def traffic_links(traffic: ExchangeTraffic, topology: Topology, overlap: float = 0.0) -> Array:
    """[5] microseconds of latency and per row inside a node, then between nodes, for rows that make this traffic each;
    then the share of the experts' time behind which the exchange can hide."""
    intra, inter = topology.intra, topology.inter
    return np.array(
        [
            intra.latency_s * 1e6,
            traffic.intra_bytes / intra.bytes_per_s * 1e6,
            inter.latency_s * 1e6,
            traffic.inter_bytes / inter.bytes_per_s * 1e6,
            overlap,
        ]
    )


def arrival_links(spec: ModelSpec, topology: Topology, overlap: float = 0.0) -> Array:
    """:func:`traffic_links` of token-and-expert pairs computed on a rank, as in :meth:`ExchangeTraffic.arriving`."""
    return traffic_links(ExchangeTraffic.arriving(1.0, spec, topology), topology, overlap)


def crossing_links(spec: ModelSpec, link: Link, overlap: float = 0.0) -> Array:
    """:func:`traffic_links` of rows known to cross a link inside the node."""
    return np.array([1e6 * link.latency_s, row_us(spec, link), 0.0, 0.0, overlap])


def row_us(spec: ModelSpec, link: Link, bytes_per_value: float = BYTES_PER_VALUE) -> float:
    """A token's hidden state over a link in one direction, its latency left out."""
    return 1e6 * spec.hidden_size * bytes_per_value / link.bytes_per_s


def row_trips_s(topology: Topology, row_bytes: float) -> Array:
    """[source, rank] seconds of a row's way to another rank and back, latencies left out."""
    nodes = topology.rank_nodes
    near = nodes[:, None] == nodes[None, :]
    seconds = 2.0 * row_bytes * np.where(near, 1 / topology.intra.bytes_per_s, 1 / topology.inter.bytes_per_s)
    np.fill_diagonal(seconds, 0.0)
    return np.asarray(seconds)


# Ring collectives of tensor parallelism: reduce-scatter, all-gather, and the all-reduce that is both. A ring of R ranks
# passes R - 1 times a part of 1/R of the bytes to the next rank:
#
#     reduce-scatter = all-gather = (R - 1) x (latency + bytes / R / bandwidth)        all-reduce = both
#
# Wrong for switches that add on the way (NVLS halves an all-reduce) and for trees, which have fewer latencies.


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
