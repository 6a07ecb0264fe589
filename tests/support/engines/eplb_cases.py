"""Rounds of the EPLB policy without vLLM: what it is asked, a group of one rank, and maps to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.vllm.eplb import Agreement, EplbRound, Rounds
from coterie.placement.maps.files import PlacementMap
from coterie.placement.maps.formats import write_map
from coterie.types import Placement, balancedness
from eplb_ranks import EXPERTS, LAYERS, RANKS, SLOTS, drifting_loads

PLANNER = "eplb"
"""Where any will do: it compiles in seconds."""
LOADS = drifting_loads()
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS).slot_experts.astype(np.int64)


class Alone:
    """A group of one rank; `agrees` is what comparing with others would say."""

    def __init__(self, rank: int = 0, agrees: bool = True) -> None:
        self.rank, self.agrees = rank, agrees

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:
        assert 0 <= digest < 2**63
        return Agreement(self.agrees, planning_s)


def vllms_map() -> np.ndarray:
    """Stands for what vLLM's own policy would answer; not a map Coterie would make of these loads."""
    return np.flip(LINEAR, axis=1).copy()


def asked(
    load: np.ndarray = LOADS[0], old: np.ndarray | None = LINEAR, ranks: int = RANKS, nodes: int = 1
) -> EplbRound:
    return EplbRound(load, ranks * SLOTS // RANKS, nodes, ranks, old)


def ask(rounds: Rounds, round_: EplbRound, group: Any = None) -> np.ndarray:
    return rounds.run(round_, vllms_map, group or Alone())


def map_file(path: Path, slots: np.ndarray, ranks: int = RANKS) -> str:
    write_map(path, PlacementMap(Placement(slots.astype(np.int32), ranks, EXPERTS)), "vllm")
    return str(path)


def duplicates(slots: Any) -> int:
    return Placement(np.array(slots, np.int32), RANKS, EXPERTS).duplicates


def balance(slots: Any, load: np.ndarray) -> float:
    return balancedness(Placement(np.array(slots, np.int32), RANKS, EXPERTS).rank_load(load))
