"""The KV directory: which leading blocks of a prompt each worker holds.

Engines publish (parent's hash, tokens, hash) for each block they store, and the hash of each they remove. A block's
*content* is its tokens and context and those of all blocks before it; it gets a 128-bit key, chained from the first
block on. Two tables map a key to a bit per worker: one by content, one by the engines' own hashes. So a prompt is
matched by its tokens without any knowledge of an engine's hash function, and workers with different hashes for one
content share a row. A third table per worker, hash → content, serves removals and children.

There are no false hits; a block that a worker holds may be missed:
- only blocks in GPU memory and of the full-attention group are kept;
- a block whose parent is unknown waits for it, known by its hash alone;
- blocks are a set: engines repeat a stored block when it is reused, so one removal takes it away;
- one content under two hashes of a worker differs in something the events do not carry (an adapter loaded again from
  another path; images, before the extra keys were published): no hit by tokens.

Not safe for use by several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import InputError, check_at_least
from coterie.kvindex import _tables
from coterie.kvindex.identity import NO_CONTEXTS, contexts, event_contexts, event_tokens, hash_keys, writeable
from coterie.wire.kv_events import BlockHash, BlockRemoved, BlockStored, KVEvent

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_NO_TOKENS = np.zeros(0, np.uint64)
_Words = NDArray[np.uint64]
_Used = NDArray[np.int64]
_FILL = 0.625
"""Share of a table's entries in use at which it doubles."""
MAX_BLOCKS = 1 << 18
"""Most blocks of a worker unless it is told otherwise: 4 million tokens in blocks of 16, about 64 MB of tables."""
MAX_WAITING = 1 << 12
"""Most blocks of a worker whose parent is unknown: each is stored by itself, at 20 µs and 1 KB."""


@dataclass(slots=True)
class DirectoryCounts:
    """Counts of a directory, in blocks unless stated otherwise."""

    stored: int = 0
    """Stored blocks that were new on their worker; repeats count once."""
    removed: int = 0
    """Removed by an event."""
    apart: int = 0
    """Stored in another medium, group or place: not kept, no hit."""
    unknown_removals: int = 0
    unknown_parents: int = 0
    """Stored under a parent that the worker does not hold: known by hash alone until it does."""
    without_content: int = 0
    """Stored without the tokens of whole blocks, or with keys that cannot be read: known by hash alone."""
    ambiguous: int = 0
    """Stored under a second hash: no hit by tokens."""
    forgotten: int = 0
    """Dropped because their worker's stream could no longer be trusted."""
    gaps: int = 0
    """Number of gaps in message numbers."""
    lost: int = 0
    """Missing messages that were not replayed."""
    replayed: int = 0
    """Missing messages that were replayed."""
    restarts: int = 0
    """Number of times that a worker's sequence fell."""
    undecodable: int = 0
    """Messages that could not be read or hold an unknown event."""
    refused: int = 0
    """Blocks past what their worker may hold, or past those that may wait for a parent."""
    last_error: str = ""
    """Why the last message or block was refused."""


class HeldBlocks(NamedTuple):
    """Blocks of one worker, on the GPU and of the full-attention group."""

    hits: int
    waiting: int
    """Blocks among these whose parent is unknown."""


class _Table:
    """A hash table that grows and never shrinks. Doubling a million rows takes tens of milliseconds: set a capacity."""

    __slots__ = ("entries", "limit", "used")

    def __init__(self, width: int, capacity: int = 0) -> None:
        self.entries: _Words = np.zeros((_tables.SMALLEST, 2 + width), np.uint64)
        self.used: _Used = np.zeros(1, np.int64)
        self.limit = int(_tables.SMALLEST * _FILL)
        self.reserve(capacity)

    def reserve(self, more: int) -> None:
        need = self.used.item() + more
        if need <= self.limit:
            return
        entries = len(self.entries)
        while need > entries * _FILL:
            entries *= 2
        grown = np.zeros((entries, self.entries.shape[1]), np.uint64)
        _tables.rehash(self.entries, grown)
        self.entries, self.limit = grown, int(entries * _FILL)

    def widen(self, width: int) -> None:
        """Add columns of zeros; an entry's place depends on its key alone."""
        more = 2 + width - self.entries.shape[1]
        if more:
            self.entries = np.pad(self.entries, ((0, 0), (0, more)))


class _Waiting(NamedTuple):
    """A block whose parent is unknown."""

    parent: NDArray[np.uint64]  # [1, 2]
    key: NDArray[np.uint64]  # [1, 2]
    tokens: NDArray[np.uint64]
    contexts: NDArray[np.uint64]


