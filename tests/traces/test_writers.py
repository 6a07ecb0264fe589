"""Writers: what is written reads back the same, and nothing is ever replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, UnknownNameError
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers import detect, kind_of, read_trace
from coterie.traces.writers import write_trace, writers

RESERVED = {"arrival_s", "timestamp", "prompt_tokens", "output_tokens", "id", "domain", "prefix_blocks", "block_tokens"}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
NAMES = st.text("abcXYZ_ .,\"'é", min_size=1, max_size=6).filter(lambda n: n == n.strip() and n not in RESERVED)
JSON_VALUES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9) | TEXT


@st.composite
def requests(draw: st.DrawFn, *, values: st.SearchStrategy[Any] = TEXT) -> RequestTrace:
    count = draw(st.integers(1, 8))

    def column(items: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(items, min_size=count, max_size=count))

    arrival = np.array(column(st.floats(0, 1e6)))
    prompt = np.array(column(st.integers(0, 3000)), np.int64)
    block = draw(st.sampled_from([16, 512]))
    hashes = st.integers(-(2**62), 2**62)
    blocks = (
        [np.array(draw(st.lists(hashes, min_size=n, max_size=n)), np.int64) for n in (-(-prompt // 512)).tolist()]
        if draw(st.booleans())
        else None
    )
    return RequestTrace(
        prompt_tokens=prompt,
        output_tokens=np.array(column(st.integers(0, 10**6)), np.int64),
        arrival_s=np.sort(arrival - arrival.min()),
        ids=column(TEXT) if draw(st.booleans()) else None,
        domains=column(TEXT) if draw(st.booleans()) else None,
        prefix_blocks=blocks,
        block_tokens=block if blocks is not None else None,
        extra={name: column(values) for name in draw(st.sets(NAMES, max_size=2))},
    )


def check_same(one: RequestTrace, two: RequestTrace, without: tuple[str, ...] = ()) -> None:
    for name in ("prompt_tokens", "output_tokens", "arrival_s"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    for name in ("ids", "domains"):
        assert getattr(two, name) == (None if name in without else getattr(one, name))
    assert dict(one.extra) == dict(two.extra)
    if one.prefix_blocks is None or "prefix_blocks" in without:
        assert two.prefix_blocks is None
    else:
        assert one.block_tokens == two.block_tokens
        assert one.prefix_blocks is not None
        assert two.prefix_blocks is not None
        assert [b.tolist() for b in one.prefix_blocks] == [b.tolist() for b in two.prefix_blocks]


def round_trip(folder: Path, trace: Any, format: str) -> Any:
    written = write_trace(trace, folder / "t", format)
    assert written.path == folder / "t"
    assert detect(folder / "t") == format, "the file shows its format"
    assert [p.name for p in folder.iterdir()] == ["t"], "no temporary file stays"
    return read_trace(folder / "t")


@given(requests(values=JSON_VALUES))
def test_jsonl_holds_everything(tmp_path_factory: pytest.TempPathFactory, trace: RequestTrace) -> None:
    check_same(trace, round_trip(tmp_path_factory.mktemp("jsonl"), trace, "jsonl"))


@given(requests())
def test_csv_holds_everything_but_blocks(tmp_path_factory: pytest.TempPathFactory, trace: RequestTrace) -> None:
    check_same(trace, round_trip(tmp_path_factory.mktemp("csv"), trace, "csv"), without=("prefix_blocks",))


@given(requests())
def test_coterie_holds_everything(tmp_path_factory: pytest.TempPathFactory, trace: RequestTrace) -> None:
    check_same(trace, round_trip(tmp_path_factory.mktemp("coterie"), trace, "coterie"))


def activations(rng: np.random.Generator, **optional: Any) -> ActivationTrace:
    meta = TraceMeta("demo", num_experts=300, num_layers=3, top_k=2, layer_ids=(1, 2, 3))
    ids = rng.integers(0, 300, (10, 3, 2))
    phase = np.array([0, 0, 1, 1, 0, 1, 1, 1, 1, 1], np.uint8)
    return ActivationTrace.from_arrays(meta, ids, np.array([0, 4, 4, 10]), phase=phase, **optional)


@pytest.mark.parametrize("format", ["coterie", "npz"])
@pytest.mark.parametrize("full", [True, False])
def test_activations_round_trip(tmp_path: Path, rng: np.random.Generator, format: str, full: bool) -> None:
    optional = {
        "token_ids": rng.integers(0, 1000, 10).astype(np.int32),
        "gate_weights": rng.random((10, 3, 2)).astype(np.float16),
    }
    trace = activations(rng, **optional if full else {})
    again = round_trip(tmp_path, trace, format)
    assert (again.meta.num_experts, again.meta.top_k, again.meta.num_layers) == (300, 2, 3)
    tokens, offsets = again.arrays()
    np.testing.assert_array_equal(offsets, [0, 4, 4, 10])
    for name, array in trace.arrays()[0]._asdict().items():
        np.testing.assert_array_equal(getattr(tokens, name), array, err_msg=name)
    np.testing.assert_array_equal(again.requests.output_tokens, trace.requests.output_tokens)


def test_npz_keeps_lengths_and_domains_and_names_the_rest(tmp_path: Path, rng: np.random.Generator) -> None:
    table = RequestTrace(
        np.array([500, 600, 700]),
        np.array([2, 1, 5]),
        np.array([0.0, 1.0, 2.0]),
        domains=["law", "math", "law"],
        extra={"user": [1, 2, 3]},
    )
    trace = activations(rng, requests=table)
    assert write_trace(trace, tmp_path / "t", "npz").left_out == ("requests.arrival_s", "requests.extra.user", "model")
    again = read_trace(tmp_path / "t")
    assert isinstance(again, ActivationTrace)
    np.testing.assert_array_equal(again.requests.prompt_tokens, table.prompt_tokens)
    np.testing.assert_array_equal(again.requests.output_tokens, table.output_tokens)
    assert again.requests.domains == table.domains
    assert write_trace(trace, tmp_path / "c", "coterie").left_out == ()


def load(rng: np.random.Generator) -> LoadTable:
    counts = rng.integers(0, 2**40, (4, 3, 8)).astype(np.uint64)
    return LoadTable(counts, "demo", ["a", "b", "c", "d"], np.arange(4), np.arange(1, 4))


@pytest.mark.parametrize("format", ["coterie", "npz"])
def test_load_round_trip(tmp_path: Path, rng: np.random.Generator, format: str) -> None:
    again = round_trip(tmp_path, load(rng), format)
    np.testing.assert_array_equal(again.counts, load(np.random.default_rng(0)).counts)


def test_load_as_arrays(tmp_path: Path, rng: np.random.Generator) -> None:
    table = load(rng)
    assert write_trace(table, tmp_path / "x", "npz").left_out == ("labels", "model")
    with np.load(tmp_path / "x") as arrays:
        assert sorted(arrays) == ["counts", "layer_ids", "tokens"]
        np.testing.assert_array_equal(arrays["counts"], table.counts)


def small(**columns: Any) -> RequestTrace:
    given = {"prompt_tokens": np.array([600]), "output_tokens": np.array([1]), "arrival_s": np.array([0.0])}
    return RequestTrace(**{**given, **columns})


def test_what_a_format_has_no_place_for_is_named(tmp_path: Path) -> None:
    trace = small(ids=["a"], domains=["b"], extra={"user": [1]}, prefix_blocks=[np.array([1, 2])], block_tokens=512)
    assert write_trace(trace, tmp_path / "a", "coterie").left_out == ()
    assert write_trace(trace, tmp_path / "b", "jsonl").left_out == ()
    assert write_trace(trace, tmp_path / "c", "csv").left_out == ("prefix_blocks",)


@pytest.mark.parametrize(
    ("trace", "format", "message"),
    [
        (small(), "npz", "format 'npz' cannot hold requests; coterie and csv and jsonl can"),
        (LoadTable(np.ones((1, 1, 2), np.uint64)), "csv", "cannot hold load; coterie and npz can"),
        (activations(np.random.default_rng(0)), "jsonl", "cannot hold activations; coterie and npz can"),
        (small(arrival_s=None), "csv", "has no arrival_s, which format 'csv' needs"),
        (small().take(slice(0, 0)), "jsonl", "has no requests"),
        (small(extra={"id": ["x"]}), "csv", "extra column 'id' has the name of a column"),
        (small(extra={"block_tokens": [1]}), "jsonl", "extra column 'block_tokens'"),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path: Path, trace: Any, format: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_trace(trace, tmp_path / "x", format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", list(writers))
def test_an_existing_name_is_never_replaced(tmp_path: Path, format: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(ConfigError, match="exists already; choose another name"):
            write_trace(small(), tmp_path / name, format)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file/x cannot be written: "):
        write_trace(small(), tmp_path / "file/x", "csv")


def test_unknown_format_suggests(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown output format 'jsonx'. Did you mean 'jsonl'\?"):
        write_trace(small(), tmp_path / "x", "jsonx")


def test_parent_folders_are_made_and_kinds_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    assert write_trace(small(), tmp_path / "a/b/c").format == "coterie"
    written = read_trace(tmp_path / "a/b/c")
    assert isinstance(written, RequestTrace)
    assert len(written) == 1
    assert [kind_of(t) for t in (small(), load(rng), activations(rng))] == ["requests", "load", "activations"]
