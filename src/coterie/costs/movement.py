"""Moving weights and caches: which link a transfer takes, how long, and what it takes from the steps beside it.

A *synchronous* engine stops for every move: all of the movement's time shows, ``exposed`` = 1. One that *stages* moves
copies weights beside its steps and switches when they are there. It then pays what the copies take from the steps:

    exposed = (step beside copies - step alone) ÷ time of the copies alone

fitted as seconds of step time per byte moved, from decode steps timed beside copies
(:mod:`coterie.engines.calibration.contention`). Per byte, because the links of a topology have other speeds than the
path that was measured: the step loses to bytes that pass through its memory, whatever link brings them.

Weights that come over a link between devices are priced as copies inside a device. Those read and write one memory
where a link's two ends share the work, so this is an upper bound for the device that receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.costs.cells import ContentionCell
from coterie.errors import ConfigError
from coterie.types import Link, Topology

Movement = Literal["stops", "staged"]
"""How an engine moves weights: it stops serving for every move, or stages moves behind its steps."""


def transfer_s(link: Link, nbytes: float) -> float:
    """One transfer in one direction."""
    return link.latency_s + nbytes / link.bytes_per_s


def link_between(topology: Topology, source: int, target: int) -> Link:
    """The link from one rank to another."""
    return topology.intra if topology.node_of(source) == topology.node_of(target) else topology.inter


def load_s(topology: Topology, nbytes: float) -> NDArray[np.float64]:
    """[link] seconds to bring so many bytes to a rank: from its node, from another, from the host."""
    return np.array([transfer_s(link, nbytes) for link in (topology.intra, topology.inter, topology.host)])


class Contention(msgspec.Struct, frozen=True):
    """Steps beside copies over one path."""

    us_per_byte: float
    """Microseconds that steps take longer, per byte moved beside them."""
    exposed: float
    """Share of the copies' own time that shows in the steps', at the path's speed."""
    largest_exposed: float
    """The same of the worst single cell: what a rate that was measured costs at most."""
    cells: int


def fit_contention(cells: Sequence[ContentionCell]) -> dict[str, Contention]:
    """Contention by path: lines through 0, by least squares, so that the cells that move most weigh most.

    A fit below 0 is noise around no slowdown and counts as 0; a share past 1 counts as 1, as if the engine stopped.
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
    """Share of the movement that shows when it is staged: that of the link where it is largest.

    One number for all links, because a planner's objective has one; the others cost less than it says.
    """
    if not {"device", "host-to-device"} <= contention.keys():
        raise ConfigError(
            "movement='staged' needs contention, which the preset does not hold; measure it with coterie calibrate "
            "--contention"
        )
    links = [(contention["host-to-device"], topology.host)]
    if topology.num_ranks > 1:
        links.append((contention["device"], topology.intra))
    if topology.num_nodes > 1:
        links.append((contention["device"], topology.inter))
    return max(min(1.0, path.us_per_byte * 1e-6 * link.bytes_per_s) for path, link in links)
