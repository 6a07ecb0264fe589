"""placeholder"""
from pathlib import Path
from typing import Any
def draw_figures(folder: Path, rows: list[dict[str, Any]]) -> None: ...
