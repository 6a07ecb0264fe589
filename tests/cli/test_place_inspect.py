"""``coterie place inspect``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import Run, refused
from coterie.placement.maps import formats as maps
from coterie.types import Placement
from planning_commands import DENSE, LAYERS, MODEL, counts, save_load


@pytest.fixture
def load(tmp_path: Path) -> Path:
    return save_load(tmp_path / "load")


def test_inspecting_a_map(run: Run, load: Path, tmp_path: Path) -> None:
    rows = np.tile(np.concatenate([np.arange(32), [0, 0, 1, 31] * 2]).astype(np.int32), (LAYERS, 1))
    maps.write_map(tmp_path / "m", maps.PlacementMap(Placement(rows, 4, 32), MODEL.name))
    ran = run("place", "inspect", tmp_path / "m", "--load", load)
    assert (ran.code, ran.err) == (0, "")
    for said in (
        "24 layers of 32 experts, 40 slots on 4 ranks",
        "Balancedness (mean ÷ busiest rank, 1 is even), mean of layers",
        "duplicates on a rank: 144: memory",
        "24 of 24 layers are placed like",
    ):
        assert said in ran.out
    found = json.loads(run("place", "inspect", tmp_path / "m", "--load", load, "--window", "law", "--json").out)
    placement = Placement(rows, 4, 32)
    assert found["replicas"] == [24 * 29, 0, 24 * 2, 0, 24]
    assert found["rank_load"] == placement.rank_load(counts()[1]).tolist()
    assert found["duplicates"] == 144
    plain = run("place", "inspect", tmp_path / "m")
    assert "Balance" not in plain.out
    refused(run("place", "inspect", tmp_path / "m", "--model", DENSE.name), "model: is 'gpt-oss-20b'")
    refused(run("place", "inspect", tmp_path / "gone"), "does not exist")


def test_inspecting_shares(run: Run, load: Path, tmp_path: Path) -> None:
    rows = np.tile(np.concatenate([np.arange(32), np.arange(8)]).astype(np.int32), (LAYERS, 1))
    shares = np.where(np.arange(40) < 8, 0.25, np.where(np.arange(40) < 32, 1.0, 0.75)) * np.ones((LAYERS, 1))
    maps.write_map(tmp_path / "m", maps.PlacementMap(Placement(rows, 4, 32), MODEL.name, None, shares))
    found = json.loads(run("place", "inspect", tmp_path / "m", "--load", load, "--window", "0", "--json").out)
    tokens = counts()[0].astype(float)
    first = 0.25 * tokens[:, :8].sum(axis=1) + tokens[:, 8:10].sum(axis=1)
    assert np.array(found["rank_load"])[:, 0] == pytest.approx(first)


def test_published_placements_are_shown(run: Run, data_dir: Path) -> None:
    file = data_dir / "placements/deepseek-v3/placements_rank_layer_expert.npz"
    ran = run("place", "inspect", f"{file}#DSV3_baseline_16_devices_58_MoE_Layers", "--model", "deepseek-v3")
    assert "deepseek-v3: 58 layers of 256 experts, 256 slots on 16 ranks" in ran.out
