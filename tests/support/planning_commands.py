"""What the tests of the commands that plan and show placements share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coterie.models import get_model
from coterie.traces import LoadTable

MODEL = get_model("gpt-oss-20b")  # 24 layers, 32 experts, no dense layer
LAYERS, EXPERTS = MODEL.num_moe_layers, MODEL.num_experts
DENSE = get_model("deepseek-v2-lite")  # the first of 27 layers is dense


def save_load(path: Path) -> Path:
    LoadTable(counts(), model=MODEL.name, labels=["code/0", "law"]).save(path)
    return path


def counts(windows: int = 2, layers: int = LAYERS, experts: int = EXPERTS) -> np.ndarray:
    return np.random.default_rng(0).lognormal(5, 1, (windows, layers, experts)).astype(np.uint64)
