"""How fast the KV directory answers and applies events, and how much memory it takes."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coterie.answers.suites import Report
from coterie.kvindex import Follower, KVDirectory
from coterie.wire.kv_events import BlockRemoved, BlockStored, KVEvents, encode_kv_events
from coterie_lab.benches.timing import Row, median_us

BLOCK_SIZE = 16
PROMPT_BLOCKS = 256
SHARED_BLOCKS = 64
"""Leading blocks of a prompt that 16 prompts share, so that runs end at different depths."""
HOLDERS = 2
"""Workers that hold a prompt."""


def kv_directory_rows(
    report: Report, *, num_blocks: int = 1_000_000, num_workers: int = 64, prompts: int = 200
) -> list[Row]:
    """Time a directory of `num_blocks` distinct blocks: matching by tokens, applying events, memory.

    `warm` asks for the same prompt every time, `spread` for another one each time.
    """
    rng = np.random.default_rng(0)
    directory = KVDirectory(num_workers, block_size=BLOCK_SIZE, capacity=num_blocks, rng=rng)
    texts, hashes = _prompts(num_blocks, rng)
    holdings, apply_s = 0, 0.0
    for index in range(len(texts)):
        report("filling the KV directory", index, len(texts))
        event = _stored(texts[index], hashes[index])
        for worker in rng.choice(num_workers, min(HOLDERS, num_workers), replace=False):
            start = time.perf_counter()
            directory.stored(int(worker), event)
            apply_s += time.perf_counter() - start
            holdings += PROMPT_BLOCKS
    blocks = len(np.unique(hashes))
    sizes = {"blocks": blocks, "workers": num_workers, "prompt_blocks": PROMPT_BLOCKS}
    rows: list[Row] = []
    picked = rng.choice(len(texts), min(prompts, len(texts)), replace=False)
    asked = texts[picked]
    warm_us = median_us(partial(directory.match_tokens, asked[0]), 1001)
    for cache, took_us in (("warm", warm_us), ("spread", _spread_us(directory, asked))):
        rows.append({"name": "kv_match_tokens", "cache": cache, **sizes, "median_us": took_us})
    size = directory.nbytes
    memory = {"gb": round(size / 1e9, 3), "bytes_per_block": round(size / blocks), "holdings": holdings}
    rows.append({"name": "kv_apply", **sizes, **memory, "blocks_per_s": round(holdings / apply_s)})
    rows += [_stream_row(blocks) for blocks in (1, 8, PROMPT_BLOCKS)]
    return rows


def _spread_us(directory: KVDirectory, asked: NDArray[np.int64]) -> float:
    """Time matches of another prompt each time, whose tokens have just been written, as by a tokenizer."""
    took_s = []
    for tokens in (prompt.copy() for _ in range(-(-1001 // len(asked))) for prompt in asked):
        start = time.perf_counter()
        directory.match_tokens(tokens)
        took_s.append(time.perf_counter() - start)
    return round(1e6 * float(np.median(took_s)), 2)


def _prompts(num_blocks: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Draw prompts with `num_blocks` distinct blocks in all: token ids [prompt, token] and hashes [prompt, block]."""
    fresh = 16 * (PROMPT_BLOCKS - SHARED_BLOCKS) + SHARED_BLOCKS
    count = 16 * max(1, round(num_blocks / fresh))
    texts = rng.integers(0, 200_000, (count, PROMPT_BLOCKS * BLOCK_SIZE))
    hashes = rng.integers(0, 1 << 64, (count, PROMPT_BLOCKS), np.uint64)
    for first in range(0, count, 16):
        texts[first : first + 16, : SHARED_BLOCKS * BLOCK_SIZE] = texts[first, : SHARED_BLOCKS * BLOCK_SIZE]
        hashes[first : first + 16, :SHARED_BLOCKS] = hashes[first, :SHARED_BLOCKS]
    return texts, hashes


def _stored(tokens: NDArray[np.int64], hashes: NDArray[np.uint64], parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes.tolist(),
        parent_block_hash=parent,
        token_ids=tokens.tolist(),
        block_size=BLOCK_SIZE,
        medium="GPU",
        group_idx=0,
    )


def _stream_row(event_blocks: int, blocks: int = 16_384) -> Row:
    """Time payloads as received on one core, decoding included: events of this many blocks, half as many removals."""
    rng = np.random.default_rng(1)
    payloads = []
    for _ in range(blocks // PROMPT_BLOCKS):
        tokens = rng.integers(0, 200_000, PROMPT_BLOCKS * BLOCK_SIZE)
        hashes = rng.integers(0, 1 << 64, PROMPT_BLOCKS, np.uint64)
        for start in range(0, PROMPT_BLOCKS, event_blocks):
            stop = start + event_blocks
            part = tokens[start * BLOCK_SIZE : stop * BLOCK_SIZE]
            event = _stored(part, hashes[start:stop], int(hashes[start - 1]) if start else None)
            payloads.append(encode_kv_events(KVEvents(0.0, [event])))
        gone = hashes[PROMPT_BLOCKS // 2 :].tolist()
        payloads.append(encode_kv_events(KVEvents(0.0, [BlockRemoved(block_hashes=gone, medium="GPU", group_idx=0)])))
    elapsed = 0.0
    for sent in (payloads[-2:], payloads):  # the first time loads the loops
        follower = Follower(KVDirectory(2, block_size=BLOCK_SIZE, rng=rng))
        start_s = time.process_time()
        for seq, payload in enumerate(sent):
            follower.apply_payload(0, seq, payload)
        elapsed = time.process_time() - start_s
    return {
        "name": "kv_stream",
        "event_blocks": event_blocks,
        "blocks": blocks,
        "events_per_s": round(len(payloads) / elapsed),
        "times_10,000_events": round(len(payloads) / elapsed / 1e4, 2),
        "blocks_per_s": round(1.5 * blocks / elapsed),
    }
