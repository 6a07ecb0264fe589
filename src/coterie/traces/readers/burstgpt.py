"""BurstGPT's traces: CSV of requests to ChatGPT and GPT-4 through a university's gateway.

    Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type

``Timestamp`` is in seconds since the collection began; the third file of the release adds the bracketed columns.
Requests that failed have 0 response tokens and are kept, as the file has them: the published files named
``without_fails`` leave them out. Columns other than the time and the two token counts are kept as extra, as text.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from coterie.traces.readers._rows import RequestColumns, csv_rows, sniff_csv
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import RequestTrace

USED = ("Timestamp", "Request tokens", "Response tokens")
COLUMNS = (*USED, "Model", "Total tokens", "Log Type")


def read_burstgpt(path: Path, options: ReadOptions) -> RequestTrace:
    columns = RequestColumns(USED)
    arrival_s = array("d")
    for row in csv_rows(path, COLUMNS):
        arrival_s.append(row.time("Timestamp"))
        columns.add(row, row.whole("Request tokens"), row.whole("Response tokens"))
    return columns.trace(path, "burstgpt", options, np.array(arrival_s))


readers.add(
    "burstgpt",
    Reader(
        read_burstgpt,
        lambda path: sniff_csv(path).issuperset(COLUMNS),
        "BurstGPT CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type",
    ),
)
