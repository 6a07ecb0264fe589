"""One expert-parallel group that decodes in lockstep with data-parallel attention: every rank is a worker.

A rank keeps the KV cache of its own requests, computes their attention and dense layers, and holds some experts of
every layer. A token whose expert is not on its rank is sent to a rank that holds it, and the result is sent back; all
ranks wait for each other in every layer. Every step replays the recorded experts of each token exactly:

    step = attention + dense + routing of the busiest rank
         + sum over layers of (experts of the slowest rank + dispatch and combine of the busiest link)

A token uses a slot on its own rank if one holds its expert; else the slots of the expert are used round-robin. A token
is sent once per remote expert, or with `deduplicate` once per rank that holds any of its remote experts, as in
:mod:`coterie.costs.exchange`. Wrong for engines whose ranks do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.exchange import crossing_links
from coterie.costs.step import Batch, PlacedStepModel, StepModel, check_placement
from coterie.errors import ConfigError, check
from coterie.placement.holdings import Demand, Held, bit_words, held_by
from coterie.types import Placement


class GroupStep(NamedTuple):
    """Terms of one step's time in seconds, and its numbers of activations."""

    rest_s: float
    """Attention, dense layers and routing of the busiest rank."""
    experts_s: float
    all_to_all_s: float
    remote: int
    """Number of activations whose expert was on another rank."""
    activations: int

    @property
    def total_s(self) -> float:
        return self.rest_s + self.experts_s + self.all_to_all_s


class LockstepGroup:
    """Step times of a model on a placement; `asked` [rank, layer, expert] counts activations of each rank's tokens.

    With `deduplicate` a token is sent at most once to a rank, however many of its experts are there.
    """

    def __init__(self, model: StepModel, placement: Placement, deduplicate: bool = False) -> None:
        check_group(model, placement)
        self.placement, self.ranks = placement, placement.num_ranks
        self.held: Held = held_by(placement)
        self.slots = slot_tables(placement)
        self.deduplicate = deduplicate
        self._model = PlacedStepModel(model, placement)
        self._model.links = crossing_links(model.spec, model.topology, model.options.overlap)
        self._turns = np.zeros((placement.num_layers, placement.num_experts), np.int64)
        self.asked: Demand = np.zeros(self.held.shape)

    @property
    def local(self) -> NDArray[np.uint64]:
        """[rank, layer, word] bit e is set if the rank holds expert e of the layer."""
        return bit_words(self.held)

    def step(self, expert_ids: NDArray[np.integer], home: NDArray[np.int64], context: NDArray[np.int64]) -> GroupStep:
        """Time a decode step of one token per request.

        expert_ids are [token, layer, k], `home` [token] is the rank of each token, `context` [token] its cached tokens.
        """
        tokens = np.bincount(home, minlength=self.ranks)
        cached = np.bincount(home, weights=context, minlength=self.ranks).astype(np.int64)
        return self.mixed_step(
            expert_ids, home, [Batch(int(n), int(held)) for n, held in zip(tokens, cached, strict=True)]
        )

    def mixed_step(
        self, expert_ids: NDArray[np.integer], home: NDArray[np.int64], batches: Sequence[Batch]
    ) -> GroupStep:
        """Time a step of decoded and prompt tokens.

        expert_ids are [token, layer, k], `home` [token] is the rank of each token, `batches` has one batch per rank.
        """
        check(
            expert_ids.shape[1] == self.placement.num_layers and len(expert_ids) == len(home),
            f"expert_ids has shape {expert_ids.shape}; expected [{len(home)}, {self.placement.num_layers}, k]",
        )
        counts = np.bincount(home, minlength=self.ranks).tolist()
        if counts != [batch.tokens for batch in batches]:
            raise ConfigError(f"ranks have {counts} tokens; batches have {[batch.tokens for batch in batches]}")
        rows = np.zeros(self.placement.slot_experts.shape, np.int64)
        crossing = np.zeros((2, self.placement.num_layers, self.ranks), np.int64)
        remote = dispatch(
            expert_ids,
            np.arange(len(home)),
            len(home),
            home[None],
            *self.slots,
            self._turns,
            rows,
            crossing,
            self.asked,
            self.deduplicate,
        )
        tokens = np.array([self._model.model.running_tokens(batch) for batch in batches])
        touched = self._model.model.touched_by_padding(batches)
        experts_s, all_to_all_s = 1e-6 * self._model.layers_us(rows, tokens, crossing, touched).cumsum(axis=1)[:, -1]
        return GroupStep(
            max(self._model.rest(batch).total_s for batch in batches),
            float(experts_s),
            float(all_to_all_s),
            int(remote),
            expert_ids.size,
        )


