"""Map files: the initial map, maps made elsewhere, and the saved map.

A map made elsewhere (`load_map`: the gateway's advice, `coterie plan --to vllm`) is looked for in every round. Ranks
read at different times, and the file may be replaced in between or reach a machine later. The map is therefore offered
in every round until all ranks have read the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coterie.engines.vllm.eplb.base import EplbRound, Slots
from coterie.engines.vllm.settings import EplbSettings
from coterie.placement import read_map
from coterie.placement.maps.files import PlacementMap
from coterie.placement.maps.formats import replace_map
from coterie.types import Placement

logger = logging.getLogger("vllm.coterie")


class Stamp(NamedTuple):
    """Identifies a version of a file; a replaced file has another inode."""

    modified_ns: int
    bytes: int
    inode: int


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return Stamp(stat.st_mtime_ns, stat.st_size, stat.st_ino)


class MapFiles:
    """Map files of the settings. `failed` is called with a message if a file cannot be read or written."""

    def __init__(self, settings: EplbSettings, failed: Callable[[str], None]) -> None:
        self._settings = settings
        self._failed = failed
        self._initial = self._read_initial()
        self._warned: set[str] = set()
        self._most_layers = 0
        self._read: Stamp | None = None
        self._found: Placement | None = None
        self._taken: Stamp | None = None

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
        path = Path(self._settings.load_map or "")
        stamp = stamp_of(path)
        if stamp is None or stamp == self._taken:
            return None
        if stamp != self._read:
            self._read, self._found = stamp, None
            try:
                self._found = read_map(path, model=self._settings.model).placement
            except Exception:
                self._failed(f"coterie: {path} cannot be used")
        placement = self._found
        return placement if placement is not None and self._fits(placement, asked, str(path)) else None

    def taken(self) -> None:
        """Mark the offered map as applied by all ranks."""
        self._taken = self._read

    def save(self, asked: EplbRound, slots: Slots) -> None:
        """Replace the file of `save_map` atomically."""
        if self._settings.save_map is None or len(asked.tokens) < self._most_layers:
            return
        self._most_layers = len(asked.tokens)  # a restart needs the main model's map, not a draft model's
        path = Path(self._settings.save_map)
        try:
            placement = Placement(slots.astype(np.int32), asked.num_ranks, asked.tokens.shape[1])
            replace_map(path, PlacementMap(placement, self._settings.model or "unknown"), "vllm")
        except Exception:
            self._failed(f"coterie: the map could not be kept in {path}")

    def _read_initial(self) -> Placement | None:
        path, kept = self._settings.initial_map, self._settings.save_map
        if path is None or (path == kept and not Path(path).exists()):
            return None
        return read_map(path, model=self._settings.model).placement

    def _fits(self, placement: Placement, asked: EplbRound, path: str) -> bool:
        wanted, given = ((p.num_layers, p.num_experts, p.num_ranks, p.num_slots) for p in (asked.linear(), placement))
        if wanted != given and path not in self._warned:
            self._warned.add(path)
            logger.warning("coterie: %s has %s layers, experts, ranks and slots; vLLM asks for %s", path, given, wanted)
        return wanted == given
