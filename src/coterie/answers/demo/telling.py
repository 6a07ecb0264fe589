"""Report the progress of a comparison to a gateway's dashboard: `PUT /comparison`, from a separate thread.

The comparison never waits for the gateway. Only the newest state is sent, at most four times a second. If the gateway
is unavailable, its dashboard lacks the progress; the comparison goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from coterie.answers.demo.run import DemoRow
from coterie.errors import UnavailableError
from coterie.net.http_client import Client

PERIOD_S = 0.25


class Telling:
    """Progress of a running comparison, for the gateway's dashboard."""

    def __init__(self, url: str, routers: Sequence[str], hardware: str) -> None:
        self._url = url
        self._state: dict[str, Any] = {"state": "running", "routers": list(routers), "hardware": hardware}
        self._lock = threading.Lock()
        self._news, self._over = threading.Event(), threading.Event()

    def progress(self, what: str, done: int, total: int) -> None:
        self._change(stage=what[:500], done=done, total=total)

    def rows(self, rows: Sequence[DemoRow]) -> None:
        self._change(rows=[_told(row) for row in rows])

    def done(self, verdict: str) -> None:
        self._change(state="done", stage="", done=0, total=0, verdict=verdict[:500])

    def failed(self, problem: str) -> None:
        self._change(state="failed", stage="", done=0, total=0, verdict=f"The comparison failed: {problem}"[:500])

    def _change(self, **values: Any) -> None:
        with self._lock:
            self._state = {**self._state, **values}
        self._news.set()

    def run(self) -> None:
        """Send each new state until :meth:`end` is called; runs in the reporting thread."""
        while not self._over.is_set() or self._news.is_set():
            self._news.wait()
            self._news.clear()
            with self._lock:
                state = self._state
            with suppress(UnavailableError):
                asyncio.run(self._send(state))
            self._over.wait(PERIOD_S)

    async def _send(self, state: dict[str, Any]) -> None:
        async with Client(self._url) as client:
            await client.call("PUT", "/comparison", state)

    def end(self) -> None:
        self._over.set()
        self._news.set()


@contextmanager
def telling(url: str, routers: Sequence[str], hardware: str) -> Iterator[Telling]:
    """Report progress while the block runs. The block calls `done` at its end; an exception reports a failure."""
    found = Telling(url, routers, hardware)
    thread = threading.Thread(target=found.run, name="coterie-telling", daemon=True)
    thread.start()
    try:
        yield found
    except BaseException as error:
        found.failed(str(error))
        raise
    finally:
        found.end()
        thread.join()


def _told(row: DemoRow) -> dict[str, Any]:
    return {
        "router": row.router,
        "experts": row.experts,
        "saving_pct": row.saving_pct,
        "low_pct": row.interval_pct[0],
        "high_pct": row.interval_pct[1],
        "step_ms": row.h200_ms,
        "requests": row.requests,
    }
