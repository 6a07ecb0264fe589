"""``coterie``: the verbs, and how errors become exit codes.

0 done, 1 the answer is no, 2 bad input or something this machine lacks, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from coterie import __version__
from coterie._interrupts import handle_interrupts
from coterie.cli.output import err
from coterie.cli.verbs.bench import GroupsInHelp, bench_command
from coterie.cli.verbs.calibrate import calibrate_command
from coterie.cli.verbs.convert import convert_command
from coterie.cli.verbs.demo import demo_command
from coterie.cli.verbs.evaluate import SeveralValues, evaluate_command
from coterie.cli.verbs.fit import fit_command
from coterie.cli.verbs.generate import generate_command
from coterie.cli.verbs.inspect import inspect_command
from coterie.cli.verbs.models import models_command
from coterie.cli.verbs.place import place_app
from coterie.cli.verbs.plan import PlannersInHelp, plan_command
from coterie.cli.verbs.record import record_command
from coterie.cli.verbs.replay import replay_command
from coterie.cli.verbs.simulate import simulate_command
from coterie.cli.verbs.worker import worker_command
from coterie.errors import CoterieError

app = typer.Typer(
    name="coterie", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
app.command("bench", cls=GroupsInHelp)(bench_command)
app.command("calibrate")(calibrate_command)
app.command("convert")(convert_command)
app.command("demo")(demo_command)
app.command("evaluate", cls=SeveralValues)(evaluate_command)
app.command("fit")(fit_command)
app.command("generate")(generate_command)
app.command("inspect")(inspect_command)
app.command("models")(models_command)
app.add_typer(place_app, name="place")
app.command("plan", cls=PlannersInHelp)(plan_command)
app.command("record")(record_command)
app.command("replay")(replay_command)
app.command("simulate")(simulate_command)
app.command("worker")(worker_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _coterie(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Expert-aware scheduling for Mixture-of-Experts serving."""
    del version  # the option's callback has printed it and exited


# Typer carries its own copy of Click's exceptions in newer versions: find the class rather than name a module.
_CommandLineError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Entry point of the ``coterie`` command: every failure is one line and an exit code, never a traceback."""
    handle_interrupts()
    try:
        code = _command()(standalone_mode=False)
    except SystemExit as error:  # Typer turns a closed stdout into exit code 1, which here means "the answer is no"
        code = _closed_pipe() if isinstance(error.__context__, BrokenPipeError) else error.code
    except CoterieError as error:
        _fail(str(error))
    except _CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(error.format_message())  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        err.print("interrupted")
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RecursionError) as error:
        _fail(f"the input asks for more than this machine has: {error or type(error).__name__}")
    sys.exit(code)


@cache
def _command() -> Callable[..., Any]:
    """Build the command from the verbs' signatures, once per process: it takes 50 ms."""
    return typer.main.get_command(app)


def _closed_pipe() -> int:
    """The reader of stdout (such as head) has closed it: discard what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)
