"""The KV directory: which leading blocks of a prompt each worker holds.

Engines publish (parent's hash, tokens, hash) for each block they store, and the hash of each block they remove. A
block's *content* is its tokens and context and those of all blocks before it; it gets a 128-bit key, chained from the
first block on. One table maps a content's key to the workers that hold it. So a prompt is matched by its tokens without
any knowledge of an engine's hash function, and workers with different hashes for one content share a row. A second
table per worker, hash → content, serves removals and children.

There are no false hits; a block that a worker holds may be missed:
- only blocks in GPU memory and of the full-attention group are kept;
- a block whose parent is unknown is not matched until the parent is known;
- blocks are a set: engines publish a stored block again when it is reused, and a single removal deletes it;
- if a worker stores one content under two hashes, the blocks differ in something that the events do not carry (an
  adapter loaded again from another path; images, in versions that do not publish extra keys): the content is not
  matched.

Not safe for use by several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import InputError, check, check_at_least, check_given
from coterie.kvindex import _tables
from coterie.kvindex.identity import NO_CONTEXTS, contexts, event_contexts, event_tokens, hash_keys, writeable
from coterie.wire.kv_events import BlockRemoved, BlockStored, KVEvent

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_NO_TOKENS = np.zeros(0, np.uint64)
_Words = NDArray[np.uint64]
_Used = NDArray[np.int64]
_FILL = 0.625
"""Share of a table's entries in use at which it doubles."""
MAX_BLOCKS = 1 << 18
"""Default limit on blocks per worker: 4 million tokens in blocks of 16, about 64 MB of tables."""
MAX_WAITING = 1 << 12
"""Limit on blocks per worker whose parent is unknown: each is stored by itself, at 20 µs and 1 KB."""


@dataclass(slots=True)
class DirectoryCounts:
    """Counts of a directory, in blocks unless stated otherwise."""

    stored: int = 0
    """Stored blocks that were new on their worker; repeats count once."""
    removed: int = 0
    """Blocks removed by an event."""
    apart: int = 0
    """Blocks stored in another medium, KV cache group or locality: not kept, never a hit."""
    unknown_removals: int = 0
    unknown_parents: int = 0
    """Blocks stored under a parent whose content is unknown: not matched until it is known."""
    without_content: int = 0
    """Blocks stored without the tokens of whole blocks, or with unreadable extra keys: not matched."""
    ambiguous: int = 0
    """Blocks whose content the worker holds under another hash: not matched."""
    forgotten: int = 0
    """Blocks dropped because their worker's event stream could no longer be trusted."""
    gaps: int = 0
    """Number of gaps in the messages' sequence numbers."""
    lost: int = 0
    """Missing messages that were not replayed."""
    replayed: int = 0
    """Missing messages that were replayed."""
    restarts: int = 0
    """Number of restarts: a worker's sequence number fell, or jumped farther than a gap can be."""
    undecodable: int = 0
    """Messages that could not be decoded, for example because of an unknown event type."""
    refused: int = 0
    """Blocks over their worker's limit, or over the limit on blocks that wait for a parent."""
    last_error: str = ""
    """Reason why the last message or block was refused."""


class _Table:
    """A hash table that only grows. Doubling a million rows takes tens of milliseconds; a `capacity` avoids it."""

    __slots__ = ("entries", "used")

    def __init__(self, width: int, capacity: int = 0) -> None:
        self.entries: _Words = np.zeros((_tables.SMALLEST, 2 + width), np.uint64)
        self.used: _Used = np.zeros(3, np.int64)
        """Entries in use; of the contents also the sets ever in use, and the first set that was freed (0: none)."""
        self.reserve(capacity)

    def reserve(self, more: int) -> None:
        entries = len(self.entries)
        while self.used[0] + more > entries * _FILL:
            entries *= 2
        if entries > len(self.entries):
            grown = np.zeros((entries, self.entries.shape[1]), np.uint64)
            _tables.rehash(self.entries, grown)
            self.entries = grown


