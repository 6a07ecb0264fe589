"""Moving weights and caches: the link of a transfer, its time, and how much it slows the steps that run meanwhile.

A *synchronous* engine stops for every move: all of the transfer time is exposed, ``exposed`` = 1. An engine that
*stages* moves copies weights while its steps run, and switches when they have arrived. The copies then slow the steps:

    exposed = (step beside copies - step alone) ÷ time of the copies alone

The slowdown is fitted as step time per byte moved, from decode steps timed while copies ran
(:mod:`coterie.engines.calibration.contention`). Per byte, because the links of a topology differ in speed from the
measured path: a step slows down with the bytes that pass through the device's memory, whichever link carries them.

Weights that arrive over a link between devices are priced as copies inside a device. Such a copy both reads and writes
the same memory, while a receiver only writes, so this is an upper bound for the receiving device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.costs.cells import ContentionCell
from coterie.errors import check
from coterie.types import Link, Topology

Movement = Literal["stops", "staged"]
"""How an engine moves weights: it stops serving during a move, or copies while its steps run."""


def transfer_s(link: Link, nbytes: float) -> float:
    """Return the seconds of one transfer in one direction."""
    return link.latency_s + nbytes / link.bytes_per_s


def link_between(topology: Topology, source: int, target: int) -> Link:
    """Return the link from one rank to another."""
    link = topology.intra if topology.node_of(source) == topology.node_of(target) else topology.inter
    return link._replace(bytes_per_s=topology.bytes_per_s[source][target]) if topology.bytes_per_s else link


def load_s(topology: Topology, nbytes: float) -> NDArray[np.float64]:
    """Return [source, rank] seconds to load `nbytes`; over `intra` from a rank to itself. The last row is the host."""
    latency_s = np.where(topology.near, topology.intra.latency_s, topology.inter.latency_s)
    host_s = np.full((1, topology.num_ranks), transfer_s(topology.host, nbytes))
    return np.concatenate([latency_s + nbytes / topology.rates, host_s])


class Contention(msgspec.Struct, frozen=True):
    """Slowdown of steps by copies over one path."""

    us_per_byte: float
    """Microseconds added to steps per byte copied meanwhile."""
    exposed: float
    """Share of the copies' own time by which steps get slower, at the measured path's speed."""
    largest_exposed: float
    """Largest `exposed` of a single cell: the worst case among the measured copy rates."""
    cells: int


def fit_contention(cells: Sequence[ContentionCell]) -> dict[str, Contention]:
    """Fit contention by path: least-squares lines through 0, in which cells that move more bytes weigh more.

    A negative slope is noise around no slowdown and becomes 0; a share above 1 becomes 1, as if the engine stopped.
    """
    by_path: dict[str, Contention] = {}
    for path in sorted({cell.path for cell in cells}):
        mine = [cell for cell in cells if cell.path == path]
        slower = np.array([cell.beside_us - cell.alone_us for cell in mine])
        nbytes, copying = (np.array([getattr(cell, name) for cell in mine], float) for name in ("nbytes", "copy_us"))
        by_path[path] = Contention(
            us_per_byte=max(0.0, float(slower @ nbytes / (nbytes @ nbytes))),
            exposed=float(np.clip(slower @ copying / (copying @ copying), 0.0, 1.0)),
            largest_exposed=float(np.clip((slower / copying).max(), 0.0, 1.0)),
            cells=len(mine),
        )
    return by_path


def staged_exposed(contention: Mapping[str, Contention], topology: Topology) -> float:
    """Return the exposed share of staged movement: the largest share over the links of the topology.

    It is one number because a planner's objective has one; it overestimates the cost of the other links.
    """
    check(
        {"device", "host-to-device"} <= contention.keys(),
        "movement='staged' needs contention, which the preset does not hold; measure it with coterie calibrate "
        "--contention",
    )
    links = [(contention["host-to-device"], topology.host)]
    if topology.num_ranks > 1:
        links.append((contention["device"], topology.intra))
    if topology.num_nodes > 1:
        links.append((contention["device"], topology.inter))
    return max(min(1.0, path.us_per_byte * 1e-6 * link.bytes_per_s) for path, link in links)
