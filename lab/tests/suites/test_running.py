"""Cells run in parallel: killed processes, interrupted runs, and what is kept of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import UnavailableError
from coterie.types import Interval
from coterie_lab.suites.kept import KeptResults
from coterie_lab.suites.running import TRIES, in_parallel, with_half
from coterie_lab.suites.shared import run_cells
from simulate_traces import quiet

SLEEPERS = """
import os, signal, time
from coterie_lab.suites.running import in_parallel

def work(item):
    os.write(1, f"{item}\\n".encode())  # in one piece: lines of both processes go to one pipe
    time.sleep(900)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    os.cpu_count = lambda: 2
    list(in_parallel(work, ["a", "b", "c"]))
"""


class Cell(NamedTuple):
    name: str
    seed: int


class Outcome(NamedTuple):
    """Values that JSON does not hold as they are: tuples, keys that are no strings, no number."""

    mean: float
    spread: tuple[float, float]
    by_seed: dict[int, float]


CELLS = [Cell(name, seed) for name in ("round_robin", "joint") for seed in range(3)]


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("coterie_lab.suites.running.os.cpu_count", lambda: 2)
    yield
    while running := active_children():
        assert wait([process.sentinel for process in running], timeout=300), "a process is still there"


def _square(value: int) -> int:
    return value * value


def _killed(value: int, folder: Path, survives: int) -> int:
    """Square; but the processes of odd values are killed as many times as they survive."""
    tries = folder / str(value)
    with tries.open("a") as file:
        file.write("x")
    if value % 2 and len(tries.read_text()) <= survives:
        os.kill(os.getpid(), signal.SIGKILL)
    return value * value


def _outcome(cell: Cell, folder: Path) -> Outcome:
    """Note that the cell ran. The first time, the last cell fails."""
    again = (folder / "failed").exists()
    if cell == CELLS[-1] and not again:
        (folder / "failed").touch()
        raise OSError("no space left")
    with (folder / "ran").open("a") as file:
        file.write(f"{CELLS.index(cell)}\n")
    return Outcome(cell.seed / 3, (float("-inf"), 0.1), {cell.seed: 0.5})


@pytest.mark.usefixtures("two_processes")
def test_in_parallel_gives_every_item_with_its_result() -> None:
    assert dict(in_parallel(_square, list(range(20)))) == {value: value * value for value in range(20)}
    assert dict(in_parallel(partial(pow, 2), [3])) == {3: 8}


@pytest.mark.usefixtures("two_processes")
def test_the_item_of_a_killed_process_runs_again(tmp_path: Path) -> None:
    work = partial(_killed, folder=tmp_path, survives=TRIES - 1)
    assert dict(in_parallel(work, list(range(6)))) == {value: value * value for value in range(6)}
    assert [len((tmp_path / str(value)).read_text()) for value in range(6)] == [1, TRIES] * 3


@pytest.mark.usefixtures("two_processes")
def test_an_item_that_kills_its_processes_is_named_after_the_results_of_all_others(tmp_path: Path) -> None:
    results = in_parallel(partial(_killed, folder=tmp_path, survives=TRIES), [0, 1, 2, 4, 6])
    assert dict(next(results) for _ in range(4)) == {value: value * value for value in (0, 2, 4, 6)}
    with pytest.raises(UnavailableError, match=f"^the process of 1 of 5 runs died {TRIES} times .*: 1$"):
        next(results)
    assert len((tmp_path / "1").read_text()) == TRIES


@pytest.mark.usefixtures("two_processes")
def test_stopping_early_ends_the_processes() -> None:
    results = in_parallel(time.sleep, [0.0, 900.0, 900.0])
    assert next(results) == (0.0, None)
    assert active_children()
    results.close()  # type: ignore[attr-defined]  # a generator


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_command(sent: signal.Signals, tmp_path: Path) -> None:
    """Every process holds the pipe of the command's output, which ends when the last of them has."""
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    command = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert {command.stdout.readline() for _ in range(2)} == {"a\n", "b\n"}
    command.send_signal(sent)
    rest, errors = command.communicate(timeout=300)
    assert rest == ""
    assert errors.count("KeyboardInterrupt") == (sent == signal.SIGINT), "one traceback, and none of the workers"


@pytest.mark.usefixtures("two_processes")
def test_an_interrupted_run_continues_with_what_is_missing(tmp_path: Path) -> None:
    work, kept = partial(_outcome, folder=tmp_path), KeptResults(tmp_path / "kept.jsonl", Outcome, "1")
    with pytest.raises(OSError, match="no space left"):
        run_cells(work, CELLS, quiet, "", kept)
    before = len(kept.read(CELLS))
    progress: list[int] = []
    results = run_cells(work, CELLS, lambda *counts: progress.append(counts[1]), "", kept)
    assert results == {cell: _outcome(cell, tmp_path) for cell in CELLS}
    assert list(results) == CELLS
    assert progress == list(range(before, len(CELLS) + 1))
    ran = (tmp_path / "ran").read_text().split()[: -len(CELLS)]
    assert set(ran) == {str(index) for index in range(len(CELLS))}
    # A result that was on its way when the run failed is not in the file: its cell ran twice.
    assert len(ran) - len(set(ran)) <= 1


@given(st.integers(0, 600))
def test_only_whole_lines_of_a_cut_file_count(at: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "failed").touch()
        work, kept = partial(_outcome, folder=folder), KeptResults(folder / "kept.jsonl", Outcome, "1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coterie_lab.suites.running.os.cpu_count", lambda: 1)
            whole = run_cells(work, CELLS, quiet, "", kept)
            written = kept.path.read_bytes()
            kept.path.write_bytes(written[:at])
            (folder / "ran").unlink()
            assert run_cells(work, CELLS, quiet, "", kept) == whole
            # Every line begins with its break, and is whole if nothing of it is cut.
            ends = [end for end in range(1, len(written) + 1) if written[end : end + 1] in (b"\n", b"")]
            again = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
            assert again == [str(index) for index, end in enumerate(ends) if end > at]
            assert kept.read(CELLS) == whole


def test_results_of_another_version_or_kind_are_not_read(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path / "kept.jsonl", Outcome, "1")
    outcome = kept.add(CELLS[0], Outcome(0.25, (0.0, 1.0), {7: 0.5}))
    assert outcome == Outcome(0.25, (0.0, 1.0), {7: 0.5})
    assert kept.read(CELLS) == {CELLS[0]: outcome}
    assert KeptResults(kept.path, Outcome, "2").read(CELLS) == {}
    assert KeptResults(kept.path, dict[str, float], "1").read(CELLS) == {}
    assert kept.read([("round_robin", 0)]) == {}, "a cell of another class"


def test_half_of_an_interval_stands_behind_the_mean() -> None:
    assert with_half(Interval(2.5, 0.5, 4.5)) == "+2.5 ± 2.0"
    assert with_half(Interval(7.0, None, None)) == "+7.0"
