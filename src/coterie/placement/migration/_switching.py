"""Choose which slots of a layer switch together and in which order, so that every expert keeps a slot on a living rank.

A slot may be overwritten once its expert has another slot. These dependencies form chains, which can be switched one
slot after another from their end, and rings, which must be switched together or be cut. See :mod:`.rounds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple


class _Group(NamedTuple):
    """Slots that switch together."""

    arriving: dict[int, int]
    """Slot → expert that arrives there."""
    settles: frozenset[int]
    """Slots that hold their final expert after this group has switched."""
    waits_for: int | None
    """Slot that must hold its final expert before this group switches, or by the same switch; None if there is none."""
    follows: bool
    """Whether the preceding group, an earlier piece of the same ring, must switch in an earlier switch."""


def switch_order(
    before: Sequence[int], wanted: Mapping[int, int], alive: Sequence[bool], per_rank: int, budget: int
) -> list[dict[int, int]] | str:
    """Return the arriving experts (slot → expert) of each switch of a layer, or the reason why there is no order."""
    needs = _needs(before, wanted, alive, per_rank)
    if isinstance(needs, str):
        return needs
    groups: list[_Group] = []
    for ring in _rings(needs):
        if len(ring) == 1:
            groups.append(_Group({ring[0]: wanted[ring[0]]}, frozenset(ring), needs[ring[0]], follows=False))
            continue
        pieces = _pieces(ring, before, per_rank, budget)
        if pieces is None:
            return (
                f"experts of slots {sorted(ring)} change places in a ring that cannot be cut so that each rank stages "
                f"at most {budget} at a time"
            )
        last = len(pieces) - 1
        groups += [
            _Group(piece, frozenset(ring if number == last else ()), None, follows=number > 0)
            for number, piece in enumerate(pieces)
        ]
    return _pack(groups, len(alive), per_rank, budget)


def _pack(groups: list[_Group], ranks: int, per_rank: int, budget: int) -> list[dict[int, int]]:
    """Pack as many groups into each switch as fit into staging; a group follows the groups it depends on."""
    switches: list[dict[int, int]] = []
    settled: set[int] = set()
    waiting = list(enumerate(groups))
    while waiting:
        room = Counter(dict.fromkeys(range(ranks), budget))
        batch: dict[int, int] = {}
        later: list[tuple[int, _Group]] = []
        left = {number for number, _ in waiting}  # groups not in an earlier switch
        for number, group in waiting:
            takes = Counter(slot // per_rank for slot in group.arriving)
            waits = group.waits_for is not None and group.waits_for not in settled
            if waits or (group.follows and number - 1 in left) or any(room[r] < n for r, n in takes.items()):
                later.append((number, group))
                continue
            room.subtract(takes)
            settled |= group.settles
            batch |= group.arriving
        switches.append(batch)
        waiting = later
    return switches


def _pieces(ring: list[int], before: Sequence[int], per_rank: int, budget: int) -> list[dict[int, int]] | None:
    """Cut a ring into shorter rings that fit into staging, to be switched one after another; None if impossible.

    The expert of the first slot goes to the second slot, and so on. A piece gives all its slots but the first their
    final expert; the first slot holds the expert of the piece's last slot until the next piece, which costs one extra
    transfer per cut. With staging for one expert, a piece cannot have two slots on one rank.
    """
    content = {slot: before[slot] for slot in ring}
    pieces: list[dict[int, int]] = []
    while True:
        cut = _cut(ring, per_rank, budget)
        if cut is None:
            return None
        ring, size = cut
        piece = ring[:size]
        arriving = {to: content[slot] for slot, to in pairwise(piece)} | {piece[0]: content[piece[-1]]}
        content |= arriving
        pieces.append(arriving)
        if size == len(ring):
            return pieces
        ring = [ring[0], *ring[size:]]


def _cut(ring: list[int], per_rank: int, budget: int) -> tuple[list[int], int] | None:
    """Return the ring, rotated, and the number of its first slots that make a piece; None if no piece fits."""
    fallback = None
    for turn in range(len(ring)):
        turned = ring[turn:] + ring[:turn]
        staged: Counter[int] = Counter()
        size = 0
        while size < len(turned) and staged[turned[size] // per_rank] < budget:
            staged[turned[size] // per_rank] += 1
            size += 1
        if size == len(turned):
            return turned, size
        if size < 2:
            continue
        # The next piece has the first slot and the slot after this piece: prefer that they are on different ranks.
        if turned[0] // per_rank != turned[size] // per_rank:
            return turned, size
        fallback = fallback or (turned, size)
    return fallback


def _needs(
    before: Sequence[int], wanted: Mapping[int, int], alive: Sequence[bool], per_rank: int
) -> dict[int, int | None] | str:
    """Return slot → slot that must switch before or with it, so that the expert it overwrites keeps a place."""
    live: dict[int, list[int]] = {}
    arrivals: dict[int, list[int]] = {}
    for slot, expert in enumerate(before):
        if alive[slot // per_rank]:
            live.setdefault(expert, []).append(slot)
    for slot, expert in wanted.items():
        arrivals.setdefault(expert, []).append(slot)
    needs: dict[int, int | None] = dict.fromkeys(wanted)
    for expert, slots in live.items():
        if all(slot in wanted for slot in slots):
            if expert not in arrivals:
                return f"expert {expert} would keep no slot on a living rank"
            needs[slots[-1]] = arrivals[expert][0]  # its other slots need not wait: this slot keeps the expert
    return needs


def _rings(needs: Mapping[int, int | None]) -> list[list[int]]:
    """Group slots that must switch together (rings; else single slots), each group after the slots it depends on."""
    order: list[list[int]] = []
    settled: set[int] = set()
    for start in needs:
        path: list[int] = []
        slot: int | None = start
        while slot is not None and slot not in settled and slot not in path:
            path.append(slot)
            slot = needs[slot]
        ring: list[int] = []
        if slot is not None and slot in path:
            ring = path[path.index(slot) :]
            order.append(ring)
        order += [[single] for single in reversed(path[: len(path) - len(ring)])]
        settled.update(path)
    return order
