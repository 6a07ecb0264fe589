"""Sphinx settings: the Markdown pages of this repository as a site that needs no network (`make docs`).

Pages stay plain Markdown, readable on a code host. What only a site can show is added while it is built:

- navigation: every table of docs/README.md, under the heading above it;
- docs/api.md: under each table, the documentation of the objects that its first column names;
- docs/commands.md: the `--help` of every verb.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from typer.main import get_command
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from coterie import __version__  # noqa: E402
from coterie.cli.main import app as coterie_app  # noqa: E402

project = "Coterie"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md", "lab/*.md", "lab/benchmarks/*.md", "examples/*.md", "src/coterie/data/*/*.md"]
# These folders are not walked at all.
exclude_patterns = [".*", "build", "dist", "out", "tests", "lab/training", "lab/tests", "lab/src"]

myst_heading_anchors = 4
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"Coterie {__version__}"
html_static_path = ["static"]
html_css_files = ["coterie.css"]
html_extra_path = ["index.html"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False

HEADING = re.compile(r"^## (.+)$", re.M)
LINK = re.compile(r"^\| \[[^]]+\]\(([^)#]+)\)", re.M)
TERMINAL = {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}
NAME = re.compile(r"^\| `([\w.]+)`", re.M)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Second-level headings of a page, each with the text up to the next."""
    parts = HEADING.split(text)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def navigation() -> str:
    """Captioned tables of contents: one for every section of docs/README.md that lists pages."""
    lines, first = [], ["/docs/README"]
    for caption, text in sections((ROOT / "docs/README.md").read_text()):
        pages = [(ROOT / "docs" / link).resolve().relative_to(ROOT) for link in LINK.findall(text)]
        if pages:
            entries = "\n".join([*first, *(f"/{page.with_suffix('')}" for page in pages)])
            lines.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n")
            first = []
    return "".join(lines)


def references(text: str) -> str:
    """A page with the documentation of the objects in each of its tables below that table."""
    parts = [HEADING.split(text)[0]]
    for heading, section in sections(text):
        entries = "\n".join(directive(name) for name in NAME.findall(section))
        parts.append(f"## {heading}{section}\n```{{eval-rst}}\n{entries}\n```\n\n")
    return "".join(parts)


def directive(name: str) -> str:
    """Autodoc's directive for the object of this full name; a class with all its documented members."""
    module, _, attribute = name.rpartition(".")
    if isinstance(getattr(import_module(module), attribute), type):
        return f".. autoclass:: {name}\n   :members:\n"
    return f".. autofunction:: {name}\n"


def helps(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """The help of every verb, as a terminal of 88 columns shows it."""
    if subcommands := getattr(command, "commands", None):
        for name in sorted(subcommands):
            yield from helps(subcommands[name], (*words, name))
        return
    said = CliRunner(env=TERMINAL).invoke(coterie_app, [*words, "--help"], prog_name="coterie")
    if said.exit_code:
        raise RuntimeError(f"coterie {' '.join(words)} --help: exit code {said.exit_code}: {said.output}")
    lines = "\n".join(line.rstrip() for line in said.stdout.strip().splitlines())
    yield f"\n## coterie {' '.join(words)}\n\n```text\n{lines}\n```\n"


def add_generated(_: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page, as it is read, what only the site shows."""
    if page == root_doc:
        source[0] += navigation()
    elif page == "docs/api":
        source[0] = references(source[0])
    elif page == "docs/commands":
        source[0] += "".join(helps(get_command(coterie_app)))


def drop_field_aliases(*arguments: Any) -> None:
    """Leave out the text that Python gives a NamedTuple's field which has none of its own."""
    lines: list[str] = arguments[-1]
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(site: Sphinx) -> None:
    site.connect("source-read", add_generated)
    site.connect("autodoc-process-docstring", drop_field_aliases)
