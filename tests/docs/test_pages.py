"""Pages hold: their Python runs, their links lead somewhere, the commands they show exist.

The Python blocks of a page run in order, as one script, in an empty folder. A comment before a block says what it needs
beside Coterie itself::

    <!-- needs: torch -->
    ```python

Such a page has two tests: its other blocks alone, and all of its blocks where the need is met, under the mark of that
name. tests/conftest.py says which pages go to the worker that compiles the loops they run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from coterie.cli.main import app
from pages import PAGES, ROOT

COMMANDS: Any = typer.main.get_command(app)
NEEDS = {"torch": ("torch", "transformers"), "vllm": ("vllm",)}
"""A need is a mark of pytest: packages that are imported for it."""

BLOCK = re.compile(r"^(?:<!-- needs: (?P<need>\w+) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
HEADING = re.compile(r"^#+ (.*)$", re.M)
LINK = re.compile(r"\]\(([^()\s]+)\)")
INLINE_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S* )*(?:\S+/|python -m )?coterie +([^|;&#]+)")
"""A line of a shell: variables may come before it, and a folder."""


class Block(NamedTuple):
    language: str
    text: str
    line: int
    """Line number of the block's first line in the page."""
    need: str | None


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text()
    return [
        Block(found["language"], found["text"], text[: found.start("text")].count("\n") + 1, found["need"])
        for found in BLOCK.finditer(text)
    ]


def script(page: str, need: str | None) -> str:
    """Python blocks, each on the lines it has in the page, so that a traceback names them."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.need in (None, need):
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines)


def scripts() -> Iterator[Any]:
    for page in PAGES:
        if script(page, None):
            yield pytest.param(page, None, id=page)
        for need in dict.fromkeys(block.need for block in blocks(page) if block.need):
            yield pytest.param(page, need, id=f"{page}-{need}", marks=getattr(pytest.mark, need))


@pytest.mark.parametrize(("page", "need"), list(scripts()))
def test_python_runs(page: str, need: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[need] if need else ():
        pytest.importorskip(package)
    code = compile(script(page, need), str(PAGES[page]), "exec")
    monkeypatch.chdir(tmp_path)
    if re.search(r"\.(register|add)\(", script(page, need)):  # what it registers would stay in this process
        (tmp_path / "page.py").write_text(script(page, need))
        ran = subprocess.run([sys.executable, "-W", "error", "page.py"], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        return
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    exec(code, module.__dict__)


@pytest.mark.parametrize(("page", "checks"), [("docs/placement", "check_planner"), ("CONTRIBUTING", "check_router")])
def test_a_policy_of_ones_own_runs_when_copied(page: str, checks: str, tmp_path: Path) -> None:
    """Without the blocks before it."""
    (text,) = (block.text for block in blocks(page) if f"import {checks}" in block.text)
    (tmp_path / "mine.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "mine.py"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = BLOCK.sub("", PAGES[page].read_text())
    broken = []
    for link in LINK.findall(text):
        file, _, heading = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (PAGES[page].parent / file).resolve() if file else PAGES[page]
        if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
            broken.append(link)
    assert broken == []


@cache
def headings(path: Path) -> set[str]:
    """Names of a page's headings in links, as GitHub makes them."""
    text = BLOCK.sub("", path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    wrong = []
    for words in commands(PAGES[page].read_text()):
        if re.fullmatch("[A-Z]+", words[0]):  # VERB stands for any
            continue
        command: Any = COMMANDS
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            if words[0] not in command.commands:
                wrong.append(f"no verb {words[0]}")
                break
            command = command.get_command(None, words.pop(0))
        known = {"--help"}.union(*((*parameter.opts, *parameter.secondary_opts) for parameter in command.params))
        named = [word.partition("=")[0] for word in words if re.match("--?[a-z]", word)]
        wrong += [f"{command.name} has no {option}" for option in named if option not in known]
    assert wrong == []


def test_commands_are_found_in_code_alone() -> None:
    page = """Use `coterie plan --load x`, coterie inspect --prose, `coterie.testing` or
```
$ coterie fit trace --workers 8 \\
    --json | head
A=1 .venv/bin/coterie demo --out x   # --comment
```
"""
    found = [["fit", "trace", "--workers", "8", "--json"], ["demo", "--out", "x"], ["plan", "--load", "x"]]
    assert list(commands(page)) == found


def commands(text: str) -> Iterator[list[str]]:
    """Words after `coterie`, of every command in code."""
    shell = [block["text"] for block in BLOCK.finditer(text) if block["language"] in ("", "bash", "sh", "console")]
    inline = [" ".join(code.split()) for code in INLINE_CODE.findall(BLOCK.sub("", text))]
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    for line in (*lines, *inline):
        if found := COMMAND.match(line):
            yield found[1].split()


def test_the_architecture_page_has_every_layer_in_order() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [
        re.sub(r"\(\w+\)", "", layer).replace("|", " ").split() for layer in contract["layers"]
    ]  # (not yet there)
    section = PAGES["docs/architecture"].read_text().partition("## Layers")[2].partition("## The lab")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in section.splitlines() if row.startswith("| `")]
    assert rows == layers
