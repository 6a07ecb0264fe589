"""What every verb shares: results on stdout, all else on stderr.

With ``--json`` stdout carries exactly one JSON object; tables, progress and logs go to stderr in any case, so a
pipe never sees them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # not needed for help, which would take half as long again
    import numpy as np
    from numpy.typing import NDArray

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]

WIDTH = 110
"""Largest width of a table, in characters."""

MAX_ROWS = 32
"""Ranks shown in a table of bars; the busiest ones if there are more."""
_PARTS = " ▏▎▍▌▋▊▉█"

err = Console(stderr=True)
out = Console()


def set_width() -> None:
    """Limit the width of what is printed on stdout from now on."""
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH  # a pipe has no width; rich would take 80


def progress() -> Progress:
    """A progress bar on stderr that leaves no trace when done."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,  # off a terminal it would leave an empty line
    )


@contextmanager
def reporting(first: str, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar as a callback: report(what, done, total).

    Off a terminal there is no bar; with `lines`, every new `what` is then printed as a line on stderr.
    """
    if lines and not err.is_terminal:
        said = [""]

        def say(what: str, _done: int, _total: int) -> None:
            if what != said[0]:
                said[0] = what
                typer.echo(what, err=True)

        say(first, 0, 1)
        yield say
        return
    with progress() as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def print_json(value: Mapping[str, Any]) -> None:
    typer.echo(msgspec.json.encode(value, enc_hook=_plain).decode())


def _plain(value: Any) -> Any:
    # Scalars and arrays of NumPy become plain values.
    return value.tolist() if hasattr(value, "tolist") else str(value)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]], note: str | None = None) -> None:
    """A table on stdout: text left, numbers right, floats in three significant digits."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    cells = [[_cell(value) for value in row] for row in rows]
    raw = [list(row) for row in cells]
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index][1], int | float) or row[index][1] is None for row in raw) and bool(raw)
        table.add_column(column, justify="right" if numeric else "left")
    for row in cells:
        table.add_row(*(Text(text) for text, _ in row))  # a name in brackets is a name, not markup
    out.print(table)


def _cell(value: Any) -> tuple[str, Any]:
    value = value.item() if hasattr(value, "item") else value  # a scalar of NumPy
    if value is None:
        return "-", None
    if isinstance(value, bool):
        return ("yes" if value else "no"), str(value)
    if isinstance(value, float):
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"), value
    if isinstance(value, int):
        return f"{value:,}", value
    return str(value), value


def print_verdict(sentence: str, then: str | None = None) -> None:
    """End a verb: one plain sentence, and the command to type next. In JSON they are `verdict` and `next`."""
    out.print()
    out.print(sentence, markup=False, highlight=False, soft_wrap=True)
    if then is not None:
        out.print(f"Next: {then}", markup=False, highlight=False, soft_wrap=True)


def shell(*words: object) -> str:
    """A command to type: words with spaces in them are quoted."""
    return shlex.join(map(str, words))


def bar(value: float, full: float, width: int) -> str:
    """Draw `value` as a bar of blocks; `full` fills the width."""
    eighths = round(8 * width * min(value / full, 1.0)) if full > 0 else 0
    return ("█" * (eighths // 8) + _PARTS[eighths % 8]).rstrip().ljust(width)


class Column(NamedTuple):
    """A value per rank, drawn as bars; columns of one `scale` share the longest bar."""

    name: str
    values: NDArray[np.float64]
    """[rank]"""
    scale: int


def print_rank_bars(title: str, columns: Sequence[Column], note: str) -> None:
    """Print a table with one row per rank and one bar per column."""
    import numpy as np

    width = max(4, min(24, (min(out.width, 120) - 8) // len(columns) - 8))
    full: dict[int, float] = {}
    for column in columns:
        full[column.scale] = max(full.get(column.scale, 0.0), float(column.values.max()))
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    table.add_column("rank", justify="right")
    for column in columns:
        table.add_column(column.name)
    busiest = np.argsort(-np.max([column.values for column in columns], axis=0), kind="stable")
    for rank in np.sort(busiest[:MAX_ROWS]):
        cells = [f"{bar(c.values[rank], full[c.scale], width)} {c.values[rank]:.2f}" for c in columns]
        table.add_row(str(rank), *(Text(cell) for cell in cells))
    out.print(table)
    if len(busiest) > MAX_ROWS:
        out.print(f"({len(busiest) - MAX_ROWS} less busy ranks are not shown)", highlight=False)


def relative(busy: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide by the mean: 1 is an average rank."""
    return busy / busy.mean() if busy.any() else 0.0 * busy


# Options that several commands share.

FromOption = Annotated[
    str | None, typer.Option("--from", help="Format of the input; detected from the file by default.")
]
TraceModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of the model that produced the trace, if the file does not give it.")
]
NumExpertsOption = Annotated[
    int | None, typer.Option("--num-experts", min=1, help="Experts per layer, if the file holds expert ids only.")
]
