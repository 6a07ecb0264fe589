"""Read dumps of SGLang's expert distribution recorder: ``expert_distribution_recorder_*.pt``. Needs torch to unpickle.

    mode             file                holds                                                  becomes
    stat(_approx)    …_{time}.pt         logical_count [step, layer, expert]                    LoadTable
    per_pass         …_{time}_{rank}.pt  records of global_physical_count [layer, slot]         LoadTable
    per_token        …_{time}_{rank}.pt  records of topk_ids_of_layer [layer, token, 8]         ActivationTrace

The path is a file or, for stat and per_pass, a folder: ranks are summed pass by pass, as SGLang does in stat mode.
With tensor parallel attention every rank sees every token, so the counts are too high by the tensor parallel size;
the shares between experts are right.

Exactness:

- Counts and expert ids are exact. per_pass and per_token record slots; these are mapped to experts by the slot map at
  the time of the dump. The dump does not say whether the map changed during the recording.
- The step buffer of stat is a ring: after it wraps, windows are rotated in time. Steps and layers without any load
  (unused rows of the ring, dense layers) are dropped.
- per_token lists tokens by pass, without request ids. Tokens of one pass are split exactly (extend_seq_lens). Passes
  are joined by position and batch order: a token at position p continues the first request in the batch whose next
  position is p. Two requests at the same position can be swapped if one leaves the batch. A prompt that starts past
  position 0 continues a chunked prompt at that position; if there is none, it is a prompt with a cached prefix. Tokens
  that were cached or ran before the recording have no routing: `extra["missing_tokens"]` counts them, and they count
  as prompt tokens. The end of a prompt and every decode pass generate a token, so output_tokens is decode rows + 1.
- Speculative passes are refused: they record tokens that were later rejected.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, UnavailableError, check_file, check_input_file
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers.base import Reader, ReadOptions
from coterie.types import DECODE, PREFILL

EXTEND_PASS, DECODE_PASS, MIXED_PASS, IDLE_PASS = 1, 2, 3, 4
"""Values of SGLang's ForwardMode. Larger values are speculative passes or differ between SGLang versions."""


def read_sglang_recorder(path: Path, options: ReadOptions) -> ActivationTrace | LoadTable:
    """Read a dump of any of the three modes; the mode follows from the content."""
    files = sorted(path.glob("expert_distribution_recorder_*.pt")) if path.is_dir() else [path]
    check_file(files, path, "folder", "holds no expert_distribution_recorder_*.pt")
    return read_rank_dumps(path, files, options)


def read_rank_dumps(path: Path, files: Sequence[Path], options: ReadOptions) -> ActivationTrace | LoadTable:
    """Read the dumps of one recording, one file per rank; errors of several files name `path`."""
    dumps = [_load(file) for file in files]
    for file, dump in zip(files, dumps, strict=True):
        stat = "logical_count" in dump
        if stat or any("topk_ids_of_layer" in record for record in _records(file, dump)):
            if len(files) == 1:
                return (_stat if stat else _per_token)(file, dump, options)
            raise TraceError(
                path, "folder", f"holds {len(files)} dumps of which {file.name} stands alone: give one file"
            )
    return _per_pass(path if len(files) > 1 else files[0], files, dumps, options)


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


def _per_pass(path: Path, files: Sequence[Path], dumps: Sequence[dict[str, Any]], options: ReadOptions) -> LoadTable:
    passes: dict[int, NDArray[np.int64]] = {}
    for file, dump in zip(files, dumps, strict=True):
        experts = _slot_map(file, dump)  # [layer, slot]
        shape = len(experts), int(experts.max()) + 1
        for index, record in enumerate(_records(file, dump)):
            counts = _field(file, index, record, "global_physical_count", 2)  # [layer, slot]
            check_file(
                counts.shape == experts.shape,
                file,
                f"records[{index}].global_physical_count",
                f"has shape {counts.shape}, the slot map {experts.shape}",
            )
            load = passes.setdefault(_pass_number(file, index, record), np.zeros(shape, np.int64))
            check_file(
                load.shape == shape, file, "last_physical_to_logical_map", "has another shape than the other ranks'"
            )
            np.add.at(load, (np.arange(len(experts))[:, None], experts), counts)
    order = sorted(passes)
    counts = np.stack([passes[number] for number in order])
    return _table(path, counts, options, [str(number) for number in order], mode="per_pass", ranks=len(files))


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


@dataclass(slots=True, eq=False)
class _Request:
    """A request rebuilt from the passes: the rows of its tokens, in order."""

    first_position: int
    rows: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the request's next token."""
        return self.first_position + len(self.rows)

    def take(self, rows: range, phase: int) -> None:
        self.rows.extend(rows)
        self.phases.extend([phase] * len(rows))


@dataclass(slots=True)
class _Joiner:
    """Join the tokens of successive passes into requests."""

    requests: list[_Request] = field(default_factory=list)
    live: list[_Request] = field(default_factory=list)
    """Requests that may continue, in batch order."""
    chunked: _Request | None = None
    """Last prompt of the latest prompt pass: the only prompt that may be unfinished."""

    def extend(self, row: int, lengths: Sequence[int], positions: NDArray[np.int64], mixed: bool) -> None:
        """Add a pass of prompts; a mixed pass also holds single tokens of running requests."""
        chunked, self.chunked = self.chunked, None
        running = list(self.live) if mixed else []
        at = 0
        for length in lengths:
            position, phase = int(positions[at]), PREFILL
            if at == 0 and chunked is not None and chunked.position == position:  # an unfinished prompt goes first
                request = self.chunked = chunked
                running = [other for other in running if other is not chunked]
            elif length == 1 and (known := _standing_at(position, running)) is not None:
                running.remove(known)
                request, phase = known, DECODE
            else:
                request = self.chunked = self._start(position)
            request.take(range(row + at, row + at + length), phase)
            at += length

    def decode(self, row: int, positions: NDArray[np.int64]) -> None:
        """Add a pass with one token of every running request; requests that are absent have left the batch."""
        waiting, self.live = self.live, []
        for at, position in enumerate(positions.tolist()):
            request = _standing_at(position, waiting)
            if request is None:
                request = self._start(position)
            else:
                waiting.remove(request)
                self.live.append(request)
            request.take(range(row + at, row + at + 1), DECODE)
        if self.chunked is not None and self.chunked in waiting:
            self.live.append(self.chunked)
        else:
            self.chunked = None

    def _start(self, position: int) -> _Request:
        request = _Request(position)
        self.requests.append(request)
        self.live.append(request)
        return request


