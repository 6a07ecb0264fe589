"""Reports of a waiting list: counters, problems, and decisions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from coterie.errors import ConfigError, CoterieError


@dataclass
class WaitingCounters:
    """Counts since the start."""

    selections: int = 0
    """Selections made by the strategy."""
    handed_out: int = 0
    moved: int = 0
    """Requests handed out while an older one of their class waited."""
    unknown: int = 0
    """Windows without a known load, served in order of arrival."""
    failures: int = 0
    """Failures of strategies (served in order of arrival) and predictors (served without that request's load)."""
    worst_skips: int = 0
    """Most times any request was passed over."""


class WaitingReport:
    """Counters; each kind of problem is reported once."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.counters = WaitingCounters()
        self._tell = tell
        self._told: set[str] = set()

    def failed(self, what: str, error: Exception) -> None:
        """Count a failure that serving survives."""
        self.counters.failures += 1
        text = str(error) if isinstance(error, CoterieError) else repr(error)
        self.once(what, f"{what} failed, serving goes on: {text}")

    def once(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            if self._tell is not None:
                self._tell(message)


class BatchDecision(NamedTuple):
    """One selection, with requests by name."""

    queue: str
    window: list[str]
    """Window as the strategy saw it, oldest first."""
    skipped: list[int]
    """[request of the window] times it was passed over before."""
    queued: int
    """Waiting requests of the class, those beyond the window included."""
    size: int
    """Requests asked for."""
    running: list[str]
    order: list[str]
    """Selected requests, in order."""
    reason: str


class DecisionFile:
    """Appends a line of JSON for every decision."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.open("a").close()
        except OSError as error:
            raise ConfigError(f"decisions={str(path)!r}: cannot be written: {error.strerror}") from None

    def __call__(self, decision: BatchDecision) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(decision._asdict()) + "\n")
