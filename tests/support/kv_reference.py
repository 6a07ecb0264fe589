"""The directory as dictionaries and sets: slow, plain, and the word on what is right; and events to drive both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from books import check_directory
from coterie.kvindex import KVDirectory
from coterie.kvindex.identity import hash_keys
from coterie.wire.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

SIZE = 2
FULL = {"full_attention", "mla_attention", "sink_full_attention"}
Chain = tuple[Any, ...]


@dataclass
class ReferenceWorker:
    group: int
    told: bool = False
    held: dict[BlockHash, Chain | None] = field(default_factory=dict)
    """Hash → its chain of blocks from the root, None while not known."""
    waiting: dict[BlockHash, tuple[BlockHash | None, Any]] = field(default_factory=dict)
    shown: set[Chain] = field(default_factory=set)
    veiled: set[Chain] = field(default_factory=set)

    def clear_hits(self) -> None:
        for part in (self.held, self.waiting, self.shown, self.veiled):
            part.clear()


def block_key(lora: Any, keys: Sequence[Any], salt: str | None) -> Any:
    items = [*(key for key in keys if key != lora), *([salt] if salt and salt not in keys else [])]
    return lora, tuple(sorted(map(repr, items)))


class ReferenceDirectory:
    def __init__(self, num_workers: int, block_size: int, group: int = 0) -> None:
        self.block_size = block_size
        self.group = group
        self.workers = [ReferenceWorker(group) for _ in range(num_workers)]

    def apply(self, worker: int, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.clear(worker)
        elif isinstance(event, BlockRemoved):
            self._removed(self.workers[worker], event)
        else:
            self._stored(self.workers[worker], event)

    def clear(self, worker: int) -> None:
        self.workers[worker].clear_hits()

    def drop(self, worker: int) -> None:
        self.workers[worker] = ReferenceWorker(self.group)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [_run(hashes, state.held) for state in self.workers]

    def match_tokens(self, tokens: Sequence[int], lora: Any = None, salt: str | None = None) -> list[int]:
        size, chains = self.block_size, []
        chain: tuple[Any, ...] = ()
        for block in range(len(tokens) // size):
            part = tuple(tokens[block * size : (block + 1) * size])
            chain = (*chain, (part, block_key(lora, [], salt if block == 0 else None)))
            chains.append(chain)
        return [size * _run(chains, state.shown) for state in self.workers]

    def _stored(self, state: ReferenceWorker, event: BlockStored) -> None:
        kind, group = event.kv_cache_spec_kind, event.group_idx
        if kind is not None and group is not None and not state.told:
            right = group if kind in FULL else (-1 if group == state.group else state.group)
            state.told = kind in FULL
            if right != state.group:
                state.group = right
                state.clear_hits()
        place = ((event.medium or "GPU").upper(), group, (event.locality or "LOCAL").upper())
        full = kind is None or kind in FULL
        if not (full and place[0] == "GPU" and place[2] == "LOCAL" and group in (None, state.group)):
            return
        size = self.block_size
        whole = event.block_size == size and len(event.token_ids) == size * len(event.block_hashes)
        lora = event.lora_id if event.lora_name is None else event.lora_name
        above: BlockHash | None = event.parent_block_hash
        resolved = []
        for block, name in enumerate(event.block_hashes):
            if not whole:
                state.held.setdefault(name, None)
                continue
            salt = event.cache_salt if above is None else None
            keys = (event.extra_keys[block] if event.extra_keys else None) or []
            own = (tuple(event.token_ids[block * size : (block + 1) * size]), block_key(lora, keys, salt))
            chain = () if above is None else state.held.get(above)
            if chain is None:
                if state.held.setdefault(name, None) is None:
                    state.waiting[name] = (above, own)
            else:
                self._show(state, name, (*chain, own))
                resolved.append(name)
            above = name
        for name in resolved:
            state.waiting.pop(name, None)
        while resolved:
            name = resolved.pop()
            for child in [child for child, (parent, _) in state.waiting.items() if parent == name]:
                _, own = state.waiting.pop(child)
                self._show(state, child, (*(state.held[name] or ()), own))
                resolved.append(child)

    @staticmethod
    def _show(state: ReferenceWorker, name: BlockHash, chain: Chain) -> None:
        before = state.held.get(name)
        state.held[name] = chain
        if before == chain:
            return
        state.shown.discard(before or ())
        if chain in state.shown:
            state.veiled.add(chain)
            state.shown.discard(chain)
        elif chain not in state.veiled:
            state.shown.add(chain)

    @staticmethod
    def _removed(state: ReferenceWorker, event: BlockRemoved) -> None:
        medium, group, locality = (event.medium or "GPU").upper(), event.group_idx, (event.locality or "LOCAL").upper()
        if medium == "GPU" and locality == "LOCAL" and group in (None, state.group):
            for name in event.block_hashes:
                state.shown.discard(state.held.pop(name, None) or ())
                state.waiting.pop(name, None)


def _run(wanted: Sequence[Any], there: Any) -> int:
    for count, item in enumerate(wanted):
        if item not in there:
            return count
    return len(wanted)


HASHES: st.SearchStrategy[BlockHash] = st.one_of(
    st.integers(0, 7), st.sampled_from([b"a" * 8, b"b" * 8, b"c", 2**64 - 1, -3])
)


@st.composite
def events(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["stored"] * 6 + ["removed"] * 3 + ["cleared"]))
    place: dict[str, Any] = {
        "medium": draw(st.sampled_from(["GPU"] * 6 + [None, "CPU"])),
        "group_idx": draw(st.sampled_from([None] * 4 + [0, 0, 0, 1])),
        "locality": draw(st.sampled_from([None] * 7 + ["REMOTE"])),
    }
    if kind == "cleared":
        return AllBlocksCleared()
    names = draw(st.lists(HASHES, min_size=1, max_size=4, unique=True))
    if kind == "removed":
        return BlockRemoved(block_hashes=names, **place)
    return BlockStored(
        block_hashes=names,
        parent_block_hash=draw(st.one_of(st.none(), HASHES)),
        token_ids=draw(st.lists(st.integers(0, 1), min_size=2 * len(names), max_size=2 * len(names))),
        block_size=draw(st.sampled_from([SIZE] * 9 + [1])),
        **place,
        kv_cache_spec_kind=draw(st.sampled_from([None] * 8 + ["full_attention", "sliding_window"])),
        lora_name=draw(st.sampled_from([None] * 6 + ["ada"])),
        cache_salt=draw(st.sampled_from([None] * 6 + ["salt"])),
        extra_keys=draw(st.sampled_from([None] * 5 + [[["salt"]] + [None] * (len(names) - 1)])),
    )


class HeldBlocks(NamedTuple):
    """Number of blocks that one worker holds, and of those that wait for an unknown parent."""

    hits: int
    waiting: int


def blocks_held(directory: KVDirectory, worker: int) -> HeldBlocks:
    state = directory._workers[worker]
    return HeldBlocks(state.blocks, len(state.waiting))


def matched(directory: KVDirectory, hashes: Sequence[BlockHash]) -> np.ndarray:
    """Count the leading blocks that each worker holds, by the engine's hashes: [worker]."""
    keys = [tuple(hash_keys([name], directory._seeds)[0].tolist()) for name in hashes]
    known = [set(map(tuple, state.held.entries[:, :2].tolist())) for state in directory._workers]
    return np.array([_run(keys, rows) for rows in known])


PROMPTS = [[(number >> bit) & 1 for bit in range(6)] for number in range(64)]


def check_same(blocks: KVDirectory, reference: ReferenceDirectory, chains: list[list[Any]]) -> None:
    check_directory(blocks)
    for prompt in PROMPTS:
        assert blocks.match_tokens(prompt).tolist() == reference.match_tokens(prompt)
    for lora, salt in (("ada", None), (None, "salt"), ("ada", "salt")):
        for prompt in PROMPTS[::5]:
            answer = blocks.match_tokens(prompt, lora=lora, cache_salt=salt).tolist()
            assert answer == reference.match_tokens(prompt, lora, salt)
    for chain in chains:
        assert matched(blocks, chain).tolist() == reference.match(chain)
    for worker, state in enumerate(reference.workers):
        assert blocks_held(blocks, worker) == HeldBlocks(len(state.held), len(state.waiting))
