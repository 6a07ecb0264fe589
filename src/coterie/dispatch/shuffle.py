"""Attention-TP: the order in which a reduce-scatter leaves each rank the tokens whose experts it holds.

After tensor-parallel attention every rank holds a partial sum of every token. The reduce-scatter that adds them up
leaves each rank an equal block of tokens, in the order of the rows. So the rows are put in an order in which rank r's
block holds the tokens predicted for rank r:

    argsort   tokens by predicted rank, stable
    group     one group per rank
    align     every block holds ceil(tokens ÷ ranks): surplus tokens move to ranks with room, padding fills the rest

Tokens with the least confidence move, where confidence is the share of a token's activations expected to be local on
its rank. Ranks with room are filled from the lowest; all are equally good, since a token's second choice is not known.
Only a token's confidence counts, so moving the least confident tokens of each full rank is optimal.

:func:`shuffle_schedule` is compiled: it runs per layer and step. The tests have a reference in NumPy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie._numba import njit
from coterie.errors import ConfigError, check, check_at_least

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PADDING = -1
"""Entry of `order` at a place without a token."""


class ShuffleSchedule(NamedTuple):
    """A shuffle of n tokens into equal blocks, one per rank."""

    order: Ints
    """[rank x per_rank] token at each place, or PADDING."""
    per_rank: int
    """Number of places in a rank's block."""
    inverse: Ints
    """[token] place of the token: ``shuffled[inverse]`` restores the original order."""

    @property
    def num_ranks(self) -> int:
        return len(self.order) // self.per_rank if self.per_rank else 0

    def tokens_of(self, rank: int) -> Ints:
        """Return the tokens of a rank's block, in the order of their places, without padding."""
        block = self.order[rank * self.per_rank : (rank + 1) * self.per_rank]
        return np.asarray(block[block != PADDING])


def shuffle_schedule(ranks: ArrayLike, num_ranks: int, confidence: ArrayLike | None = None) -> ShuffleSchedule:
    """Return the schedule for tokens of predicted `ranks` [token]; without `confidence` [token] it is equal for all.

    Of tokens with equal confidence the earlier ones move.
    """
    wanted, sure = _checked(ranks, num_ranks, confidence)
    per_rank = -(-len(wanted) // num_ranks)
    grouped, ends = _grouped(wanted, sure, num_ranks)
    counts = np.diff(ends, prepend=0)
    # Tokens whose confidence is below their rank's bar leave, and the first `ties` tokens at the bar.
    bars = np.full(num_ranks, -np.inf)
    ties = np.zeros(num_ranks, np.int64)
    for rank in np.flatnonzero(counts > per_rank):
        own, surplus = grouped[ends[rank] - counts[rank] : ends[rank]], counts[rank] - per_rank
        bars[rank] = np.partition(own, surplus - 1)[surplus - 1]  # by NumPy: Numba takes 8 s to compile its own
        ties[rank] = surplus - np.count_nonzero(own < bars[rank])
    order, inverse = _align(wanted, sure, per_rank, bars, ties, np.minimum(counts, per_rank))
    return ShuffleSchedule(order, per_rank, inverse)


def _checked(ranks: ArrayLike, num_ranks: int, confidence: ArrayLike | None) -> tuple[Ints, Floats]:
    check_at_least(1, num_ranks=num_ranks)
    wanted = np.asarray(ranks)
    check(
        wanted.ndim == 1 and (not wanted.size or wanted.dtype.kind in "iu"),
        f"ranks has shape {wanted.shape} and dtype {wanted.dtype}; it must be [token] whole numbers",
    )
    wanted = np.ascontiguousarray(wanted, np.int64)
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < num_ranks:
        wrong = wanted[(wanted < 0) | (wanted >= num_ranks)][0]
        raise ConfigError(f"ranks holds {wrong}; it must be in 0 … {num_ranks - 1}")
    sure = np.zeros(len(wanted)) if confidence is None else np.ascontiguousarray(confidence, np.float64)
    check(sure.shape == wanted.shape, f"confidence has shape {sure.shape}; ranks has {wanted.shape}")
    check(np.isfinite(sure).all(), "confidence must hold finite numbers")
    return wanted, sure


@njit()
def _grouped(wanted: Ints, sure: Floats, num_ranks: int) -> tuple[Floats, Ints]:
    """Return the confidences by rank, and [rank] where those of a rank end."""
    starts = np.zeros(num_ranks, np.int64)
    for rank in wanted:
        starts[rank] += 1
    starts = np.cumsum(starts) - starts
    grouped = np.empty(len(wanted))
    for token, rank in enumerate(wanted):
        grouped[starts[rank]] = sure[token]
        starts[rank] += 1
    return grouped, starts


@njit()
def _align(wanted: Ints, sure: Floats, per_rank: int, bars: Floats, ties: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return order and inverse, in a few passes; `counts` [rank] tokens stay, and grow as others move."""
    num_ranks, homes = len(bars), wanted.copy()
    moves = np.zeros(len(wanted), np.bool_)
    for token, rank in enumerate(wanted):
        if sure[token] < bars[rank]:
            moves[token] = True
        elif sure[token] == bars[rank] and ties[rank] > 0:
            moves[token] = True
            ties[rank] -= 1
    to = 0
    for token in range(len(wanted)):
        if moves[token]:
            while counts[to] >= per_rank:
                to += 1
            homes[token] = to
            counts[to] += 1
    places = np.arange(num_ranks) * per_rank  # [rank] next free place
    order = np.full(num_ranks * per_rank, PADDING, np.int64)
    inverse = np.empty(len(wanted), np.int64)
    for token, home in enumerate(homes):
        place = places[home]
        order[place] = token
        inverse[token] = place
        places[home] = place + 1
    return order, inverse
