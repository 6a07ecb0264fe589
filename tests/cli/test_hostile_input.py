"""What is no file is refused before it is opened, and no name can break the output or control a terminal."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from command_line import Ran, refused
from coterie.cli.output import visible
from coterie.traces import ActivationTrace, ActivationWriter, TraceMeta

Run = Callable[..., Ran]
META = TraceMeta("gpt-oss-20b", num_experts=32, num_layers=24, top_k=4)


@pytest.fixture(params=["pipe", "socket", "/dev/zero"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Reading any of these never ends."""
    path = tmp_path / str(request.param)
    if request.param == "pipe":
        os.mkfifo(path)
        yield path
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            yield path
    else:
        yield Path("/dev/zero")


def recorded(folder: Path, requests: int = 12, domain: str = "law") -> ActivationWriter:
    """A recording that is not closed yet."""
    rng = np.random.default_rng(0)
    out = ActivationWriter(folder, META)
    for index in range(requests):
        ids = np.argsort(rng.random((8, 24, 32)), axis=2)[:, :, :4]
        out.append(ids, [0] * 4 + [1] * 4, arrival_s=float(index), domain=domain)
    return out


INPUTS: dict[str, tuple[str, ...]] = {
    "trace": ("inspect", "@"),
    "trace of a format": ("convert", "@", "out", "--from", "csv"),
    "archive": ("convert", "@", "out", "--from", "npz"),
    "like": ("generate", "out", "--like", "@"),
    "fit": ("fit", "@", "--workers", "2", "-o", "out"),
    "arrivals": ("simulate", "--arrivals", "@"),
    "CAPS config": ("simulate", "--config", "@"),
    "load": ("plan", "@", "--model", "gpt-oss-20b"),
    "placement": ("place", "inspect", "@"),
    "placement of a format": ("place", "inspect", "@", "--from", "tensorrt-llm"),
    "model config": ("models", "--config", "@"),
    "evaluate": ("evaluate", "all-to-all", "--trace", "@", "--out", "out"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_no_file_is_refused(
    run: Run, no_file: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*(str(no_file) if word == "@" else word for word in INPUTS[kind])), str(no_file))
    assert not (tmp_path / "out").exists()


def test_what_is_no_file_is_refused_by_plan(run: Run, no_file: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "t").close()
    refused(run("plan", tmp_path / "t", "--ranks", 4, "--current", no_file), str(no_file), "expected a file")


@pytest.mark.parametrize("name", ["prompts.txt", "preset.json", "router.safetensors", "meta.json"])
def test_pipes_under_names_that_are_opened_by_their_ending(run: Run, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "t"
    recorded(folder).close()
    path = (folder if name == "meta.json" else tmp_path) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    lines = {
        "prompts.txt": ("record", "--engine", "vllm", "--url", "http://x", "--prompts", path, "-o", tmp_path / "o"),
        "preset.json": ("plan", folder, "--ranks", 4, "--preset", path),
        "router.safetensors": ("fit", folder, "--workers", 2, "-o", path),
        "meta.json": ("inspect", folder),
    }
    refused(run(*lines[name]), name)


def test_a_loop_of_links_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(run("inspect", tmp_path / "loop"), "loop")
    refused(run("fit", tmp_path / "loop", "--workers", 2, "-o", tmp_path / "router"), "loop")
    refused(run("convert", tmp_path / "loop", tmp_path / "loop"), "loop")


# ----------------------------------------------------------------------------------------------------------- names

STRANGE = "a\x1b[2J\x07\u202eb[red]\x9bc"
SHOWN = "a\\x1b[2J\\x07\\u202eb[red]\\x9bc"


def test_visible_shows_what_would_control_a_terminal() -> None:
    assert visible(STRANGE) == SHOWN
    assert visible("\udcff\ud800") == "\\xff\\ud800"
    assert visible("ä\n中🙂") == "ä\n中🙂"


def check_harmless(ran: Ran) -> None:
    for stream in (ran.out, ran.err):
        stream.encode()
        assert not any(mark in stream for mark in ("\x1b", "\x07", "\u202e", "\x9b")), stream


@pytest.mark.parametrize("verb", [("inspect",), ("fit", "--workers", "2", "-o", "r"), ("plan", "--ranks", "4")])
def test_names_in_a_trace_cannot_control_the_terminal(
    run: Run, tmp_path: Path, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / STRANGE
    for out in [recorded(folder, domain=STRANGE)]:
        out.close()
    ran = run(verb[0], folder, *verb[1:])
    check_harmless(ran)
    assert ran.code == 0, ran.err


def test_names_in_errors_cannot_control_the_terminal(run: Run) -> None:
    for line in (("models", STRANGE), ("inspect", STRANGE), (STRANGE,), ("models", f"--{STRANGE}")):
        ran = run(*line)
        check_harmless(ran)
        assert ran.code == 2
        assert "\\x1b" in ran.err


def test_a_report_escapes_names(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    recorded(folder, domain="<img src=x>").close()
    assert run("inspect", folder, "--out", tmp_path / "report").code == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<script>" not in page
    assert "<img src=x>" not in page


@pytest.mark.parametrize("verb", ["inspect", "convert", "plan", "missing"])
def test_a_path_that_is_not_utf8(run: Run, tmp_path: Path, verb: str) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    recorded(folder).close()
    lines = {
        "inspect": ("inspect", folder, "--out", f"{folder}-report"),
        "convert": ("convert", folder, f"{folder}-copy"),
        "plan": ("plan", folder, "--ranks", 4, "-o", f"{folder}-map"),
        "missing": ("inspect", f"{folder}-missing"),
    }
    shown = run(*lines[verb])
    check_harmless(shown)
    assert shown.code == (2 if verb == "missing" else 0), shown.err
    (tmp_path / "again").mkdir()
    again = [str(part).replace("-", "--") if "-" in str(part)[len(str(tmp_path)) :] else part for part in lines[verb]]
    ran = run(*again, "--json")
    check_harmless(ran)
    if verb != "missing":
        assert "\\xff\\xfe" in json.dumps(json.loads(ran.out), ensure_ascii=False).replace("\\\\", "\\")


# ---------------------------------------------------------------------------------------------- unfinished recordings


def test_an_unfinished_recording_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "t"
    recorded(folder).suspend()
    assert ActivationTrace.open(folder).unfinished
    warning = f"warning: {folder}: its recording was interrupted or still runs; it holds 12 requests so far\n"
    for line in (
        ("inspect", folder),
        ("convert", folder, "copy"),
        ("fit", folder, "--workers", 2, "-o", "router"),
        ("plan", folder, "--ranks", 4),
        ("simulate", folder, "--requests", 4),
        ("generate", "made", "--like", folder, "--requests", 2),
    ):
        ran = run(*line, "--json")
        assert (ran.code, ran.err) == (0, warning), line
        found = json.loads(ran.out)
        if line[0] == "inspect":
            assert any("interrupted or still runs" in note for note in found["notes"])
        if line[0] == "convert":
            assert found["unfinished"] is True
    assert not ActivationTrace.open(tmp_path / "copy").unfinished, "a copy is whole"
    assert run("inspect", tmp_path / "copy").err == ""


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "line",
    [
        ("generate", "out", "--requests", 2**32),
        ("generate", "out", "--requests", 2**70),
        ("generate", "out", "--tokens", 2**62),
        ("generate", "out", "--size", "999999TB"),
        ("fit", "@", "--workers", 2, "-o", "out", "--batch", 2**70),
        ("fit", "@", "--workers", 2**32, "-o", "out"),
        ("convert", "@", "out", "--num-experts", 2**32),
        ("plan", "@", "--ranks", 4, "--slots", 2**32),
        ("plan", "@", "--ranks", 2**32),
        ("plan", "@", "--ranks", 4, "--window", "9" * 4400),
        ("plan", "@", "--ranks", 4, "--window", f"0:{10**17}"),
        ("simulate", "@", "--requests", 2**40),
        ("simulate", "@", "--ranks", 2**32),
    ],
    ids=lambda line: " ".join(map(str, line))[:40],
)
def test_sizes_are_checked_before_they_are_allocated(
    run: Run, tmp_path: Path, line: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "t").close()
    ran = run(*(tmp_path / "t" if word == "@" else word for word in line))
    refused(ran)
    assert "than this machine has" not in ran.err, "found by allocating"
    assert not (tmp_path / "out").exists()
