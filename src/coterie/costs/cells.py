"""Cells, the measurements of a calibration: each is one timing of one kernel at one size.

Cells are plain values: ``engines/`` measures them with torch, a preset's JSON stores them, and this package fits them
without torch. The names of the shipped presets are here too, so that listing them does not import the fitting code.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.errors import UnknownNameError, check
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
    """Whether the kernel was repeated on the same weights, which may stay in the cache; else the cache was cold."""


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
    """Whether a causal mask was used: a new token does not attend to later ones."""

    @property
    def seen(self) -> float:
        """Tokens that a new token attends to, on average."""
        return self.context + (self.query / 2 if self.causal and self.query > 1 else self.query)


class RoutingCell(msgspec.Struct, frozen=True):
    """Work of a MoE layer outside its experts: gate, top-k, sort, gather, weighted sum."""

    tokens: int
    us: float


class CopyCell(msgspec.Struct, frozen=True):
    """Bytes moved over a path: device to itself, host to device, device to host, or between peers."""

    path: Literal["device", "host-to-device", "device-to-host", "peer"]
    nbytes: int
    us: float


ExchangeKind = Literal["node", "nodes", "bulk"]
"""All-to-all inside a node, between nodes, and inside a node by a kernel for many rows, which sends a token once to a
rank."""


class CollectiveCell(msgspec.Struct, frozen=True, omit_defaults=True):
    """All-to-all between `ranks` ranks; each sends `nbytes` in all, spread evenly; between nodes, over their links."""

    ranks: int
    nbytes: int
    us: float
    kind: ExchangeKind = "node"


class ContentionCell(msgspec.Struct, frozen=True):
    """Decode steps and copies of weights: the time of each alone, and of a step while copies run."""

    path: Literal["device", "host-to-device"]
    nbytes: int
    """Bytes moved per step."""
    copy_us: float
    """Time of the copies while no step runs."""
    alone_us: float
    """Time of a step while no copy runs."""
    beside_us: float
    """Time of a step while the copies run."""
    spread_us: float = 0.0
    """Half the interquartile range of the measured slowdowns."""


class StepCell(NamedTuple):
    """A step of an engine under imposed routing: decode requests of equal contexts, or equal prompts."""

    tokens: int
    prompts: int
    """Prompts that the tokens belong to; 0 is a decode step with one token a request."""
    cached: float
    """Cached tokens, summed over requests."""
    load: NDArray[np.int64]
    """[layer, expert] tokens; all 0 if the experts were left out."""
    even: bool
    """Whether tokens are spread evenly over some experts; else they were drawn or recorded."""
    us: float
    """Time from the start of the forward pass to the sampled token, median of the repeats."""
    forward_us: float
    """Time of the forward pass alone."""
    period_us: float
    """Time from the start of the step before, median; not a number where it is unknown."""


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
    """Fields of the ModelSpec; None for a model that Coterie knows by name."""


class Measurement(msgspec.Struct, frozen=True):
    """A calibration: all cells, with the machine, the software and the date of the measurement."""

    hardware: dict[str, str | int | float]
    software: dict[str, str]
    date: str
    shapes: tuple[ShapeMeasurement, ...]
    copies: tuple[CopyCell, ...] = ()
    collectives: tuple[CollectiveCell, ...] = ()
    contention: tuple[ContentionCell, ...] = ()
    note: str = ""


def step_load(ids: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """Return the load of one step: tokens per expert, [layer, expert]."""
    layers = ids.shape[1]
    flat = ids.astype(np.int64) + np.arange(layers)[None, :, None] * num_experts
    return np.bincount(flat.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)


def expert_tokens(tokens: int, top_k: int, active: int, zipf: float = 0.0) -> NDArray[np.int64]:
    """Return [active] tokens per active expert of a cell: `tokens` tokens activate `top_k` experts each.

    The popularity of the i-th expert falls as i^-zipf. An expert gets a token at most once, so at most `tokens` in all,
    and every active expert gets at least one. Nothing is random: the same cell gives the same counts everywhere.
    """
    total = tokens * top_k
    check(top_k <= active <= total, f"active={active} must be between top_k={top_k} and tokens x top_k={total}")
    weight = np.arange(1, active + 1, dtype=np.float64) ** -zipf
    counts = np.ones(active, np.int64)
    while (left := total - int(counts.sum())) > 0:
        room = counts < tokens
        share = np.where(room, weight, 0.0)
        extra = np.minimum(np.floor(share / share.sum() * left).astype(np.int64), tokens - counts)
        if extra.sum() == 0:  # fewer tokens left than experts with room: give one to each, most popular first
            extra[np.flatnonzero(room)[:left]] = 1
        counts += extra
    return counts


@cache
def preset_names() -> tuple[str, ...]:
    folder = files("coterie").joinpath("costs/presets")
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def check_preset(name_or_path: str) -> None:
    """Raise unless the argument is the name of a shipped preset or the path of a JSON file."""
    path = Path(name_or_path)
    if name_or_path not in preset_names() and not (path.suffix == ".json" and path.exists()):
        raise UnknownNameError("preset", name_or_path, preset_names())
