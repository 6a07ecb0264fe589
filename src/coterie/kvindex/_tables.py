"""Hash tables with 128-bit keys, in plain arrays.

A table is uint64 [entry, 2 + width] with a power of two of entries; the first two columns are the key. It uses open
addressing: linear probing from the entry given by the low bits of the key's second half. The first half is odd, so 0
there means an empty entry. Deletion shifts later entries back, so no entry becomes unreachable; entry numbers change,
so callers must not keep them.

The `contents` table maps the key of a block's content to its holders, in one word: up to four workers, each as its
number + 1 in 15 bits, or the row of a set of workers if there are more. `sets` is uint64 [set, word], with one bit per
worker; rows that were freed form a list. `held` tables (one per worker) map the key of a block's hash to the key of its
content, 0 if the content is unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie._numba import helper, njit

Words = NDArray[np.uint64]

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_LOW_SIX = np.uint64(63)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_VEIL = np.uint64(0xD1B54A32D192ED02)
"""XOR mask from a content's key to the key of its ambiguity mark in a `held` table. Even, so that keys stay odd."""

_CHUNK = np.int64(64)
"""Blocks whose keys are computed before the first lookup, so that the memory loads of the lookups overlap."""

SMALLEST = 64

_FEW = 4
"""Holders that fit in the word of a content."""
_BITS = np.uint64(15)
_FIELD = np.uint64(0x7FFF)
MOST_WORKERS = 0x7FFF
_MANY = np.uint64(1 << 63)
"""Bit that says that the word is the row of a set."""


@helper()
def _mixed(x: np.uint64) -> Any:
    """SplitMix64's finaliser, a bijection."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


@njit()
def fold(words: Words, tag: np.uint64, seeds: Words, keys: Words) -> None:
    """Compute keys [item, 2] of items of equal length, words [item, word]; items of one word never collide."""
    for item in range(words.shape[0]):
        first, second = seeds[0] ^ tag, seeds[1] ^ tag
        for column in range(words.shape[1]):
            first = _mixed(first ^ words[item, column])
            second = _mixed(second + words[item, column] * _SPREAD)
        keys[item, 0], keys[item, 1] = first | _ONE, second


@helper()
def _chain(tokens: Words, contexts: Words, weights: Words, start: int, above: Words, keys: Words, count: int) -> None:
    """Compute the keys of `count` prefixes, which end with the blocks from `start` on.

    `above` is the key of the prefix before `start`; it is overwritten with the last key. The hash is multilinear with
    secret random weights, chained: two prompts get the same key with a probability under 2^-90, even if an attacker
    chose their tokens (ids below 2^20).
    """
    size = weights.shape[1] - 4
    for index in range(count):  # apart from the chain, one half of the key at a time, so that it is vectorised
        words = tokens[(start + index) * size : (start + index + 1) * size]
        first = second = _ZERO
        for token in range(size):
            first += weights[0, token] * words[token]
        for token in range(size):
            second += weights[1, token] * words[token]
        keys[index, 0], keys[index, 1] = first, second
    left, right = above[0], above[1]
    for index in range(count):
        first = keys[index, 0] + weights[0, size] * left + weights[0, size + 1] * right
        second = keys[index, 1] + weights[1, size] * left + weights[1, size + 1] * right
        if contexts.shape[0] > start + index:
            third, fourth = contexts[start + index, 0], contexts[start + index, 1]
            first += weights[0, size + 2] * third + weights[0, size + 3] * fourth
            second += weights[1, size + 2] * third + weights[1, size + 3] * fourth
        left, right = _mixed(first) | _ONE, _mixed(second)
        keys[index, 0], keys[index, 1] = left, right
    above[0], above[1] = left, right


@njit()
def _find(table: Words, first: np.uint64, second: np.uint64) -> Any:
    """Return the entry of a key; if the key is absent, -1 - the entry where it would be inserted."""
    mask = np.int64(table.shape[0] - 1)
    entry = np.int64(second) & mask
    while table[entry, 0] != _ZERO:
        if table[entry, 0] == first and table[entry, 1] == second:
            return entry
        entry = (entry + 1) & mask
    return -1 - entry


@njit()
def _insert(table: Words, used: NDArray[np.int64], first: np.uint64, second: np.uint64) -> Any:
    """Return the entry of a key; an absent key gets a new entry, whose values are 0."""
    entry = _find(table, first, second)
    if entry < 0:
        entry = -1 - entry
        table[entry, 0], table[entry, 1] = first, second
        used[0] += 1
    return entry


@njit()
def _delete(table: Words, used: NDArray[np.int64], entry: int) -> None:
    mask = np.int64(table.shape[0] - 1)
    hole, following = np.int64(entry), (np.int64(entry) + 1) & mask
    while table[following, 0] != _ZERO:
        home = np.int64(table[following, 1]) & mask
        # Move an entry back only if the hole is not before its home: a lookup starts there.
        if ((following - home) & mask) >= ((following - hole) & mask):
            for column in range(table.shape[1]):
                table[hole, column] = table[following, column]
            hole = following
        following = (following + 1) & mask
    for column in range(table.shape[1]):
        table[hole, column] = _ZERO
    used[0] -= 1


@njit()
def rehash(old: Words, new: Words) -> None:
    used = np.zeros(1, np.int64)
    for entry in range(old.shape[0]):
        if old[entry, 0] != _ZERO:
            target = _insert(new, used, old[entry, 0], old[entry, 1])
            for column in range(2, old.shape[1]):
                new[target, column] = old[entry, column]


@njit()
def _holds(word: np.uint64, sets: Words, worker: int) -> Any:
    if word & _MANY:
        return (sets[word ^ _MANY, worker >> 6] >> (np.uint64(worker) & _LOW_SIX)) & _ONE != _ZERO
    while word != _ZERO:
        if word & _FIELD == np.uint64(worker + 1):
            return True
        word >>= _BITS
    return False


@njit()
def _mark(word: np.uint64, bits: Words) -> None:
    """Set the bits of the workers in a word that is not the row of a set."""
    while word != _ZERO:
        worker = (word & _FIELD) - _ONE
        bits[worker >> np.uint64(6)] |= _ONE << (worker & _LOW_SIX)
        word >>= _BITS


@njit()
def _hold(rows: Words, used: NDArray[np.int64], sets: Words, first: np.uint64, second: np.uint64, worker: int) -> Any:
    """Add the worker to the key's holders; returns whether it held the key before."""
    entry = _insert(rows, used, first, second)
    word = rows[entry, 2]
    if _holds(word, sets, worker):
        return True
    added = np.uint64(worker + 1)
    if not word & _MANY:
        for field in range(_FEW):
            shift = np.uint64(field) * _BITS
            if (word >> shift) & _FIELD == _ZERO:
                rows[entry, 2] = word | added << shift
                return False
        row = used[2]  # the first freed row, or else the next new one
        if row:
            used[2] = np.int64(sets[row, 0])
        else:
            used[1] += 1
            row = used[1]
        sets[row] = _ZERO
        _mark(word, sets[row])
        word = _MANY | np.uint64(row)
        rows[entry, 2] = word
    sets[word ^ _MANY, worker >> 6] |= _ONE << (np.uint64(worker) & _LOW_SIX)
    return False


