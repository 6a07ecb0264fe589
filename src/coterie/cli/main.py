"""``coterie``: the verbs, and how errors become exit codes.

0 done, 1 the answer is no, 2 bad input or something this machine lacks, 130 interrupted.
"""

from __future__ import annotations

import sys

import typer
from rich.markup import escape

from coterie.cli.bench import bench_command
from coterie.cli.calibrate import calibrate_command
from coterie.cli.convert import convert_command
from coterie.cli.demo import demo_command
from coterie.cli.evaluate import evaluate_command
from coterie.cli.generate import generate_command
from coterie.cli.inspect import inspect_command
from coterie.cli.models import models_command
from coterie.cli.output import err
from coterie.errors import CoterieError

app = typer.Typer(
    name="coterie",
    help="Expert-aware scheduling for Mixture-of-Experts serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("bench")(bench_command)
app.command("calibrate")(calibrate_command)
app.command("convert")(convert_command)
app.command("demo")(demo_command)
app.command("evaluate")(evaluate_command)
app.command("generate")(generate_command)
app.command("inspect")(inspect_command)
app.command("models")(models_command)


def main() -> None:
    """Entry point of the ``coterie`` command."""
    try:
        app()
    except CoterieError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # stdout was closed by the reader, such as head
        sys.stderr.close()
        sys.exit(0)