def check_group(model: StepModel, placement: Placement) -> None:
    """Raise unless a placement has the model's layers and experts, on all ranks of the model's topology."""
    check_placement(model, placement)
    topology = model.topology
    check(
        placement.num_ranks == topology.num_ranks,
        f"placement.num_ranks={placement.num_ranks} must equal topology.num_ranks={topology.num_ranks}",
    )


class SlotTables(NamedTuple):
    """Slots to which an expert's tokens are sent. If a rank has two slots of an expert, only the first is used."""

    nearest: NDArray[np.int64]
    """[layer, rank, expert] slot of the expert on the rank, or else its only slot, or else -1: its slots take turns."""
    holders: NDArray[np.int64]
    """[layer, expert, turn] slots of the expert, one per rank that holds it, then -1."""
    copies: NDArray[np.int64]
    """[layer, expert] number of ranks that hold the expert."""


def slot_tables(placement: Placement) -> SlotTables:
    layers, ranks, experts = placement.num_layers, placement.num_ranks, placement.num_experts
    own = np.full((layers, ranks, experts), -1, np.int64)
    slots = placement.slot_experts
    for slot in range(placement.num_slots - 1, -1, -1):
        own[np.arange(layers), slot // placement.slots_per_rank, slots[:, slot]] = slot
    copies = (own >= 0).sum(axis=1)
    holders = np.take_along_axis(own, np.argsort(own < 0, axis=1, kind="stable"), axis=1).transpose(0, 2, 1)
    only = np.where(copies == 1, holders[:, :, 0], -1)[:, None]
    nearest = np.where(own >= 0, own, only)
    return SlotTables(nearest, np.ascontiguousarray(holders), copies.astype(np.int64))


BLOCK = 256
"""Tokens that are dispatched in one layer before the next: tables of a layer and the tokens' experts stay in caches."""


@njit()
def dispatch(
    ids: NDArray[np.integer],
    picked: NDArray[np.int64],
    count: int,
    home: NDArray[np.int64],
    nearest: NDArray[np.int64],
    holders: NDArray[np.int64],
    copies: NDArray[np.int64],
    turns: NDArray[np.int64],
    rows: NDArray[np.int64],
    crossing: NDArray[np.int64],
    asked: NDArray[np.float64],
    deduplicate: bool,
) -> int:
    """Add tokens to rows [layer, slot] and crossing [sent or received, layer, rank]; return the remote activations.

    The tokens are the first `count` entries of `picked`, row numbers of ids [row, layer, k]. home [1 or layer, token]
    is the rank of each token, the same in all layers or one per layer. `asked` [rank, layer, expert] counts activations
    by the token's rank; it may be empty.
    """
    slots, ranks, layers, top_k, remote = rows.shape[1], nearest.shape[1], ids.shape[1], ids.shape[2], np.uint64(0)
    rank_at = np.empty(slots, np.uint64)  # [slot] rank; a division per activation would dominate
    for slot in range(slots):
        rank_at[slot] = slot // (slots // ranks)
    kept = np.uint64(deduplicate)
    for begin in range(0, count, BLOCK):
        for layer in range(layers):
            homes, computed, received = home[layer if len(home) > 1 else 0], rows[layer], crossing[1, layer]
            for token in range(begin, min(begin + BLOCK, count)):
                rank, experts = np.uint64(homes[token]), ids[picked[token], layer]
                near, sent_to, away = nearest[layer, rank], np.uint64(0), np.uint64(0)  # sent_to: a bit for each rank
                for at in range(top_k):
                    expert = np.uint64(experts[at])  # unsigned: a negative index would be checked for
                    slot = near[expert]
                    if slot < 0:
                        turn = turns[layer, expert]
                        slot = holders[layer, expert, turn]
                        turns[layer, expert] = turn + 1 if turn + 1 < copies[layer, expert] else 0
                    computed[np.uint64(slot)] += 1
                    there = rank_at[np.uint64(slot)]
                    crosses = np.uint64(there != rank)  # no branch: half of them would be mispredicted
                    remote += crosses
                    crosses &= ~(sent_to >> there)
                    received[there] += np.int64(crosses)
                    away += crosses
                    sent_to |= kept << there
                crossing[0, layer, rank] += np.int64(away)
                if len(asked) > 0:
                    for at in range(top_k):
                        asked[rank, layer, np.uint64(experts[at])] += 1.0
    return int(remote)
