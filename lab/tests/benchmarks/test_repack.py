"""Small clones in the formats of the public repositories are repacked into files that the reader takes."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import ReadOptions, read_trace
from coterie.traces.readers.npz import read_placements
from repack import SETS


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def repacked(name: str, folder: Path, model: str | None = None) -> Any:
    out = folder / name
    out.mkdir()
    SETS[name](folder / "clone", out)
    return read_trace(out / "expert_counts.npz" if model else out, options=ReadOptions(model))


def example(rng: np.random.Generator, tokens: int, dataset: str) -> str:
    def layer() -> dict[str, list[float]]:
        return {"selected_experts": rng.permutation(32)[:4].tolist(), "selected_probs": [0.5, 0.25, 0.125, 0.125]}

    steps = [{f"token_{7 + n}": {f"layer_{i}": layer() for i in rng.permutation(24)}} for n in range(tokens)]
    about = {"dataset": dataset, "category": "law", "finished_successfully": True, "has_repetition": False}
    words = {"row_index": 3, "original_prompt": "p", "full_text": ["t"] * 12, "generated_only": ["t"] * (tokens + 1)}
    return json.dumps({**about, **words, "router_data": steps})


def test_gpt_oss_keeps_two_of_three_and_hides_gpqa(tmp_path: Path, rng: np.random.Generator) -> None:
    for number, dataset in enumerate(("gpqa_main", "mmlu", "sorry_bench_base", "tulu", "tulu2")):
        file = tmp_path / "clone" / "data" / dataset / "law" / "True_False_examples.json"
        write(file, example(rng, number + 2, dataset))
    trace = repacked("gpt-oss-20b", tmp_path)
    assert isinstance(trace, ActivationTrace)
    assert trace.requests.extra["dataset"] == ["gpqa_main", "mmlu", "tulu2"]
    assert trace.lengths.tolist() == [2, 3, 6]
    assert trace.requests.prompt_tokens.tolist() == [7, 7, 7]
    steps = json.loads((tmp_path / "clone/data/mmlu/law/True_False_examples.json").read_text())["router_data"]
    assert trace.request(1).expert_ids[2, 23].tolist() == steps[2]["token_9"]["layer_23"]["selected_experts"]


def test_deepseek_v2_lite(tmp_path: Path, rng: np.random.Generator) -> None:
    ids = rng.permuted(np.tile(np.arange(64), (26, 4, 3, 1)), axis=3)[..., :6]  # [layer, domain, token, k]
    for number, domain in enumerate(("intent", "law", "summary", "translation")):
        for layer in range(26):
            row = ids[layer, number].ravel()
            weights = "\t".join(f"{value / 1e4:.4f}" for value in row)
            file = tmp_path / "clone/results/expert_scores" / domain / f"expert_weights_{layer + 1}.txt"
            write(file, "\t".join(map(str, row)) + "\t\t" + weights + "\n")
    trace = repacked("deepseek-v2-lite", tmp_path)
    assert isinstance(trace, ActivationTrace)
    assert trace.requests.domains == ["intent", "law", "summary", "translation"]
    np.testing.assert_array_equal(trace.request(2).expert_ids, ids[:, 2].swapaxes(0, 1))


def test_glm(tmp_path: Path, rng: np.random.Generator) -> None:
    names = ["logs/merged_all", "logs/sal_code", "logs/sal_code_eval", "logs/sal_general", "saliency/sal_wiki_calib_07"]
    counts = rng.integers(1, 90, (len(names), 75, 256))
    for name, table in zip(names, counts, strict=True):
        layers = {str(3 + n): {"cnt": row.tolist()} for n, row in enumerate(table)}
        write(tmp_path / "clone" / f"{name}.json", json.dumps({"tokens": 9, "layers": layers}))
    table = repacked("glm-5.2", tmp_path)
    assert isinstance(table, LoadTable)
    assert list(table.labels or []) == ["merged_all", "sal_code", "sal_code_eval", "sal_general", "wiki/7"]
    np.testing.assert_array_equal(table.counts, counts)
    assert np.asarray(table.layer_ids).tolist() == list(range(3, 78))


def test_olmoe_and_a_pickle_that_would_run_code(tmp_path: Path) -> None:
    folder = tmp_path / "clone/scripts/routing_output/olmoe"
    (folder / "expert_counts").mkdir(parents=True)
    counters = [Counter({np.int64(5): np.int64(layer + 7)}) for layer in range(3)]
    (folder / "expert_counts/arxiv.pkl").write_bytes(pickle.dumps(counters))
    table = repacked("olmoe-mixtral", tmp_path, "olmoe")
    assert isinstance(table, LoadTable)
    assert table.counts[0, :, 5].tolist() == [7, 8, 9]
    assert table.counts.sum() == 24
    (folder / "expert_counts/book.pkl").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print is not expected"):
        SETS["olmoe-mixtral"](tmp_path / "clone", tmp_path / "olmoe-mixtral")


def test_placements(tmp_path: Path) -> None:
    folder = tmp_path / "clone/omni/accelerators/placement"
    held = np.ones((2, 3, 4), np.int32)
    for name in (
        "patterns/placement_pattern_20250626_221356_58_rearrange_layers_58_layers_16_ranks_prefill_step0to100000",
        "patterns/base_patterns/DSV3_baseline_16_devices_58_MoE_Layers",
        "tests/patterns/placement_pattern_3d_v3_naivebalance3_16devices_HE",
        "tests/patterns/DSV3_0427_GSM8K_decode_RedFullLays_+10_58_MoELayers_32_dies_epmaxdeploy_12",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", held)
    SETS["deepseek-v3"](tmp_path / "clone", tmp_path)
    placements = read_placements(tmp_path / "placements_rank_layer_expert.npz")
    assert len(placements) == 4
    assert all((held == placement).all() for placement in placements.values())
