"""Request logs: Azure's and BurstGPT's CSV files, Mooncake's JSON Lines, and plain tables.

Plain tables, CSV or JSON Lines, are the formats to write by hand or from your own logs. Their columns (keys) are
``arrival_s`` or ``timestamp``, both in seconds, ``prompt_tokens`` and ``output_tokens``; optionally ``id`` and
``domain``; in JSON Lines also ``prefix_blocks`` with ``block_tokens``. All other columns are kept as extra. CSV has no
types, so its extra columns are text; JSON Lines keeps numbers, text, lists and null as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.traces.readers._rows import RequestColumns, Row, csv_rows, json_rows, sniff_csv, sniff_json
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import RequestTrace

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def read_azure(path: Path, options: ReadOptions) -> RequestTrace:
    """Read Azure's LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

    Timestamps are absolute, with up to seven fractional digits (ticks of 100 ns) and, in 2024, a time zone. They are
    subtracted as integer nanoseconds before the conversion to seconds, so that no precision is lost.
    """
    columns = RequestColumns(AZURE_COLUMNS, 1e9, "q")
    for row in csv_rows(path, AZURE_COLUMNS):
        columns.add(row, _nanoseconds(row), row.whole("ContextTokens"), row.whole("GeneratedTokens"))
    return columns.trace(path, "azure", options)


def _nanoseconds(row: Row) -> int:
    text = row.values["TIMESTAMP"].strip()
    match = _STAMP.fullmatch(text)
    try:
        whole, fraction, zone = match.groups() if match else ("", "", "")  # "" is not a time: it raises
        seconds = (datetime.fromisoformat(whole + (zone or "Z")) - _EPOCH) // _SECOND
        if not 1700 < int(whole[:4]) < 2200:  # the years whose nanoseconds fit 64 bits
            raise ValueError
    except ValueError:
        raise row.error(
            "TIMESTAMP", f"found {text[:40]!r}, expected a time like 2023-11-16 18:17:03.9799600 (a zone may follow)"
        ) from None
    return seconds * 10**9 + int((fraction or "0").ljust(9, "0"))


readers.add(
    "azure",
    Reader(
        read_azure,
        lambda path: sniff_csv(path).issuperset(AZURE_COLUMNS),
        "Azure LLM inference trace 2023 or 2024, CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    ),
)


BURSTGPT_USED = ("Timestamp", "Request tokens", "Response tokens")
BURSTGPT_COLUMNS = (*BURSTGPT_USED, "Model", "Total tokens", "Log Type")


def read_burstgpt(path: Path, options: ReadOptions) -> RequestTrace:
    """Read BurstGPT's traces: CSV of requests to ChatGPT and GPT-4 through a university's gateway.

        Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type

    ``Timestamp`` is in seconds since the collection began; the third file of the release adds the bracketed columns.
    Failed requests have 0 response tokens and are kept; the published files named ``without_fails`` do not have them.
    Columns other than the time and the two token counts are kept as extra, as text.
    """
    columns = RequestColumns(BURSTGPT_USED)
    for row in csv_rows(path, BURSTGPT_COLUMNS):
        columns.add(row, row.number("Timestamp"), row.whole("Request tokens"), row.whole("Response tokens"))
    return columns.trace(path, "burstgpt", options)


readers.add(
    "burstgpt",
    Reader(
        read_burstgpt,
        lambda path: sniff_csv(path).issuperset(BURSTGPT_COLUMNS),
        "BurstGPT CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type",
    ),
)


MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(path: Path, options: ReadOptions) -> RequestTrace:
    """Read Mooncake's traces: JSON Lines of requests with the hashes of their prompt's 512-token blocks.

        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

    ``timestamp`` is in milliseconds. A prompt must have one hash per 512 tokens, rounded up, as on all 12,031 lines of
    the published conversation trace: a shorter list would look like a smaller shared prefix.
    """
    columns, blocks = RequestColumns(MOONCAKE_KEYS, 1e3), []
    for row in json_rows(path, MOONCAKE_KEYS):
        length, hashes = row.whole("input_length"), row.blocks("hash_ids")
        if len(hashes) != -(-length // MOONCAKE_BLOCK_TOKENS):
            raise row.error(
                "hash_ids",
                f"found {len(hashes)} hashes, expected {-(-length // MOONCAKE_BLOCK_TOKENS)} for {length} tokens in "
                f"blocks of {MOONCAKE_BLOCK_TOKENS}",
            )
        blocks.append(hashes)
        columns.add(row, row.number("timestamp"), length, row.whole("output_length"))
    return columns.trace(path, "mooncake", options, prefix_blocks=blocks, block_tokens=MOONCAKE_BLOCK_TOKENS)


readers.add(
    "mooncake",
    Reader(
        read_mooncake,
        lambda path: sniff_json(path).issuperset(MOONCAKE_KEYS),
        "Mooncake JSON Lines: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks",
    ),
)


TOKENS = ("prompt_tokens", "output_tokens")
CLOCKS = ("arrival_s", "timestamp")
OPTIONAL = ("id", "domain")
BLOCKS = ("prefix_blocks", "block_tokens")


def _read(rows: Iterator[Row], path: Path, format: str, options: ReadOptions, known: tuple[str, ...]) -> RequestTrace:
    """Read a plain table. The first row determines the optional columns; every other row must have the same."""
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
    texts: dict[str, list[str]] = {name: [] for name in OPTIONAL if name in present}
    blocks: list[NDArray[np.int64]] = []
    for row in chain((first,), rows):
        if not row.is_text:  # in CSV the header applies to every row
            _check_keys(row, clock, known, present)
        for name, column in texts.items():
            column.append(row.text(name))
        if "prefix_blocks" in present:
            blocks.append(row.blocks("prefix_blocks"))
            if row.whole("block_tokens") != block_tokens:
                raise row.error("block_tokens", f"found {row.whole('block_tokens')}, line {first.line} {block_tokens}")
        columns.add(row, row.number(clock), row.whole("prompt_tokens"), row.whole("output_tokens"))
    return columns.trace(
        path,
        format,
        options,
        ids=texts.get("id"),
        domains=texts.get("domain"),
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
        lambda path, options: _read(csv_rows(path, TOKENS), path, "csv", options, OPTIONAL),
        lambda path: _has_request_columns(sniff_csv(path)),
        "plain CSV of requests: arrival_s (or timestamp), prompt_tokens, output_tokens, optional id, domain",
    ),
)
readers.add(
    "jsonl",
    Reader(
        lambda path, options: _read(json_rows(path, TOKENS), path, "jsonl", options, (*OPTIONAL, *BLOCKS)),
        lambda path: _has_request_columns(sniff_json(path)),
        "plain JSON Lines of requests: the keys of csv, and prefix_blocks with block_tokens",
    ),
)