class _Waiting(NamedTuple):
    """A block whose parent is unknown."""

    parent: NDArray[np.uint64]  # [1, 2]
    key: NDArray[np.uint64]  # [1, 2]
    tokens: NDArray[np.uint64]
    contexts: NDArray[np.uint64]


@dataclass(slots=True)
class _Worker:
    group: int
    """Full-attention KV cache group; -1 if the assumed group is known to be of another kind."""
    group_named: bool = False
    """Whether an event of the engine named the full-attention group."""
    held: _Table = field(default_factory=lambda: _Table(2))
    blocks: int = 0
    waiting: dict[bytes, _Waiting] = field(default_factory=dict)
    children: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Key of an unknown parent → keys of the blocks that wait for it."""


def check_few(num_workers: int) -> None:
    most = _tables.MOST_WORKERS
    check(num_workers <= most, f"num_workers={num_workers} must be at most {most}")


class KVDirectory:
    """Directory of blocks per worker. `capacity` is the number of distinct blocks to allocate memory for at once.

    `max_blocks` limits the blocks of each worker; `limits` (worker → blocks) overrides it for workers whose KV cache
    size is known. Blocks over the limit are refused and counted, never kept.
    `group` is the full-attention KV cache group of a hybrid model, used if the engine's events do not name it (vLLM's
    events give the kind of a group for offloaded blocks only). A worker is one stream of events: each data-parallel
    rank of an engine is a worker of its own.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        block_size: int = 16,
        group: int = 0,
        capacity: int = 0,
        max_blocks: int = MAX_BLOCKS,
        rng: np.random.Generator | None = None,
    ) -> None:
        check_at_least(1, num_workers=num_workers, block_size=block_size, max_blocks=max_blocks)
        check_at_least(0, group=group)
        check_few(num_workers)
        self.num_workers, self.block_size, self.group, self.max_blocks = num_workers, block_size, group, max_blocks
        self.limits: dict[int, int] = {}
        self.counters = DirectoryCounts()
        # Results do not depend on these numbers; if they are secret, nobody can construct prompts that collide.
        rng = np.random.default_rng() if rng is None else rng
        self._seeds = rng.integers(0, 1 << 64, 2, np.uint64)
        self._weights = rng.integers(0, 1 << 64, (2, block_size + 4), np.uint64) | np.uint64(1)
        self._contents = _Table(1, capacity)
        self._sets: _Words = np.zeros((1, -(-num_workers // 64)), np.uint64)
        self._workers = [_Worker(group) for _ in range(num_workers)]

    def grow(self, num_workers: int) -> None:
        """Make room for more workers; existing workers keep their numbers and blocks."""
        check_at_least(self.num_workers, num_workers=num_workers)
        check_few(num_workers)
        self._workers += [_Worker(self.group) for _ in range(num_workers - self.num_workers)]
        self.num_workers = num_workers
        self._sets = np.pad(self._sets, ((0, 0), (0, -(-num_workers // 64) - self._sets.shape[1])))

    def apply(self, worker: int, event: KVEvent) -> None:
        """Apply the next event of a worker's stream; see :class:`Follower` for gaps."""
        if isinstance(event, BlockStored):
            self.stored(worker, event)
        elif isinstance(event, BlockRemoved):
            self.removed(worker, event)
        else:
            self.cleared(worker)

    def stored(self, worker: int, event: BlockStored) -> None:
        state = self._state(worker)
        self._learn_group(worker, state, event)
        full = event.kv_cache_spec_kind is None or event.kv_cache_spec_kind in _FULL_ATTENTION
        if not (full and _is_local(event) and event.group_idx in (None, state.group)):
            self.counters.apart += len(event.block_hashes)
            return
        if not event.block_hashes or not self._has_room(worker, state, len(event.block_hashes)):
            return
        above = [] if event.parent_block_hash is None else [event.parent_block_hash]
        family_keys = hash_keys(above + event.block_hashes, self._seeds)
        keys = family_keys[len(above) :]
        tokens, contexts_ = event_tokens(event, self.block_size), event_contexts(event)
        parent = np.zeros(2, np.uint64)
        if tokens is None or contexts_ is None:
            self.counters.without_content += len(keys)
            self._store(worker, state, keys, _NO_TOKENS, NO_CONTEXTS, parent)
        elif not above or _tables.content_of(state.held.entries, family_keys, parent):
            self._store(worker, state, keys, tokens, contexts_, parent)
            if state.waiting:
                self._join(worker, state, keys)
        else:
            self._wait(worker, state, family_keys[:1], keys, tokens, contexts_)

    def removed(self, worker: int, event: BlockRemoved) -> None:
        """Remove blocks; an event of another medium, locality or group is ignored, because such blocks are not kept."""
        state = self._state(worker)
        if not (_is_local(event) and event.group_idx in (None, state.group) and event.block_hashes):
            return
        keys = hash_keys(event.block_hashes, self._seeds)
        known = _tables.remove(*self._arrays(state), worker, keys)
        state.blocks -= known
        self._stop_waiting(state, keys)
        self.counters.removed += known
        self.counters.unknown_removals += len(event.block_hashes) - known

    def cleared(self, worker: int) -> None:
        """Drop all blocks of a worker that emptied its cache."""
        self.counters.removed += self._empty(worker, self._state(worker))

    def forget(self, worker: int) -> None:
        """Drop all blocks of a worker whose stream cannot be trusted, until new events arrive."""
        self.counters.forgotten += self._empty(worker, self._state(worker))

    def drop_worker(self, worker: int) -> None:
        """Forget the blocks and group of a worker that is gone or restarted."""
        self.forget(worker)
        self._workers[worker] = _Worker(self.group)

    def match_tokens(
        self,
        token_ids: ArrayLike,
        *,
        lora: str | int | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> NDArray[np.int64]:
        """Count the leading tokens of a prompt that each worker holds, [worker], in whole blocks.

        `extra_keys` lists each block's extra keys, as the engine publishes them. Pass `token_ids` as an integer array
        for speed: converting a list of 4,096 tokens takes longer than the match.
        """
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InputError(f"token_ids has shape {tokens.shape} and dtype {tokens.dtype}, expected integers [token]")
        words = writeable(np.ascontiguousarray(tokens, np.int64).view(np.uint64))
        encoded = contexts(len(words) // self.block_size, lora, cache_salt, extra_keys)
        keys = check_given(encoded, "extra_keys hold a value that msgpack cannot encode", InputError)
        depth = np.zeros(self.num_workers, np.int64)
        _tables.match_tokens(self._contents.entries, self._sets, words, keys, self._weights, depth)
        return depth * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, without waiting blocks."""
        held = sum(state.held.entries.nbytes for state in self._workers)
        return self._contents.entries.nbytes + self._sets.nbytes + held

    def check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise InputError(f"worker={worker} must be at least 0 and below num_workers={self.num_workers}")

    def _state(self, worker: int) -> _Worker:
        self.check_worker(worker)
        return self._workers[worker]

    def _has_room(self, worker: int, state: _Worker, blocks: int) -> bool:
        """Return whether a worker may hold `blocks` more blocks. Marks of ambiguous contents do not count as blocks."""
        limit = self.limits.get(worker, self.max_blocks)
        if state.blocks + blocks > limit:
            self._refuse(blocks, f"worker {worker} tells of {state.blocks + blocks} blocks, must be at most {limit}")
            return False
        if state.held.used[0] > 2 * limit:  # blocks and marks: marks are never deleted one by one
            self.forget(worker)
        return True

    def _refuse(self, blocks: int, reason: str) -> None:
        self.counters.refused += blocks
        self.counters.last_error = reason

    def _arrays(self, state: _Worker) -> tuple[_Words, _Used, _Words, _Used, _Words]:
        contents = self._contents
        return state.held.entries, state.held.used, contents.entries, contents.used, self._sets

    def _learn_group(self, worker: int, state: _Worker, event: BlockStored) -> None:
        """Set the full-attention group from the first event that names its group's kind."""
        if event.kv_cache_spec_kind is None or event.group_idx is None or state.group_named:
            return
        if event.kv_cache_spec_kind in _FULL_ATTENTION:
            state.group_named, group = True, event.group_idx
        else:
            group = -1 if event.group_idx == state.group else state.group
        if group != state.group:
            self.counters.forgotten += self._empty(worker, state)
            state.group = group

    def _store(
        self,
        worker: int,
        state: _Worker,
        keys: NDArray[np.uint64],
        tokens: NDArray[np.uint64],
        contexts_: NDArray[np.uint64],
        parent: NDArray[np.uint64],
    ) -> None:
        more = len(keys)
        state.held.reserve(2 * more)  # an entry for each block, and possibly one for a mark
        self._contents.reserve(more)
        if self._contents.used[1] + more >= len(self._sets):
            self._sets = np.pad(self._sets, ((0, len(self._sets) + more), (0, 0)))
        tally = np.zeros(2, np.int64)
        _tables.store(*self._arrays(state), worker, keys, tokens, contexts_, self._weights, parent, tally)
        new, ambiguous = tally.tolist()
        state.blocks += new
        self.counters.stored += new
        self.counters.ambiguous += ambiguous

    def _wait(
        self,
        worker: int,
        state: _Worker,
        parent_key: NDArray[np.uint64],
        keys: NDArray[np.uint64],
        tokens: NDArray[np.uint64],
        contexts_: NDArray[np.uint64],
    ) -> None:
        """Store blocks under an unknown parent: each waits for the block before it, unless its content is known."""
        above, size, content = parent_key, self.block_size, np.zeros(2, np.uint64)
        if len(state.waiting) + len(keys) > MAX_WAITING:
            self._refuse(len(keys), f"worker {worker}: {len(keys)} blocks more wait for a parent, over {MAX_WAITING}")
            self._store(worker, state, keys, _NO_TOKENS, NO_CONTEXTS, content)
            return
        for block in range(len(keys)):
            key, context = keys[block : block + 1], contexts_[block : block + 1]
            part = tokens[block * size : (block + 1) * size]
            if _tables.content_of(state.held.entries, above, content):
                self._store(worker, state, key, part, context, content)
                self._join(worker, state, key)
            else:
                self._store(worker, state, key, _NO_TOKENS, NO_CONTEXTS, content)
                self.counters.unknown_parents += 1
                if not _tables.content_of(state.held.entries, key, content):
                    name = key.tobytes()
                    self._stop_waiting(state, key)
                    state.waiting[name] = _Waiting(above.copy(), key.copy(), part.copy(), context.copy())
                    state.children.setdefault(above.tobytes(), set()).add(name)
            above = key

    def _join(self, worker: int, state: _Worker, keys: NDArray[np.uint64]) -> None:
        """Resolve the blocks that wait for `keys`, whose content became known, and their waiting descendants."""
        self._stop_waiting(state, keys)
        ready = [keys[block : block + 1] for block in range(len(keys))]
        parent = np.zeros(2, np.uint64)
        while ready:
            key = ready.pop()
            for name in list(state.children.get(key.tobytes(), ())):
                child = state.waiting[name]
                self._stop_waiting(state, child.key)
                _tables.content_of(state.held.entries, key, parent)
                self._store(worker, state, child.key, child.tokens, child.contexts, parent)
                ready.append(child.key)

    @staticmethod
    def _stop_waiting(state: _Worker, keys: NDArray[np.uint64]) -> None:
        for key in keys if state.waiting else ():
            if (waiting := state.waiting.pop(key.tobytes(), None)) is not None:
                parent = waiting.parent.tobytes()
                state.children[parent].discard(key.tobytes())
                if not state.children[parent]:
                    del state.children[parent]

    def _empty(self, worker: int, state: _Worker) -> int:
        _tables.release_all(*self._arrays(state), worker)
        blocks, state.blocks, state.held = state.blocks, 0, _Table(2)
        state.waiting.clear()
        state.children.clear()
        return blocks


def _is_local(event: BlockStored | BlockRemoved) -> bool:
    """Return whether the event concerns the worker's own GPU; an event without medium or locality does."""
    return (event.medium or "GPU").upper() == "GPU" and (event.locality or "LOCAL").upper() == "LOCAL"
