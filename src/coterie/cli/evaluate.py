"""``coterie evaluate``: run one suite, print our numbers beside the published ones."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from coterie.cli.output import JsonOption, err, out, print_json, print_table, progress
from coterie.errors import ConfigError
from coterie.evaluation.suites import Suite, SuiteOptions, SuiteResult, load_suites
from coterie.traces.store import write_json

WIDTH = 110


def evaluate_command(
    suite: Annotated[str, typer.Argument(help="Suite to run; an unknown name lists them all.")],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Trace to evaluate on, in any known format; else COTERIE_DATA's.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the trace, where the file itself does not show it.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Tokens of one step, over all ranks together.")] = 128,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for SUITE.json, the object --json prints; replaced if there.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Run a suite: our numbers beside the published ones, with notes on what agrees and what does not."""
    chosen = load_suites()[suite]
    data = os.environ.get("COTERIE_DATA")
    options = SuiteOptions(trace, from_, batch, Path(data) if data else None, seed)
    if out_folder is not None and out_folder.exists() and not out_folder.is_dir():
        raise ConfigError(f"{out_folder} is a file; --out takes a folder")
    bar = progress()
    bar.disable = not err.is_terminal  # into a file rich would leave an empty line, before an error too
    with bar:
        task = bar.add_task(suite, total=None)

        def report(doing: str, done: int, total: int) -> None:
            bar.update(task, description=escape(doing), completed=done, total=total)

        result = chosen.run(options, report)
    if out_folder is not None:
        out_folder.mkdir(parents=True, exist_ok=True)
        write_json(out_folder / f"{suite}.json", asdict(result))
    if json_output:
        print_json(asdict(result))
        return
    _print(chosen, result)
    if out_folder is not None:
        out.print(f"Written: {escape(str(out_folder / f'{suite}.json'))}", highlight=False, soft_wrap=True)


def _print(suite: Suite, result: SuiteResult) -> None:
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH  # a pipe has no width; rich would take 80
    for table in suite.tables:
        rows = [row for row in result.rows if table.shows(row)]
        if rows:
            headings = [column.heading for column in table.columns]
            print_table(table.title, headings, [[_cell(column.value(row)) for column in table.columns] for row in rows])
            out.print()
    if not suite.tables and result.rows:
        keys = [key for key, value in result.rows[0].items() if not isinstance(value, dict | list)]
        print_table(result.suite, keys, [[_cell(row.get(key)) for key in keys] for row in result.rows])
        out.print()
    for note in result.notes:
        out.print(f"- {escape(note)}", highlight=False)


def _cell(value: Any) -> Any:
    """Names come from traces and may hold what rich takes for markup."""
    return escape(value) if isinstance(value, str) else value
