"""What every verb of ``coterie`` promises: help, --json, exit codes, one line for bad input, nothing half done.

Verbs are found in the app, so a new one is held to this without being listed here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from command_line import Ran, runner
from coterie.cli import main
from coterie.cli.main import app
from coterie.traces import ActivationTrace, ActivationWriter, RequestTrace, TraceMeta

META = TraceMeta("demo", num_experts=8, num_layers=2, top_k=2)
CSV = "arrival_s,prompt_tokens,output_tokens\n"


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that reach it; groups only lead to others."""
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name in command.list_commands(None):
        child = command.get_command(None, name)
        yield from leaves(child, (*words, name))


VERBS = dict(leaves(typer.main.get_command(app)))
every_verb = pytest.mark.parametrize("words", VERBS, ids=" ".join)


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("coterie")
    return subprocess.run([script, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@every_verb
def test_help_describes_the_verb_and_every_argument(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert (VERBS[words].help or "").strip(), "a docstring is the description"
    undescribed = [p.name for p in VERBS[words].params if not (getattr(p, "help", None) or "").strip()]
    assert undescribed == []


@every_verb
def test_takes_json(words: tuple[str, ...]) -> None:
    flags = [option for parameter in VERBS[words].params for option in parameter.opts]
    assert "--json" in flags


@every_verb
def test_an_unknown_option_exits_with_2(run: Callable[..., Ran], words: tuple[str, ...]) -> None:
    ran = run(*words, "--no-such-option")
    assert ran.code == 2
    assert "--no-such-option" in ran.err
    assert ran.out == ""


def test_an_unknown_verb_exits_with_2(run: Callable[..., Ran]) -> None:
    check_one_line(run("conjure"), "conjure")


# ------------------------------------------------------------------------------------------ bad input, for every reader


def cut_npz(folder: Path) -> Path:
    path = own_npz(folder)
    path.write_bytes(path.read_bytes()[:-40])
    return path


def own_npz(folder: Path, **change: Any) -> Path:
    arrays = {
        "expert_ids": np.arange(24).reshape(6, 2, 2) % 8,
        "offsets": np.array([0, 2, 6]),
        "num_experts": np.array(8),
        **change,
    }
    np.savez(folder / "routing.npz", **arrays)
    return folder / "routing.npz"


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


def recorded(folder: Path) -> Path:
    with ActivationWriter(folder / "trace", META) as out:
        out.append(np.arange(12).reshape(3, 2, 2) % 8, [0, 1, 1], arrival_s=0.0, domain="law")
    return folder / "trace"


def empty_recording(folder: Path) -> Path:
    ActivationWriter(folder / "trace", META).close()
    return folder / "trace"


def cut_recording(folder: Path) -> Path:
    path = recorded(folder)
    file = path / "activations.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return path


def nan_recording(folder: Path) -> Path:
    path = recorded(folder)
    columns = {"prompt_tokens": [1], "output_tokens": [2], "arrival_s": [float("nan")], "domain": ["law"]}
    pq.write_table(pa.table(columns), path / "requests.parquet")
    return path


def bad_id_in_a_recording(folder: Path) -> Path:
    path = recorded(folder)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "num_experts": 7}))  # id 7 is there
    return path


BAD = {
    # what is wrong: (how to make it, a file of that name is blamed, for this field)
    "npz cut": (cut_npz, "routing.npz", "is cut"),  # recognised by its name: its directory was at the end
    "npz of another shape": (lambda f: own_npz(f, expert_ids=np.zeros((6, 2), int)), "routing.npz", "expert_ids"),
    "npz with offsets past the tokens": (lambda f: own_npz(f, offsets=np.array([0, 9])), "routing.npz", "offsets"),
    "npz with an id that is no expert": (lambda f: own_npz(f, num_experts=np.array(7)), "routing.npz", "expert_ids"),
    "npz without tokens": (
        lambda f: own_npz(f, expert_ids=np.zeros((0, 2, 2), int), offsets=np.array([0])),
        "routing.npz",
        "offsets",
    ),
    "npz with gate weights that are NaN": (
        lambda f: own_npz(f, gate_weights=np.full((6, 2, 2), np.nan, np.float16)),
        "routing.npz",
        "gate weights",
    ),
    "csv with a NaN time": (text("r.csv", CSV + "0,1,1\nnan,1,1\n"), "r.csv", "arrival_s"),
    "csv without requests": (text("r.csv", CSV), "r.csv", ""),
    "jsonl with a NaN time": (
        text("r.jsonl", '{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}\n'),
        "r.jsonl",
        "arrival_s",
    ),
    "a format nobody knows": (text("notes.txt", "hello\n"), "notes.txt", "format"),
    "an empty file": (text("nothing", ""), "nothing", "format"),
    "a file that is not there": (lambda f: f / "missing", "missing", "file"),
    "a recording cut by one byte": (cut_recording, "activations.safetensors", ""),
}

