"""Commands that pages show print what the pages show.

A comment before a block says that its commands run, in order, in one empty folder per page::

    <!-- runs -->
    ```
    $ coterie models

Each line of output that the block shows must be printed, in that order; a line that holds `…` stands for anything.
Numbers of three digits and more may differ by 1%: a search breaks near ties by the last bit of a sum, which differs
between processors (1,682 moves on aarch64 are 1,673 on x86_64).
`<!-- runs: data -->` needs COTERIE_DATA, `<!-- runs: long -->` takes minutes, `<!-- runs: data long -->` is both.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from command_line import Run, runner
from coterie.cli.output import out
from pages import PAGES

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
BLOCK = re.compile(r"^<!-- runs(?:: (?P<need>[a-z ]+))? -->\n+```\w*\n(?P<text>.*?)^```$", re.M | re.S)


class Shown(NamedTuple):
    command: str
    printed: list[str]


def shown(text: str, need: str | None) -> list[Shown]:
    """Commands of the blocks with this need, each with the lines shown below it."""
    found: list[Shown] = []
    for block in BLOCK.finditer(text):
        if block["need"] != need:
            continue
        for line in block["text"].replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append(Shown(line[2:], []))
            elif line.strip() and "…" not in line:
                found[-1].printed.append(line.rstrip())
    return found


def pages() -> Iterator[Any]:
    for page, path in PAGES.items():
        for need in dict.fromkeys(block["need"] for block in BLOCK.finditer(path.read_text())):
            marks = [pytest.mark.long] if need and "long" in need else []
            yield pytest.param(page, need, id=f"{page}-{need}" if need else page, marks=marks)


@pytest.mark.parametrize(("page", "need"), list(pages()))
def test_commands_print_what_is_shown(
    page: str,
    need: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if need and "data" in need:
        request.getfixturevalue("data_dir")
    monkeypatch.chdir(tmp_path)
    run = runner(monkeypatch, capsys)
    for command, printed in shown(PAGES[page].read_text(), need):
        check(run, command, printed)


def check(run: Run, command: str, printed: list[str]) -> None:
    words = [os.path.expandvars(word) for word in shlex.split(command, comments=True)]
    assert words[0] == "coterie", f"only coterie's commands are run: {command}"
    out.width = 80  # as where output is no terminal; a verb may have set another in this process
    ran = run(*words[1:])
    assert ran.code == 0, f"{command}: {ran.err}"
    lines = iter([line.rstrip() for line in ran.out.splitlines()])
    for line in printed:
        assert any(is_shown(line, other) for other in lines), (
            f"{command}: shown and not printed:\n{line}\nprinted:\n{ran.out}"
        )


def is_shown(line: str, other: str) -> bool:
    """Return whether two lines are equal but for the last digits of their numbers."""
    if line == other:
        return True
    if NUMBER.split(line) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=True)
    return all(
        a == b or (len(a) == len(b) >= 3 and as_number(a) == pytest.approx(as_number(b), 0.01)) for a, b in pairs
    )


def as_number(text: str) -> float:
    return float(text.replace(",", ""))


def test_last_digits_may_differ_and_nothing_else() -> None:
    line = "1,682 moves, 63.5 GB: 1,682 inside a node (144 ms of link time)"
    assert is_shown(line, "1,673 moves, 63.2 GB: 1,673 inside a node (144 ms of link time)")
    for other in ("1,582 moves, 63.5 GB", "16,820 moves", "1,682 moves, 63 GB", "1,682 jumps"):
        assert not is_shown(line, other + line[len(other) :])
    assert not is_shown("4 ranks", "5 ranks")


def test_blocks_are_read() -> None:
    page = "<!-- runs -->\n```\n$ coterie a\nx\n…\n$ coterie b \\\n  --c\n```\n"
    page += "\n<!-- runs: data -->\n```\n$ coterie d\n```\n"
    assert shown(page, None) == [Shown("coterie a", ["x"]), Shown("coterie b    --c", [])]
    assert shown(page, "data") == [Shown("coterie d", [])]
