"""Map files: the initial map, maps made elsewhere, and the saved map.

A map made elsewhere (`load_map`: the gateway's advice, `coterie plan --to vllm`) is looked for in every round. Ranks
read at different times, and the file may be replaced in between or reach a machine later. The map is therefore offered
in every round until all ranks have read the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from coterie.engines.vllm.eplb.base import EplbRound, Slots
from coterie.engines.vllm.settings import EplbSettings
from coterie.placement import PlacementMap, read_map, replace_map
from coterie.types import Placement

logger = logging.getLogger("vllm.coterie")
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A file that may be replaced at any time, and its content; `failed` is called if reading fails."""

    def __init__(self, path: str, read: Callable[[Path], T], failed: Callable[[], None]) -> None:
        self.path, self._reader, self._failed = Path(path), read, failed
        self.version: tuple[int, ...] | None = None
        """Time of change, size and inode of the version that was read; None if there is no file."""
        self.content: T | None = None

    def look(self) -> None:
        """Read the file if it was replaced since the last call."""
        try:
            stat = self.path.stat()
            version = stat.st_mtime_ns, stat.st_size, stat.st_ino
        except OSError:
            version = None
        if version != self.version:
            self.version, self.content = version, None
            try:
                self.content = None if version is None else self._reader(self.path)
            except Exception:
                self._failed()


class MapFiles:
    """Map files of the settings. `failed` is called with a message if a file cannot be read or written."""

    def __init__(self, settings: EplbSettings, failed: Callable[[str], None]) -> None:
        self._settings, self._failed = settings, failed
        path, unusable = settings.initial_map, f"coterie: {settings.load_map} cannot be used"
        first_start = path == settings.save_map and path is not None and not Path(path).exists()
        self._initial = None if path is None or first_start else self._read(path)
        self._warned: set[str] = set()
        self._most_layers = 0
        self._load = WatchedFile(settings.load_map or "", self._read, partial(failed, unusable))
        self._taken: tuple[int, ...] | None = None

    def begin(self, asked: EplbRound, current: Placement) -> Placement | None:
        """Return the initial map, once, and only if vLLM still has the map it starts with.

        A rank that joins later must not go back to the initial map while the other ranks do not.
        """
        initial = self._initial
        if initial is None or not self._fits(initial, asked, str(self._settings.initial_map)):
            return None  # vLLM may call the policy for a draft model first
        self._initial = None
        return initial if bool((current.slot_experts == asked.linear().slot_experts).all()) else None

    def forget_initial(self) -> None:
        self._initial = None

    def offered(self, asked: EplbRound) -> Placement | None:
        """Return the map of `load_map` if the file is newer than the last applied one and the map fits."""
        self._load.look()
        placement = None if self._load.version == self._taken else self._load.content
        return placement if placement is not None and self._fits(placement, asked, str(self._load.path)) else None

    def taken(self) -> None:
        """Mark the offered map as applied by all ranks."""
        self._taken = self._load.version

    def save(self, asked: EplbRound, slots: Slots) -> None:
        """Replace the file of `save_map` atomically."""
        if self._settings.save_map is None or len(asked.tokens) < self._most_layers:
            return
        self._most_layers = len(asked.tokens)  # a restart needs the main model's map, not a draft model's
        try:
            saved = PlacementMap(
                Placement(slots.astype(np.int32), asked.num_ranks, asked.tokens.shape[1]),
                self._settings.model or "unknown",
            )
            replace_map(Path(self._settings.save_map), saved, "vllm")
        except Exception:
            self._failed(f"coterie: the map could not be kept in {self._settings.save_map}")

    def _read(self, path: str | Path) -> Placement:
        return read_map(path, model=self._settings.model).placement

    def _fits(self, placement: Placement, asked: EplbRound, path: str) -> bool:
        wanted, given = ((p.num_layers, p.num_experts, p.num_ranks, p.num_slots) for p in (asked.linear(), placement))
        if wanted != given and path not in self._warned:
            self._warned.add(path)
            logger.warning("coterie: %s has %s layers, experts, ranks and slots; vLLM asks for %s", path, given, wanted)
        return wanted == given
