"""Mooncake's traces: JSON Lines of requests with the hashes of their prompt's 512-token blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

``timestamp`` is in milliseconds. Every prompt has one hash for each 512 tokens begun, which holds on all 12,031
lines of the published conversation trace and is enforced: a shorter list would pass for a smaller shared prefix.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from coterie.traces.readers._rows import RequestColumns, json_rows, sniff_json
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import RequestTrace

BLOCK_TOKENS = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(path: Path, options: ReadOptions) -> RequestTrace:
    columns = RequestColumns(KEYS)
    arrival_ms, blocks = array("d"), []
    for row in json_rows(path, KEYS):
        length, hashes = row.whole("input_length"), row.blocks("hash_ids")
        if len(hashes) != -(-length // BLOCK_TOKENS):
            needed = f"{-(-length // BLOCK_TOKENS)} for {length} tokens in blocks of {BLOCK_TOKENS}"
            raise row.error("hash_ids", f"found {len(hashes)} hashes, expected {needed}")
        arrival_ms.append(row.time("timestamp"))
        blocks.append(hashes)
        columns.add(row, length, row.whole("output_length"))
    arrival_s = (np.array(arrival_ms) - min(arrival_ms)) / 1e3
    return columns.trace(path, "mooncake", options, arrival_s, prefix_blocks=blocks, block_tokens=BLOCK_TOKENS)


readers.add(
    "mooncake",
    Reader(
        read_mooncake,
        lambda path: sniff_json(path).issuperset(KEYS),
        "Mooncake JSON Lines: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks",
    ),
)
