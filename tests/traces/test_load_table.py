"""Load tables on disk: what is written is read, and damage is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from activation_cases import make
from coterie.errors import ConfigError, TraceError
from coterie.traces import LoadTable
from coterie.traces.readers import read_trace


def test_load_table_round_trip(tmp_path: Path, rng: np.random.Generator) -> None:
    table = LoadTable(
        rng.integers(0, 2**40, (3, 2, 5)).astype(np.uint64),
        "demo",
        ["a", "b", "c"],
        np.array([1, 2, 3]),
        np.array([4, 9]),
        {"file": "x"},
    )
    table.save(tmp_path / "t")
    found = read_trace(tmp_path / "t")
    assert isinstance(found, LoadTable)
    np.testing.assert_array_equal(found.counts, table.counts)
    np.testing.assert_array_equal(found.tokens, table.tokens)
    np.testing.assert_array_equal(found.layer_ids, table.layer_ids)
    assert (found.model, found.labels, found.source) == ("demo", ["a", "b", "c"], {"file": "x"})
    assert (len(found), found.num_layers, found.num_experts) == (3, 2, 5)
    bare = LoadTable(np.ones((1, 1, 1), np.uint64))
    bare.save(tmp_path / "bare")
    assert LoadTable.open(tmp_path / "bare").labels is None


def test_damaged_load_tables(tmp_path: Path, rng: np.random.Generator) -> None:
    for counts in (np.ones((2, 2)), np.ones((0, 1, 1)), np.ones((1, 1, 0))):
        with pytest.raises(ConfigError, match="counts has shape"):
            LoadTable(counts.astype(np.uint64))
    with pytest.raises(ConfigError, match="labels has 1 rows; counts has 2"):
        LoadTable(np.ones((2, 1, 1), np.uint64), labels=["a"])
    LoadTable(np.ones((2, 1, 1), np.uint64), labels=["a", "b"]).save(tmp_path / "t")
    file = tmp_path / "t" / "load.safetensors"
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"load\.safetensors"):
            LoadTable.open(tmp_path / "t")
    file.write_bytes(data)
    meta = tmp_path / "t" / "meta.json"
    for labels in ('["a"]', "7"):
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "labels": json.loads(labels)}))
        with pytest.raises(TraceError):
            LoadTable.open(tmp_path / "t")
    make(rng, [1]).save(tmp_path / "activations")
    with pytest.raises(TraceError, match="kind: found 'activations', expected 'load'"):
        LoadTable.open(tmp_path / "activations")
