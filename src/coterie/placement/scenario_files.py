"""Samples of steps on disk: written where requests are known, read where only their mean is, such as in vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.placement.base import Load
from coterie.traces.store import ArrayFile, write_described

FORMAT, VERSION = "scenarios", 1


def save_scenarios(path: str | Path, load: Load) -> None:
    """Write the scenarios of a load; an older file is replaced at once or not at all."""
    if load.scenarios is None or load.weights is None:
        raise ConfigError("the load has no scenarios to write")
    arrays: dict[str, NDArray[np.floating]] = {"steps": load.scenarios.astype(np.float32), "weights": load.weights}
    about = {"format": FORMAT, "version": VERSION, "whole_steps": load.whole_steps}
    try:
        write_described(Path(path), arrays, about)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def load_scenarios(path: str | Path) -> Load:
    """The load of the steps in a file; its window is their mean step."""
    path = Path(path)
    file = ArrayFile(path)
    about = file.about(FORMAT, VERSION)
    steps, weights = file["steps"], file["weights"]
    if steps.dtype.kind != "f" or weights.dtype.kind != "f":
        raise TraceError(path, "steps", f"are {steps.dtype} with weights {weights.dtype}; both must be floats")
    if steps.ndim != 3 or not len(steps):
        raise TraceError(path, "steps", f"have shape {steps.shape}; they must be [scenario, layer, expert], none 0")
    try:
        mean = np.average(steps, axis=0, weights=weights)
        return Load(mean, scenarios=steps, weights=weights, whole_steps=about.get("whole_steps") is True)
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise TraceError(path, "steps", str(error)) from None
