"""Readers of loads: TensorRT-LLM's statistics and load histories, whole, wrong and cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.errors import TraceError
from coterie.traces import LoadTable
from coterie.traces.readers import ReadOptions, detect, read_trace, readers
from routed_experts_payloads import distinct_experts

# ------------------------------------------------------------------------------------------- TensorRT-LLM, load-history


def trtllm(folder: Path, ranks: list[dict[str, np.ndarray]], **meta: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2, **meta}))
    for rank, arrays in enumerate(ranks):
        save_file(arrays, folder / f"rank{rank}.safetensors")
    return folder


def statistics(rng: np.random.Generator, tokens: int = 3) -> dict[str, np.ndarray]:
    return {
        f"{step}_{layer}": np.bincount(distinct_experts(rng, tokens, 1, 2, 4).ravel(), minlength=4)
        for step in (100, 101)
        for layer in (3, 10)
    }


def test_trtllm(tmp_path: Path, rng: np.random.Generator) -> None:
    ranks = [statistics(rng), statistics(rng, tokens=2)]
    path = trtllm(tmp_path / "s", ranks, ep_size=2)
    assert detect(path) == "trtllm"
    table = read_trace(path, options=ReadOptions(model="m"))
    assert isinstance(table, LoadTable)
    assert (table.counts.shape, table.labels, table.model) == ((2, 2, 4), ["100", "101"], "m")
    assert np.asarray(table.layer_ids).tolist() == [3, 10], "by number, not by text"
    assert np.asarray(table.tokens).tolist() == [5, 5]
    np.testing.assert_array_equal(table.counts[1, 0], ranks[0]["101_3"] + ranks[1]["101_3"])


def test_trtllm_without_even_choices(tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = statistics(rng)
    arrays["100_3"][0] += 1
    table = read_trace(trtllm(tmp_path / "s", [arrays]))
    assert isinstance(table, LoadTable)
    assert table.tokens is None


@pytest.mark.parametrize(
    ("change", "meta", "problem"),
    [
        ({"100_3": None}, {}, "100_3: is in no rank's file"),
        ({"103_3": np.ones(4, int), "103_10": np.ones(4, int)}, {}, "102_3: is in no rank's file"),
        ({"x": np.ones(4, int)}, {}, "x: is not a key of the form {iteration}_{layer}"),
        ({"100_3": np.ones(5, int)}, {}, "100_3: is int64 (5,), expected integers (4,)"),
        ({"100_3": np.ones(4)}, {}, "100_3: is float64 (4,)"),
        ({"100_3": np.array([1, -2, 0, 0])}, {}, "100_3[1]: is -2"),
        ({}, {"num_experts": None}, "num_experts: is None"),
        ({}, {"num_experts_per_token": 0}, "num_experts_per_token: is 0"),
        ({}, {"ep_size": 4}, "found 1 files, meta_info.json says ep_size=4"),
    ],
)
def test_trtllm_that_is_wrong(
    tmp_path: Path, rng: np.random.Generator, change: dict[str, Any], meta: dict[str, Any], problem: str
) -> None:
    arrays = {name: value for name, value in (statistics(rng) | change).items() if value is not None}
    path = trtllm(tmp_path / "s", [arrays], **meta)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert problem in str(caught.value)


def test_trtllm_files_missing_or_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    path = trtllm(tmp_path / "s", [statistics(rng)] * 3)
    data = (path / "rank0.safetensors").read_bytes()
    for length in range(0, len(data), 9):
        (path / "rank0.safetensors").write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"rank0\.safetensors"):
            read_trace(path)
    (path / "rank0.safetensors").write_bytes(data)
    (path / "rank1.safetensors").unlink()
    with pytest.raises(TraceError, match=r"rank1\.safetensors: is missing; there is a rank2"):
        read_trace(path)
    for rank in (0, 2):
        (path / f"rank{rank}.safetensors").unlink()
    assert not readers["trtllm"].sniff(path)
    with pytest.raises(TraceError, match=r"rank\*\.safetensors: is missing"):
        read_trace(path, "trtllm")
    (path / "meta_info.json").unlink()
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(path, "trtllm")
    with pytest.raises(TraceError, match="hold no statistics"):
        read_trace(trtllm(tmp_path / "none", [{}]))


def history(*loads: Any) -> dict[str, Any]:
    return {"load_history": [{"logical_expert_load": load} for load in loads]}


def test_load_history(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps(history([[1, 2, 3], [4, 5, 6]], [[0, 0, 2.0], [1, 1, 0]])))
    assert detect(path) == "load-history"
    table = read_trace(path, options=ReadOptions(model="m", num_experts=3))
    assert isinstance(table, LoadTable)
    assert table.counts.tolist() == [[[1, 2, 3], [4, 5, 6]], [[0, 0, 2], [1, 1, 0]]]
    assert table.model == "m"
    assert table.counts.dtype == np.uint64
    with pytest.raises(TraceError, match="has 3 experts, --num-experts says 4"):
        read_trace(path, options=ReadOptions(num_experts=4))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({}, "load_history: must be a list"),
        (history(), "at least one window"),
        ([], "JSON: must be an object"),
        ({"load_history": [{}]}, "load_history[0].logical_expert_load: is missing"),
        ({"load_history": [3]}, "load_history[0].logical_expert_load: is missing"),
        (history([[1, 2], [3]]), "rows of different lengths"),
        (history([]), "expected numbers [layer][expert]"),
        (history([[1]], [[1, 2]]), "load_history[1]: has shape (1, 2), the first window (1, 1)"),
        (history([["a"]]), "expected numbers"),
        (history([[True]]), "expected numbers"),
        (history([[None]]), "expected numbers"),
        (history([[1, -2]]), "[0][1]: is -2"),
        (history([[1, 0.5]]), "[0][1]: is 0.5"),
        (history([[1], [float("nan")]]), "[1][0]: is nan"),
        (history([[float("inf")]]), "[0][0]: is inf"),
        (history([[2**70]]), "expected numbers"),
    ],
)
def test_load_history_that_is_wrong(tmp_path: Path, value: dict[str, Any] | list[Any], problem: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps(value))
    with pytest.raises(TraceError) as caught:
        read_trace(path, "load-history")
    assert problem in str(caught.value)
    text = json.dumps(history([[1, 2]]))
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(TraceError, match=r"history\.json: JSON: cannot be parsed"):
            read_trace(path, "load-history")
