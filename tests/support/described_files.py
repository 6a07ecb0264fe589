"""Files with Coterie's metadata, changed to be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save


def rewritten(
    file: Path, about: dict[str, Any] | None = None, drop: tuple[str, ...] = (), arrays: dict[str, Any] | None = None
) -> Path:
    """The file with some metadata or arrays changed or left out."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    known = json.loads(header["__metadata__"]["coterie"])
    meta = {"coterie": json.dumps({k: v for k, v in (known | (about or {})).items() if k not in drop})}
    file.write_bytes(save({k: v for k, v in (load(data) | (arrays or {})).items() if k not in drop}, meta))
    return file
