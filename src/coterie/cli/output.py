"""Output shared by all verbs: results on stdout, everything else on stderr.

With ``--json``, stdout has exactly one JSON object. Progress and logs always go to stderr, so that a pipe never sees
them.

Names come from files and may contain any character: terminal control characters are shown as escapes, such as
``\\x1b``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # importing NumPy for --help would make it 50% slower
    import numpy as np
    from numpy.typing import NDArray

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
AdminKeyFileOption = Annotated[
    Path | None, typer.Option("--admin-key-file", help="File with the gateway's admin key. Default: COTERIE_ADMIN_KEY.")
]

WIDTH = 88
"""Largest width of a table, in characters: what a page of the documentation shows on a screen of 1280 pixels."""

MAX_ROWS = 32
"""Most ranks in a table of bars; if there are more ranks, the busiest are shown."""
_PARTS = " ▏▎▍▌▋▊▉█"

_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except line feed, characters that reorder text, and surrogates."""


def visible(text: str) -> str:
    """Return text with escapes for characters that control a terminal or cannot be encoded as UTF-8."""
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # surrogate escape: Python's code for a byte of a path that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Console(Console):
    """Console whose printed text cannot control the terminal; only rich's own styles can."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


err: Console = _Console(stderr=True)
out: Console = _Console()


def set_width() -> None:
    """Limit the width of later output on stdout."""
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH  # a pipe has no width; rich would assume 80


@contextmanager
def reporting(first: str, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr during the block and yield its callback, report(what, done, total).

    Without a terminal there is no bar; with `lines`, every new `what` is then printed as a line on stderr.
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
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,  # without a terminal it would leave an empty line
    )
    with bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def print_json(value: Mapping[str, Any]) -> None:
    try:
        text = msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # a value contains a path that is not UTF-8
        text = msgspec.json.encode(_encodable(msgspec.to_builtins(value, enc_hook=_plain)))
    typer.echo(text.decode())


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else visible(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    # Convert NumPy scalars and arrays to plain values.
    return value.tolist() if hasattr(value, "tolist") else str(value)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]], note: str | None = None) -> None:
    """Print a table on stdout: text left-aligned, numbers right-aligned, floats with three significant digits."""
    cells = [[_cell(value) for value in row] for row in rows]
    texts = [[column.replace("_", " ") for column in columns], *([text for text, _ in row] for row in cells)]
    fits = ((_widths(texts, padding, whole), padding) for whole in (True, False) for padding in (1, 0))
    widths, padding = next((fit for fit in fits if fit[0]), (None, 1))
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left", padding=(0, padding))
    for index, (column, width) in enumerate(zip(columns, widths or (None,) * len(columns), strict=True)):
        numeric = bool(cells) and all(isinstance(row[index][1], int | float | None) for row in cells)
        table.add_column(
            column if width is None or width >= len(column) else texts[0][index],
            justify="right" if numeric else "left",
            width=width,
        )
    for row in cells:
        table.add_row(*(Text(text) for text, _ in row))  # Text, so that a name in brackets is not read as markup
    out.print(table)


def _widths(rows: Sequence[Sequence[str]], padding: int, whole: bool) -> list[int] | None:
    """Return widths of columns at which no word is cut, and, if `whole`, only heads are broken; None if too wide."""
    columns = list(zip(*rows, strict=True))
    room = out.width - 1 - len(columns) * (1 + 2 * padding)
    widths = [
        max(
            len(part) for row, text in enumerate(column) for part in ([text] if whole and row else text.split() or [""])
        )
        for column in columns
    ]
    for texts in (slice(1, None), slice(None)):  # room that is left is for whole cells, then for whole heads
        more = [max((len(line) for text in c[texts] for line in text.split("\n")), default=0) for c in columns]
        for index in sorted(range(len(columns)), key=lambda i: more[i] - widths[i]):
            widths[index] += max(0, min(more[index] - widths[index], room - sum(widths)))
    return widths if sum(widths) <= room else None


def _cell(value: Any) -> tuple[str, Any]:
    value = value.item() if hasattr(value, "item") else value  # a NumPy scalar
    if value is None:
        return "-", None
    if isinstance(value, bool):
        return ("yes" if value else "no"), str(value)
    if isinstance(value, float):
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"), value
    if isinstance(value, int):
        return f"{value:,}", value
    return visible(str(value)).replace("\n", "\\n"), value


def print_lines(*lines: str) -> None:
    """Print lines of plain text, which the terminal wraps."""
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def print_verdict(sentence: str, then: str) -> None:
    """Print the end of a verb's output: the verdict in one sentence, and the next command to run."""
    print_lines("", sentence, f"Next: {then}")


def shell(*words: object) -> str:
    """Join words to a shell command, quoted where necessary."""
    return shlex.join(map(str, words))


def bar(value: float, full: float, width: int) -> str:
    """Return `value` as a bar of block characters; `full` fills `width` characters."""
    eighths = round(8 * width * min(value / full, 1.0)) if full > 0 else 0
    return ("█" * (eighths // 8) + _PARTS[eighths % 8]).rstrip().ljust(width)


class RankColumn(NamedTuple):
    """Column of bars, one value per rank; columns with the same `scale` are drawn to the same maximum."""

    name: str
    values: NDArray[np.float64]
    """[rank] value that the bar shows."""
    scale: int


def print_rank_bars(title: str, columns: Sequence[RankColumn], note: str) -> None:
    """Print a table with one row per rank and one bar per column."""
    import numpy as np

    width = max(4, min(24, (min(out.width, 120) - 8) // len(columns) - 8))
    full = {
        scale: max(float(c.values.max()) for c in columns if c.scale == scale) for scale in {c.scale for c in columns}
    }
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
    """Divide by the mean, so that 1 is an average rank; all 0 if there is no load."""
    return busy / busy.mean() if busy.any() else 0.0 * busy


# Options shared by several commands.

FromOption = Annotated[
    str | None, typer.Option("--from", help="Format of the input; detected from the file by default.")
]
TraceModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of the model that produced the trace, if the file does not give it.")
]
NumExpertsOption = Annotated[
    int | None,
    typer.Option("--num-experts", min=1, max=65536, help="Experts per layer, if the file holds expert ids only."),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        help="Windows of the load table: a label, a number from 0, or A:B. Default: all windows but those named "
        "merged_…, which are sums of others.",
    ),
]
