"""Moving weights and caches: which link a transfer takes, and how long."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.types import Link, Topology


def transfer_s(link: Link, nbytes: float) -> float:
    """One transfer in one direction."""
    return link.latency_s + nbytes / link.bytes_per_s


def link_between(topology: Topology, source: int, target: int) -> Link:
    """The link from one rank to another."""
    return topology.intra if topology.node_of(source) == topology.node_of(target) else topology.inter


def load_s(topology: Topology, nbytes: float) -> NDArray[np.float64]:
    """[link] seconds to bring so many bytes to a rank: from its node, from another, from the host."""
    return np.array([transfer_s(link, nbytes) for link in (topology.intra, topology.inter, topology.host)])
