"""Read dumps of SGLang's expert distribution recorder: ``expert_distribution_recorder_*.pt``. Needs torch to unpickle.

    mode             file                holds
    stat(_approx)    …_{time}.pt         logical_count [step, layer, expert]
    per_pass         …_{time}_{rank}.pt  records of global_physical_count [layer, slot]
    per_token        …_{time}_{rank}.pt  records of topk_ids_of_layer [layer, token, 8]

All become a LoadTable. per_token lists tokens by pass, without request ids: they are counted, not joined into requests.

The path is a file or, for per_pass and per_token, a folder: ranks are summed pass by pass, as SGLang does in stat mode.
With tensor parallel attention every rank sees every token, so the counts are too high by the tensor parallel size;
the shares between experts are right.

- Counts are exact. per_pass and per_token record slots; these are mapped to experts by the slot map at the time of the
  dump. The dump does not say whether the map changed during the recording.
- The step buffer of stat is a ring: after it wraps, windows are rotated in time. Steps and layers without any load
  (unused rows of the ring, dense layers) are dropped.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError, UnavailableError, check_file, check_input_file
from coterie.traces import LoadTable
from coterie.traces.readers.base import Reader, ReadOptions


def read_sglang_recorder(path: Path, options: ReadOptions) -> LoadTable:
    """Read a dump of any of the three modes; the mode follows from the content."""
    files = sorted(path.glob("expert_distribution_recorder_*.pt")) if path.is_dir() else [path]
    check_file(files, path, "folder", "holds no expert_distribution_recorder_*.pt")
    return read_rank_dumps(path, files, options)


def read_rank_dumps(path: Path, files: Sequence[Path], options: ReadOptions) -> LoadTable:
    """Read the dumps of one recording, one file per rank; errors of several files name `path`."""
    dumps = [_load(file) for file in files]
    for file, dump in zip(files, dumps, strict=True):
        if "logical_count" in dump:
            if len(files) == 1:
                return _stat(file, dump, options)
            raise TraceError(
                path, "folder", f"holds {len(files)} dumps of which {file.name} stands alone: give one file"
            )
    return _by_pass(path if len(files) > 1 else files[0], files, dumps, options)


def _load(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise UnavailableError(f"{path} is a torch file and torch is missing: pip install coterie[torch]") from None
    check_file(path.exists(), path, "file", "does not exist")
    check_input_file(path)
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises pickle, zip, runtime, key and type errors on damaged files
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise TraceError(path, "file", f"torch cannot load it: {first}") from None
    check_file(
        isinstance(dump, dict) and ("logical_count" in dump or "records" in dump),
        path,
        "dump",
        "has neither logical_count nor records: not of the expert distribution recorder",
    )
    return cast(dict[str, Any], dump)


def _records(path: Path, dump: dict[str, Any]) -> list[dict[str, Any]]:
    records = dump.get("records")
    check_file(
        isinstance(records, list) and records and all(isinstance(record, dict) for record in records),
        path,
        "records",
        "must be a list of at least one pass",
    )
    return cast(list[dict[str, Any]], records)


def _integers(path: Path, name: str, value: Any, ndim: int) -> NDArray[np.int64]:
    """Convert a tensor or list of integers to an array of `ndim` dimensions."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        raise TraceError(path, name, f"is {type(value).__name__}, expected integers") from None
    check_file(
        array.ndim == ndim and (array.dtype.kind in "ui" or not array.size),
        path,
        name,
        f"is {array.dtype} {array.shape}, expected integers of {ndim} dimensions",
    )
    return array.astype(np.int64)


def _table(
    path: Path, counts: NDArray[np.int64], options: ReadOptions, labels: list[str] | None, **source: Any
) -> LoadTable:
    least = int(counts.min(initial=0))
    check_file(least >= 0, path, "counts", f"hold {least}, expected tokens")
    options.check_experts(path, "counts", counts.shape[2])
    steps, layers = (np.flatnonzero(counts.any(axis=axes)) for axes in ((1, 2), (0, 2)))
    check_file(steps.size, path, "counts", "hold no load: nothing was recorded")
    return LoadTable(
        counts[steps][:, layers].astype(np.uint64),
        model=options.model or "unknown",
        labels=None if labels is None else [labels[step] for step in steps],
        layer_ids=layers.astype(np.int64),
        source={"format": "sglang-recorder", "file": path.name, **source},
    )


