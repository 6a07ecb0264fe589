"""The ``coterie`` command: its verbs, and the mapping of errors to exit codes.

Exit codes: 0 done; 1 the answer is no; 2 bad input, or something missing on this machine; 130 interrupted (Ctrl-C); 143
terminated (SIGTERM). The last two clean up before they exit.
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
from typer.core import TyperCommand, TyperGroup

from coterie import __version__
from coterie._compiling import announce
from coterie._interrupts import INTERRUPTED, WORDS, exit_code, handle_interrupts, interrupted_by
from coterie.cli.output import err
from coterie.cli.verbs import VERBS, plugin_option
from coterie.errors import CoterieError, UnfinishedWarning


@cache
def _load(name: str) -> Any:
    """Build the command from the verb's signature, once per process."""
    return VERBS[name].load(name)


class Verbs(TyperGroup):
    """Command group of all verbs; imports only the verb that is run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = {**dict.fromkeys(VERBS), **self.commands}  # a wrong name suggests one of these

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or (_load(cmd_name) if cmd_name in VERBS else None)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        listed: dict[str, Any] = {name: TyperCommand(name, help=verb.summary) for name, verb in VERBS.items()}
        TyperGroup(name=self.name, commands=listed, params=self.params, help=self.help).format_help(ctx, formatter)


app = typer.Typer(
    name="coterie",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


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
    del version  # the option's callback prints the version and exits


# Newer versions of Typer have their own copy of Click's exceptions: find the class by name instead of importing it.
_CommandLineError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Run the ``coterie`` command. A failure prints one line and sets the exit code; only a bug prints a traceback."""
    try:
        code = _run()
    except KeyboardInterrupt:  # it arrived while an error, or an earlier interrupt, was being reported
        code = interrupted_by()
        err.print(WORDS[code])
    sys.exit(code)


def _run() -> int | str | None:
    """Run the verb of the command line and return the exit code; report errors."""
    verb = next((word for word in sys.argv[1:] if word in VERBS), None)
    try:
        with handle_interrupts(), _one_line_warnings():
            if verb is not None:
                announce(VERBS[verb].compile_s)
            code: int | str | None = _command()(standalone_mode=False)
            if code == INTERRUPTED:  # some versions of Typer return this code for Ctrl-C, others raise
                raise KeyboardInterrupt
    except SystemExit as error:  # Typer turns a closed stdout into exit code 1, which here means "the answer is no"
        code = _closed_pipe() if isinstance(error.__context__, BrokenPipeError) else error.code
    except BaseException as error:
        code = interrupted_by() if isinstance(error, typer.Abort) else exit_code(error)
        if code is None:
            message = _message(error)
            if message is None:  # a bug in Coterie: show the traceback
                raise
            _fail(message)
        err.print(WORDS[code])
    return code


def _message(error: BaseException) -> str | None:
    """Return the message of an error caused by the input or the machine; None for any other error."""
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
    """Print each warning about unfinished input once, as one line; print other warnings as Python does."""
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
    """Build the whole command, once per process."""
    command = typer.main.get_command(app)
    command.params.append(plugin_option())
    return command


def _closed_pipe() -> int:
    """Discard the buffered output after the reader of stdout (such as head) has closed it; return exit code 0."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)
