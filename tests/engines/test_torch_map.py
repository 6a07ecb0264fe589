"""Torch reads what is written for sglang-das without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.placement.maps.torch_file import torch_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_torch_reads_the_arrays(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "map": np.arange(12).reshape(3, 4),
        "mass": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    }
    (tmp_path / "file.pt").write_bytes(torch_file(arrays))
    found = torch.load(tmp_path / "file.pt", weights_only=True, map_location="cpu")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert np.array_equal(found[name].numpy(), array)
        assert found[name].numpy().dtype == array.dtype
