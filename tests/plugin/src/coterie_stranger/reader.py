"""A log of tokens as text: one line a token, and a last line that says how many there were.

stranger-log 1 MODEL EXPERTS LAYERS TOP_K
REQUEST prefill|decode ID,ID;ID,ID        ids of a layer between commas, layers between semicolons
end TOKENS
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np

from coterie.errors import TraceError
from coterie.traces import ActivationTrace, TraceMeta
from coterie.traces.readers import Reader, ReadOptions
from coterie.types import DECODE, PREFILL

PHASES = {"prefill": PREFILL, "decode": DECODE}


def read_log(path: Path, options: ReadOptions) -> ActivationTrace:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(path, "file", f"cannot be read: {error}") from None
    head, *lines = text.splitlines() or [""]
    if not head.startswith("stranger-log 1 ") or not lines or lines[-1] != f"end {len(lines) - 1}" or text[-1] != "\n":
        raise TraceError(path, "lines", "must run from 'stranger-log 1' to 'end TOKENS', with as many in between")
    try:
        model, *sizes = head.split()[2:]
        experts, layers, top_k = (int(size) for size in sizes)
        rows = [line.split() for line in lines[:-1]]
        names = [name for name, _, _ in rows]
        ids = np.array([[layer.split(",") for layer in row[2].split(";")] for row in rows]).astype(np.int64)
        phase = np.array([PHASES[row[1]] for row in rows], np.uint8)
        lengths = [len(list(group)) for _, group in groupby(names)]
        meta = TraceMeta(options.model or model, options.num_experts or experts, layers, top_k)
        return ActivationTrace.from_arrays(meta, ids, np.concatenate([[0], np.cumsum(lengths)]), phase=phase)
    except (ValueError, KeyError, IndexError) as error:
        raise TraceError(path, "line", f"cannot be parsed: {error}") from None


def sniff_log(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(15) == b"stranger-log 1 "
    except OSError:
        return False


STRANGER_LOG = Reader(read_log, sniff_log, "lines of tokens and their experts, of a stranger")