def _standing_at(position: int, requests: Sequence[_Request]) -> _Request | None:
    return next((request for request in requests if request.position == position), None)


def _per_token(path: Path, dump: dict[str, Any], options: ReadOptions) -> ActivationTrace:
    experts = _slot_map(path, dump)
    num_experts = int(experts.max()) + 1
    options.check_experts(path, "last_physical_to_logical_map", num_experts)
    joiner, blocks, token_ids, row = _Joiner(), [], [], 0
    for index, record in sorted(enumerate(_records(path, dump)), key=lambda item: _pass_number(path, *item)):
        tokens, positions = (_field(path, index, record, name, 1) for name in ("input_ids", "positions"))
        slots = _field(path, index, record, "topk_ids_of_layer", 3)
        if slots.shape[:2] != (len(experts), len(tokens)) or len(positions) != len(tokens):
            problem = f"has shape {slots.shape} for {len(experts)} layers and {len(tokens)} tokens"
            raise TraceError(path, f"records[{index}].topk_ids_of_layer", f"{problem}, {len(positions)} positions")
        _join(path, index, record, joiner, row, positions)
        blocks.append(slots.transpose(1, 0, 2))
        token_ids.append(tokens)
        row += len(tokens)
    check_file(row, path, "records", "hold no token: nothing was recorded")
    built = joiner.requests
    order = np.array([at for request in built for at in request.rows])
    slots = np.concatenate(blocks)[order]
    layers = np.flatnonzero((slots >= 0).any(axis=(0, 2)))
    ids = _experts(path, slots, experts, layers)
    try:
        meta = TraceMeta(
            model=options.model or "unknown",
            num_experts=num_experts,
            num_layers=ids.shape[1],
            top_k=ids.shape[2],
            layer_ids=tuple(layers.tolist()),
            source={"format": "sglang-recorder", "file": path.name, "mode": "per_token"},
        )
        requests = RequestTrace(
            prompt_tokens=np.array([request.first_position + request.phases.count(PREFILL) for request in built]),
            output_tokens=np.array([request.phases.count(DECODE) + 1 for request in built]),
            extra={"missing_tokens": [request.first_position for request in built]},
        )
        return ActivationTrace.from_arrays(
            meta,
            ids,
            np.cumsum([0, *(len(request.rows) for request in built)]),
            requests,
            np.array([phase for request in built for phase in request.phases], np.uint8),
            np.concatenate(token_ids)[order].astype(np.int32),
        )
    except ConfigError as error:
        raise TraceError(path, "records", str(error)) from None


def _field(path: Path, index: int, record: dict[str, Any], name: str, ndim: int) -> NDArray[np.int64]:
    return _integers(path, f"records[{index}].{name}", record.get(name), ndim)


def _pass_number(path: Path, index: int, record: dict[str, Any]) -> int:
    return int(_field(path, index, record, "forward_pass_id", 0))


def _join(
    path: Path, index: int, record: dict[str, Any], joiner: _Joiner, row: int, positions: NDArray[np.int64]
) -> None:
    mode = record.get("forward_mode")
    if mode == DECODE_PASS:
        joiner.decode(row, positions)
    elif mode in (EXTEND_PASS, MIXED_PASS):
        lengths = _field(path, index, record, "extend_seq_lens", 1)
        if int(lengths.min(initial=1)) < 1 or int(lengths.sum()) != len(positions):
            problem = f"sum to {int(lengths.sum())} with a least of {int(lengths.min(initial=0))}"
            raise TraceError(
                path, f"records[{index}].extend_seq_lens", f"{problem}; the pass has {len(positions)} tokens"
            )
        joiner.extend(row, lengths.tolist(), positions, mixed=mode == MIXED_PASS)
    elif mode != IDLE_PASS or len(positions):
        known = "1 (extend), 2 (decode), 3 (mixed) or 4 (idle)"
        problem = f"is {mode!r}, expected {known}: speculative passes are not read"
        raise TraceError(path, f"records[{index}].forward_mode", problem)


def _experts(
    path: Path, slots: NDArray[np.int64], experts: NDArray[np.int64], layers: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Map slots [token, layer, 8] to experts [token, MoE layer, k].

    The recorder's buffer has 8 columns for any k and a row for every layer, dense ones too: unused entries are -1.
    """
    top_k = int((slots >= 0).sum(axis=2).max(initial=0))
    check_file(top_k, path, "topk_ids_of_layer", "is -1 throughout: nothing was recorded")
    kept = slots[:, layers, :top_k]
    bad = np.argwhere((kept < 0) | (kept >= experts.shape[1]))
    if bad.size:
        token, layer, place = (int(n) for n in bad[0])
        name = f"topk_ids_of_layer[{int(layers[layer])}], token {token}, choice {place}"
        raise TraceError(
            path, name, f"is {int(kept[token, layer, place])}, expected a slot in 0 … {experts.shape[1] - 1}"
        )
    return experts[layers[:, None], kept]


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
