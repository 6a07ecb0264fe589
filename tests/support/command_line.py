"""Call ``coterie`` as the shell does: arguments in, exit code and both streams out."""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

import pytest

from coterie.cli.main import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Run(Protocol):
    def __call__(self, *arguments: object) -> Ran: ...


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *verb: str) -> Run:
    """Run the entry point in this process; `verb` comes before the arguments of every call."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["coterie", *verb, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        # What a loop that is not compiled yet says: it depends on which tests ran before.
        lines = [line for line in said.err.splitlines(keepends=True) if not line.startswith("compiling once")]
        return Ran(int(stopped.value.code or 0), said.out, "".join(lines))

    return run


def refused(ran: Ran, *words: str) -> None:
    """The command said why in one line, and printed nothing else."""
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1, ran.err
    for word in words:
        assert word in ran.err
