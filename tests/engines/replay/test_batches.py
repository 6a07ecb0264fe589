"""Replay: batches on disk, and the order in which they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.costs.cells import step_load
from coterie.engines.replay.batches import ReplayBatches, read_batches, write_batches
from coterie.engines.replay.run import _turns
from coterie.errors import ConfigError, TraceError
from coterie.types import ModelSpec
from replay_cases import SPEC, draw_ids, small


@given(st.data())
@settings(max_examples=25)
def test_a_file_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    seed, largest = data.draw(st.integers(0, 2**16)), data.draw(st.sampled_from([7, 255, 256, 600]))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rng = np.random.default_rng(seed)
    groups = {
        group: {router: [rng.integers(0, largest + 1, (n, 3, 2)) for n in sizes] for router in ("a", "b c")}
        for group in ("batch 8", "ü")
    }
    groups["ü"]["a"][0].flat[0] = largest
    path = tmp_path_factory.mktemp("replay") / "batches.npz"
    write_batches(path, "gpt-oss-20b", groups)
    found = read_batches(path)
    assert (found.model, found.routers, list(found.groups)) == ("gpt-oss-20b", ("a", "b c"), list(groups))
    assert found.groups["ü"]["a"][0].dtype == (np.uint8 if largest < 256 else np.uint16)
    for group, routers in groups.items():
        for router, steps in routers.items():
            assert len(steps) == len(found.groups[group][router])
            for wrote, read in zip(steps, found.groups[group][router], strict=True):
                np.testing.assert_array_equal(wrote, read)


def test_a_file_is_small_and_never_replaced(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wide = ModelSpec(
        "wide",
        num_layers=24,
        num_experts=32,
        top_k=4,
        hidden_size=8,
        expert_intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=8,
    )
    path = tmp_path / "batches.npz"
    write_batches(path, "gpt-oss-20b", {"one": {"a": [draw_ids(rng, 32, wide) for _ in range(200)]}})
    assert path.stat().st_size < 600_000
    with pytest.raises(ConfigError, match="exists already"):
        write_batches(path, "gpt-oss-20b", small())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({}, "groups is empty"),
        ({"a": {}}, "at least one"),
        ({"a": {"x": [np.zeros((1, 2, 1), int)]}, "b": {"y": [np.zeros((1, 2, 1), int)]}}, "the same routers"),
        ({"a": {"x": []}}, "a, x: there are no steps"),
        ({"a": {"x": [np.zeros((0, 2, 1), int)]}}, r"step 0: ids are uint8\[0, 2, 1\]"),
        ({"a": {"x": [np.zeros((3, 2), int)]}}, r"ids are uint8\[3, 2\]; expected unsigned \[token, layer, k\]"),
        ({"a": {"x": [np.full((1, 2, 1), -3)]}}, "expert id -3 must not be negative"),
        ({"a": {"x": [np.zeros((1, 2, 1), int), np.zeros((1, 3, 1), int)]}}, r"step 1: .layer, k. is \(3, 1\)"),
    ],
)
def test_batches_that_cannot_be(tmp_path: Path, groups: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_batches(tmp_path / "batches.npz", "tiny", groups)
    assert not list(tmp_path.iterdir())


def header(**change: object) -> np.ndarray:
    return np.array(json.dumps({"version": 1, "model": "tiny", "groups": ["g"], "routers": ["r"], **change}))


GOOD = {"header": header(), "ids_0_0": np.zeros((3, 2, 1), np.uint8), "tokens_0_0": np.array([1, 2])}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"header": None}, "header: missing: found ids_0_0, tokens_0_0"),
        ({"header": np.array("{")}, "header: is not JSON"),
        ({"header": header(version=2)}, "header: must be an object of version 1"),
        ({"header": header(model=3)}, "header: model=3 must be a name"),
        ({"header": header(routers="r")}, "header: routers='r' must be a list of names"),
        ({"header": header(groups=["g", "g"])}, "each once"),
        ({"ids_0_0": None}, "ids_0_0: missing"),
        ({"ids_0_0": np.zeros((4, 2, 1), np.uint8)}, r"ids_0_0: shape \(4, 2, 1\) must be .* of 3 tokens"),
        ({"ids_0_0": np.zeros((3, 2, 1))}, "batches: g, r, step 0: ids are float64"),
        ({"tokens_0_0": np.array([3, 0])}, "tokens_0_0: must be whole numbers"),
        ({"ids_0_0": np.zeros((0, 2, 1), np.uint8), "tokens_0_0": np.array([], int)}, "there are no steps"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **{name: array for name, array in {**GOOD, **change}.items() if array is not None})
    with pytest.raises(TraceError, match=problem) as caught:
        read_batches(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_no_npz_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    with pytest.raises(TraceError, match="not found"):
        read_batches(path)
    np.savez(path, **GOOD)  # type: ignore[arg-type]
    whole = path.read_bytes()
    for content in (b"", b"words", whole[:-40], whole[:100]):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"bad.npz: file: is not a .npz archive, or is cut"):
            read_batches(path)


def test_batches_of_another_model(batches: ReplayBatches) -> None:
    batches.check(SPEC)
    twice = {"g": {"r": (np.ones((2, 3, 2), np.uint8),)}}
    for other, problem in (
        (ReplayBatches("tiny", twice), "g, r: a token takes the same expert twice"),
        (ReplayBatches("tiny", {"g": {"r": (np.array([[[0, 8]] * 3], np.uint8),)}}), "expert 8 must be below .*=8"),
        (ReplayBatches("tiny", {"g": {"r": (np.array([[[0, 1]] * 5], np.uint8),)}}), r"is \(5, 2\); tiny has \(3, 2\)"),
    ):
        with pytest.raises(ConfigError, match=problem):
            other.check(SPEC)


@given(st.integers(1, 9), st.integers(0, 2**16))
def test_load_counts_tokens(tokens: int, seed: int) -> None:
    ids = draw_ids(np.random.default_rng(seed), tokens)
    load = step_load(ids, SPEC.num_experts)
    for layer in range(ids.shape[1]):
        for expert in range(SPEC.num_experts):
            assert load[layer, expert] == (ids[:, layer] == expert).sum()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_routers_take_turns(steps: list[int]) -> None:
    turns = _turns(steps)
    assert sorted(turns) == [(router, step) for router, many in enumerate(steps) for step in range(many)]
    assert [step for _, step in turns] == sorted(step for _, step in turns), "no router runs ahead"
    if len(set(steps)) == 1:
        firsts = [turns[step * len(steps)][0] for step in range(steps[0])]
        assert firsts == [step % len(steps) for step in range(steps[0])]
