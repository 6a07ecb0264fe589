"""Load tables: tokens per expert, counted over windows or domains. Coarser than activations, far smaller.

On disk: a folder with ``meta.json`` and ``load.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, check_at_least, check_share
from coterie.traces.requests import FORMAT, VERSION, new_trace_folder, read_meta
from coterie.traces.store import ArrayFile, write_arrays, write_json


@dataclass(frozen=True, slots=True)
class LoadTable:
    """A series of loads, one per window (in order of time) or per label."""

    counts: NDArray[np.uint64]
    """[window, layer, expert] tokens."""
    model: str = "unknown"
    labels: Sequence[str] | None = None
    """[window] name of each window, such as its domain."""
    tokens: NDArray[np.int64] | None = None
    """[window] tokens seen, if known."""
    layer_ids: NDArray[np.int64] | None = None
    """[layer] index of each row in the model, dense layers counted."""
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.counts.ndim != 3 or 0 in self.counts.shape:
            raise ConfigError(f"counts has shape {self.counts.shape}; expected [window, layer, expert], none 0")
        if float(self.counts.sum(dtype=np.float64)) >= 2.0**62:
            raise ConfigError("counts sum to more than 64 bits hold; are they tokens?")
        if self.tokens is not None and len(self.tokens) and int(np.min(self.tokens)) < 0:
            raise ConfigError(f"tokens={int(np.min(self.tokens))} must not be negative")
        for name, axis in (("labels", 0), ("tokens", 0), ("layer_ids", 1)):
            column = getattr(self, name)
            if column is not None and len(column) != self.counts.shape[axis]:
                raise ConfigError(f"{name} has {len(column)} rows; counts has {self.counts.shape[axis]}")

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[2])

    def save(self, path: str | Path) -> None:
        folder = new_trace_folder(path)
        arrays: dict[str, NDArray[Any]] = {"counts": self.counts}
        if self.tokens is not None:
            arrays["tokens"] = self.tokens
        if self.layer_ids is not None:
            arrays["layer_ids"] = self.layer_ids
        write_arrays(folder / "load.safetensors", arrays)
        write_json(
            folder / "meta.json",
            {
                "format": FORMAT,
                "version": VERSION,
                "kind": "load",
                "model": self.model,
                "labels": list(self.labels) if self.labels is not None else None,
                "source": dict(self.source),
            },
        )

    @classmethod
    def open(cls, path: str | Path) -> LoadTable:
        folder = Path(path)
        meta = read_meta(folder)
        if meta["kind"] != "load":
            raise TraceError(folder / "meta.json", "kind", f"found {meta['kind']!r}, expected 'load'")
        file = ArrayFile(folder / "load.safetensors")
        try:
            return cls(
                counts=file["counts"].astype(np.uint64),
                model=str(meta.get("model", "unknown")),
                labels=meta.get("labels"),
                tokens=file.get("tokens"),
                layer_ids=file.get("layer_ids"),
                source=meta.get("source") or {},
            )
        except (ConfigError, TypeError) as error:
            raise TraceError(folder, "load", str(error)) from None


# A load before and after a drift: the workload on which placement planners are compared.
#
# Popularity is Zipf's, in a new random order in each layer. Between two windows every expert's popularity is scaled by
# a lognormal factor, and a tenth of the experts, drawn at random, exchange theirs. Unlike real drift,
# which moves related experts together: see `coterie evaluate latency-optimal` for real loads.


class LoadsBeforeAfter(NamedTuple):
    """Two windows, [layer, expert] tokens each."""

    before: NDArray[np.float64]
    after: NDArray[np.float64]


def zipf_drift(
    layers: int,
    experts: int,
    rng: Generator,
    *,
    exponent: float = 1.0,
    sigma: float = 0.3,
    shuffled: float = 0.1,
    tokens: float = 1e6,
) -> LoadsBeforeAfter:
    """`tokens` tokens a layer and window, before and after a drift."""
    check_at_least(1, layers=layers, experts=experts)
    check_share(shuffled=shuffled)
    popularity = np.arange(1, experts + 1) ** -exponent
    before = rng.permuted(np.tile(popularity, (layers, 1)), axis=1)
    after = before * rng.lognormal(0.0, sigma, before.shape)
    count = round(shuffled * experts)
    for row in after:
        chosen = rng.choice(experts, count, replace=False)
        row[chosen] = row[rng.permutation(chosen)]
    return LoadsBeforeAfter(*(window / window.sum(axis=1, keepdims=True) * tokens for window in (before, after)))
