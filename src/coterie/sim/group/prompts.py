"""Prompts cut into pieces, with rows by slot and copies by rank counted in advance for each piece.

All prompts of a run have the same length, so the load of each piece of a recorded prompt is counted once per placement,
and a step that computes the piece adds these counts. A prompt longer than its recording repeats it from the start.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.errors import check, check_at_least
from coterie.sim.fleet.requests import Recordings
from coterie.sim.group.step import dispatch, slot_tables
from coterie.types import Placement

IN_ORDER = -1
"""Predicted rank of a token without a prediction: it gets the first rank with room."""


class PromptTables(NamedTuple):
    """Counts of the prompts of all recordings on one placement."""

    tokens: NDArray[np.int64]
    """[piece] number of prompt tokens."""
    rows: NDArray[np.uint32]
    """[recording, piece, layer, slot] token-and-expert pairs."""
    sent: NDArray[np.int32]
    """[recording, piece, layer, rank] copies of tokens. With data-parallel attention: copies that the rank receives if
    the prompt lives on another rank. With tensor-parallel attention: copies that the rank sends."""
    got: NDArray[np.int32]
    """[recording, piece, layer, rank] copies that the rank receives; with data-parallel attention equal to `sent`."""
    local: NDArray[np.int64]
    """[recording, piece, home] activations on the tokens' own rank, over all layers, if the prompt is on rank `home`.
    With tensor-parallel attention there is one column: ranks share a prompt."""

    def switch(self, to: PromptTables, layer: int) -> None:
        """Take the counts of one layer from the tables of another placement; with data-parallel attention."""
        shape = (*self.local.shape, -1)
        for counts, sign in ((self.rows, -1), (to.rows, 1)):
            self.local[:] += sign * counts[:, :, layer].astype(np.int64).reshape(shape).sum(axis=-1)
        self.rows[:, :, layer], self.sent[:, :, layer] = to.rows[:, :, layer], to.sent[:, :, layer]
        self.got[:, :, layer] = to.got[:, :, layer]


def piece_lengths(prompt_tokens: int, piece: int) -> NDArray[np.int64]:
    """Return [piece] tokens: full pieces, then the remainder."""
    check_at_least(1, prompt_tokens=prompt_tokens, piece=piece)
    return np.diff(np.arange(0, prompt_tokens, piece), append=prompt_tokens).astype(np.int64)


def check_one_slot_each(placement: Placement) -> None:
    check(
        placement.num_slots == placement.num_experts,
        f"num_slots={placement.num_slots} must equal num_experts={placement.num_experts}: "
        "prompts are counted for placements without replicas",
    )


def prompt_tables(
    recordings: Recordings, placement: Placement, prompt_tokens: int, piece: int, deduplicate: bool
) -> PromptTables:
    """Count prompts whose tokens are all on one rank (data-parallel attention), for every choice of that rank."""
    check_one_slot_each(placement)
    tables = _empty(len(recordings), placement, piece_lengths(prompt_tokens, piece), placement.num_ranks)
    slot_of = np.argsort(placement.slot_experts, axis=1).astype(np.int64)  # [layer, expert]
    _count_pieces(
        recordings.expert_ids,
        recordings.prompt_row,
        recordings.prompt_rows,
        slot_of,
        deduplicate,
        tables.tokens,
        tables.rows,
        tables.sent,
        tables.local,
    )
    return tables._replace(got=tables.sent)


def shuffled_tables(
    recordings: Recordings,
    placement: Placement,
    prompt_tokens: int,
    piece: int,
    deduplicate: bool,
    predicted: NDArray[np.integer],
) -> PromptTables:
    """Count prompts whose tokens are split evenly over ranks in each layer, by `predicted` [layer, row] ranks."""
    check_one_slot_each(placement)
    tables = _empty(len(recordings), placement, piece_lengths(prompt_tokens, piece), 1)
    slots, shape = slot_tables(placement), (placement.num_layers, placement.num_experts)
    turns, asked = np.zeros(shape, np.int64), np.empty((0, *shape))
    for recording in range(len(recordings)):
        first, length = int(recordings.prompt_row[recording]), int(recordings.prompt_rows[recording])
        start = 0
        for at, tokens in enumerate(tables.tokens.tolist()):
            picked = first + np.arange(start, start + tokens) % length
            home = np.empty((placement.num_layers, tokens), np.int64)
            deal_layers(predicted, picked, tokens, placement.num_ranks, home)
            rows = np.zeros(placement.slot_experts.shape, np.int64)
            crossing = np.zeros((2, placement.num_layers, placement.num_ranks), np.int64)
            remote = dispatch(
                recordings.expert_ids, picked, tokens, home, *slots, turns, rows, crossing, asked, deduplicate
            )
            tables.rows[recording, at], tables.sent[recording, at] = rows, crossing[0]
            tables.got[recording, at] = crossing[1]
            tables.local[recording, at] = int(rows.sum()) - remote
            start += tokens
    return tables


def _empty(recordings: int, placement: Placement, tokens: NDArray[np.int64], homes: int) -> PromptTables:
    shape = (recordings, len(tokens), placement.num_layers)
    return PromptTables(
        tokens=tokens,
        rows=np.zeros((*shape, placement.num_slots), np.uint32),
        sent=np.zeros((*shape, placement.num_ranks), np.int32),
        got=np.zeros((*shape, placement.num_ranks), np.int32),
        local=np.zeros((recordings, len(tokens), homes), np.int64),
    )


@njit()
def _count_pieces(
    ids: NDArray[np.integer],
    first: NDArray[np.int64],
    length: NDArray[np.int64],
    slot_of: NDArray[np.int64],
    deduplicate: bool,
    tokens: NDArray[np.int64],
    rows: NDArray[np.uint32],
    copies: NDArray[np.int32],
    local: NDArray[np.int64],
) -> None:
    slots, ranks = rows.shape[3], copies.shape[3]
    rank_at = np.empty(slots, np.int64)
    for slot in range(slots):
        rank_at[slot] = slot // (slots // ranks)
    for recording in range(len(first)):
        start = 0
        for piece in range(len(tokens)):
            for at in range(start, start + tokens[piece]):
                row = first[recording] + at % length[recording]
                for layer in range(ids.shape[1]):
                    seen = np.uint64(0)  # bit r is set once a copy to rank r is counted
                    for k in range(ids.shape[2]):
                        slot = slot_of[layer, np.int64(ids[row, layer, k])]
                        rank = rank_at[slot]
                        bit = np.uint64(1) << np.uint64(rank)
                        rows[recording, piece, layer, slot] += np.uint32(1)
                        local[recording, piece, rank] += 1
                        if not deduplicate or seen & bit == np.uint64(0):
                            copies[recording, piece, layer, rank] += np.int32(1)
                        seen |= bit
            start += tokens[piece]


@njit()
def deal_layers(
    predicted: NDArray[np.integer], picked: NDArray[np.int64], count: int, ranks: int, home: NDArray[np.int64]
) -> None:
    """Fill home [layer, token] with ranks: the predicted rank while it has room; each rank has room for an equal share.

    Tokens whose predicted rank is full, and tokens without a prediction, go in order to the first rank with room.
    """
    room = np.empty(ranks, np.int64)
    for layer in range(len(home)):
        for rank in range(ranks):
            room[rank] = (count + ranks - 1) // ranks
        for token in range(count):
            wanted = np.int64(predicted[layer, picked[token]])
            home[layer, token] = IN_ORDER
            if wanted >= 0 and room[wanted] > 0:
                home[layer, token] = wanted
                room[wanted] -= 1
        free = 0
        for token in range(count):
            if home[layer, token] == IN_ORDER:
                while room[free] == 0:
                    free += 1
                home[layer, token] = free
                room[free] -= 1
