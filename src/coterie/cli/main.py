"""``coterie``: the verbs, and how errors become exit codes.

0 done, 1 the answer is no, 2 bad input or something this machine lacks, 130 interrupted (Ctrl-C), 143 terminated
(SIGTERM). Both clean up before they end.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from coterie import __version__
from coterie._interrupts import INTERRUPTED, WORDS, exit_code, handle_interrupts, interrupted_by
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
from coterie.cli.verbs.plan import plan_command
from coterie.cli.verbs.record import record_command
from coterie.cli.verbs.replay import replay_command
from coterie.cli.verbs.simulate import simulate_command
from coterie.cli.verbs.worker import worker_command
from coterie.errors import CoterieError, UnfinishedWarning

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
app.command("plan")(plan_command)
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
    try:
        with handle_interrupts(), _one_line_warnings():
            code = _command()(standalone_mode=False)
            if code == INTERRUPTED:  # some versions of Typer turn an interrupt into this code, others raise
                raise KeyboardInterrupt
    except SystemExit as error:  # Typer turns a closed stdout into exit code 1, which here means "the answer is no"
        code = _closed_pipe() if isinstance(error.__context__, BrokenPipeError) else error.code
    except BaseException as error:
        code = interrupted_by() if isinstance(error, typer.Abort) else exit_code(error)
        if code is None:
            message = _message(error)
            if message is None:  # an error in Coterie itself
                raise
            _fail(message)
        err.print(WORDS[code])
    sys.exit(code)


def _message(error: BaseException) -> str | None:
    """What is wrong with the input or the machine; None for any other error."""
    if isinstance(error, CoterieError):
        return str(error)
    if isinstance(error, _CommandLineError):
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        return str(error.format_message())  # type: ignore[attr-defined]
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError | RecursionError):
        return f"the input asks for more than this machine has: {error or type(error).__name__}"
    return None


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print a warning about the input as one line, once; others as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UnfinishedWarning)
        show, seen = warnings.showwarning, set()

        def print_once(message: Warning | str, category: type[Warning], *details: Any, **more: Any) -> None:
            if not issubclass(category, UnfinishedWarning):
                show(message, category, *details, **more)
            elif str(message) not in seen:
                seen.add(str(message))
                err.print(f"[bold yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)

        warnings.showwarning = print_once
        yield


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
