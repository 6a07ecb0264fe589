"""Load tables: tokens per expert, counted over windows or domains. Coarser than activation traces, but far smaller.

On disk: a folder with ``meta.json`` and ``load.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_share
from coterie.traces.requests import FORMAT, VERSION, new_trace_folder, read_meta
from coterie.traces.store import ArrayFile, value_errors, write_arrays, write_json


@dataclass(frozen=True, slots=True)
class LoadTable:
    """A series of loads, one per time window (in order of time) or per label."""

    counts: NDArray[np.uint64]
    """[window, layer, expert] tokens."""
    model: str = "unknown"
    labels: Sequence[str] | None = None
    """[window] name of each window, such as its domain."""
    tokens: NDArray[np.int64] | None = None
    """[window] tokens processed; None if not known."""
    layer_ids: NDArray[np.int64] | None = None
    """[layer] index of each layer in the model, dense layers counted."""
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(
            self.counts.ndim == 3 and 0 not in self.counts.shape,
            f"counts has shape {self.counts.shape}; expected [window, layer, expert], none 0",
        )
        check(
            float(self.counts.sum(dtype=np.float64)) < 2.0**62, "counts sum to more than 64 bits hold; are they tokens?"
        )
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
        arrays = {"counts": self.counts, "tokens": self.tokens, "layer_ids": self.layer_ids}
        write_arrays(folder / "load.safetensors", {n: array for n, array in arrays.items() if array is not None})
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
        meta = read_meta(folder, "load")
        file = ArrayFile(folder / "load.safetensors")
        with value_errors(folder, "load"):
            return cls(
                counts=file["counts"].astype(np.uint64),
                model=str(meta.get("model", "unknown")),
                labels=meta.get("labels"),
                tokens=file.get("tokens"),
                layer_ids=file.get("layer_ids"),
                source=meta.get("source") or {},
            )


# A load before and after a drift: the workload on which placement planners are compared.
#
# Popularity follows Zipf's law, in a new random order in each layer. Between the two windows every expert's popularity
# is scaled by a lognormal factor, and a tenth of the experts, drawn at random, exchange their popularities. Real drift
# differs: it moves related experts together. See `coterie evaluate latency-optimal` for real loads.


class LoadsBeforeAfter(NamedTuple):
    """Loads of two windows, each [layer, expert] tokens."""

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
    """Draw a load before and after a drift; each layer of each window sums to `tokens`."""
    check_at_least(1, layers=layers, experts=experts)
    check_share(shuffled=shuffled)
    before = rng.permuted(np.tile(np.arange(1, experts + 1) ** -exponent, (layers, 1)), axis=1)
    after = before * rng.lognormal(0.0, sigma, before.shape)
    count = round(shuffled * experts)
    for row in after:
        chosen = rng.choice(experts, count, replace=False)
        row[chosen] = row[rng.permutation(chosen)]
    return LoadsBeforeAfter(*(window / window.sum(axis=1, keepdims=True) * tokens for window in (before, after)))


MERGED = "merged_"
"""Prefix of the labels of windows that are sums of other windows in the same table."""


class ChosenWindows(NamedTuple):
    """Windows chosen from a table."""

    windows: list[int]
    """Indices of the windows, ascending."""
    what: str
    """Description of the windows and their file, for messages."""


def domain_of(label: str) -> str:
    """Return the domain of a label: the part before a "/"; the part after it numbers the domain's windows."""
    return label.split("/")[0]


def choose_windows(path: Path, table: LoadTable, window: str | None) -> ChosenWindows:
    """Choose windows of the table read from `path`.

    `window` is a label (or the part of it before a "/"), an index from 0, or a range A:B that excludes B. None chooses
    all windows except those named merged_…: they are sums of other windows, whose tokens would count twice.
    """
    labels = list(table.labels or ())
    if window is None:
        return _all_windows(path, labels, len(table))
    chosen = [i for i, label in enumerate(labels) if label == window or label.startswith(f"{window}/")]
    if not chosen:
        first, colon, last = window.partition(":")
        if not all(part.isdecimal() or (colon and not part) for part in (first, last or first)):
            names = ", ".join(dict.fromkeys(domain_of(label) for label in labels))
            also = f", or one of {names}" if names else ""
            raise ConfigError(f"--window={window} must be a number or a range A:B{also}")
        start, end = _up_to(len(table), first), _up_to(len(table), last)
        stop = (end if last else len(table)) if colon else start + 1
        check(
            start < stop <= len(table),
            f"--window={window} must be within the {len(table)} windows of {path}, counted from 0",
        )
        chosen = list(range(start, stop))
    return ChosenWindows(chosen, f"{window} of {path.name}")


def _up_to(most: int, digits: str) -> int:
    """Parse a number and limit it to `most` + 1; "" is 0. It may have thousands of digits, which int() refuses."""
    plain = digits.lstrip("0")
    return min(int(plain or "0"), most + 1) if len(plain) <= len(str(most)) else most + 1


def _all_windows(path: Path, labels: list[str], count: int) -> ChosenWindows:
    merged = {i for i, label in enumerate(labels) if label.startswith(MERGED)}
    chosen = [i for i in range(count) if i not in merged]
    check(
        chosen or count <= 1, f"all {count} windows of {path} are merged ones, which overlap: choose one with --window"
    )
    if not merged or not chosen:
        return ChosenWindows(list(range(count)), f"{count} windows of {path.name}" if count > 1 else path.name)
    are = f"{len(merged)} named {MERGED}… are" if len(merged) > 1 else f"1 named {MERGED}… is"
    return ChosenWindows(chosen, f"{len(chosen)} of {count} windows of {path.name} ({are} left out: sums of others)")
