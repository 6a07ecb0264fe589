"""Names of the presets that ship, without the imports that reading one takes."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from coterie.errors import UnknownNameError


@cache
def preset_names() -> tuple[str, ...]:
    folder = files("coterie").joinpath("costs/presets")
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def check_preset(name_or_path: str) -> None:
    """Raise unless it is the name of a shipped preset or the path of a JSON file."""
    path = Path(name_or_path)
    if name_or_path not in preset_names() and not (path.suffix == ".json" and path.exists()):
        raise UnknownNameError("preset", name_or_path, preset_names())
