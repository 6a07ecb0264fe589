"""Azure's LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

Timestamps are absolute, with up to seven fractional digits (ticks of 100 ns) and, in 2024, a time zone; they are
subtracted as whole nanoseconds, so nothing is lost to floating point on the way to seconds since the first.
"""

from __future__ import annotations

import re
from array import array
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from coterie.traces.readers._rows import RequestColumns, Row, csv_rows, sniff_csv
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import RequestTrace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)


def read_azure(path: Path, options: ReadOptions) -> RequestTrace:
    columns = RequestColumns(COLUMNS)
    arrival_ns = array("q")
    for row in csv_rows(path, COLUMNS):
        arrival_ns.append(_nanoseconds(row))
        columns.add(row, row.whole("ContextTokens"), row.whole("GeneratedTokens"))
    since_first = np.array(arrival_ns) - min(arrival_ns)
    return columns.trace(path, "azure", options, since_first / 1e9)


def _nanoseconds(row: Row) -> int:
    text = row.values["TIMESTAMP"].strip()
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        whole, fraction, zone = match.groups()
        seconds = (datetime.fromisoformat(whole) - _EPOCH) // _SECOND
        offset = 0
        if zone not in (None, "Z"):
            offset = (int(zone[1:3]) * 3600 + int(zone[4:]) * 60) * (-1 if zone[0] == "-" else 1)
        if not 1700 < int(whole[:4]) < 2200:  # the years whose nanoseconds fit 64 bits
            raise ValueError
    except ValueError:
        problem = f"found {text[:40]!r}, expected a time like 2023-11-16 18:17:03.9799600 (a zone may follow)"
        raise row.error("TIMESTAMP", problem) from None
    return (seconds - offset) * 10**9 + int((fraction or "0").ljust(9, "0"))


readers.add(
    "azure",
    Reader(
        read_azure,
        lambda path: sniff_csv(path).issuperset(COLUMNS),
        "Azure LLM inference trace 2023 or 2024, CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    ),
)
