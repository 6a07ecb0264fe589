"""Cells, the measurements of a calibration: each is one timing of one kernel at one size.

Plain values, so that they can be measured with torch in ``engines/``, kept in a preset's JSON, and fitted here
without it. The names of the shipped presets are here too, since listing them must not import what reading one does.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, UnknownNameError
from coterie.types import WeightDtype


class MoeCell(msgspec.Struct, frozen=True, omit_defaults=True):
    """One MoE layer's experts on one device: gate, up, activation, down."""

    tokens: int
    active: int
    """Distinct experts that receive a token."""
    us: float
    """Median time, microseconds."""
    zipf: float = 0.0
    """Skew of tokens over the active experts; 0 spreads them evenly. See :func:`expert_tokens`."""
    warm: bool = False
    """Repeated on the same weights, so that what fits in the cache stays there; else the cache was cold."""


class GemmCell(msgspec.Struct, frozen=True):
    """A dense projection: [tokens, k] x [k, n]."""

    tokens: int
    n: int
    k: int
    us: float


class AttentionCell(msgspec.Struct, frozen=True, omit_defaults=True):
    """One layer's attention: `batch` requests, each with `query` new tokens over `context` cached ones."""

    batch: int
    query: int
    context: int
    us: float
    causal: bool = True
    """Whether new tokens were kept from seeing those after them."""

    @property
    def seen(self) -> float:
        """Tokens that a new one attends to on average."""
        return self.context + (self.query / 2 if self.causal and self.query > 1 else self.query)


class RoutingCell(msgspec.Struct, frozen=True):
    """A MoE layer without its experts: gate, top-k, sort, gather, weighted sum."""

    tokens: int
    us: float


class CopyCell(msgspec.Struct, frozen=True):
    """Bytes moved over a path: device to itself, host to device, device to host, or between peers."""

    path: Literal["device", "host-to-device", "device-to-host", "peer"]
    nbytes: int
    us: float


class CollectiveCell(msgspec.Struct, frozen=True):
    """All-to-all between `ranks`, each sending `nbytes` in all, spread evenly."""

    ranks: int
    nbytes: int
    us: float


class ContentionCell(msgspec.Struct, frozen=True):
    """Decode steps beside copies of weights: what each takes alone, and the step beside the copies."""

    path: Literal["device", "host-to-device"]
    nbytes: int
    """Bytes moved per step."""
    copy_us: float
    """Time of these copies with no step beside them."""
    alone_us: float
    """A step with no copies beside it."""
    beside_us: float
    """A step beside them."""
    spread_us: float = 0.0
    """Half of the range of the middle half of the slowdowns measured."""


class MoeTable(msgspec.Struct, frozen=True):
    """All MoE cells of one shape in one weight dtype."""

    dtype: WeightDtype
    kernel: str
    cells: tuple[MoeCell, ...]


class ShapeMeasurement(msgspec.Struct, frozen=True):
    """Everything measured for one model's shape on one device."""

    model: str
    moe: tuple[MoeTable, ...] = ()
    routing: tuple[RoutingCell, ...] = ()
    gemm: tuple[GemmCell, ...] = ()
    attention: tuple[AttentionCell, ...] = ()
    spec: dict[str, Any] | None = None
    """The shape's numbers, where it is not one of the shipped ones."""


class Measurement(msgspec.Struct, frozen=True):
    """A calibration: what was measured, on which machine, with what, when."""

    hardware: dict[str, str | int | float]
    software: dict[str, str]
    date: str
    shapes: tuple[ShapeMeasurement, ...]
    copies: tuple[CopyCell, ...] = ()
    collectives: tuple[CollectiveCell, ...] = ()
    contention: tuple[ContentionCell, ...] = ()
    note: str = ""


def expert_tokens(tokens: int, top_k: int, active: int, zipf: float = 0.0) -> NDArray[np.int64]:
    """[active] tokens of each active expert when `tokens` tokens take `top_k` each: what a cell was measured with.

    Popularity falls as rank^-zipf, no expert gets a token twice (so none gets more than `tokens`), every active one
    gets at least one, and nothing is random: the same cell means the same counts everywhere.
    """
    total = tokens * top_k
    if not top_k <= active <= total:
        raise ConfigError(f"active={active} must be between top_k={top_k} and tokens x top_k={total}")
    weight = np.arange(1, active + 1, dtype=np.float64) ** -zipf
    counts = np.ones(active, np.int64)
    while (left := total - int(counts.sum())) > 0:
        room = counts < tokens
        share = np.where(room, weight, 0.0)
        extra = np.minimum(np.floor(share / share.sum() * left).astype(np.int64), tokens - counts)
        if extra.sum() == 0:  # fewer left than experts with room: one each, most popular first
            extra[np.flatnonzero(room)[:left]] = 1
        counts += extra
    return counts


@cache
def preset_names() -> tuple[str, ...]:
    folder = files("coterie").joinpath("costs/presets")
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def check_preset(name_or_path: str) -> None:
    """Raise unless it is the name of a shipped preset or the path of a JSON file."""
    path = Path(name_or_path)
    if name_or_path not in preset_names() and not (path.suffix == ".json" and path.exists()):
        raise UnknownNameError("preset", name_or_path, preset_names())
