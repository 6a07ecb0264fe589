"""Readers of expert loads that other systems write: TensorRT-LLM's statistics, and load histories in JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError, check_file, check_found, read_json
from coterie.traces.load import LoadTable
from coterie.traces.readers._rows import head_of
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.segments import MAX_EXPERTS
from coterie.traces.store import ArrayFile


def read_load_history(path: Path, options: ReadOptions) -> LoadTable:
    """Read the load history of an EPLB experiment: ``{"load_history": [{"logical_expert_load": [layer][expert]}, …]}``.

    Each entry is one window, in order of time. The file names neither the model nor its dense layers, so `layer_ids`
    is None.
    """
    history = read_json(path).get("load_history")
    if not isinstance(history, list) or not history:
        raise TraceError(path, "load_history", "must be a list of at least one window")
    windows = [_window(path, index, entry) for index, entry in enumerate(history)]
    for index, window in enumerate(windows):
        check_file(
            window.shape == windows[0].shape,
            path,
            f"load_history[{index}]",
            f"has shape {window.shape}, the first window {windows[0].shape}",
        )
    options.check_experts(path, "logical_expert_load", windows[0].shape[1])
    return LoadTable(
        np.stack(windows), model=options.model or "unknown", source={"format": "load-history", "file": path.name}
    )


def _window(path: Path, index: int, entry: Any) -> NDArray[np.uint64]:
    field = f"load_history[{index}].logical_expert_load"
    check_file(isinstance(entry, dict) and "logical_expert_load" in entry, path, field, "is missing")
    try:
        load = np.array(entry["logical_expert_load"])
    except (ValueError, OverflowError):
        raise TraceError(path, field, "has rows of different lengths, expected [layer][expert]") from None
    check_file(
        load.ndim == 2 and 0 not in load.shape and load.dtype.kind in "uif",
        path,
        field,
        f"is {load.dtype} {load.shape}, expected numbers [layer][expert]",
    )
    whole = (load >= 0) & (load < 2**63) & (load == np.floor(load))  # False for NaN too
    for layer, expert in np.argwhere(~whole):
        raise TraceError(path, f"{field}[{layer}][{expert}]", f"is {load[layer, expert]}, expected a count of tokens")
    return load.astype(np.uint64)


def sniff_load_history(path: Path) -> bool:
    head = head_of(path, 1 << 16)
    return head.startswith(b"{") and b'"load_history"' in head


readers.add(
    "load-history",
    Reader(read_load_history, sniff_load_history, "EPLB load history, JSON: tokens per expert in each window"),
)


META = "meta_info.json"
_RANK = re.compile(r"rank(\d{1,9})\.safetensors")
_KEY = re.compile(r"(\d{1,18})_(\d{1,9})")


def read_trtllm(path: Path, options: ReadOptions) -> LoadTable:
    """Read TensorRT-LLM expert statistics: a folder with ``meta_info.json`` and one ``rank*.safetensors`` per rank.

    TensorRT-LLM writes them if EXPERT_STATISTIC_ITER_RANGE is set. ``meta_info.json`` has num_experts and
    num_experts_per_token. Each rank's file maps ``"{iteration}_{layer}"`` to int64 [expert]: how often the tokens of
    *that rank* chose each logical expert in the iteration. The load of an iteration is the sum over ranks, as in
    TensorRT-LLM's own planner. The number of tokens is not recorded: it is choices ÷ experts per token if all layers
    agree, else None.
    """
    meta = read_json(path / META)
    num_experts, top_k = (_positive(path / META, meta, name) for name in ("num_experts", "num_experts_per_token"))
    options.check_experts(path / META, "num_experts", num_experts)
    files = _rank_files(path)
    if meta.get("ep_size", len(files)) != len(files):
        raise TraceError(path, "rank*.safetensors", f"found {len(files)} files, {META} says ep_size={meta['ep_size']}")
    loads: dict[tuple[int, int], NDArray[np.int64]] = {}
    for file in files:
        _add(loads, ArrayFile(file), num_experts)
    steps, layers = (sorted({key[axis] for key in loads}) for axis in (0, 1))
    check_file(steps, path, "rank*.safetensors", "hold no statistics")
    for step in range(steps[0], steps[-1] + 1):
        for layer in layers:
            check_file((step, layer) in loads, path, f"{step}_{layer}", "is in no rank's file")
    counts = np.stack([np.stack([loads[step, layer] for layer in layers]) for step in steps])
    return LoadTable(
        counts.astype(np.uint64),
        model=options.model or "unknown",
        labels=[str(step) for step in steps],
        tokens=_tokens(counts, top_k),
        layer_ids=np.array(layers, np.int64),
        source={"format": "trtllm", "file": path.name, "ranks": len(files), "top_k": top_k},
    )


def _rank_files(path: Path) -> list[Path]:
    by_rank = {int(match[1]): file for file in path.iterdir() if (match := _RANK.fullmatch(file.name))}
    check_file(by_rank, path, "rank*.safetensors", "is missing")
    for rank in range(len(by_rank)):
        check_file(rank in by_rank, path, f"rank{rank}.safetensors", f"is missing; there is a rank{max(by_rank)}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _positive(path: Path, meta: Mapping[str, Any], name: str) -> int:
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_EXPERTS:
        raise TraceError(path, name, f"is {value!r}, expected a whole number in 1 … {MAX_EXPERTS}")
    return value


def _add(loads: dict[tuple[int, int], NDArray[np.int64]], file: ArrayFile, num_experts: int) -> None:
    for key, counts in file.items():
        match = check_found(_KEY.fullmatch(key), file.path, key, "is not a key of the form {iteration}_{layer}")
        check_file(
            counts.shape == (num_experts,) and counts.dtype.kind in "ui",
            file.path,
            key,
            f"is {counts.dtype} {counts.shape}, expected integers ({num_experts},)",
        )
        if int(counts.min()) < 0:
            raise TraceError(file.path, f"{key}[{int(counts.argmin())}]", f"is {int(counts.min())}, expected a count")
        at = int(match[1]), int(match[2])
        loads[at] = loads.get(at, np.zeros(num_experts, np.int64)) + counts.astype(np.int64)


def _tokens(counts: NDArray[np.int64], top_k: int) -> NDArray[np.int64] | None:
    choices = counts.sum(axis=2)  # [window, layer]
    even = (choices == choices[:, :1]).all() and not (choices % top_k).any()
    return choices[:, 0] // top_k if even else None


def sniff_trtllm(path: Path) -> bool:
    return (path / META).is_file() and any(_RANK.fullmatch(file.name) for file in path.iterdir())


readers.add(
    "trtllm", Reader(read_trtllm, sniff_trtllm, "TensorRT-LLM expert statistics: a folder with rank*.safetensors")
)