@njit()
def _release(
    rows: Words, used: NDArray[np.int64], sets: Words, first: np.uint64, second: np.uint64, worker: int
) -> None:
    """Remove the worker from the key's holders; delete the key's row if no worker holds it."""
    entry = _find(rows, first, second)
    if entry < 0:
        return
    word = rows[entry, 2]
    if word & _MANY:
        row = np.int64(word ^ _MANY)
        sets[row, worker >> 6] &= ~(_ONE << (np.uint64(worker) & _LOW_SIX))
        if sets[row].any():
            return
        sets[row, 0], used[2] = np.uint64(used[2]), row
    elif not _holds(word, sets, worker):
        return
    else:
        kept = _ZERO
        while word != _ZERO:
            if word & _FIELD != np.uint64(worker + 1):
                kept = kept << _BITS | word & _FIELD
            word >>= _BITS
        rows[entry, 2] = kept
        if kept != _ZERO:
            return
    _delete(rows, used, entry)


@njit()
def store(
    held: Words,
    held_used: NDArray[np.int64],
    contents: Words,
    contents_used: NDArray[np.int64],
    sets: Words,
    worker: int,
    keys: Words,
    tokens: Words,
    contexts: Words,
    weights: Words,
    parent: Words,
    tally: NDArray[np.int64],
) -> None:
    """Record blocks stored by a worker, each the child of the block before; without tokens the content is unknown.

    A block that is held already keeps its content unless a known content replaces it. If a worker stores one content
    under two hashes, the blocks differ in something that its events do not carry: the content is marked as ambiguous
    and no longer matched by tokens. Adds the numbers of new blocks and ambiguous ones to `tally`; overwrites `parent`.
    """
    chained = np.empty((keys.shape[0], 2), np.uint64)
    if tokens.shape[0]:
        _chain(tokens, contexts, weights, 0, parent, chained, keys.shape[0])
    for block in range(keys.shape[0]):
        count = held_used[0]
        entry = _insert(held, held_used, keys[block, 0], keys[block, 1])
        if held_used[0] > count:
            tally[0] += 1
        if tokens.shape[0] == 0:
            continue
        above, below = chained[block, 0], chained[block, 1]
        old_above, old_below = held[entry, 2], held[entry, 3]
        if old_above == above and old_below == below:
            continue
        held[entry, 2], held[entry, 3] = above, below
        if old_above != _ZERO:
            _release(contents, contents_used, sets, old_above, old_below, worker)
        if _find(held, above ^ _VEIL, below ^ _VEIL) >= 0:
            tally[1] += 1
        elif _hold(contents, contents_used, sets, above, below, worker):
            tally[1] += 1
            _release(contents, contents_used, sets, above, below, worker)
            _insert(held, held_used, above ^ _VEIL, below ^ _VEIL)


