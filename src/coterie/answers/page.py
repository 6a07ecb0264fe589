"""The report of a verb: figures as PNG files, and one self-contained HTML page.

A marker file in the report folder lists the files of the report. Only the listed files are ever replaced. A folder
that is not empty and has no marker is refused, so that no file of the user is lost.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from coterie.answers import figures
from coterie.errors import TraceError, check, read_json
from coterie.traces.store import naming, replaced, write_json

MARKER = ".coterie-report.json"
Cell = str | float | int | None
_MARK = "coterie-report"

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #ffffff; --text: #1c2430; --muted: #5b6675; --line: #e3e7ec; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0f1216; --card: #171b21; --text: #e6eaf0; --muted: #9aa6b5; --line: #2c333d; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0.4rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 0.3rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; margin: 1rem 0; }
p { margin: 0.3rem 0 0.8rem; max-width: 75ch; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1rem; align-items: start; }
@media (min-width: 900px) { .pair.two { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); } }
img { width: 100%; height: auto; display: block; border-radius: 6px; }
.table, .figure { overflow-x: auto; }
@media (max-width: 700px) { .figure img { width: 680px; max-width: none; } } /* below, words in it cannot be read */
table { border-collapse: collapse; font-size: 0.9rem; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding-bottom: 0.3rem; }
th, td { text-align: left; padding: 0.3rem 0.5rem; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; }
td.n, th.n { text-align: right; }
td { overflow-wrap: break-word; }
td.n { white-space: nowrap; overflow-wrap: normal; }
ul { padding-left: 1.2rem; margin: 0.3rem 0; }
li { margin: 0.3rem 0; max-width: 85ch; }
a { color: inherit; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    key: str
    """Anchor of the section on the page, and name of the figure's file."""
    title: str
    meaning: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    plot: Callable[[Any, figures.Theme], None] | None = None
    alt: str = ""
    """Text alternative of the figure, for screen readers."""
    height_in: float = figures.HEIGHT_IN


class Part(NamedTuple):
    """A part of the page without an anchor: a table, and a list of sentences."""

    title: str
    sentences: Sequence[str | Section]
    """Sentences; a section stands for a link to it, with its first sentence that has a number."""
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Cell, ...]] = ()


def check_report_folder(folder: Path) -> None:
    """Raise unless the folder is new, empty, or holds an earlier report."""
    check(not folder.exists() or folder.is_dir(), f"{folder} is a file; a report is a folder")
    if folder.is_dir() and any(folder.iterdir()):
        _written_before(folder)


