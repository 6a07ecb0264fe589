"""Reader of ``.npz`` files: public activation data and Coterie's own. The path is the file or the folder with it.

The names of the arrays determine the layout. Some layouts need a sidecar, a second file in the same folder:

    expert_ids, gate_probs_f16, offsets     + requests.jsonl.gz   gpt-oss-20b: decode routing     → ActivationTrace
    expert_ids, gate_weight_x1e4, offsets   + requests.jsonl      DeepSeek-V2-Lite by ESFT        → ActivationTrace
    expert_ids, offsets, and optionally phase, token_ids, gate_weights, num_experts, layer_ids,
      prompt_tokens with output_tokens, domains:                  Coterie's own                   → ActivationTrace
    counts, layer_ids                       + index.jsonl         GLM-5.2 counts                  → LoadTable
    counts, and optionally layer_ids, tokens                      Coterie's own                   → LoadTable
    model|expert_counts|domain                                    OLMoE and Mixtral counts        → LoadTable

Contents of the two activation data sets, inferred from the data:

- *gpt-oss-20b*: row t of a request has the experts of its generated token t (with this alignment, equal tokens choose
  equal experts in layer 0 55% of the time, against 24% if shifted by one). The last generated token was never an input
  of the model, so a request has one row fewer than tokens; in two requests (185 and 384, both cut at 512 tokens) the
  list of token strings is one too short and one too long. All rows are DECODE, the prompt's routing is not recorded,
  and output_tokens is rows + 1.
- *DeepSeek-V2-Lite*: ESFT ran whole training examples, prompt and answer together, through one forward pass. Nothing
  was generated, so all rows are PREFILL and prompt_tokens is the number of rows; the start of the answer is not
  recorded. Gate weights are softmax scores over all 64 experts, not normalised over the six chosen.

The GLM tables overlap: the merged tables are sums of the shards, so adding up all windows counts tokens twice.
:func:`read_placements` reads placements from ``.npz``, which are not traces.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError, TraceError, check_file, check_found, check_input_file
from coterie.traces.activations import ActivationTrace, TraceMeta
from coterie.traces.load import LoadTable
from coterie.traces.readers._rows import Row, check_unpacked, json_rows
from coterie.traces.readers.base import Reader, ReadOptions, Trace, readers
from coterie.traces.readers.routed_experts import experts_of
from coterie.traces.requests import RequestTrace
from coterie.traces.store import value_errors
from coterie.types import DECODE, PREFILL
from coterie.wire.routed_experts import decode_npy

OLMOE_LAYERS = (0, 7, 15)
"""Layers of every model that OLMoE's routing analysis recorded."""

Arrays = Mapping[str, NDArray[Any]]


def read_npz(path: Path, options: ReadOptions) -> Trace:
    """Read a trace in any of the layouts above."""
    file = _find(path) if path.is_dir() else path
    names = _names(file)
    layout = check_found(
        _layout(names),
        file,
        "arrays",
        f"holds {', '.join(names[:4]) or 'nothing'}{', …' if len(names) > 4 else ''}: not a layout of traces "
        "(token tables and placements have functions of their own)",
    )
    # Read all arrays, even unknown ones: an array with a damaged name must not look like an absent optional array.
    return _READ[layout](file, _load(file, names), options)


def _layout(names: Sequence[str]) -> str | None:
    if {"expert_ids", "offsets"} <= set(names):
        kinds = {"gate_probs_f16": "gpt-oss", "gate_weight_x1e4": "esft"}
        return next((kind for key, kind in kinds.items() if key in names), "own")
    if "counts" in names and set(names) <= {"counts", "layer_ids", "tokens"}:
        return "counts"
    return "olmoe" if names and all(name.count("|") == 2 for name in names) else None


def _find(folder: Path) -> Path:
    files = sorted(folder.glob("*.npz"))
    known = [file for file in files if sniff_npz(file)]
    if len(known) != 1:
        which = ", ".join(file.name for file in known or files) or "no .npz file"
        raise TraceError(folder, "folder", f"holds {which}; expected one .npz of a known layout, or give the file")
    return known[0]


