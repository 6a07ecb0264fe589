"""Numbers and shapes that no array, table or 64-bit word holds: refused in one line that names the file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coterie.errors import InputError, TraceError
from coterie.models import model_from_config
from coterie.placement.maps.formats import read_map
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.traces.readers import read_trace
from coterie.traces.store import ArrayFile
from coterie.wire.routed_experts import decode_npy

HUGE = 2**70
DIGITS = "9" * 4400
"""More digits than Python turns into a number."""


@pytest.mark.parametrize("shape", [[0, HUGE], [0, 2**63], [1] * 65, [0] * 65])
def test_shapes_of_safetensors(tmp_path: Path, shape: list[int]) -> None:
    size = int(np.prod(shape)) if 0 not in shape else 0
    header = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(TraceError, match=r"a\.safetensors: a: has a shape that no array has"):
        ArrayFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize("shape", ["(0, 1180591620717411303424)", f"({'1, ' * 65})", f"({'0, ' * 65})", f"({DIGITS},)"])
def test_shapes_of_npy(shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    size = 1 if shape.startswith("(1") else 0
    data = b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header + bytes(size)
    with pytest.raises(InputError):
        decode_npy(data)


WRONG_COLUMNS: dict[str, Callable[[int], Any]] = {
    "text": lambda rows: pa.array(["x"] * rows),
    "gaps": lambda rows: pa.array([None] * rows, pa.int64()),
    "above 63 bits": lambda rows: pa.array([2**63] * rows, pa.uint64()),
    "negative": lambda rows: pa.array([-1] * rows),
    "lists": lambda rows: pa.array([[1]] * rows),
    "bytes": lambda rows: pa.array([b"\xff"] * rows),
}


@pytest.mark.parametrize("wrong", WRONG_COLUMNS)
@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "arrival_s", "id"])
def test_columns_of_parquet(tmp_path: Path, name: str, wrong: str) -> None:
    RequestTrace(np.array([5, 6]), np.array([1, 2]), np.array([0.0, 1.5]), ids=["a", "b"]).save(tmp_path / "t")
    file = tmp_path / "t" / "requests.parquet"
    table = pq.ParquetFile(io.BytesIO(file.read_bytes()), pre_buffer=False).read(use_threads=False)
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, WRONG_COLUMNS[wrong](2)), file)
    if (name, wrong) == ("id", "text"):
        assert RequestTrace.open(tmp_path / "t").ids == ["x", "x"]
        return
    with pytest.raises(TraceError, match=r"requests\.parquet"):
        RequestTrace.open(tmp_path / "t")


@pytest.mark.parametrize("name", ["", "output_tokens", "x"])
def test_names_of_parquet(tmp_path: Path, name: str) -> None:
    RequestTrace(np.array([5]), np.array([1])).save(tmp_path / "t")
    file = tmp_path / "t" / "requests.parquet"
    table = pq.ParquetFile(io.BytesIO(file.read_bytes()), pre_buffer=False).read(use_threads=False)
    pq.write_table(table.rename_columns([name, "output_tokens"]), file)
    with pytest.raises(TraceError, match=r"requests\.parquet"):
        RequestTrace.open(tmp_path / "t")


NUMBERS = {"over 64 bits": str(HUGE), "4,400 digits": DIGITS}
TEXTS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "csv": ("r.csv", "arrival_s,prompt_tokens,output_tokens\n0,@,1\n", read_trace),
    "csv time": ("r.csv", "arrival_s,prompt_tokens,output_tokens\n-@,1,1\n", read_trace),
    "jsonl": ("r.jsonl", '{"arrival_s": 0, "prompt_tokens": @, "output_tokens": 1}\n', read_trace),
    "jsonl time": ("r.jsonl", '{"arrival_s": @, "prompt_tokens": 1, "output_tokens": 1}\n', read_trace),
    "mooncake": (
        "m.jsonl",
        '{"timestamp": 30, "input_length": 600, "output_length": 5, "hash_ids": [@]}\n',
        read_trace,
    ),
    "load history": ("h.json", '{"load_history": [{"logical_expert_load": [[1, @]]}]}', read_trace),
    "config": ("config.json", '{"num_hidden_layers": @, "hidden_size": 64}', model_from_config),
    "sglang": ("m.json", '{"physical_to_logical_map": [[0, @]]}', lambda path: read_map(path, num_ranks=1)),
    "tensorrt-llm": (
        "m.yaml",
        "num_slots: @\ninitial_global_assignments:\n  0: [0, 1]\nlayer_updates_per_iter: 0\n",
        lambda path: read_map(path, num_ranks=1),
    ),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", TEXTS)
def test_numbers_that_no_word_holds(tmp_path: Path, kind: str, number: str) -> None:
    name, text, read = TEXTS[kind]
    (tmp_path / name).write_text(text.replace("@", NUMBERS[number]))
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


@pytest.mark.parametrize("key", ["num_experts", "num_layers", "top_k", "layer_ids", "block_tokens", "num_tokens"])
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_meta(tmp_path: Path, key: str, number: str) -> None:
    trace = ActivationTrace.from_arrays(TraceMeta("any", 8, 1, 2), np.array([[[0, 1]], [[2, 3]]]), np.array([0, 2]))
    trace.save(tmp_path / "t")
    path = tmp_path / "t" / "meta.json"
    meta = json.loads(path.read_text())
    holder = meta["segments"][0] if key == "num_tokens" else meta
    holder[key] = ["@"] if key == "layer_ids" else "@"
    path.write_text(json.dumps(meta).replace('"@"', NUMBERS[number]))
    if key == "block_tokens" and number == "over 64 bits":
        ActivationTrace.open(tmp_path / "t")  # not computed with
        return
    with pytest.raises(TraceError, match=r"meta\.json|phase"):
        ActivationTrace.open(tmp_path / "t")
