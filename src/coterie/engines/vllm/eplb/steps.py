"""Steps to plan for: vLLM's interface passes the tokens of a window, so single steps come from a file.

The file is written where requests are known (`coterie plan --save-scenarios`). It may be replaced at any time. In every
round the ranks compare what they have read: unless all have read the same, the round is planned for the mean step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from coterie.engines.vllm.eplb.files import Stamp, stamp_of
from coterie.placement import Load
from coterie.placement.scenario_files import load_scenarios
from coterie.placement.scenarios import at_mean

logger = logging.getLogger("vllm.coterie")


class StepsFile:
    """The steps of the file, about the mean step that vLLM reports. `failed` is told what could not be read."""

    def __init__(self, path: str | None, failed: Callable[[str], None]) -> None:
        self._path = None if path is None else Path(path)
        self._failed = failed
        self._stamp: Stamp | None = None
        self._found: Load | None = None
        self._digest = 0
        self._use = False
        self._warned: set[str] = set()

    def offered(self) -> int:
        """Look for a newer file. 63 bits that are equal on all ranks that have read the same; 0 without a file."""
        if self._path is None:
            return 0
        stamp = stamp_of(self._path)
        if stamp is None:
            self._warn(f"{self._path} does not exist; plans are for the mean step")
        if stamp != self._stamp:
            self._stamp, self._found = stamp, None if stamp is None else self._read(self._path)
            self._digest = 0 if self._found is None else _digest(self._found)
        return self._digest

    def agreed(self, same: bool) -> None:
        """Whether all ranks were offered the same: only then it is used."""
        self._use = same
        if not same:
            self._warn(f"{self._path} is not the same on all ranks; plans are for the mean step until it is")

    def around(self, load: Load) -> Load:
        """The load with the file's steps about its mean step, where they are used and fit."""
        found = self._found
        if not self._use or found is None or found.scenarios is None:
            return load
        if found.tokens.shape != load.tokens.shape:
            shapes = f"{found.tokens.shape} layers and experts; vLLM asks for {load.tokens.shape}"
            self._warn(f"{self._path} has {shapes}: planned for the mean step")
            return load
        steps = at_mean(found.scenarios, found.weights, load.tokens / load.steps)
        return replace(load, scenarios=steps, weights=found.weights, whole_steps=found.whole_steps)

    def _read(self, path: Path) -> Load | None:
        try:
            return load_scenarios(path)
        except Exception:
            self._failed(f"coterie: {path} cannot be used; plans are for the mean step")
            return None

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("coterie: %s", message)


def _digest(load: Load) -> int:
    assert load.scenarios is not None
    assert load.weights is not None
    content = load.scenarios.tobytes() + load.weights.tobytes() + bytes([load.whole_steps])
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
