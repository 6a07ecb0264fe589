"""Find and read new dumps of SGLang's expert distribution recorder.

Every rank writes its own dump. Counts of ranks are summed. Ranks that attend to the same requests record the same
tokens, so that only one rank of each attention group is read.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.torch_files import read_sglang_recorder
from coterie.errors import TraceError
from coterie.traces import ActivationTrace, LoadTable, RequestTrace
from coterie.traces.readers.base import ReadOptions

SETTLE_S, DUMP_WAIT_S = 1.0, 60.0
"""A dump is complete when no file has grown for `SETTLE_S` seconds; waiting ends after `DUMP_WAIT_S` seconds."""


def dumps_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("expert_distribution_recorder_*.pt")}


async def new_dumps(folder: Path, before: Mapping[Path, int]) -> list[Path]:
    """Wait until the new dump files stop growing and return them; `before` are the old files."""
    seen: dict[Path, int] = {}
    changed = begun = time.monotonic()
    while time.monotonic() - begun < DUMP_WAIT_S:
        now = {path: size for path, size in dumps_in(folder).items() if path not in before}
        if now != seen:
            seen, changed = now, time.monotonic()
        elif now and time.monotonic() - changed >= SETTLE_S:
            break
        await asyncio.sleep(0.1)
    return sorted(seen)


def ranks_sharing_tokens(info: Mapping[str, Any]) -> int:
    """Return how many consecutive ranks attend to the same tokens with data-parallel attention; 0 means all ranks."""
    ranks, groups = info.get("tp_size"), info.get("dp_size")
    if not info.get("enable_dp_attention") or not isinstance(ranks, int) or not isinstance(groups, int) or groups < 1:
        return 0
    return max(1, ranks // groups)


def read_dumps(files: Sequence[Path], options: ReadOptions, shared_by: int) -> ActivationTrace | LoadTable:
    """Read the new files of one dump; `shared_by` is :func:`ranks_sharing_tokens`."""
    ranks = {path: int(rank[1]) for path in files if (rank := re.search(r"_(\d{1,6})\.pt$", path.name))}
    if len(files) == 1 or len(ranks) < len(files):
        return _known(read_sglang_recorder(files[-1], options), files[-1])
    first = _known(read_sglang_recorder(min(files, key=ranks.__getitem__), options), files[0])
    if isinstance(first, LoadTable):
        with (
            tempfile.TemporaryDirectory() as name
        ):  # links to only these dumps: the server's folder may hold older ones
            for path in files:
                (Path(name) / path.name).symlink_to(path.resolve())
            return _known(read_sglang_recorder(Path(name), options), Path(name))
    if not shared_by:
        return first
    chosen = sorted((path for path in files if ranks[path] % shared_by == 0), key=ranks.__getitem__)
    return _joined([_known(read_sglang_recorder(path, options), path) for path in chosen])


def _known(trace: Any, path: Path) -> ActivationTrace | LoadTable:
    if not isinstance(trace, ActivationTrace | LoadTable):
        raise TraceError(path, "dump", f"holds a {type(trace).__name__}, expected experts")
    return trace


def _joined(traces: Sequence[ActivationTrace | LoadTable]) -> ActivationTrace:
    """Concatenate the traces of several ranks, rank by rank."""
    held = [trace for trace in traces if isinstance(trace, ActivationTrace)]
    parts, tables = [trace.arrays()[0] for trace in held], [trace.requests for trace in held]
    lengths = np.concatenate([trace.lengths for trace in held])
    token_ids = [tokens.token_ids for tokens in parts if tokens.token_ids is not None]
    missing = [count for table in tables for count in table.extra.get("missing_tokens", [0] * len(table))]
    requests = RequestTrace(
        np.concatenate([table.prompt_tokens for table in tables]),
        np.concatenate([table.output_tokens for table in tables]),
        extra={"missing_tokens": missing},
    )
    return ActivationTrace.from_arrays(
        held[0].meta,
        np.concatenate([tokens.expert_ids for tokens in parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        requests,
        np.concatenate([tokens.phase for tokens in parts]),
        np.concatenate(token_ids) if len(token_ids) == len(parts) else None,
    )
