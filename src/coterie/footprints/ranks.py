"""Ranks of tokens: which rank holds a token's experts in each layer, and the sequences that these ranks form.

A token's *rank in a layer* is the rank that holds most of the experts it activates there. If several ranks hold equally
many, it is the rank whose expert is listed first: top-k lists the highest gate score first.

The *context* of a token at layer l is its ranks in the layers before l, the latest first: order m uses m layers.
Contexts of all orders have one numbering, so that one sorted array of keys finds any context::

    key = start(m) + latest x R^(m - 1) + the one before x R^(m - 2) + …        start(m) = 1 + R + … + R^(m - 1)

R is the number of ranks. The context of order m - 1 is that of order m without its earliest rank:
(key - start(m)) // R + start(m - 1). Order 0, the empty context, has key 0 and is a context of every token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, check

MAX_ORDER = 5
"""Largest number of previous layers in a context."""
MAX_KEY = 1 << 62

Held = NDArray[np.bool_]
"""[rank, layer, expert] whether the rank holds the expert."""


class TokenRanks(NamedTuple):
    """Ranks that hold the experts of some tokens."""

    ranks: NDArray[np.int64]
    """[token, layer] rank that holds most of the token's experts."""
    local: NDArray[np.uint16]
    """[token, layer, rank] number of the token's activations whose expert the rank holds."""


def token_ranks(expert_ids: NDArray[np.integer], held: Held) -> TokenRanks:
    """Return the rank of each token in each layer, from expert ids [token, layer, k]; of equals the first listed."""
    check(
        expert_ids.ndim == 3 and held.ndim == 3 and expert_ids.shape[1] == held.shape[1] and expert_ids.shape[2],
        f"expert_ids has shape {expert_ids.shape}, held {held.shape}; expected [token, layer, k] and "
        "[rank, layer, expert] with the same layers",
    )
    bad = np.argwhere((expert_ids < 0) | (expert_ids >= held.shape[2]))
    if len(bad):
        raise ConfigError(f"token {bad[0, 0]} activates an expert outside 0 … {held.shape[2] - 1}")
    tokens, layers, k = expert_ids.shape
    ranks, local = np.zeros((tokens, layers), np.int64), np.zeros((tokens, layers, len(held)), np.uint16)
    for layer in range(layers):
        here = np.ascontiguousarray(held[:, layer].T)[expert_ids[:, layer]]  # [token, k, rank]
        count = here.sum(axis=1, dtype=np.uint16)
        first = np.where(count > 0, here.argmax(axis=1), k)
        local[:, layer], ranks[:, layer] = count, (count * (k + 1) - first).argmax(axis=1)
    return TokenRanks(ranks, local)


def key_starts(num_ranks: int, order: int) -> NDArray[np.int64]:
    """Return [order + 2] the first key of each order 0 … `order`, and the end."""
    check(0 <= order <= MAX_ORDER, f"order={order} must be in 0 … {MAX_ORDER}")
    starts = [sum(num_ranks**shorter for shorter in range(m)) for m in range(order + 2)]
    check(
        num_ranks >= 1 and starts[-1] <= MAX_KEY,
        f"num_ranks={num_ranks} with order={order} has {starts[-1]} contexts; at most {MAX_KEY}",
    )
    return np.array(starts, np.int64)


def context_keys(previous: NDArray[np.integer], num_ranks: int, order: int) -> NDArray[np.int64]:
    """Return [token] the key of the longest context of at most `order` ranks.

    `previous` [token, layer] are the ranks in any number of previous layers, the latest last; a negative rank is
    unknown and ends the context.
    """
    check(previous.ndim == 2, f"previous has shape {previous.shape}; expected [token, layer]")
    if previous.size and int(previous.max()) >= num_ranks:
        raise ConfigError(f"previous holds rank {int(previous.max())}; it must be below num_ranks={num_ranks}")
    starts = key_starts(num_ranks, order)
    index = np.zeros(len(previous), np.int64)
    length = np.zeros(len(previous), np.int64)
    known = np.ones(len(previous), np.bool_)
    for column in range(1, min(order, previous.shape[1]) + 1):
        rank = previous[:, -column].astype(np.int64)
        known &= rank >= 0
        index = np.where(known, index * num_ranks + rank, index)
        length += known
    return starts[length] + index


def find_contexts(keys: NDArray[np.int64], wanted: NDArray[np.int64], num_ranks: int, order: int) -> NDArray[np.int64]:
    """Return [token] the index in the rising `keys` of the longest known part of each wanted context.

    The earliest layers are dropped until the key is found; keys[0] must be 0, the empty context.
    """
    starts = key_starts(num_ranks, order)
    out = np.zeros(len(wanted), np.int64)
    left = np.arange(len(wanted))  # tokens whose context is not found yet
    while len(left):
        key = wanted[left]
        at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        out[left] = at
        missing = keys[at] != key
        left = left[missing]
        if len(left):
            wanted = wanted.copy()
            wanted[left] = shorter_contexts(key[missing], num_ranks, starts)
    return out


def shorter_contexts(keys: NDArray[np.int64], num_ranks: int, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [token] the key of the context without its earliest layer; 0 for the empty context."""
    length = np.searchsorted(starts, keys, side="right") - 1
    return np.where(length > 0, (keys - starts[length]) // num_ranks + starts[np.maximum(length - 1, 0)], 0)
