"""Log lines: one JSON object per event, on stderr.

Events are the gateway's start and stop, reloads, changes of a worker's state, decisions of the control loop, unexpected
exceptions, and optionally the end of each request. No line holds text of a request, a header or a key: an event has
only the fields of its method, and of an exception only the class and the place are logged, as its message may quote
the request.

A thread writes the lines, because a stalled reader of stderr would otherwise block the event loop. If too many lines
wait, further ones are dropped and counted, and the count is logged.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import msgspec
import numpy as np

from coterie.errors import check_at_least

MAX_TEXT = 500
"""Most characters of a text that are logged."""


class Log:
    """Writer of events as JSON lines. Close it, or the last lines may be lost."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        requests: bool = False,
        most_waiting: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`requests`: whether to log the end of every request. `most_waiting`: most lines that wait to be written."""
        check_at_least(1, most_waiting=most_waiting)
        self.requests, self.lost = requests, 0
        self._stream = sys.stderr if stream is None else stream
        self._most, self._clock = most_waiting, clock
        self._waiting: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._closed = False

    def started(self, url: str, version: str, pools: Mapping[str, str], workers: int) -> None:
        """Log the gateway's start. `pools` maps each pool's name to its router; `workers` is the number of workers."""
        self._put("start", url=url, version=version, pools=dict(pools), workers=workers)

    def stopped(self, reason: str, cut: int = 0, seconds: float = 0.0) -> None:
        """Log the gateway's stop. `cut`: requests cut at the end of the drain; `seconds`: duration of the drain."""
        self._put("stop", reason=reason, cut=cut, seconds=round(seconds, 3))

    def reloaded(self, changed: Sequence[str] = (), problem: str | None = None) -> None:
        """Log a reload of the config; with a problem the old config stays in force."""
        self._put("reload", ok=problem is None, changed=list(changed), problem=problem)

    def worker(self, worker: str, pool: str, state: str, reason: str | None = None) -> None:
        """Log a worker's change of state: joined, left, healthy, unhealthy, open, half_open, closed, draining…"""
        self._put("worker", worker=worker, pool=pool, state=state, reason=reason)

    def control(self, kind: str, reason: str, values: Mapping[str, Any]) -> None:
        """Log a decision of the control loop that changed something, or failed to."""
        self._put("control", kind=kind, reason=reason, values=dict(values))

    def warning(self, problem: str) -> None:
        """Log a warning for the operator, about the gateway and never about a request."""
        self._put("warning", problem=problem)

    def failed(self, error: BaseException) -> None:
        """Log an unexpected exception: its class, and the line that raised it."""
        frames = traceback.extract_tb(error.__traceback__)
        line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None
        self._put("exception", error=type(error).__name__, line=line)

    def request(
        self,
        id: str,
        path: str,
        outcome: str,
        status: int | None,
        *,
        caller: str | None = None,
        worker: str | None = None,
        prefill_worker: str | None = None,
        failures: Sequence[str] = (),
        ttft_s: float | None = None,
        total_s: float | None = None,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Log the end of a request, if `requests` is set. `path` is without its query.

        `failures` holds the failure before each retry, as "WORKER KIND".
        """
        if self.requests:
            self._put(
                "request",
                id=id,
                path=path,
                outcome=outcome,
                status=status,
                caller=caller,
                worker=worker,
                prefill_worker=prefill_worker,
                retries=len(failures),
                failures=list(failures) or None,
                ttft_ms=None if ttft_s is None else round(ttft_s * 1e3, 3),
                total_ms=None if total_s is None else round(total_s * 1e3, 3),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
            )

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the waiting lines; give up after `timeout_s` if nobody reads."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
        if self._writer is not None:
            self._writer.join(timeout_s)

    def _put(self, name: str, **fields: Any) -> None:
        if self._closed or self._waiting.qsize() >= self._most:
            self.lost += 1
            return
        self._waiting.put({"time": self._clock(), "event": name, **fields})
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="coterie-log", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        told = 0
        while (event := self._waiting.get()) is not None:
            try:
                self._stream.write(_line(event))
                if self.lost > told:
                    self._stream.write(_line({"time": self._clock(), "event": "lines_lost", "lines": self.lost - told}))
                    told = self.lost
                if self._waiting.empty():
                    self._stream.flush()
            except Exception:  # the stream is closed or its reader is gone; the next line may succeed
                self.lost += 1


def _line(event: Mapping[str, Any]) -> str:
    fields = {name: _short(value) for name, value in event.items() if value is not None}
    fields["time"] = datetime.fromtimestamp(event["time"], UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode(fields, enc_hook=_plain).decode() + "\n"


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; return the class name of any other value."""
    return value.item() if isinstance(value, np.generic) else type(value).__name__


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_TEXT].encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded in UTF-8
    if isinstance(value, dict):
        return {_short(key): _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value