@dataclass(slots=True)
class _Worker:
    group: int
    """Full-attention group; -1 while the assumed one is known to be wrong."""
    group_named: bool = False
    """Whether the engine named the group."""
    held: _Table = field(default_factory=lambda: _Table(2))
    blocks: int = 0
    waiting: dict[bytes, _Waiting] = field(default_factory=dict)
    children: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Unknown parent → blocks that wait for it."""


class KVDirectory:
    """Directory of blocks per worker. `capacity` is the number of distinct blocks to allocate memory for at once.

    `max_blocks` bounds the blocks of a worker, `limits` those of one whose KV cache is known, by its number: what a
    worker tells of beyond that is refused and counted, never kept.
    `group` is the full-attention KV cache group of a hybrid model, if the engine's events do not name it (vLLM's
    give the kind of a group for offloaded blocks only). A worker is one stream of events: each data-parallel rank of
    an engine is a worker of its own.
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
        self.num_workers = num_workers
        self.block_size = block_size
        self.group = group
        self.max_blocks = max_blocks
        self.limits: dict[int, int] = {}
        self.counters = DirectoryCounts()
        # Results do not depend on these numbers; secret ones prevent prompts made to collide.
        rng = np.random.default_rng() if rng is None else rng
        self._seeds = rng.integers(0, 1 << 64, 2, np.uint64)
        self._weights = rng.integers(0, 1 << 64, (2, block_size + 4), np.uint64) | np.uint64(1)
        words = -(-num_workers // 64)
        self._hashes = _Table(words, capacity)
        self._contents = _Table(words, capacity)
        self._workers = [_Worker(group) for _ in range(num_workers)]

    def grow(self, num_workers: int) -> None:
        """Make room for more workers; those there keep their numbers and blocks."""
        check_at_least(self.num_workers, num_workers=num_workers)
        self._workers += [_Worker(self.group) for _ in range(num_workers - self.num_workers)]
        self.num_workers = num_workers
        for table in (self._hashes, self._contents):
            table.widen(-(-num_workers // 64))

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
        above = event.parent_block_hash
        family = event.block_hashes if above is None else [above, *event.block_hashes]
        family_keys = hash_keys(family, self._seeds)
        keys = family_keys if above is None else family_keys[1:]
        tokens, contexts_ = event_tokens(event, self.block_size), event_contexts(event)
        parent = np.zeros(2, np.uint64)
        if tokens is None or contexts_ is None:
            self.counters.without_content += len(keys)
            self._store(worker, state, keys, _NO_TOKENS, NO_CONTEXTS, parent)
        elif above is None or _tables.content_of(state.held.entries, family_keys, parent):
            self._store(worker, state, keys, tokens, contexts_, parent)
            self._join(worker, state, keys)
        else:
            self._wait(worker, state, family_keys[:1], keys, tokens, contexts_)

    def removed(self, worker: int, event: BlockRemoved) -> None:
        """Remove blocks; those of another medium, place or group are not kept."""
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

    def match(self, hashes: Sequence[BlockHash] | NDArray[np.uint64]) -> NDArray[np.int64]:
        """[worker] leading blocks of a prompt that each worker holds, by the hashes its engine gives them.

        Right only where all workers share a hash function: else match the tokens.
        """
        depth = np.zeros(self.num_workers, np.int64)
        if len(hashes):
            _tables.match_keys(self._hashes.entries, hash_keys(hashes, self._seeds), depth)
        return depth

    def match_tokens(
        self,
        token_ids: ArrayLike,
        *,
        lora: str | int | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> NDArray[np.int64]:
        """[worker] leading tokens of a prompt that each worker holds, in whole blocks.

        `extra_keys` are those of each block, as the engine publishes them. An array of integers is the fast way:
        turning a list of 4,096 into one takes longer than the match.
        """
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InputError(f"token_ids has shape {tokens.shape} and dtype {tokens.dtype}, expected integers [token]")
        words = writeable(np.ascontiguousarray(tokens, np.int64).view(np.uint64))
        keys = contexts(len(words) // self.block_size, lora, cache_salt, extra_keys)
        if keys is None:
            raise InputError("extra_keys hold a value that msgpack cannot encode")
        depth = np.zeros(self.num_workers, np.int64)
        _tables.match_tokens(self._contents.entries, words, keys, self._weights, depth)
        depth *= self.block_size
        return depth

    def held(self, worker: int) -> HeldBlocks:
        state = self._state(worker)
        return HeldBlocks(state.blocks, len(state.waiting))

    def __len__(self) -> int:
        """Distinct blocks, by their hashes."""
        return int(self._hashes.used[0])

    @property
    def nbytes(self) -> int:
        """Memory of all tables, without waiting blocks."""
        tables = [self._hashes, self._contents, *(state.held for state in self._workers)]
        return sum(table.entries.nbytes for table in tables)

    def check_integrity(self) -> None:
        """Raise InputError if the tables contradict each other; for tests and idle times."""
        for name, table in (("hashes", self._hashes), ("contents", self._contents)):
            rows = table.entries[table.entries[:, 0] != 0]
            if len(rows) != table.used[0] or not rows[:, 2:].any(axis=1).all():
                raise InputError(f"{name}: {len(rows)} rows, {table.used[0]} counted, or one without a worker")
        by_worker = sum(state.blocks for state in self._workers)
        bits = int(np.bitwise_count(self._hashes.entries[:, 2:]).sum())
        if by_worker != bits:
            raise InputError(f"workers hold {by_worker} blocks, the table of hashes says {bits}")

    def _state(self, worker: int) -> _Worker:
        if not 0 <= worker < self.num_workers:
            raise InputError(f"worker={worker} must be at least 0 and below num_workers={self.num_workers}")
        return self._workers[worker]

    def _has_room(self, worker: int, state: _Worker, blocks: int) -> bool:
        """Whether a worker may hold so many blocks more. Marks of ambiguous contents have room of their own."""
        limit = self.limits.get(worker, self.max_blocks)
        if state.blocks + blocks > limit:
            self._refuse(blocks, f"worker {worker} tells of {state.blocks + blocks} blocks, must be at most {limit}")
            return False
        if state.held.used.item() > 2 * limit:
            self.forget(worker)
        return True

    def _refuse(self, blocks: int, reason: str) -> None:
        self.counters.refused += blocks
        self.counters.last_error = reason

    def _arrays(self, state: _Worker) -> tuple[_Words, _Used, _Words, _Used, _Words, _Used]:
        held, hashes, contents = state.held, self._hashes, self._contents
        return held.entries, held.used, hashes.entries, hashes.used, contents.entries, contents.used

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
        state.held.reserve(2 * more)  # a block, and possibly a mark
        self._hashes.reserve(more)
        self._contents.reserve(more)
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
        """Blocks under an unknown parent: each waits for the one before it, unless its own content is known."""
        above, size, found = parent_key, self.block_size, np.zeros(2, np.uint64)
        if len(state.waiting) + len(keys) > MAX_WAITING:
            self._refuse(len(keys), f"worker {worker}: {len(keys)} blocks more wait for a parent, over {MAX_WAITING}")
            self._store(worker, state, keys, _NO_TOKENS, NO_CONTEXTS, found)
            return
        for block in range(len(keys)):
            key = keys[block : block + 1]
            part = tokens[block * size : (block + 1) * size]
            context = contexts_[block : block + 1]
            if _tables.content_of(state.held.entries, above, found):
                self._store(worker, state, key, part, context, found)
                self._join(worker, state, key)
            else:
                self._store(worker, state, key, _NO_TOKENS, NO_CONTEXTS, found)
                self.counters.unknown_parents += 1
                if not _tables.content_of(state.held.entries, key, found):
                    name = key.tobytes()
                    self._forget_waiting(state, name)
                    state.waiting[name] = _Waiting(above.copy(), key.copy(), part.copy(), context.copy())
                    state.children.setdefault(above.tobytes(), set()).add(name)
            above = key

    def _join(self, worker: int, state: _Worker, keys: NDArray[np.uint64]) -> None:
        """Resolve blocks whose content became known, and their waiting children."""
        if not state.waiting:
            return
        self._stop_waiting(state, keys)
        ready = [keys[block : block + 1] for block in range(len(keys))]
        parent = np.zeros(2, np.uint64)
        while ready:
            key = ready.pop()
            for name in list(state.children.get(key.tobytes(), ())):
                child = state.waiting[name]
                self._forget_waiting(state, name)
                _tables.content_of(state.held.entries, key, parent)
                self._store(worker, state, child.key, child.tokens, child.contexts, parent)
                ready.append(child.key)

    def _stop_waiting(self, state: _Worker, keys: NDArray[np.uint64]) -> None:
        if state.waiting:
            for block in range(len(keys)):
                self._forget_waiting(state, keys[block].tobytes())

    @staticmethod
    def _forget_waiting(state: _Worker, name: bytes) -> None:
        waiting = state.waiting.pop(name, None)
        if waiting is not None:
            parent = waiting.parent.tobytes()
            state.children[parent].discard(name)
            if not state.children[parent]:
                del state.children[parent]

    def _empty(self, worker: int, state: _Worker) -> int:
        held, hashes, contents = state.held, self._hashes, self._contents
        _tables.release_all(held.entries, hashes.entries, hashes.used, contents.entries, contents.used, worker)
        blocks, state.blocks = state.blocks, 0
        state.held = _Table(2)
        state.waiting.clear()
        state.children.clear()
        return blocks


def _is_local(event: BlockStored | BlockRemoved) -> bool:
    """Whether the event is about the worker's own GPU, which it is about where it names no medium."""
    return (event.medium or "GPU").upper() == "GPU" and (event.locality or "LOCAL").upper() == "LOCAL"