@njit()
def remove(
    held: Words,
    held_used: NDArray[np.int64],
    contents: Words,
    contents_used: NDArray[np.int64],
    sets: Words,
    worker: int,
    keys: Words,
) -> int:
    """Record blocks removed by a worker; returns how many of them it held."""
    known = 0
    for block in range(keys.shape[0]):
        entry = _find(held, keys[block, 0], keys[block, 1])
        if entry < 0:
            continue
        known += 1
        if held[entry, 2] != _ZERO:
            _release(contents, contents_used, sets, held[entry, 2], held[entry, 3], worker)
        _delete(held, held_used, entry)
    return known


@njit()
def release_all(
    held: Words,
    held_used: NDArray[np.int64],  # noqa: ARG001  # as in `store` and `remove`
    contents: Words,
    contents_used: NDArray[np.int64],
    sets: Words,
    worker: int,
) -> None:
    """Clear a worker's bit in the rows of all blocks in its `held` table."""
    for entry in range(held.shape[0]):
        if held[entry, 2] != _ZERO:
            _release(contents, contents_used, sets, held[entry, 2], held[entry, 3], worker)


@njit()
def content_of(held: Words, keys: Words, out: Words) -> bool:
    """Copy the content's key of the block keys[0] to `out`; returns whether the block is held and its content known."""
    entry = _find(held, keys[0, 0], keys[0, 1])
    if entry < 0 or held[entry, 2] == _ZERO:
        return False
    out[0], out[1] = held[entry, 2], held[entry, 3]
    return True


@njit()
def _run(
    rows: Words, sets: Words, keys: Words, start: int, count: int, alive: Words, seen: Words, depth: NDArray[np.int64]
) -> Any:
    """Match `count` more blocks for the workers in `alive`; returns False once no worker is left.

    A worker that lacks a block is removed from `alive`, and the number of that block is its `depth`. `seen[0, 0]` is
    the word of the last block, and `seen[1]` is space for the bits of its holders.
    """
    mask = np.uint64(rows.shape[0] - 1)
    for block in range(count):  # without a branch, so that the processor waits for all of them at once
        entry = keys[block, 1] & mask
        keys[block, 2] = rows[entry, 0] + rows[entry, 2]  # both ends: an entry may lie in two cache lines
    for block in range(count):
        entry = _find(rows, keys[block, 0], keys[block, 1])
        word = rows[entry, 2] if entry >= 0 else _ZERO
        if word == seen[0, 0]:
            continue
        seen[0, 0], left = word, _ZERO
        holders = sets[word ^ _MANY] if word & _MANY else seen[1]
        if not word & _MANY:
            holders[:] = _ZERO
            _mark(word, holders)
        for column in range(alive.shape[0]):
            before = alive[column]
            now = before & holders[column]
            alive[column] = now
            left |= now
            gone, worker = before & ~now, 64 * column
            while gone != _ZERO and worker < depth.shape[0]:
                if gone & _ONE:
                    depth[worker] = start + block
                gone >>= _ONE
                worker += 1
        if left == _ZERO:
            return False
    return True


@njit()
def _finish(blocks: int, alive: Words, depth: NDArray[np.int64]) -> None:
    for worker in range(depth.shape[0]):
        if (alive[worker >> 6] >> (np.uint64(worker) & _LOW_SIX)) & _ONE:
            depth[worker] = blocks


@njit()
def match_tokens(
    rows: Words, sets: Words, tokens: Words, contexts: Words, weights: Words, depth: NDArray[np.int64]
) -> None:
    """Count the leading blocks that each worker holds, by the prompt's tokens."""
    size = weights.shape[1] - 4
    blocks = tokens.shape[0] // size
    alive = np.full(sets.shape[1], ~_ZERO)
    seen = np.full((2, sets.shape[1]), ~_ZERO)
    keys = np.empty((_CHUNK, 3), np.uint64)
    above = np.zeros(2, np.uint64)
    for start in range(0, blocks, _CHUNK):
        count = min(_CHUNK, blocks - start)
        _chain(tokens, contexts, weights, start, above, keys, count)
        if not _run(rows, sets, keys, start, count, alive, seen, depth):
            return
    _finish(blocks, alive, depth)
