"""``coterie place apply``: a checkpoint in the order of a placement, with a verdict, or a refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import Run, refused
from coterie.engines.tiny import tiny_model_path
from coterie.engines.worker.model import RequestRows
from coterie.engines.worker.numpy_model import NumpyModel
from coterie.placement.maps.formats import PlacementMap, write_map
from coterie.types import Placement

LAYERS, EXPERTS = 8, 32


@pytest.fixture
def placement(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    slots = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]).astype(np.int32)
    return write_map(tmp_path / "p.json", PlacementMap(Placement(slots, 8, EXPERTS))).path


def test_the_reference_model_computes_the_same_with_other_numbers(run: Run, placement: Path, tmp_path: Path) -> None:
    out = tmp_path / "permuted"
    ran = run("place", "apply", placement, tiny_model_path(), "-o", out)
    assert (ran.code, ran.err) == (0, "")
    assert "of 256 experts have another index" in ran.out
    assert ran.out.rstrip().endswith(f"Next: vllm serve {out} --enable-expert-parallel --data-parallel-size 8")
    tokens = list(range(300, 340))
    found = [
        NumpyModel(folder, num_blocks=8, block_size=16).step([RequestRows(tokens, 0, list(range(4)), True)])
        for folder in (tiny_model_path(), out)
    ]
    np.testing.assert_allclose(found[1].logits, found[0].logits, rtol=0, atol=1e-3)
    slots = json.loads(placement.read_text())["slot_experts"]
    layers = np.arange(LAYERS)[None, :, None]
    back = np.array(slots)[layers, found[1].expert_ids]
    np.testing.assert_array_equal(np.sort(back), np.sort(found[0].expert_ids))


def test_json_and_refusals(run: Run, placement: Path, tmp_path: Path) -> None:
    out, tiny = tmp_path / "permuted", tiny_model_path()
    found = json.loads(run("place", "apply", placement, tiny, "-o", out, "--json").out)
    assert (found["layers"], found["experts"], found["ranks"]) == (list(range(LAYERS)), EXPERTS, 8)
    assert found["verdict"]
    assert found["next"].startswith("vllm serve ")
    refused(run("place", "apply", placement, tiny, "-o", out), "is not empty")
    refused(run("place", "apply", placement, out, "-o", tmp_path / "again"), "was permuted already")
    refused(run("place", "apply", placement, tiny, "-o", tmp_path / "x", "--ties", "any"), "must be one of refuse")
    refused(run("place", "apply", tmp_path / "gone", tiny, "-o", tmp_path / "x"), "does not exist")
    replicas = write_map(tmp_path / "r.json", PlacementMap(Placement.linear(LAYERS, EXPERTS, 8, 40))).path
    refused(run("place", "apply", replicas, tiny, "-o", tmp_path / "x"), "a permutation has no replicas")
    assert not (tmp_path / "x").exists()
