"""Arrays on disk: plain safetensors both ways, refused when damaged, never half-written under the final name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file, save_file

from coterie.errors import TraceError, read_json
from coterie.traces.store import ArrayFile, ArrayFileWriter, ArraySpec, write_arrays, write_json

DTYPES = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]
DTYPES += [np.float16, np.float32, np.float64]


def sample() -> dict[str, np.ndarray]:
    return {
        "ids": np.arange(24, dtype=np.uint8).reshape(4, 3, 2),
        "offsets": np.array([0, 1, 4], np.int64),
        "gates": np.linspace(0, 1, 8, dtype=np.float16),
        "none": np.zeros((0, 3), np.int32),
    }


some_arrays = st.dictionaries(
    st.text("abcdefgh_éß", min_size=1, max_size=6),
    st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(min_side=0, max_dims=3, max_side=4))),
    min_size=1,
    max_size=4,
)


@given(some_arrays)
def test_the_library_reads_ours_and_we_read_its(tmp_path_factory: pytest.TempPathFactory, some: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    write_arrays(folder / "ours", some)
    save_file(some, folder / "theirs")
    mine, theirs = ArrayFile(folder / "theirs"), load_file(folder / "ours")
    assert sorted(mine) == sorted(theirs) == sorted(some)
    for name, array in some.items():
        for found in (mine[name], theirs[name], ArrayFile(folder / "ours")[name]):
            assert found.dtype == array.dtype
            assert found.shape == array.shape
            assert found.tobytes() == array.tobytes()


def test_every_array_starts_on_a_multiple_of_its_item_size(tmp_path: Path) -> None:
    write_arrays(tmp_path / "f", sample())
    file = ArrayFile(tmp_path / "f")
    assert all(file[name].flags.aligned for name in file)


def test_reading_maps_and_cannot_write(tmp_path: Path) -> None:
    write_arrays(tmp_path / "f", sample())
    file = ArrayFile(tmp_path / "f")
    assert file["ids"].base is not None
    assert np.shares_memory(file["ids"], file["ids"][1:])
    with pytest.raises(ValueError, match="read-only"):
        file["ids"][0] = 1
    before = file["ids"].copy()
    file.release()
    np.testing.assert_array_equal(file["ids"], before, "pages let go are read again")


def test_rows_may_come_in_parts(tmp_path: Path) -> None:
    array = np.arange(30, dtype=np.int32).reshape(10, 3)
    with ArrayFileWriter(tmp_path / "f", {"a": ArraySpec(array.dtype, array.shape)}) as out:
        out.append("a", array[:1])
        out.append("a", array[1:1])
        out.append("a", array[1:])
        assert not (tmp_path / "f").exists()
    np.testing.assert_array_equal(load_file(tmp_path / "f")["a"], array)


@pytest.mark.parametrize(
    "rows", [np.zeros((3, 3), np.int32), np.zeros((1, 2), np.int32), np.zeros((2, 3, 1), np.int32)]
)
def test_rows_that_do_not_fit(tmp_path: Path, rows: np.ndarray) -> None:
    specs = {"a": ArraySpec(np.dtype(np.int32), (2, 3))}
    with (
        pytest.raises(TraceError, match=r"f: a: rows of shape .* at row 0 do not fit \(2, 3\)"),
        ArrayFileWriter(tmp_path / "f", specs) as out,
    ):
        out.append("a", rows)
    assert list(tmp_path.iterdir()) == []


def test_missing_rows_leave_no_file(tmp_path: Path) -> None:
    specs = {"a": ArraySpec(np.dtype(np.int32), (2,))}
    with pytest.raises(TraceError, match="a: has 1 of 2 rows"), ArrayFileWriter(tmp_path / "f", specs) as out:
        out.append("a", np.zeros(1, np.int32))
    assert list(tmp_path.iterdir()) == []


def test_an_error_inside_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ArrayFileWriter(tmp_path / "f", {"a": ArraySpec(np.dtype(np.int32), (2,))}) as out:
        out.append("b", np.zeros(1, np.int32))
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_of_a_crash_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "f.tmp").write_bytes(b"half of something" * 100)
    write_arrays(tmp_path / "f", sample())
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    np.testing.assert_array_equal(ArrayFile(tmp_path / "f")["offsets"], [0, 1, 4])


def test_every_cut_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "f", sample())
    data = (tmp_path / "f").read_bytes()
    for length in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"/cut: \w+: "):
            ArrayFile(tmp_path / "cut")
    (tmp_path / "long").write_bytes(data + b"\0")
    with pytest.raises(TraceError, match=f"has {len(data) + 1} bytes; its header describes {len(data)}"):
        ArrayFile(tmp_path / "long")


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    path = tmp_path_factory.mktemp("damaged") / "f"
    write_arrays(path, sample())
    data = bytearray(path.read_bytes())
    at %= 8 + int.from_bytes(data[:8], "little")
    data[at] = byte
    path.write_bytes(data)
    try:
        file = ArrayFile(path)
    except TraceError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert problem.startswith(f"{path}: ")
        return
    for name in set(file) & set(sample()):
        assert file[name].nbytes == sample()[name].nbytes


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"a": 1}',
        '{"a": {"dtype": "I32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": ["I32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "I32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": "I32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "I32", "shape": [1], "data_offsets": [4, 8]}}',
        "[" * 100_000,
    ],
)
def test_headers_that_lie(tmp_path: Path, header: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 4)
    with pytest.raises(TraceError):
        ArrayFile(path)


def test_missing_file_array_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nothing: file: does not exist"):
        ArrayFile(tmp_path / "nothing")
    with pytest.raises(TraceError, match="file: "):
        ArrayFile(tmp_path)
    write_arrays(tmp_path / "f", {"a": np.zeros(1), "b": np.zeros(1)})
    file = ArrayFile(tmp_path / "f")
    assert file.get("c") is None
    with pytest.raises(TraceError, match="c: is missing; the file has a, b"):
        file["c"]


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 2}, "a failed write changes nothing"


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udcff", "[" * 100_000])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "meta.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError, match=r"meta\.json: JSON: "):
        read_json(path)


def test_json_missing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="file: does not exist"):
        read_json(tmp_path / "meta.json")
