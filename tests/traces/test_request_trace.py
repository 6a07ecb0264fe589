"""RequestTrace itself: checks, order, and the folder on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.traces import RequestTrace


def example() -> RequestTrace:
    return RequestTrace(
        prompt_tokens=np.array([5, 600, 7]),
        output_tokens=np.array([1, 2, 3]),
        arrival_s=np.array([2.0, 0.5, 2.0]),
        ids=["a", "b", "c"],
        domains=["code", "math", "code"],
        prefix_blocks=[np.array([1]), np.array([1, 2]), np.array([], np.int64)],
        block_tokens=512,
        extra={"user": ["x", None, "z"]},
        source={"format": "test"},
    )


def test_order_of_arrival_moves_every_column_and_keeps_ties() -> None:
    ordered = example().in_order()
    assert ordered.ids == ["b", "a", "c"]
    assert ordered.prompt_tokens.tolist() == [600, 5, 7]
    assert ordered.output_tokens.tolist() == [2, 1, 3]
    assert ordered.domains == ["math", "code", "code"]
    assert ordered.extra["user"] == [None, "x", "z"]
    assert ordered.prefix_blocks is not None
    assert [b.tolist() for b in ordered.prefix_blocks] == [[1, 2], [1], []]
    assert ordered.duration_s == 1.5


def test_without_arrivals_order_and_duration_stay() -> None:
    trace = RequestTrace(prompt_tokens=np.array([3, 1]), output_tokens=np.array([0, 0]))
    assert trace.in_order() is trace
    assert trace.duration_s == 0.0


def test_take_a_slice() -> None:
    part = example().take(slice(1, 3))
    assert len(part) == 2
    assert part.ids == ["b", "c"]
    assert part.block_tokens == 512


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"output_tokens": np.array([1])}, "output_tokens has 1 rows; prompt_tokens has 2"),
        ({"output_tokens": np.array([1, -4])}, "output_tokens=-4 must be in 0"),
        ({"arrival_s": np.array([0.0, np.nan])}, r"arrival_s\[1\]=nan must be a finite time"),
        ({"extra": {"user": ["x"]}}, "user has 1 rows"),
        ({"block_tokens": 16}, "prefix_blocks and block_tokens must be given together"),
    ],
)
def test_refuses_columns_that_do_not_fit(columns: dict[str, Any], message: str) -> None:
    given = {"prompt_tokens": np.array([1, 2]), "output_tokens": np.array([1, 2]), **columns}
    with pytest.raises(ConfigError, match=message):
        RequestTrace(**given)


def test_folder_round_trip_keeps_order_and_every_column(tmp_path: Path) -> None:
    trace = example()
    trace.save(tmp_path / "t")
    again = RequestTrace.open(tmp_path / "t")
    for name in ("prompt_tokens", "output_tokens", "arrival_s"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))
    for name in ("ids", "domains", "extra", "source"):
        assert getattr(again, name) == getattr(trace, name)
    assert again.block_tokens == 512
    assert again.prefix_blocks is not None
    assert [b.tolist() for b in again.prefix_blocks] == [[1], [1, 2], []]


def test_folder_is_never_written_over_and_a_lost_row_is_seen(tmp_path: Path) -> None:
    example().save(tmp_path / "t")
    with pytest.raises(ConfigError, match="holds a trace already"):
        example().save(tmp_path / "t")
    meta = json.loads((tmp_path / "t/meta.json").read_text())
    (tmp_path / "t/meta.json").write_text(json.dumps(meta | {"num_requests": 4}))
    with pytest.raises(TraceError, match=r"requests.parquet: rows: found 3, expected 4"):
        RequestTrace.open(tmp_path / "t")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("prompt_tokens", [1, None], "prompt_tokens: holds int64, expected whole numbers without gaps"),
        ("prompt_tokens", [1.5, 2.0], "prompt_tokens: holds double, expected whole numbers"),
        ("prompt_tokens", ["7", "8"], "prompt_tokens: holds string, expected whole numbers"),
        ("prompt_tokens", [1, 1 << 41], "prompt_tokens=2199023255552 must be in 0"),
        ("domain", [1, 2], "domain: holds int64, expected text"),
        ("arrival_s", [0.0, float("nan")], "must be a finite time"),
    ],
)
def test_a_table_with_wrong_columns_is_refused(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    RequestTrace(np.array([1, 2]), np.array([3, 4]), np.array([0.0, 1.0])).save(tmp_path / "t")
    columns = {"prompt_tokens": [1, 2], "output_tokens": [3, 4], "arrival_s": [0.0, 1.0], column: values}
    pq.write_table(pa.table(columns), tmp_path / "t" / "requests.parquet")
    with pytest.raises(TraceError, match=message):
        RequestTrace.open(tmp_path / "t")


def test_columns_that_mix_kinds_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    trace = RequestTrace(np.array([1, 2]), np.array([3, 4]), extra={"x": [1, "a"]})
    with pytest.raises(ConfigError, match="column 'x' mixes kinds"):
        trace.save(tmp_path / "t")
    assert not list(tmp_path.glob("t/*"))