def _names(path: Path) -> list[str]:
    check_input_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except FileNotFoundError:
        raise TraceError(path, "file", "does not exist") from None
    except Exception as error:  # zipfile raises struct, zlib, OS and value errors on damaged archives
        raise TraceError(path, "file", f"is not a .npz archive, or is cut: {error!r}") from None


def read_arrays(path: Path) -> Arrays:
    """Read all arrays of an archive, by name; raises TraceError if it is damaged or unpacks to far too much."""
    return _load(path, _names(path))


def _load(path: Path, names: Sequence[str]) -> Arrays:
    arrays: dict[str, NDArray[Any]] = {}
    with zipfile.ZipFile(path) as archive:
        check_unpacked(path, sum(part.file_size for part in archive.infolist()))
        for name in names:
            try:
                arrays[name] = decode_npy(archive.read(name + ".npy"))  # checks the CRC before anything is parsed
            except Exception as error:
                problem = str(error) if isinstance(error, InputError) else f"cannot be unpacked: {error!r}"
                raise TraceError(path, name, problem) from None
    return arrays


def _sidecar(file: Path, *names: str) -> list[Row]:
    """Return the rows of the JSON Lines file beside an archive, which has one of these names."""
    path = next((file.with_name(name) for name in names if file.with_name(name).exists()), None)
    path = check_found(path, file.with_name(names[0]), "file", f"does not exist; {file.name} needs it")
    return list(json_rows(path, ()))


def _whole(rows: Sequence[Row], name: str) -> NDArray[np.int64]:
    """Return [row] whole numbers; a number like 12.0 is one."""
    for row in rows:
        value = row.values.get(name)
        if type(value) not in (int, float) or not 0 <= value < 2**63 or value != int(value):  # type: ignore[operator, arg-type]
            raise row.error(name, f"is {value!r}, expected a whole number, not negative")
    return np.array([row.values[name] for row in rows], np.int64)


def _match(rows: Sequence[Row], name: str, expected: NDArray[np.integer], what: str) -> None:
    """Raise TraceError unless the rows repeat the numbers that the arrays say."""
    stated = _whole(rows, name)
    if len(stated) != len(expected):
        raise TraceError(rows[0].path, "rows", f"found {len(stated)}, the arrays hold {len(expected)}")
    for at in np.flatnonzero(stated != expected):
        raise rows[int(at)].error(name, f"is {stated[at]}, {what} say {expected[at]}")


def _requests(file: Path, offsets: NDArray[np.int64], length: str, *names: str) -> list[Row]:
    """Return the rows of the requests' sidecar; the number of tokens, called `length`, and the offset must match."""
    rows = _sidecar(file, *names)
    _match(rows, length, np.diff(offsets), "offsets")
    _match(rows, "offset", offsets[:-1], "offsets")
    return rows


def _read_gpt_oss(file: Path, arrays: Arrays, options: ReadOptions) -> ActivationTrace:
    offsets = _offsets(file, arrays)
    rows = _requests(file, offsets, "n_routed_tokens", "requests.jsonl.gz", "requests.jsonl")
    requests = RequestTrace(
        prompt_tokens=_whole(rows, "n_prompt_tokens"),
        output_tokens=np.diff(offsets) + 1,
        domains=[row.text("category") for row in rows],
        extra={"dataset": [row.text("dataset") for row in rows]},
    )
    gates = _array(file, arrays, "gate_probs_f16", 3, "f")
    return _trace(
        file,
        arrays,
        options,
        options.model or file.absolute().parent.name,
        requests,
        DECODE,
        gates,
        range(gates.shape[1]),
    )


def _read_esft(file: Path, arrays: Arrays, options: ReadOptions) -> ActivationTrace:
    offsets = _offsets(file, arrays)
    requests = RequestTrace(
        prompt_tokens=np.diff(offsets),
        output_tokens=np.zeros(len(offsets) - 1, np.int64),
        domains=[
            row.text("domain") for row in _requests(file, offsets, "n_tokens", "requests.jsonl", "requests.jsonl.gz")
        ],
    )
    gates = _array(file, arrays, "gate_weight_x1e4", 3, "ui") / 1e4
    # Layer 0 of the model is dense; ESFT numbers the MoE layers 1 … 26.
    return _trace(
        file,
        arrays,
        options,
        options.model or file.absolute().parent.name,
        requests,
        PREFILL,
        gates,
        range(1, 1 + gates.shape[1]),
    )


