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

from coterie.errors import UnknownNameError, check_at_least, check_positive
from coterie.registry import Registry

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Options of a run; a suite declares which of them it reads."""

    trace: Path | None = None
    """Trace to evaluate on, instead of the suite's own."""
    trace_format: str | None = None
    """Format of that trace; None detects it."""
    batch: int = 128
    """Tokens per step, summed over all ranks."""
    data: Path | None = None
    """Folder of real data (docs/data.md); None skips what needs it, with a note."""
    seed: int = 0
    """Seed of the random generator, for suites that take one seed."""
    model: Path | None = None
    """Checkpoint folder whose own router is evaluated."""
    requests: int | None = None
    """Requests per run; None takes the suite's default."""
    seeds: tuple[int, ...] | None = None
    """Seeds, one run per seed; None takes the suite's default."""
    rates: tuple[float, ...] | None = None
    """Requests per second; None takes the suite's default."""
    strategies: tuple[str, ...] | None = None
    """Batch selection strategies to compare; None takes all."""
    routers: tuple[str, ...] | None = None
    """Routers to compare in addition to the suite's own."""
    out: Path | None = None
    """Folder for files and figures; None writes none."""

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, requests=self.requests)
        for seed in (self.seed, *(self.seeds or ())):
            check_at_least(0, seed=seed)
        for rate in self.rates or ():
            check_positive(rate=rate)


CHOICES = tuple(field.name for field in fields(SuiteOptions) if field.name not in ("data", "out"))
"""Options that a suite may read or not. Not among them: the data folder (no command-line option) and --out (all)."""


class Report(Protocol):
    """Callback: progress of a suite."""

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
    """A printed table of some rows; the JSON holds all rows in full."""

    title: str
    columns: tuple[Column, ...]
    shows: Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Suite:
    """One evaluation."""

    help: str
    """One line: what is computed, and what it is compared with."""
    run: Callable[[SuiteOptions, Report], SuiteResult]
    tables: tuple[SuiteTable, ...] = ()
    """Tables to print; empty prints every plain value of every row."""
    writes_files: bool = False
    """Whether it writes files besides its rows, such as figures."""
    reads: tuple[str, ...] | None = None
    """Names in CHOICES that `run` reads (plugins); any other option given is an error. None allows all."""

    def __post_init__(self) -> None:
        for name in self.reads or ():
            if name not in CHOICES:
                raise UnknownNameError("suite option", name, CHOICES)


suites: Registry[Suite] = Registry("suite", group="coterie.suites")
"""Registered suites; built-in ones are added by :func:`load_suites`."""


class BuiltIn(NamedTuple):
    """A suite that is not imported yet."""

    module: str
    """Package in coterie.evaluation.suites; importing it registers the suite."""
    reads: tuple[str, ...]
    """Names in CHOICES that it reads."""


BUILT_IN = {
    "all-to-all": BuiltIn("all_to_all", ("trace", "trace_format", "batch", "seed")),
    "predictors": BuiltIn("predictors", ("trace", "trace_format", "seed", "model", "requests")),
    "caps": BuiltIn("caps", ("requests", "seeds", "rates", "strategies")),
    "regimes": BuiltIn("regimes", ("requests", "seeds", "rates", "strategies")),
    "migration": BuiltIn("migration", ("trace", "trace_format", "batch", "seed")),
    "latency-optimal": BuiltIn("latency_optimal", ("seed", "seeds")),
    "placement": BuiltIn("placement", ("seeds",)),
    "eldr": BuiltIn("eldr", ("requests", "seeds", "routers")),
    "joint": BuiltIn("joint", ("requests", "seeds")),
    "drift": BuiltIn("drift", ("requests", "seeds")),
    "sem-moe": BuiltIn("sem_moe", ("trace", "trace_format", "model", "requests", "seeds", "rates")),
}
"""Suites by name, with the options they read: help shows these without importing the suites, which takes seconds."""


def load_suites() -> Registry[Suite]:
    """The registry with the built-in suites in it; importing one registers it."""
    for built_in in BUILT_IN.values():
        import_module(f"coterie.evaluation.suites.{built_in.module}.suite")
    return suites


def load_suite(name: str) -> Suite:
    """Load one suite; an unknown name raises with all names."""
    if name not in BUILT_IN:
        return load_suites()[name]
    import_module(f"coterie.evaluation.suites.{BUILT_IN[name].module}.suite")
    return suites[name]


def suite_names() -> list[str]:
    """All known names, sorted; imports no built-in suite."""
    return sorted({*BUILT_IN, *suites.names()})


def options_read(suite: str) -> tuple[str, ...]:
    """Names in CHOICES that a suite reads; imports no built-in suite."""
    if suite in BUILT_IN:
        return BUILT_IN[suite].reads
    reads = suites[suite].reads
    return CHOICES if reads is None else reads
