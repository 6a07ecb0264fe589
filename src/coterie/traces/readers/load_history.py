"""Load histories of EPLB experiments: JSON ``{"load_history": [{"logical_expert_load": [layer][expert]}, …]}``.

One window an entry, in order of time. The file names neither the model nor which layers are dense, so `layer_ids`
stays unknown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.traces.load import LoadTable
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.store import read_json


def read_load_history(path: Path, options: ReadOptions) -> LoadTable:
    history = read_json(path).get("load_history")
    if not isinstance(history, list) or not history:
        raise TraceError(path, "load_history", "must be a list of at least one window")
    windows = [_window(path, index, entry) for index, entry in enumerate(history)]
    for index, window in enumerate(windows):
        if window.shape != windows[0].shape:
            problem = f"has shape {window.shape}, the first window {windows[0].shape}"
            raise TraceError(path, f"load_history[{index}]", problem)
    experts = windows[0].shape[1]
    if options.num_experts is not None and options.num_experts != experts:
        problem = f"has {experts} experts, --num-experts says {options.num_experts}"
        raise TraceError(path, "logical_expert_load", problem)
    source = {"format": "load-history", "file": path.name}
    return LoadTable(np.stack(windows), model=options.model or "unknown", source=source)


def _window(path: Path, index: int, entry: Any) -> NDArray[np.uint64]:
    field = f"load_history[{index}].logical_expert_load"
    if not isinstance(entry, dict) or "logical_expert_load" not in entry:
        raise TraceError(path, field, "is missing")
    try:
        load = np.array(entry["logical_expert_load"])
    except (ValueError, OverflowError):
        raise TraceError(path, field, "has rows of different lengths, expected [layer][expert]") from None
    if load.ndim != 2 or 0 in load.shape or load.dtype.kind not in "uif":
        raise TraceError(path, field, f"is {load.dtype} {load.shape}, expected numbers [layer][expert]")
    bad = np.argwhere(~((load >= 0) & (load < 2**63) & (load == np.floor(load))))  # ~ catches NaN as well
    if bad.size:
        layer, expert = (int(n) for n in bad[0])
        raise TraceError(path, f"{field}[{layer}][{expert}]", f"is {load[layer, expert]}, expected a count of tokens")
    return load.astype(np.uint64)


def sniff_load_history(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        head = stream.read(1 << 16).lstrip()
    return head.startswith(b"{") and b'"load_history"' in head


readers.add(
    "load-history",
    Reader(read_load_history, sniff_load_history, "EPLB load history, JSON: tokens per expert in each window"),
)