def _read_own(file: Path, arrays: Arrays, options: ReadOptions) -> ActivationTrace:
    def optional(name: str, ndim: int, kinds: str, limit: int | None = None) -> NDArray[Any] | None:
        if name not in arrays:
            return None
        values = _array(file, arrays, name, ndim, kinds)
        bad = np.empty(0) if limit is None else np.flatnonzero((values < 0) | (values >= limit))
        if bad.size and limit is not None:
            raise TraceError(file, f"{name}[{int(bad[0])}]", f"is {int(values[bad[0]])}, expected 0 … {limit - 1}")
        return values

    phase, layer_ids, stated = (
        optional("phase", 1, "ui", 2),
        optional("layer_ids", 1, "ui"),
        optional("num_experts", 0, "ui"),
    )
    requests = None
    if not {"prompt_tokens", "output_tokens", "domains"}.isdisjoint(arrays):
        with value_errors(file, "requests"):
            domains = optional("domains", 1, "U")
            requests = RequestTrace(
                _array(file, arrays, "prompt_tokens", 1, "ui").astype(np.int64),
                _array(file, arrays, "output_tokens", 1, "ui").astype(np.int64),
                domains=None if domains is None else domains.tolist(),
            )
    return _trace(
        file,
        arrays,
        options,
        options.model or file.stem,
        requests,
        DECODE if phase is None else phase,
        optional("gate_weights", 3, "f"),
        None if layer_ids is None else layer_ids.tolist(),
        optional("token_ids", 1, "ui", 2**31),
        None if stated is None else int(stated),
    )


def _trace(
    file: Path,
    arrays: Arrays,
    options: ReadOptions,
    name: str,
    requests: RequestTrace | None,
    phase: int | NDArray[np.integer],
    gates: NDArray[np.floating] | None,
    layer_ids: Sequence[int] | None,
    token_ids: NDArray[np.integer] | None = None,
    stated: int | None = None,
) -> ActivationTrace:
    offsets, ids = _offsets(file, arrays), _array(file, arrays, "expert_ids", 3, "ui")
    weights = None if gates is None else gates.astype(np.float16)
    if weights is not None and not np.isfinite(weights).all():
        where = [int(n) for n in np.argwhere(~np.isfinite(weights))[0]]
        raise TraceError(file, f"gate weights{where}", f"is {weights[tuple(where)]}, expected a finite number")
    phases = np.full(len(ids), phase, np.uint8) if isinstance(phase, int) else phase.astype(np.uint8)
    with value_errors(file, "arrays"):
        meta = TraceMeta(
            model=name,
            num_experts=experts_of(file, options, name, stated=stated),
            num_layers=ids.shape[1],
            top_k=ids.shape[2],
            layer_ids=None if layer_ids is None else tuple(layer_ids),
            source={"format": "npz", "file": file.name},
        )
        return ActivationTrace.from_arrays(
            meta, ids, offsets, requests, phases, None if token_ids is None else token_ids.astype(np.int32), weights
        )


def _array(file: Path, arrays: Arrays, name: str, ndim: int, kinds: str) -> NDArray[Any]:
    array = arrays[name]
    if array.ndim != ndim or array.dtype.kind not in kinds:
        what = {"f": "floating point", "U": "text"}.get(kinds, "integers")
        expected = f"{what} of {ndim} dimensions"
        raise TraceError(file, name, f"is {array.dtype} {array.shape}, expected {expected}")
    return array


def _offsets(file: Path, arrays: Arrays) -> NDArray[np.int64]:
    """Return the offsets [request + 1], checked against the tokens: at least one request and one token."""
    offsets, tokens = _array(file, arrays, "offsets", 1, "ui"), len(_array(file, arrays, "expert_ids", 3, "ui"))
    check_file(
        len(offsets) >= 2 and tokens >= 1,
        file,
        "offsets",
        f"describe {max(0, len(offsets) - 1)} requests of {tokens} tokens: empty",
    )
    check_file(
        int(offsets[0]) == 0 and int(offsets[-1]) == tokens,
        file,
        "offsets",
        f"run from {offsets[0]} to {offsets[-1]}; expert_ids has {tokens} tokens, from 0",
    )
    for at in np.flatnonzero(offsets[1:] < offsets[:-1]):
        raise TraceError(file, f"offsets[{at + 1}]", f"is {offsets[at + 1]}, below {offsets[at]} before it")
    return offsets.astype(np.int64)


