"""Types of a round, a decision and the group of ranks; adapting a map to a changed number of ranks."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.placement import Plan
from coterie.types import Placement

Slots = NDArray[np.int64]
"""[layer, slot] expert; -1 if vLLM has not filled the slot yet."""


class Agreement(NamedTuple):
    """Result of a comparison over all ranks, the same on each."""

    same: bool
    """Whether all ranks have the same digest."""
    slowest_s: float
    """Largest planning time of a rank, in seconds."""


class RearrangingGroup(Protocol):
    """The ranks that rearrange experts together."""

    @property
    def rank(self) -> int: ...

    @property
    def writes(self) -> bool:
        """Whether this rank writes the map file."""

    def agree(self, digest: int, planning_s: float = 0.0) -> Agreement:
        """Compare digests and planning times over all ranks; a collective, so all ranks must call it equally often."""


class EplbRound(NamedTuple):
    """Arguments of vLLM's call to its policy."""

    tokens: NDArray[np.float64]
    """[layer, expert] tokens in the window; all 0 while vLLM reserves memory."""
    num_slots: int
    num_nodes: int
    num_ranks: int
    old: Slots | None
    """Slots before the round; their number differs while ranks are added or removed."""

    def linear(self) -> Placement:
        """Return the map that vLLM starts with."""
        layers, experts = self.tokens.shape
        return Placement.linear(layers, experts, self.num_ranks, self.num_slots)

    @property
    def whole(self) -> bool:
        """Whether the old map is usable unchanged: every slot filled, and the same number of slots as now."""
        old = self.old
        return old is not None and old.shape == (len(self.tokens), self.num_slots) and bool((old >= 0).all())


class MapDecision(NamedTuple):
    """A map and the reason to use it."""

    slot_experts: Slots
    reason: str
    kind: str = "moved"
    """Reason to keep the map, one of a few values for a metric's label; `moved` if the map changes."""
    plan: Plan | None = None
    """Plan behind the map; None if nothing was planned."""
    gain_s: float = 0.0
    """Predicted saving of the moves in seconds, over the steps they were evaluated for."""
    planning_s: float = 0.0
    """Measured planning time of this rank, in seconds; 0 if nothing was planned."""


def carry_over(asked: EplbRound) -> Placement | None:
    """Adapt the old map to the current ranks, with a slot for every expert; None if the old map is unusable.

    vLLM adds ranks at the end, with empty slots, and removes them from the end. Experts that were only on removed ranks
    go into empty slots, else they replace the replicas with the least load per remaining replica. Remaining empty slots
    get replicas of the busiest experts.
    """
    (layers, experts), old = asked.tokens.shape, asked.old
    per_rank = asked.num_slots // asked.num_ranks
    if old is None or len(old) != layers or old.shape[1] % per_rank or not (old >= 0).any():
        return None
    slots = np.full((layers, asked.num_slots), -1, np.int32)
    kept = min(asked.num_slots, old.shape[1])
    slots[:, :kept] = old[:, :kept]
    for row, tokens in zip(slots, asked.tokens, strict=True):
        _complete(row, tokens, per_rank)
    return Placement(slots, asked.num_ranks, experts)


def _complete(row: NDArray[np.int32], tokens: NDArray[np.float64], per_rank: int) -> None:
    """Give every expert a slot of `row`, and every slot an expert."""
    count = np.bincount(row[row >= 0], minlength=len(tokens))
    empty = sorted(np.flatnonzero(row < 0).tolist(), key=lambda slot: (slot % per_rank, slot))  # ranks in rotation
    missing = np.flatnonzero(count == 0)
    for expert in missing[np.argsort(-tokens[missing], kind="stable")]:
        if empty:
            slot = empty.pop(0)
        else:
            spare = np.flatnonzero(count[row] > 1)
            left = row[spare]
            slot = int(spare[np.argmin(tokens[left] / (count[left] - 1))])
            count[row[slot]] -= 1
        row[slot] = expert
        count[expert] = 1
    for slot in empty:
        first = slot // per_rank * per_rank
        held = row[first : first + per_rank]
        per_replica = tokens / count
        per_replica[held[held >= 0]] = -1.0
        row[slot] = np.argmax(per_replica)
        count[row[slot]] += 1


def count_moves(old: Slots | None, new: Slots, num_ranks: int) -> int:
    """Count the experts on ranks that did not have them; every slot if the old map is None or not comparable."""
    per_rank = new.shape[1] // num_ranks
    if old is None or old.shape[1] % per_rank:
        return int(new.size)
    ranks = [slice(start, start + per_rank) for start in range(0, new.shape[1], per_rank)]
    return sum(int((~(new[:, rank, None] == old[:, None, rank]).any(axis=2)).sum()) for rank in ranks)


def as_slots(placement: Placement) -> Slots:
    return placement.slot_experts.astype(np.int64)


def digest_of(slots: Slots, state: tuple[int, ...] = ()) -> int:
    """Return 63 bits of a hash of a map and of `state`, which must also be equal on all ranks."""
    return short_hash(np.ascontiguousarray(slots).tobytes() + repr((slots.shape, state)).encode())


def short_hash(content: bytes) -> int:
    """Return 63 bits of a hash, which fit a signed integer of torch."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