def write_report(
    folder: Path,
    page: str,
    title: str,
    parts: Sequence[Part | Section],
    others: Mapping[str, Callable[[Path], object]] = MappingProxyType({}),
) -> list[Path]:
    """Write the figures and the page; replace an earlier report in the folder, with its files.

    `others` are further files, by name, and how to write each. The page comes last and at once: where there is one, all
    of the report is there. Returns the page, the figures and the other files.
    """
    check_report_folder(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    before = _written_before(folder) if any(folder.iterdir()) else []
    drawn = [part for part in parts if isinstance(part, Section) and part.plot is not None]
    names = [f"{section.key}.png" for section in drawn]
    own = {*names, *others, page}
    for name in own:
        check(
            name in before or not (folder / name).exists(),
            f"{folder / name} exists and is of no earlier report; choose another folder",
        )
    pictures = {
        s.key: {theme.name: figures.draw(s.plot, theme, s.height_in) for theme in figures.THEMES}
        for s in drawn
        if s.plot is not None
    }
    try:
        # Write the marker first: files left by an interrupted run are then listed, and the next run can replace them.
        write_json(folder / MARKER, {"format": _MARK, "files": sorted({*before, *own})})
        for name in {*before, page} - (own - {page}):
            (folder / name).unlink(missing_ok=True)
        for key, of_theme in pictures.items():
            with naming(folder / f"{key}.png"):
                (folder / f"{key}.png").write_bytes(of_theme[figures.LIGHT.name])
        for name, write in others.items():
            with naming(folder / name):
                write(folder / name)
        with replaced(folder / page) as stream:
            stream.write(render_page(title, parts, pictures).encode("utf-8", "backslashreplace"))
        write_json(folder / MARKER, {"format": _MARK, "files": sorted(own)})
    except OSError:  # a full disk: half a report is of no use
        for name in (*before, *own, MARKER):
            (folder / name).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
    return [folder / name for name in (page, *names, *others)]


def _written_before(folder: Path) -> list[str]:
    marker = folder / MARKER
    check(marker.exists(), f"{folder} is not empty and holds no earlier report; choose another folder")
    mark = read_json(marker)
    files = mark.get("files")
    if mark.get("format") != _MARK or not isinstance(files, list):
        raise TraceError(marker, "format", f"found {mark.get('format')!r}, expected {_MARK!r} and a list of files")
    # Keep plain file names only: a marker that was tampered with must not name files outside its folder.
    return [name for name in files if isinstance(name, str) and Path(name).name == name]


def render_page(title: str, parts: Sequence[Part | Section], pictures: dict[str, dict[str, bytes]]) -> str:
    """Return the page as HTML: styles and pictures are inline, and its security policy forbids other downloads."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{html.escape(title)}</h1>",
        *(_section(part, pictures.get(part.key)) if isinstance(part, Section) else _part(part) for part in parts),
    ]
    return "\n".join([*lines, "</main></body></html>", ""])


def _finding(section: Section) -> str:
    """Return a link to the section, and its first sentence that has a number."""
    sentences = re.split(r"(?<=\.) (?=[A-Z])", section.meaning)
    said = next((sentence for sentence in sentences if re.search(r"\d", sentence)), sentences[0])
    return f'<a href="#{section.key}">{html.escape(section.title)}</a>: {html.escape(said)}'


def _section(section: Section, pictures: dict[str, bytes] | None) -> str:
    picture = ""
    if pictures is not None:
        light, dark = (base64.b64encode(pictures[theme.name]).decode() for theme in figures.THEMES)
        picture = (
            f'<div class="figure"><picture><source srcset="data:image/png;base64,{dark}" '
            'media="(prefers-color-scheme: dark)">'
            f'<img src="data:image/png;base64,{light}" alt="{html.escape(section.alt)}"></picture></div>'
        )
    table = _table(section.title, section.columns, section.rows) if section.rows else ""
    return (
        f'<section id="{section.key}"><h2>{html.escape(section.title)}</h2><p>{html.escape(section.meaning)}</p>'
        f'<div class="pair{" two" if picture and table else ""}">{picture}{table}</div></section>'
    )


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    body = [list(row) for row in rows]
    numeric = [all(isinstance(row[i], int | float | None) for row in body) for i in range(len(columns))]
    css = [' class="n"' if all_numbers else "" for all_numbers in numeric]
    head = "".join(f'<th scope="col"{kind}>{html.escape(name)}</th>' for kind, name in zip(css, columns, strict=True))
    lines = [
        "".join(f"<td{kind}>{html.escape(cell_text(cell))}</td>" for kind, cell in zip(css, row, strict=True))
        for row in body
    ]
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{html.escape(caption)}">'
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table></div>"
    )


def _part(part: Part) -> str:
    table = _table(part.title, part.columns, part.rows) if part.rows else ""
    items = "".join(
        f"<li>{html.escape(said) if isinstance(said, str) else _finding(said)}</li>" for said in part.sentences
    )
    return f"<section><h2>{html.escape(part.title)}</h2>{table}{f'<ul>{items}</ul>' if items else ''}</section>"


def cell_text(cell: Cell) -> str:
    """Format a cell: floats with three significant digits, integers in full, a dash for None."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else cell