def _read_counts(file: Path, arrays: Arrays, options: ReadOptions) -> LoadTable:
    counts = _array(file, arrays, "counts", 3, "ui")
    check_file(
        0 not in counts.shape and int(counts.min()) >= 0,
        file,
        "counts",
        f"of shape {counts.shape} must hold tokens of [window, layer, expert], none 0",
    )
    columns: dict[str, Any] = {
        name: _array(file, arrays, name, 1, "ui").astype(np.int64) for name in ("layer_ids", "tokens") if name in arrays
    }
    if file.with_name("index.jsonl").exists():
        rows = _sidecar(file, "index.jsonl")
        _match(rows, "i", np.arange(len(counts)), "the arrays")
        _match(rows, "cnt_sum_layer0", counts[:, 0].sum(axis=1, dtype=np.int64), "counts")
        columns["tokens"] = _whole(rows, "tokens")
        chunks = (row.values.get("chunk") for row in rows)  # None in a merged table
        columns["labels"] = [
            row.text("domain") if chunk is None else f"{row.text('domain')}/{chunk}"
            for row, chunk in zip(rows, chunks, strict=True)
        ]
    return _load_table(file, options, counts, options.model or file.absolute().parent.name, **columns)


def _read_olmoe(file: Path, arrays: Arrays, options: ReadOptions) -> LoadTable:
    tables: dict[str, dict[str, NDArray[Any]]] = {}
    for name in sorted(arrays):
        model, kind, domain = name.split("|")
        if kind == "expert_counts":
            tables.setdefault(model, {})[domain] = _array(file, arrays, name, 2, "ui")
    if options.model not in tables:
        raise TraceError(file, "model", f"must be chosen with --model: one of {', '.join(tables) or 'none'}")
    domains = tables[options.model]
    check_file(
        len({table.shape for table in domains.values()}) == 1, file, options.model, "has tables of different shapes"
    )
    return _load_table(
        file,
        options,
        np.stack(list(domains.values())),
        options.model,
        labels=list(domains),
        layer_ids=np.array(OLMOE_LAYERS, np.int64),
    )


def _load_table(file: Path, options: ReadOptions, counts: NDArray[Any], model: str, **columns: Any) -> LoadTable:
    if counts.size and counts.min() < 0:
        raise TraceError(file, "counts", f"hold {counts.min()}; tokens must not be negative")
    options.check_experts(file, "counts", counts.shape[2])
    with value_errors(file, "counts"):
        return LoadTable(counts.astype(np.uint64), model=model, source={"format": "npz", "file": file.name}, **columns)


def read_placements(path: str | Path) -> dict[str, NDArray[np.uint8]]:
    """Read placements by name, [rank, layer, expert]: 1 if the rank holds the expert, else 0. Every expert is held."""
    path = Path(path)
    placements, arrays = {}, read_arrays(path)
    for name in arrays:
        held = _array(path, arrays, name, 3, "ui")
        check_file(
            0 not in held.shape and int(held.min()) >= 0 and int(held.max()) <= 1,
            path,
            name,
            f"of shape {held.shape} must hold 0 or 1 for [rank, layer, expert]",
        )
        for layer, expert in np.argwhere(held.sum(axis=0) == 0):
            raise TraceError(path, name, f"has no rank for expert {expert} of layer {layer}")
        placements[name] = held.astype(np.uint8)
    check_file(placements, path, "arrays", "holds no placement")
    return placements


def sniff_npz(path: Path) -> bool:
    try:
        return bool(_find(path)) if path.is_dir() else _layout(_names(path)) is not None
    except TraceError:
        return False


_READ: dict[str, Callable[[Path, Arrays, ReadOptions], Trace]] = {
    "gpt-oss": _read_gpt_oss,
    "esft": _read_esft,
    "own": _read_own,
    "counts": _read_counts,
    "olmoe": _read_olmoe,
}

readers.add("npz", Reader(read_npz, sniff_npz, "activations or expert counts as .npz: public data sets and our own"))
