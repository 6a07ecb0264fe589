"""The last N routing decisions, for `GET /decisions`.

A record keeps references and is formatted only when it is read. It keeps neither the profile (59 KB at DeepSeek-V3's
size) nor any of the prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import check_at_least
from coterie.routing import Decision

MAX_TEXT = 200
"""Most characters shown of an id or a reason: a client can choose a long id."""


class _Record(NamedTuple):
    id: str
    time_s: float
    pool: str
    worker: str
    ids: Sequence[str | None]
    decision: Decision
    fallback: str | None
    cached: NDArray[np.int64] | None
    beliefs: NDArray[np.float64] | None
    source: str | None
    prompt_tokens: int
    decision_s: float | None
    router: str


class Decisions:
    """Ring buffer of the last decisions. Recording one takes about a microsecond."""

    def __init__(self, most: int = 1000) -> None:
        check_at_least(0, most=most)
        self.most = most
        self.recorded = 0
        """Number of decisions since the start."""
        self.before_reading: Callable[[], None] = lambda: None
        """Function called before reading, to record decisions that are still buffered elsewhere."""
        self._ring: deque[_Record] = deque(maxlen=most)

    def add(
        self,
        id: str,
        pool: str,
        worker: str,
        ids: Sequence[str | None],
        decision: Decision,
        *,
        time_s: float,
        fallback: str | None = None,
        cached: NDArray[np.int64] | None = None,
        beliefs: NDArray[np.float64] | None = None,
        source: str | None = None,
        prompt_tokens: int = 0,
        decision_s: float | None = None,
        router: str = "",
    ) -> None:
        """Record a decision made at `time_s`, in seconds since 1970.

        `ids` are the worker ids by row, None for an empty row: pass a sequence that is replaced when the fleet changes,
        not changed in place. `cached` is the request's cached tokens at each worker, [row]; `beliefs` the share of each
        worker's claims that is believed, [row]; `source` the source of the request's footprint; `router` the name of
        the router that chose.
        """
        self.recorded += 1
        self._ring.append(
            _Record(
                id,
                time_s,
                pool,
                worker,
                ids,
                decision if decision.profile is None else decision._replace(profile=None),
                fallback,
                cached,
                beliefs,
                source,
                prompt_tokens,
                decision_s,
                router,
            )
        )

    def __len__(self) -> int:
        return len(self._ring)

    def last(self, most: int = 100, *, pool: str | None = None, worker: str | None = None) -> list[dict[str, Any]]:
        """Return at most `most` decisions as plain values, newest first, optionally of one pool or one worker only."""
        self.before_reading()
        wanted = (
            record for record in reversed(self._ring) if pool in (None, record.pool) and worker in (None, record.worker)
        )
        return [_plain(record) for record in islice(wanted, max(0, most))]


def _plain(record: _Record) -> dict[str, Any]:
    scores, cached = _numbers(record.decision.scores) or [], _numbers(record.cached)
    named = [(row, id) for row, id in enumerate(record.ids) if id is not None]
    chosen = next((row for row, id in named if id == record.worker), None)
    return {
        "id": record.id[:MAX_TEXT],
        "time": datetime.fromtimestamp(record.time_s, UTC).isoformat(timespec="milliseconds"),
        "pool": record.pool,
        "worker": record.worker,
        "router": record.router[:MAX_TEXT],
        # JSON has no infinity: null marks a worker that must not get the request
        "scores": {id: scores[row] if math.isfinite(scores[row]) else None for row, id in named if row < len(scores)},
        "reason": record.decision.reason[:MAX_TEXT],
        "fallback": record.fallback,
        "prompt_tokens": int(record.prompt_tokens),
        "cached_tokens": None if cached is None or chosen is None or chosen >= len(cached) else cached[chosen],
        "cached_tokens_by_worker": None
        if cached is None
        else {id: cached[row] for row, id in named if row < len(cached)},
        "claims_believed": None
        if record.beliefs is None
        else {id: round(float(record.beliefs[row]), 3) for row, id in named if row < len(record.beliefs)},
        "footprint": record.source,
        "decision_us": None if record.decision_s is None else round(record.decision_s * 1e6, 1),
    }


def _numbers(values: Any) -> list[Any] | None:
    """Return an array [row] as a list; None if it is missing or a plugin returned anything else."""
    try:
        rows = np.asarray(values)
    except ValueError:  # rows of different lengths
        return None
    return rows.tolist() if rows.ndim == 1 and rows.dtype.kind in "iuf" else None