VERBS_THAT_READ: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "convert": lambda path, out: ("convert", path, out),
    "inspect": lambda path, out: ("inspect", path, "--out", out),
    "like": lambda path, out: ("generate", out, "--like", path, "--requests", "2"),
    "evaluate": lambda path, out: ("evaluate", "all-to-all", "--trace", path, "--out", out),
    "simulate": lambda path, _: ("simulate", path, "--requests", "2"),
}


def check_one_line(ran: Ran, *words: str) -> None:
    assert ran.code == 2, ran.err
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


@pytest.mark.parametrize("json_flag", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("verb", VERBS_THAT_READ)
@pytest.mark.parametrize("wrong", BAD)
def test_bad_input_is_one_line_and_writes_nothing(
    run: Callable[..., Ran], tmp_path: Path, wrong: str, verb: str, json_flag: tuple[str, ...]
) -> None:
    make, file, field = BAD[wrong]
    path = make(tmp_path)
    check_one_line(run(*VERBS_THAT_READ[verb](path, tmp_path / "out"), *json_flag), f"/{file}: ", field)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["inspect", "like", "simulate"])
def test_an_empty_recording_has_nothing_to_show_or_imitate(run: Callable[..., Ran], tmp_path: Path, verb: str) -> None:
    arguments = VERBS_THAT_READ[verb](empty_recording(tmp_path), tmp_path / "out")
    check_one_line(run(*arguments))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["convert", "inspect", "like", "simulate"])
def test_a_recording_with_a_nan_time(run: Callable[..., Ran], tmp_path: Path, verb: str) -> None:
    path = nan_recording(tmp_path)
    check_one_line(
        run(*VERBS_THAT_READ[verb](path, tmp_path / "out")), f"{path}/requests.parquet: ", "arrival_s[0]=nan"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["convert", "inspect", "like", "simulate"])
def test_a_recording_with_an_id_that_is_no_expert(run: Callable[..., Ran], tmp_path: Path, verb: str) -> None:
    path = bad_id_in_a_recording(tmp_path)
    check_one_line(run(*VERBS_THAT_READ[verb](path, tmp_path / "out")), f"{path}/", "expert_ids", "0 … 6")
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_lists_the_known(run: Callable[..., Ran], tmp_path: Path) -> None:
    path = own_npz(tmp_path)
    check_one_line(run("convert", path, tmp_path / "out", "--to", "npy"), "Did you mean 'npz'?", "Known: ")
    check_one_line(run("convert", path, tmp_path / "out", "--from", "np"), "Did you mean 'npz'?", "Known: ")
    check_one_line(run("models", "gpt-oss-21b"), "gpt-oss-20b")


# ------------------------------------------------------------------------------------------------- as a real process


def test_the_installed_command_ends_with_2_on_bad_input(tmp_path: Path) -> None:
    ran = shell("convert", cut_npz(tmp_path), tmp_path / "out", "--from", "npz", "--json")
    check_one_line(Ran(ran.returncode, ran.stdout, ran.stderr), "routing.npz: file: ")


def test_the_installed_command_prints_one_object_and_nothing_else(tmp_path: Path) -> None:
    ran = shell("convert", recorded(tmp_path), tmp_path / "copy", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["tokens"] == 3
    assert ran.stdout.count("\n") == 1
    assert ActivationTrace.open(tmp_path / "copy").num_tokens == 3


def test_interrupt_ends_with_130_and_prints_no_result(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("coterie")
    process = subprocess.Popen(
        [script, "generate", tmp_path / "t", "--size", "8GB", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        started = time.monotonic()
        while not list(tmp_path.glob(".t.*.tmp/activations*")):  # there once writing begins; moved to t at the end
            assert process.poll() is None
            assert time.monotonic() - started < 100
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir()), "an interruption leaves nothing behind"


def test_an_interrupt_while_an_error_is_reported_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_error: BaseException) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_message", interrupted)
    ran = runner(monkeypatch, capsys)("models", "gpt-oss-21b")
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


def test_a_request_trace_is_no_activation_trace(run: Callable[..., Ran], tmp_path: Path) -> None:
    RequestTrace(np.array([1]), np.array([1]), np.array([0.0])).save(tmp_path / "requests")
    check_one_line(run("generate", tmp_path / "out", "--like", tmp_path / "requests"), "must be an activation trace")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "g", "--seed", "-1"],
        ["demo", "--seed", "-1"],
        ["models", "x" * 300],
        ["models", "--config", "y" * 300],
        ["generate", "pyproject.toml/x"],
    ],
)
def test_what_the_system_refuses_is_one_line_too(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    check_one_line(run(*arguments))


def test_a_reader_that_has_enough_is_no_failure() -> None:
    pipe = f"set -o pipefail; {sys.executable} -c 'from coterie.cli.main import main; main()' models --json | true"
    assert subprocess.run(["bash", "-c", pipe], check=False).returncode == 0
