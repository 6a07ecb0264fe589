"""Token counts by source rank, with which a planner can account for the traffic between ranks.

Two forms are read: an .npy file [source rank, layer, expert], and a folder of TensorRT-LLM's expert statistics, in
which each rank counts its own tokens. The counts must add up to the load that they come with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError, TraceError, check_input_file
from coterie.traces.readers.load_dumps import sniff_trtllm
from coterie.traces.store import ArrayFile
from coterie.wire.routed_experts import decode_npy

Array = NDArray[np.float64]


def read_sources(path: Path, tokens: Array, layer_ids: tuple[int, ...], labels: tuple[str, ...], ranks: int) -> Array:
    """Read counts [source rank, layer, expert]; raise unless they add up to `tokens` [layer, expert].

    For TensorRT-LLM's statistics, `labels` are the iterations and `layer_ids` the layers that `tokens` was read from.
    """
    found = _of_statistics(path, tokens, layer_ids, labels, ranks) if path.is_dir() else _of_array(path)
    expected = (ranks, *tokens.shape)
    if found.shape != expected:
        raise TraceError(path, "sources", f"has shape {found.shape}; [source rank, layer, expert] is {expected} here")
    bad = np.argwhere(~((found >= 0) & (found < np.inf)))  # ~ catches NaN as well
    if bad.size:
        at = tuple(int(index) for index in bad[0])
        raise TraceError(path, f"sources{list(at)}", f"is {found[at]}; tokens must be finite and not negative")
    total = found.sum(axis=0)
    wrong = np.argwhere(~np.isclose(total, tokens, rtol=1e-6, atol=1e-6))
    if wrong.size:
        layer, expert = (int(index) for index in wrong[0])
        raise TraceError(
            path,
            "sources",
            f"of layer {layer_ids[layer]}, expert {expert} add up to {total[layer, expert]:g} tokens; "
            f"the load has {tokens[layer, expert]:g}",
        )
    return found


def _of_array(path: Path) -> Array:
    check_input_file(path)
    try:
        found = decode_npy(path.read_bytes())
    except FileNotFoundError:
        raise TraceError(path, "file", "does not exist") from None
    except (OSError, InputError) as error:
        raise TraceError(path, "file", f"is no .npy array: {error}") from None
    if found.dtype.kind not in "uif":
        raise TraceError(path, "file", "must be an .npy array of numbers")
    return found.astype(np.float64)


def _of_statistics(
    path: Path, tokens: Array, layer_ids: tuple[int, ...], iterations: tuple[str, ...], ranks: int
) -> Array:
    if not sniff_trtllm(path):
        raise TraceError(path, "sources", "is a folder, but none of TensorRT-LLM's expert statistics")
    files = sum(1 for _ in path.glob("rank*.safetensors"))
    if files != ranks:
        raise TraceError(path, "rank*.safetensors", f"are {files}; --ranks={ranks} must be as many")
    found = np.zeros((ranks, *tokens.shape))
    for rank in range(ranks):
        arrays = ArrayFile(path / f"rank{rank}.safetensors")
        for row, layer in enumerate(layer_ids):
            for iteration in iterations:
                key = f"{iteration}_{layer}"
                counts = arrays.get(key)
                if counts is not None and counts.shape != tokens.shape[1:]:
                    raise TraceError(arrays.path, key, f"has shape {counts.shape}, expected {tokens.shape[1:]}")
                if counts is not None:
                    found[rank, row] += counts
    return found
