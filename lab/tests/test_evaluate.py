"""``coterie evaluate`` as a user runs it, with the lab's suites, which it finds by their entry points."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import coterie_lab
from command_line import without_compiling
from coterie.answers.suites import CHOICES, Suite, SuiteResult, suites
from coterie.cli.main import app, main
from coterie.traces import ActivationTrace, LoadTable, TraceMeta

MAIN = [sys.executable, "-c", "from coterie.cli.main import main; main()"]
GIVEN = {
    "trace": ("--trace", "t"),
    "trace_format": ("--from", "npz"),
    "batch": ("--batch", "128"),
    "seed": ("--seed", "0"),
    "model": ("--model", "m"),
    "requests": ("--requests", "7"),
    "seeds": ("--seeds", "1", "2"),
    "rates": ("--rates", "0.5"),
    "strategies": ("--strategies", "lpt", "fcfs"),
    "routers": ("--routers", "joint"),
    "quick": ("--quick",),
}
"""Each option as a user gives it, --batch and --seed as they are by default."""
LAB = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
SUITES = tuple(LAB["coterie.suites"])


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate") / "[bold]t"
    ids = np.random.default_rng(0).random((300, 2, 32)).argpartition(3, axis=2)[:, :, :4]
    meta = TraceMeta("gpt-oss-20b", 32, 2, 4)
    ActivationTrace.from_arrays(meta, ids, np.array([0, 300])).save(path)
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, args)])
    assert result.exception is None, result.output
    return result.stdout


def test_tables_and_notes_fit(trace: Path) -> None:
    output = run("all-to-all", "--trace", trace)
    assert max(map(len, output.splitlines())) <= 110
    assert "…" not in output, "nothing is cut off"
    for text in ("beside the published table", "Counted on a trace", "58.7", "nvlink4+ib", "Not right", "[bold]t"):
        assert text in output


def test_json_is_one_object_with_the_promised_rows(trace: Path, tmp_path: Path) -> None:
    output = run("all-to-all", "--trace", trace, "--json", "--out", tmp_path / "new" / "out")
    found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert list(found) == ["suite", "rows", "notes"]
    assert found["suite"] == "all-to-all"
    assert {row["source"] for row in found["rows"]} == {"formula", "trace"}
    assert found["rows"][0]["published"]["time_us"] == 2.0
    assert json.loads((tmp_path / "new" / "out" / "all-to-all.json").read_text()) == found


def test_a_pipe_gets_the_object_and_stderr_nothing(trace: Path) -> None:
    command = [*MAIN, "evaluate", "all-to-all", "--trace", str(trace), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["suite"] == "all-to-all"
    assert without_compiling(done.stderr) == ""


def test_batch_and_data_folder_are_heeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small, large = (json.loads(run("all-to-all", "--json", "--batch", n)) for n in (64, 128))
    assert small["rows"][0]["bytes_per_layer"] * 2 == large["rows"][0]["bytes_per_layer"]
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert any(str(tmp_path) in note for note in json.loads(run("all-to-all", "--json"))["notes"])


def listening(monkeypatch: pytest.MonkeyPatch, name: str, suite: Any = None) -> list[Any]:
    """The suite keeps the options that reach it, and does nothing with them."""
    heard = []

    def keep(options: Any, _: Any) -> SuiteResult:
        heard.append(options)
        return SuiteResult(name, [], [])

    monkeypatch.setitem(suites._items, name, replace(suite or suites[name], run=keep, writes_files=False))
    return heard


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["coterie", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    return printed.err


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_given_the_options_it_reads_and_no_others(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    heard, reads = listening(monkeypatch, suite), suites[suite].reads or ()
    own = ", ".join(GIVEN[name][0] for name in CHOICES if name in reads)
    for name in set(CHOICES) - set(reads):
        said = refused(monkeypatch, capsys, suite, *GIVEN[name], "--out", tmp_path / "out", "--json")
        flag = GIVEN[name][0]
        assert said == f"error: suite {suite} does not read {flag}; it reads {own}, besides --out and --json\n"
    assert not heard
    assert not (tmp_path / "out").exists()
    run(suite, *(word for name in reads for word in GIVEN[name]), "--json")
    values = {"trace": Path("t"), "trace_format": "npz", "batch": 128, "seed": 0, "model": Path("m"), "requests": 7}
    values |= {"seeds": (1, 2), "rates": (0.5,), "strategies": ("lpt", "fcfs"), "routers": ("joint",), "quick": True}
    assert {name: getattr(heard[0], name) for name in reads} == {name: values[name] for name in reads}


def test_a_format_without_a_trace_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "all-to-all", "--from", "npz", "--json")
    assert said == "error: --from=npz is the format of --trace, which is not given\n"


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_says_what_its_source_reads(suite: str) -> None:
    files = list(Path(coterie_lab.__file__).parent.joinpath("suites", suite.replace("-", "_")).glob("*.py"))
    assert files
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    found = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options"
    }
    assert found & set(CHOICES) == set(suites[suite].reads or ())
    assert suites[suite].help.count("\n") == 0


def test_several_options_that_are_not_read_are_named_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "latency-optimal", "--rates", 1, 2, "--batch", 64, "--seeds", 1)
    assert "does not read --batch, --rates; it reads --seed, --seeds, beside" in said


def test_help_shows_which_suite_reads_what(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Suite("Mine.", lambda *_: SuiteResult("mine", [], []), reads=("model", "batch"))
    monkeypatch.setitem(suites._items, "[mine]", mine)
    lines = run("--help").splitlines()
    reads = {name: suites[name].reads or () for name in SUITES} | {"[mine]": ("batch", "model")}
    for name, options in reads.items():
        (shown,) = (line for line in lines if line.startswith(f"│ {name} "))
        assert shown.strip("│ ").split()[2:] == [GIVEN[option][0] for option in options]


def test_help_imports_no_suite() -> None:
    code = "import sys; from coterie.cli.main import app; app(['evaluate', '--help'], standalone_mode=False); "
    code += "sys.exit(any(name.startswith('coterie_lab.suites.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_bad_input_exits_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LoadTable(np.ones((1, 2, 8), np.uint64)).save(tmp_path / "load")
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    odd = TraceMeta("demo", 7, 1, 1)
    ActivationTrace.from_arrays(odd, np.zeros((200, 1, 1), int), np.array([0, 200])).save(tmp_path / "odd")
    for arguments, said in (
        (["all-to-al"], "Did you mean 'all-to-all'?"),
        (["all-to-all", "--trace", tmp_path / "load"], "kind: found 'load'"),
        (["all-to-all", "--trace", tmp_path / "noise"], "format"),
        (["all-to-all", "--trace", tmp_path / "none"], "does not exist"),
        (["all-to-all", "--trace", tmp_path / "odd"], "num_experts=7 must be a multiple"),
        (["all-to-all", "--batch", "0"], "batch=0 must be at least 1"),
        (["all-to-all", "--out", tmp_path / "noise"], "is a file"),
    ):
        monkeypatch.setattr(sys, "argv", ["coterie", "evaluate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert stopped.value.code == 2, arguments
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert said in printed.err


def test_every_option_can_be_given() -> None:
    assert tuple(GIVEN) == CHOICES
