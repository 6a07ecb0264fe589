"""``coterie evaluate`` with a user's own suite, and without the lab. The lab's suites are tested in lab/tests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.answers import suites as contract
from coterie.answers.suites import CHOICES, Suite, SuiteResult, benches, options_read, suites
from coterie.cli.main import app, main
from coterie.errors import UnknownNameError


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, args)])
    assert result.exception is None, result.output
    return result.stdout


def listening(monkeypatch: pytest.MonkeyPatch, suite: Suite) -> list[Any]:
    """Register the suite as `mine`; it keeps the options that reach it, and does nothing with them."""
    heard = []

    def keep(options: Any, _: Any) -> SuiteResult:
        heard.append(options)
        return SuiteResult("mine", [], [])

    monkeypatch.setitem(suites._items, "mine", replace(suite, run=keep))
    return heard


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    return printed.err


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if coterie-lab were not installed: its entry points are not found."""
    monkeypatch.setattr(contract, "distributions", lambda **_: ())
    for registry in (suites, benches):
        monkeypatch.setattr(registry, "_items", {})
        monkeypatch.setattr(registry, "_plugins_read", True)


@pytest.mark.usefixtures("no_lab")
@pytest.mark.parametrize("words", [("evaluate", "caps"), ("bench",), ("bench", "all"), ("bench", "routing", "--json")])
def test_without_the_lab_one_sentence_says_how_to_install_it(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(monkeypatch, capsys, *words)
    assert message.count("\n") == 1
    assert "`pip install ./lab`" in message


@pytest.mark.usefixtures("no_lab")
def test_help_without_the_lab_says_how_to_install_it() -> None:
    assert "pip install ./lab" in " ".join(run("--help").split())


@pytest.mark.usefixtures("no_lab")
def test_without_the_lab_a_users_own_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = listening(monkeypatch, Suite("Mine.", lambda *_: SuiteResult("mine", [], [])))
    run("mine", "--seed", 3)
    assert [options.seed for options in heard] == [3]


def test_a_users_own_suite_prints_without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "[x]", "ours": 1.5, "published": {"a": 1}},
        {"name": "y", "ours": None, "published": None},
    ]
    mine = Suite("Mine.", lambda options, _: SuiteResult("mine", rows, [f"batch {options.batch}"]))
    monkeypatch.setitem(suites._items, "mine", mine)
    output = run("mine", "--batch", 3)
    assert "[x]" in output
    assert "1.5" in output
    assert "- batch 3" in output


def test_a_users_own_suite_says_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Suite("Mine.", lambda *_: SuiteResult("mine", [], []), reads=("seed",))
    heard = listening(monkeypatch, mine)
    run("mine", "--seed", 3)
    assert [options.seed for options in heard] == [3]
    assert "suite mine does not read --batch; it reads --seed, beside" in refused(
        monkeypatch, capsys, "evaluate", "mine", "--batch", 3
    )
    listening(monkeypatch, replace(mine, reads=()))
    assert "does not read --seed; it reads none, beside" in refused(
        monkeypatch, capsys, "evaluate", "mine", "--seed", 3
    )
    listening(monkeypatch, replace(mine, reads=None))
    assert options_read("mine") == CHOICES
    with pytest.raises(UnknownNameError, match="Did you mean 'requests'"):
        replace(mine, reads=("request",))


def test_the_program_starts_without_a_compiler() -> None:
    code = "import sys, coterie.cli.main; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
