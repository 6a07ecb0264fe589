"""coterie-tiny: the small trained model that ships with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from coterie.errors import UnavailableError, check

TINY = "coterie-tiny"


def tiny_model_path() -> Path:
    """Return the folder of coterie-tiny, in the layout of a Hugging Face model."""
    folder = Path(str(files("coterie").joinpath("data", TINY)))
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    check(
        not missing,
        f"this installation lacks {', '.join(missing)} of {TINY}: name a model's folder instead",
        UnavailableError,
    )
    return folder
