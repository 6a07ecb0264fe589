"""The contract of a suite: one published claim or open question, answered with our numbers beside the published ones.

A suite is wrong to trust where its notes say so: they name what is reproduced, what is not, and why. A user's package
adds its own suites through the entry point group ``coterie.suites``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from coterie.errors import ConfigError, UnknownNameError
from coterie.registry import Registry

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What a user may choose; a suite reads what concerns it, and says what that is."""

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
    routers: tuple[str, ...] | None = None
    """Routers to compare beside the suite's own; None is none."""
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


CHOICES = tuple(field.name for field in fields(SuiteOptions) if field.name not in ("data", "out"))
"""Options that a suite may or may not read. The data folder is no option of the command, and every suite has --out."""


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
    reads: tuple[str, ...] | None = None
    """Those of CHOICES that `run` reads, of a user's own suite: a user who gives another is told. None is all."""

    def __post_init__(self) -> None:
        for name in self.reads or ():
            if name not in CHOICES:
                raise UnknownNameError("suite option", name, CHOICES)


suites: Registry[Suite] = Registry("suite", group="coterie.suites")
"""Holds the built-in ones after :func:`load_suites`."""


class BuiltIn(NamedTuple):
    """A suite that is not imported yet."""

    module: str
    """Of coterie.evaluation; importing it registers the suite."""
    reads: tuple[str, ...]
    """Those of CHOICES that it reads."""


BUILT_IN = {
    "all-to-all": BuiltIn("all_to_all", ("trace", "trace_format", "batch", "seed")),
    "predictors": BuiltIn("predictors", ("trace", "trace_format", "seed", "model", "requests")),
    "caps": BuiltIn("caps", ("requests", "seeds", "rates", "strategies")),
    "regimes": BuiltIn("regimes", ("requests", "seeds", "rates", "strategies")),
    "migration": BuiltIn("migration", ("trace", "trace_format", "batch", "seed")),
    "latency-optimal": BuiltIn("latency_optimal", ("seed", "seeds")),
    "eldr": BuiltIn("eldr", ("requests", "seeds", "routers")),
    "joint": BuiltIn("joint", ("requests", "seeds")),
}
"""By name. What they read stands here because help shows it, and importing them all takes seconds."""


def load_suites() -> Registry[Suite]:
    """The registry with the built-in suites in it; importing one registers it."""
    for built_in in BUILT_IN.values():
        import_module(f"coterie.evaluation.suites.{built_in.module}.suite")
    return suites


def load_suite(name: str) -> Suite:
    """One suite; a built-in one is imported alone, and an unknown name is told all there are."""
    if name not in BUILT_IN:
        return load_suites()[name]
    import_module(f"coterie.evaluation.suites.{BUILT_IN[name].module}.suite")
    return suites[name]


def suite_names() -> list[str]:
    """All known names, sorted; no built-in suite is imported for it."""
    return sorted({*BUILT_IN, *suites.names()})


def options_read(suite: str) -> tuple[str, ...]:
    """Those of CHOICES that a suite reads; a built-in one need not be imported."""
    if suite in BUILT_IN:
        return BUILT_IN[suite].reads
    reads = suites[suite].reads
    return CHOICES if reads is None else reads
