"""Plain tables of requests, CSV or JSON Lines: the formats to write by hand or from one's own logs.

Columns (keys): ``arrival_s`` or ``timestamp``, both in seconds, ``prompt_tokens``, ``output_tokens``; optional
``id`` and ``domain``; in JSON Lines also ``prefix_blocks`` with ``block_tokens``. All others are kept as extra.
CSV has no types, so its extra columns are text; JSON Lines keeps numbers, text, lists and null as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.traces.readers._rows import RequestColumns, Row, csv_rows, json_rows, sniff_csv, sniff_json
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import RequestTrace

TOKENS = ("prompt_tokens", "output_tokens")
CLOCKS = ("arrival_s", "timestamp")
OPTIONAL = ("id", "domain")
BLOCKS = ("prefix_blocks", "block_tokens")


def read_csv(path: Path, options: ReadOptions) -> RequestTrace:
    return _read(csv_rows(path, TOKENS), path, "csv", options, OPTIONAL)


def read_jsonl(path: Path, options: ReadOptions) -> RequestTrace:
    return _read(json_rows(path, TOKENS), path, "jsonl", options, (*OPTIONAL, *BLOCKS))


def _read(rows: Iterator[Row], path: Path, format: str, options: ReadOptions, known: tuple[str, ...]) -> RequestTrace:
    """The first row sets the optional columns; every other row must agree."""
    first = next(rows)
    clock = next((name for name in CLOCKS if name in first.values), None)
    if clock is None:
        raise first.error("arrival_s", f"is missing, and so is timestamp; found {', '.join(first.values)}")
    present = {name for name in known if name in first.values}
    if len(present.intersection(BLOCKS)) == 1:
        raise first.error("prefix_blocks", "must come with block_tokens, the tokens of one block")
    block_tokens = first.whole("block_tokens") if "block_tokens" in present else None
    if block_tokens == 0:
        raise first.error("block_tokens", "found 0, expected at least 1")
    columns = RequestColumns((clock, *TOKENS, *known))
    arrival_s = array("d")
    ids: list[str] = []
    domains: list[str] = []
    blocks: list[NDArray[np.int64]] = []
    for row in chain((first,), rows):
        if not row.is_text:  # in CSV the header holds for every row
            _check_keys(row, clock, known, present)
        arrival_s.append(row.time(clock))
        if "id" in present:
            ids.append(row.text("id"))
        if "domain" in present:
            domains.append(row.text("domain"))
        if "prefix_blocks" in present:
            blocks.append(row.blocks("prefix_blocks"))
            if row.whole("block_tokens") != block_tokens:
                raise row.error("block_tokens", f"found {row.whole('block_tokens')}, line {first.line} {block_tokens}")
        columns.add(row, row.whole("prompt_tokens"), row.whole("output_tokens"))
    return columns.trace(
        path,
        format,
        options,
        np.array(arrival_s),
        ids=ids if "id" in present else None,
        domains=domains if "domain" in present else None,
        prefix_blocks=blocks if "prefix_blocks" in present else None,
        block_tokens=block_tokens,
    )


def _check_keys(row: Row, clock: str, known: tuple[str, ...], present: set[str]) -> None:
    if clock not in row.values:
        raise row.error(clock, f"is missing; the line has {', '.join(row.values)}")
    for name in known:
        if (name in row.values) != (name in present):
            state = "is missing here and given" if name in present else "is given here and missing"
            raise row.error(name, f"{state} on the first line: give it on every line or on none")


def _has_request_columns(names: frozenset[str]) -> bool:
    return names.issuperset(TOKENS) and not names.isdisjoint(CLOCKS)


readers.add(
    "csv",
    Reader(
        read_csv,
        lambda path: _has_request_columns(sniff_csv(path)),
        "plain CSV of requests: arrival_s (or timestamp), prompt_tokens, output_tokens, optional id, domain",
    ),
)
readers.add(
    "jsonl",
    Reader(
        read_jsonl,
        lambda path: _has_request_columns(sniff_json(path)),
        "plain JSON Lines of requests: the keys of csv, and prefix_blocks with block_tokens",
    ),
)
