"""The contracts of ``coterie evaluate`` and ``coterie bench``: suites and groups of benchmarks, found by entry points.

A suite answers one published claim or open question, with our numbers beside the published ones. Its notes say what is
reproduced, what is not, and why. A group of benchmarks measures Coterie itself on this machine.

Coterie's own suites and benchmarks are in the package `coterie-lab`, folder lab/ of the repository. Any package adds
suites through the entry point group ``coterie.suites``, and groups of benchmarks through ``coterie.benches``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coterie.errors import check, check_at_least, check_known, check_positive
from coterie.registry import Registry

Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Options of a run; a suite declares which of them it reads."""

    trace: Path | None = None
    """Trace to evaluate on, instead of the suite's own."""
    trace_format: str | None = None
    """Format of `trace`; None detects the format."""
    batch: int = 128
    """Tokens per step, summed over all ranks."""
    data: Path | None = None
    """Folder of real data (docs/data.md); None skips the parts that need real data, with a note."""
    seed: int = 0
    """Seed of the random generator, for suites that take one seed."""
    model: Path | None = None
    """Folder of a checkpoint whose own expert routing is evaluated."""
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
    quick: bool = False
    """Whether to run a small part in at most a minute, without intervals."""
    out: Path | None = None
    """Folder for files and figures; None writes none."""

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, requests=self.requests)
        for seed in (self.seed, *(self.seeds or ())):
            check_at_least(0, seed=seed)
        for rate in self.rates or ():
            check_positive(rate=rate)


CHOICES = tuple(field.name for field in fields(SuiteOptions) if field.name not in ("data", "out"))
"""Options that a suite may read or not. Left out: `data` (no command-line option) and `out` (every suite takes it)."""


Report = Callable[[str, int, int], None]
"""Progress callback: description of the current work, units done, units in all."""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Result of a suite. Plain values only: the result is written as JSON without conversion."""

    suite: str
    rows: list[dict[str, Any]]
    """Our numbers; the field ``published`` of a row holds the published numbers to compare with, or None."""
    notes: list[str]
    """Notes, one line each: what was computed, what agrees with the published numbers, what differs and why."""


class Column(NamedTuple):
    """Column of a printed table: its heading, and the function that takes its value from a row."""

    heading: str
    value: Callable[[Row], Any]


class SuiteTable(NamedTuple):
    """A printed table of some rows; the JSON holds all rows in full."""

    title: str
    columns: tuple[Column, ...]
    shows: Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Suite:
    """One evaluation of a published claim or an open question."""

    help: str
    """One line: what the suite computes, and what the result is compared with."""
    run: Callable[[SuiteOptions, Report], SuiteResult]
    tables: tuple[SuiteTable, ...] | Callable[[], tuple[SuiteTable, ...]] = ()
    """Tables to print, or a function that returns them, if importing them takes long. Empty: print every plain value of
    every row."""
    writes_files: bool = False
    """Whether the suite writes files in addition to its rows, such as figures."""
    reads: tuple[str, ...] | None = None
    """Names in CHOICES that `run` reads; giving any other option is an error. None allows all options."""

    def __post_init__(self) -> None:
        for name in self.reads or ():
            check_known("suite option", name, CHOICES)


Bench = Callable[[Report], list[dict[str, Any]]]
"""Group of benchmarks: a function that returns rows with a `name`, sizes, and `median_us` or `median_ms`. Compare only
rows of one run, since machines differ."""

suites: Registry[Suite] = Registry("suite", group="coterie.suites")
benches: Registry[Bench] = Registry("benchmark group", group="coterie.benches")

LAB_MISSING = (
    "Coterie's own suites and benchmarks are in the package coterie-lab, which is not installed: run "
    "`pip install ./lab` in Coterie's repository"
)


def lab_missing() -> bool:
    return not any(distributions(name="coterie-lab"))


def look_up(registry: Registry[T], name: str) -> T:
    """Return the suite or group of that name; the error for an unknown name says if coterie-lab is not installed."""
    check(name in registry or not lab_missing(), f"unknown {registry.kind} {name!r}: {LAB_MISSING}")
    return registry[name]


def options_read(suite: str) -> tuple[str, ...]:
    """Return the names in CHOICES that a suite reads."""
    reads = suites[suite].reads
    return CHOICES if reads is None else reads
