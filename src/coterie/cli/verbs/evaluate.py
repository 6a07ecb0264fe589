"""``coterie evaluate``: run one suite, print our numbers beside the published ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from coterie.answers.suites import (
    CHOICES,
    LAB_MISSING,
    Suite,
    SuiteOptions,
    SuiteResult,
    lab_missing,
    look_up,
    options_read,
    suites,
)
from coterie.cli.output import JsonOption, out, print_json, print_lines, print_table, reporting, set_width
from coterie.errors import ConfigError, check

SEVERAL = ("--seeds", "--rates", "--strategies", "--routers")
"""Options that take several values, up to the next option."""


class SeveralValues(TyperCommand):
    """Command that accepts ``--seeds 42 123`` and ``--seeds 42 --seeds 123``; its help lists the suites' options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        expanded: list[str] = []
        option, taken = None, 0
        for arg in args:
            if arg.startswith("--") or (arg.startswith("-") and not _is_number(arg)):
                option, taken = (arg if arg in SEVERAL else None), 0
            elif option is not None:
                if taken:  # repeat the option before every further value
                    expanded.append(option)
                taken += 1
            expanded.append(arg)
        return super().parse_args(ctx, expanded)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        rows = [[name, " ".join(_flags(ctx, options_read(name)))] for name in suites.names()]
        note = f"{LAB_MISSING}." if lab_missing() else None
        print_table("Suites and the options they read, besides --out and --json", ["suite", "options"], rows, note)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _flags(ctx: Any, options: Iterable[str]) -> list[str]:
    """Return option names as typed on the command line, in the order of the help text."""
    return [param.opts[0] for param in ctx.command.params if param.name in options]


def _check_given(ctx: typer.Context, suite: str) -> None:
    """Raise for an option on the command line that the suite does not read."""
    reads = options_read(suite)
    sources = {name: ctx.get_parameter_source(name) for name in CHOICES if name not in reads}
    unread = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if unread:
        given, own = ", ".join(_flags(ctx, unread)), ", ".join(_flags(ctx, reads)) or "none"
        raise ConfigError(f"suite {suite} does not read {given}; it reads {own}, besides --out and --json")


def _several(values: list[Any] | None) -> tuple[Any, ...] | None:
    return tuple(dict.fromkeys(values)) if values else None


def evaluate_command(
    ctx: typer.Context,
    suite: Annotated[str, typer.Argument(help="Suite to run: one of the names listed below.")],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Trace to evaluate on, in any known format. Default: traces in the folder $COTERIE_DATA."
        ),
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--from", help="Format of the trace; detected from the file by default.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Tokens per step, summed over all ranks.")] = 128,
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder to write SUITE.json (the object that --json prints) and the suite's figures to; existing "
            "files are replaced. Default: out/SUITE for suites that write figures, else nothing is written.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the random generator, for suites that take one seed.")
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint folder; the model's own router is evaluated too. Needs torch."),
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Requests per run. Default: the suite's.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seeds", help="Seeds, one run per seed: --seeds 42 123. Default: the suite's.")
    ] = None,
    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rates", help="Requests per second: --rates 150 300. In suite regimes, shares of the fcfs capacity."
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None, typer.Option("--strategies", help="Batch selection strategies to compare. Default: all.")
    ] = None,
    routers: Annotated[
        list[str] | None, typer.Option("--routers", help="Routers to compare, in addition to the suite's own.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a small part, in at most a minute; without intervals.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Run a suite: our numbers beside the published ones, with notes on what agrees and what does not."""
    chosen = look_up(suites, suite)
    _check_given(ctx, suite)
    check(
        trace_format is None or trace is not None, f"--from={trace_format} is the format of --trace, which is not given"
    )
    data = os.environ.get("COTERIE_DATA")
    check(
        out_folder is None or not out_folder.exists() or out_folder.is_dir(),
        f"{out_folder} is a file; --out takes a folder",
    )
    if out_folder is None and chosen.writes_files:
        out_folder = Path("out") / suite
    options = SuiteOptions(
        trace=trace,
        trace_format=trace_format,
        batch=batch,
        data=Path(data) if data else None,
        seed=seed,
        model=model,
        requests=requests,
        seeds=_several(seeds),
        rates=_several(rates),
        strategies=_several(strategies),
        routers=_several(routers),
        quick=quick,
        out=out_folder,
    )
    made = out_folder is not None and not out_folder.exists()
    if out_folder is not None:
        out_folder.mkdir(parents=True, exist_ok=True)  # fail before the work if the folder cannot be created
    with reporting(suite) as report:
        try:
            result = chosen.run(options, report)
        except BaseException:
            if made and out_folder is not None:
                with contextlib.suppress(OSError):
                    out_folder.rmdir()  # if it is still empty
            raise
    if out_folder is not None:
        from coterie.traces.store import write_json

        write_json(out_folder / f"{suite}.json", asdict(result))
    if json_output:
        print_json(asdict(result))
        return
    _print(chosen, result)
    if out_folder is not None:
        names = f"{suite}.json and what is beside it" if chosen.writes_files else f"{suite}.json"
        print_lines(f"Written: {out_folder}: {names}")


def _print(suite: Suite, result: SuiteResult) -> None:
    set_width()
    tables = suite.tables() if callable(suite.tables) else suite.tables
    for table in tables:
        rows = [row for row in result.rows if table.shows(row)]
        if rows:
            headings = [column.heading for column in table.columns]
            print_table(table.title, headings, [[column.value(row) for column in table.columns] for row in rows])
            out.print()
    if not tables and result.rows:
        keys = [key for key, value in result.rows[0].items() if not isinstance(value, dict | list)]
        print_table(result.suite, keys, [[row.get(key) for key in keys] for row in result.rows])
        out.print()
    for note in result.notes:
        out.print(f"- {escape(note)}", highlight=False)
