"""The contract of a suite: one published claim or open question, answered with our numbers beside the published ones.

A suite is wrong to trust where its notes say so: they name what is reproduced, what is not, and why. A user's package
adds its own suites through the entry point group ``coterie.suites``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from coterie.errors import ConfigError
from coterie.registry import Registry

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What a user may choose; a suite reads what concerns it."""

    trace: Path | None = None
    """Trace to evaluate on, instead of the suite's own."""
    trace_format: str | None = None
    """Format of that trace, where the file does not show it."""
    batch: int = 128
    """Tokens of one step, over all ranks together."""
    data: Path | None = None
    """Folder of real data (docs/data.md); None skips what needs it, with a note."""
    seed: int = 0
    """Of everything random, where a suite has no seeds of its own."""
    model: Path | None = None
    """Folder of a checkpoint whose own router is run."""
    requests: int | None = None
    """Requests of one run; None is the suite's own number."""
    seeds: tuple[int, ...] | None = None
    """A run each; None is the suite's own."""
    rates: tuple[float, ...] | None = None
    """Requests a second; None is the suite's own."""
    strategies: tuple[str, ...] | None = None
    """Batch selection strategies to compare; None is all."""
    out: Path | None = None
    """Folder for files and figures; None writes none."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch={self.batch} must be at least 1")
        if self.requests is not None and self.requests < 1:
            raise ConfigError(f"requests={self.requests} must be at least 1")
        for seed in (self.seed, *(self.seeds or ())):
            if seed < 0:
                raise ConfigError(f"seed={seed} must be at least 0")
        for rate in self.rates or ():
            if not 0 < rate < float("inf"):
                raise ConfigError(f"rate={rate} must be a finite number above 0")


class Report(Protocol):
    """Hears how far a suite is."""

    def __call__(self, doing: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Plain values only: a result is written as JSON as it stands."""

    suite: str
    rows: list[dict[str, Any]]
    """Ours, and under ``published`` the numbers they are compared with, or None."""
    notes: list[str]
    """What was computed, what agrees, what does not and why: one line each."""


class Column(NamedTuple):
    """A column of a printed table."""

    heading: str
    value: Callable[[Row], Any]


class SuiteTable(NamedTuple):
    """How some of the rows are printed; the JSON has them all, in full."""

    title: str
    columns: tuple[Column, ...]
    shows: Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Suite:
    """One evaluation."""

    help: str
    """One line: what is computed, and what it is held against."""
    run: Callable[[SuiteOptions, Report], SuiteResult]
    tables: tuple[SuiteTable, ...] = ()
    """Empty prints every plain value of every row."""
    writes_files: bool = False
    """Writes more than its rows: figures, a log."""


suites: Registry[Suite] = Registry("suite", group="coterie.suites")
"""Holds the built-in ones after :func:`load_suites`."""

_BUILT_IN = ("coterie.evaluation.all_to_all", "coterie.evaluation.predictors", "coterie.evaluation.caps",
             "coterie.evaluation.regimes", "coterie.evaluation.migration",
             "coterie.evaluation.latency_optimal", "coterie.evaluation.eldr", "coterie.evaluation.joint")  # fmt: skip


def load_suites() -> Registry[Suite]:
    """The registry with the built-in suites in it; importing one registers it."""
    for module in _BUILT_IN:
        import_module(module)
    return suites
