"""Calibration in real vLLM, in a process of its own: its experts are those imposed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_servers import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]

SCRIPT = """
import json, sys
import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from coterie.engines.calibration import calibrate, imposed
from coterie.engines.tiny import tiny_model_path

seen = []
for name in ("forward_monolithic", "forward_modular"):
    def record(layer, x, *args, inner=getattr(RoutedExperts, name), **kwargs):
        logits = kwargs.get("router_logits")
        ids = kwargs["topk_ids"] if logits is None else logits.topk(4).indices
        seen.append(np.sort(ids.numpy(), axis=1))
        return inner(layer, x, *args, **kwargs)
    setattr(RoutedExperts, name, record)

config, spec = calibrate.model_config(tiny_model_path())
ids = calibrate.RoutedTokens.draw(spec, 4, 16).ids
engine = imposed.ImposedEngine(config, spec, ids, (32,), 256, 4)
rng = np.random.default_rng(0)
at = rng.integers(len(ids), size=(3, 4))
times = engine.decode(20, at)
last = np.stack(seen[-8 * 3 :]).reshape(3, 8, 4, 4)  # the four steps after it run nothing
assert (last == np.sort(ids[at], axis=3).transpose(0, 2, 1, 3)).all(), "other experts than imposed"
before = len(seen)
prompt = rng.integers(len(ids), size=(2, 32))
whole = engine.prefill(2, prompt)
assert (seen[-8] == np.sort(ids[prompt[1]][:, 0], axis=1)).all()
assert len(seen) == before + 16
bare = engine.prefill(1, rng.integers(len(ids), size=(1, 40)))
assert len(seen) == before + 16, "experts that should be left out ran"
print(json.dumps([[t.number for t in times], [t.number for t in whole], [t.number for t in bare],
    min(t.us - t.forward_us for t in times)]))
"""
COMMANDS = """
import sys
from pathlib import Path
from coterie.engines.calibration import calibrate
from coterie.engines.tiny import tiny_model_path

grid = calibrate.StepGrid(rows=(1, 2, 4), contexts=(16, 32), prompts=(32, 64, 128), draws=3, repeats=1)
preset = calibrate.calibrate(tiny_model_path(), "here", grid=grid, cells_path=Path("cells.npz"))
from coterie.costs.presets import load_preset, save_preset, step_model
from coterie.models import get_model
save_preset(preset, Path("here.json"))
model = step_model(get_model("coterie-tiny"), load_preset("here.json"), "fp16")
assert model.rest is not None and not model.caveat
assert preset.measurement.software["vllm"]
"""


def run(script: str, folder: Path) -> str:
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_the_experts_are_those_imposed(tmp_path: Path) -> None:
    decoded, whole, bare, head_us = json.loads(run(SCRIPT, tmp_path).splitlines()[-1])
    assert (decoded, whole, bare) == ([0, 1, 2], [0, 1], [0])
    assert head_us > 0


def test_a_calibration_is_written_and_prices_steps(tmp_path: Path) -> None:
    run(COMMANDS, tmp_path)
    assert (tmp_path / "cells.npz").is_file()