def _stat(path: Path, dump: dict[str, Any], options: ReadOptions) -> LoadTable:
    tensor = dump["logical_count"]
    flat = getattr(tensor, "ndim", 3) == 2  # older dumps are already summed over steps
    counts = _integers(path, "logical_count", tensor, 2 if flat else 3)
    return _table(path, counts[None] if flat else counts, options, None, mode="stat")


def _by_pass(path: Path, files: Sequence[Path], dumps: Sequence[dict[str, Any]], options: ReadOptions) -> LoadTable:
    passes: dict[int, NDArray[np.int64]] = {}
    for file, dump in zip(files, dumps, strict=True):
        records, experts = _records(file, dump), _slot_map(file, dump)  # experts [layer, slot]
        shape = len(experts), int(experts.max()) + 1
        for index, record in enumerate(records):
            counts = _slot_counts(file, index, record, experts.shape)
            load = passes.setdefault(int(_field(file, index, record, "forward_pass_id", 0)), np.zeros(shape, np.int64))
            check_file(
                load.shape == shape, file, "last_physical_to_logical_map", "has another shape than the other ranks'"
            )
            np.add.at(load, (np.arange(len(experts))[:, None], experts), counts)
    order = sorted(passes)
    counts = np.stack([passes[number] for number in order])
    return _table(path, counts, options, [str(number) for number in order], mode="by pass", ranks=len(files))


def _slot_counts(path: Path, index: int, record: dict[str, Any], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the tokens of each slot in a pass, of `shape` [layer, slot]."""
    name = "topk_ids_of_layer"
    if name not in record:
        counts = _field(path, index, record, "global_physical_count", 2)
        where = f"records[{index}].global_physical_count"
        check_file(counts.shape == shape, path, where, f"has shape {counts.shape}, the slot map {shape}")
        return counts
    slots = _field(path, index, record, name, 3)  # [layer, token, 8], -1 in unused entries
    check_file(
        len(slots) == shape[0] and slots.min(initial=0) >= -1 and slots.max(initial=0) < shape[1],
        path,
        f"records[{index}].{name}",
        f"has {len(slots)} layers and slots from {slots.min(initial=0)} to {slots.max(initial=0)}; "
        f"expected {shape[0]} layers and slots in -1 … {shape[1] - 1}",
    )
    counts = np.zeros(shape, np.int64)
    layer, token, place = np.nonzero(slots >= 0)
    np.add.at(counts, (layer, slots[layer, token, place]), 1)
    return counts


def _slot_map(path: Path, dump: dict[str, Any]) -> NDArray[np.int64]:
    """Return the expert of each slot, [layer, slot]. Every expert has a slot, so the maximum gives their number."""
    experts = _integers(path, "last_physical_to_logical_map", dump.get("last_physical_to_logical_map"), 2)
    check_file(
        experts.size and int(experts.min()) >= 0 and int(experts.max()) < experts.shape[1],
        path,
        "last_physical_to_logical_map",
        f"of shape {experts.shape} must hold experts, no more of them than slots",
    )
    for layer, row in enumerate(experts):
        missing = np.setdiff1d(np.arange(int(experts.max()) + 1), row)
        if missing.size:
            raise TraceError(path, f"last_physical_to_logical_map[{layer}]", f"has no slot for expert {missing[0]}")
    return experts


def _field(path: Path, index: int, record: dict[str, Any], name: str, ndim: int) -> NDArray[np.int64]:
    return _integers(path, f"records[{index}].{name}", record.get(name), ndim)


def sniff_sglang_recorder(path: Path) -> bool:
    """Detect a dump without torch: a .pt file is a zip, and its pickle starts with the field names."""
    if path.is_dir():
        return any(path.glob("expert_distribution_recorder_*.pt"))
    if path.suffix != ".pt":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                head = stream.read(4096)
    except Exception:  # no pickle, not a zip, or a damaged zip, which raises many types; detection must not raise
        return False
    return b"logical_count" in head or (b"records" in head and b"forward_pass_id" in head)


SGLANG_RECORDER = Reader(
    read_sglang_recorder, sniff_sglang_recorder, "SGLang expert distribution recorder, .pt (needs torch)"
)
