"""``coterie evaluate`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app, main
from coterie.evaluation.suites import Suite, SuiteResult, suites
from coterie.traces import ActivationTrace, LoadTable, TraceMeta

MAIN = [sys.executable, "-c", "from coterie.cli.main import main; main()"]


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate") / "[bold]t"
    ids = np.random.default_rng(0).random((300, 2, 32)).argpartition(3, axis=2)[:, :, :4]
    meta = TraceMeta("gpt-oss-20b", 32, 2, 4)
    ActivationTrace.from_arrays(meta, ids, np.array([0, 300])).save(path)
    return path


def run(*args):
    result = CliRunner().invoke(app, ["evaluate", *map(str, args)])
    assert result.exception is None, result.output
    return result.stdout


def test_tables_and_notes_fit(trace):
    output = run("all-to-all", "--trace", trace)
    assert max(map(len, output.splitlines())) <= 110
    assert "…" not in output, "nothing is cut off"
    for text in ("beside the published table", "Counted on a trace", "58.7", "nvlink4+ib", "Not right", "[bold]t"):
        assert text in output


def test_json_is_one_object_with_the_promised_rows(trace, tmp_path):
    output = run("all-to-all", "--trace", trace, "--json", "--out", tmp_path / "new" / "out")
    found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert list(found) == ["suite", "rows", "notes"]
    assert found["suite"] == "all-to-all"
    assert {row["source"] for row in found["rows"]} == {"formula", "trace"}
    assert found["rows"][0]["published"]["time_us"] == 2.0
    assert json.loads((tmp_path / "new" / "out" / "all-to-all.json").read_text()) == found


def test_a_pipe_gets_the_object_and_stderr_nothing(trace):
    command = [*MAIN, "evaluate", "all-to-all", "--trace", str(trace), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["suite"] == "all-to-all"
    assert done.stderr == ""


def test_batch_and_data_folder_are_heeded(monkeypatch, tmp_path):
    small, large = (json.loads(run("all-to-all", "--json", "--batch", n)) for n in (64, 128))
    assert small["rows"][0]["bytes_per_layer"] * 2 == large["rows"][0]["bytes_per_layer"]
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert any(str(tmp_path) in note for note in json.loads(run("all-to-all", "--json"))["notes"])


def test_a_users_own_suite_prints_without_tables(monkeypatch):
    rows = [{"name": "[x]", "ours": 1.5, "published": {"a": 1}}, {"name": "y", "ours": None, "published": None}]
    mine = Suite("Mine.", lambda options, _: SuiteResult("mine", rows, [f"batch {options.batch}"]))
    monkeypatch.setitem(suites._items, "mine", mine)
    output = run("mine", "--batch", 3)
    assert "[x]" in output
    assert "1.5" in output
    assert "- batch 3" in output


def test_bad_input_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
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
