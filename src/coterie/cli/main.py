"""``coterie``: the verbs, and how errors become exit codes.

0 done, 1 the answer is no, 2 bad input or something this machine lacks, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from coterie import __version__
from coterie._compiling import announce, note_compiled
from coterie._interrupts import handle_interrupts
from coterie.cli.output import err
from coterie.cli.verbs import VERBS
from coterie.errors import CoterieError


class _Loaded(Mapping[str, Any]):
    """Name → command; a verb is imported when it is looked up. `more` are commands added to the app."""

    def __init__(self, more: Mapping[str, Any]) -> None:
        self._more = more

    def __getitem__(self, name: str) -> Any:
        return self._more[name] if name in self._more else _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**VERBS, **self._more})

    def __len__(self) -> int:
        return len({**VERBS, **self._more})


@cache
def _load(name: str) -> Any:
    """Build the command from the verb's signature, once per process."""
    return VERBS[name].load(name)


class Verbs(TyperGroup):
    """The verbs; only the one that is asked for is imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Loaded(self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        listed: Any = {name: TyperCommand(name, help=verb.summary) for name, verb in VERBS.items()}
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
    del version  # the option's callback has printed it and exited


# Typer carries its own copy of Click's exceptions in newer versions: find the class rather than name a module.
_CommandLineError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Entry point of the ``coterie`` command: every failure is one line and an exit code, never a traceback."""
    handle_interrupts()
    verb = next((word for word in sys.argv[1:2] if word in VERBS), None)
    if verb is not None:
        announce(verb, VERBS[verb].compile_s)
    try:
        code = _command()(standalone_mode=False)
        if verb is not None and VERBS[verb].compile_s is not None and not code:
            note_compiled(verb)
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
    """The whole command, built once per process."""
    return typer.main.get_command(app)


def _closed_pipe() -> int:
    """The reader of stdout (such as head) has closed it: discard what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(2)
