"""The site of `make docs` holds every page: docs/README.md lists it, and what is generated at build time is whole.

The build itself, with warnings as errors, is a goal of its own: it takes ten times as long as these tests.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

import coterie
from coterie.cli.main import app

ROOT = Path(__file__).parents[2]
CONTENTS = ROOT / "docs/README.md"
FRONT_SCREEN = {
    "8.0%": "fleet",
    "6.8%": "fleet",
    "[6.2, 7.0]": "results/vllm-steps",
    "[7.6, 8.5]": "results/vllm-steps",
    "6.2%": "which-lever",
    "0.7%": "which-lever",
}
"""Numbers of README.md's first screen: page that derives each."""


def listed() -> list[Path]:
    """Pages in the tables of docs/README.md, which are the site's navigation."""
    links = re.findall(r"^\| \[[^]]+\]\(([^)#]+)\)", CONTENTS.read_text(), re.M)
    return [(CONTENTS.parent / link).resolve() for link in links]


def test_every_page_is_in_the_navigation_once() -> None:
    folders = ("docs", "lab/benchmarks", "examples", "src/coterie/data")
    pages = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    pages += [ROOT / "lab" / "README.md"]
    pages += [path for path in ROOT.glob("*.md") if path.name != "README.md"]  # README.md is the site's first page
    assert sorted(listed()) == sorted(set(pages) - {CONTENTS})


def test_guides_come_before_results() -> None:
    headings = re.findall(r"^## (.+)$", CONTENTS.read_text(), re.M)
    assert headings == ["Start here", "Guides", "Engines", "Serving stacks", "Reference", "Results", "For contributors"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: str(path.relative_to(ROOT)))
def test_limits_come_first(page: Path) -> None:
    """What was not run stands before the first section, where a page speaks of it at all."""
    before, *sections = re.split(r"^## ", page.read_text(), flags=re.M)
    if page.parent.name == "results":
        assert "> **Limits.**" in before
    assert all("> **Limits.**" not in section for section in sections)


def test_the_api_page_has_every_public_name() -> None:
    names = re.findall(r"^\| `([\w.]+)`", (ROOT / "docs/api.md").read_text(), re.M)
    assert len(set(names)) == len(names)
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute)
        assert found.__doc__, name
    assert {f"coterie.{name}" for name in coterie.__all__ if name != "__version__"} <= set(names)


def test_the_page_of_commands_has_every_verb() -> None:
    commands: Any = typer.main.get_command(app)
    verbs = re.findall(r"^\| `coterie ([\w-]+)`", (ROOT / "docs/commands.md").read_text(), re.M)
    assert sorted(verbs) == sorted(commands.commands)


@pytest.mark.parametrize(("number", "page"), list(FRONT_SCREEN.items()))
def test_numbers_of_the_first_screen_are_those_of_their_pages(number: str, page: str) -> None:
    assert number in (ROOT / "README.md").read_text()
    assert number in (ROOT / f"docs/{page}.md").read_text()
