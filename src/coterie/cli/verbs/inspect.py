"""``coterie inspect``: statistics of a trace, as tables, JSON, figures and an HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.markup import escape

from coterie.cli.output import (
    FromOption,
    JsonOption,
    NumExpertsOption,
    TraceModelOption,
    WindowOption,
    out,
    print_json,
    print_table,
    print_verdict,
    reporting,
)

if TYPE_CHECKING:  # numba and matplotlib take a second to import: only when a trace is inspected
    from coterie.answers.inspect.inspection import Inspection

WIDTH = 100


def inspect_command(
    trace: Annotated[Path, typer.Argument(help="Trace to read, in any known format, or sample:gpt-oss-20b.")],
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder to write figures and report.html to; must be new, empty or hold an earlier report."
        ),
    ] = None,
    from_: FromOption = None,
    model: TraceModelOption = None,
    num_experts: NumExpertsOption = None,
    window: WindowOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed for sampling requests.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Show statistics of a trace (skew, hot experts, ranks, domains, drift, distinct experts, arrivals), a verdict."""
    import numpy as np

    from coterie.answers.inspect.inspection import inspect_trace, inspect_verdict
    from coterie.traces.readers import ReadOptions, read_trace

    if out_folder is not None:
        from coterie.answers.page import check_report_folder

        check_report_folder(out_folder)  # fail before reading, which can take minutes
    opened = read_trace(trace, from_, ReadOptions(model=model, num_experts=num_experts))
    with reporting("Reading tokens") as report:
        progress = partial(report, "Reading tokens")
        inspection = inspect_trace(opened, str(trace), np.random.default_rng(seed), progress, window)
    written: dict[str, Any] = {}
    if out_folder is not None:
        from coterie.answers.inspect.sections import write_inspection

        page, *pictures = write_inspection(inspection, out_folder)
        written = {"report": str(page), "figures": [str(path) for path in pictures]}
    verdict = inspect_verdict(inspection)
    if json_output:
        print_json({**msgspec.to_builtins(inspection), **written, "verdict": verdict.sentence, "next": verdict.then})
        return
    _print(inspection)
    if written:
        out.print(f"Report: {escape(written['report'])}", soft_wrap=True)
    print_verdict(*verdict)


def _print(inspection: Inspection) -> None:
    from coterie.answers.inspect.sections import not_there, overview, sections

    out.width = min(out.width, WIDTH)
    out.print(escape(inspection.trace), highlight=False, soft_wrap=True)
    print_table("Trace", ["field", "value"], overview(inspection))
    for section in sections(inspection):
        out.print()
        if section.rows:
            print_table(section.title, section.columns, section.rows)
        out.print(escape(section.meaning), highlight=False)
    out.print()
    for note in inspection.notes:
        out.print(f"Note: {escape(note)}", highlight=False)
    for line in not_there(inspection):
        out.print(f"No {escape(line)}", highlight=False)
