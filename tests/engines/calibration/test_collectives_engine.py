"""Real gloo processes: payloads arrive, times make sense, and a rank that dies or stops is named."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.costs.roofline import fit_transfer
from coterie.engines.calibration.collectives import POISON, SIZES, check_received, measure_collectives, payload
from coterie.errors import ConfigError, UnavailableError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

FEW = (4_097, 65_536, 524_288, 2_097_152, 8_388_608)  # bytes


def workers() -> dict[str, Any]:
    return {process.name: process for process in multiprocessing.active_children() if "coterie-rank" in process.name}


def signal_in_the_middle(rank: int, number: signal.Signals) -> Callable[[str, int, int], None]:
    """Strikes once, at the second size: the first took all ranks."""

    def report(what: str, done: int, total: int) -> None:  # noqa: ARG001
        if done == 1:
            os.kill(workers()[f"coterie-rank-{rank}"].pid, number)

    return report


@pytest.mark.parametrize("processes", [2, 3])
def test_measures_real_transfers(processes: int) -> None:
    seen: list[tuple[str, int, int]] = []
    found = measure_collectives(
        processes, "gloo", FEW, lambda what, done, total: seen.append((what, done, total)), repeats=9
    )
    assert (found.backend, found.world_size) == ("gloo", processes)
    assert "loopback" in found.note
    others = processes - 1
    assert [cell.nbytes for cell in found.cells] == [nbytes // others * others for nbytes in FEW], "as much as splits"
    assert [cell.nbytes for cell in found.peers] == list(FEW)
    assert {cell.ranks for cell in found.cells} == {processes}
    assert {cell.path for cell in found.peers} == {"peer"}
    for cells in (found.cells, found.peers):
        # 2,000 times the bytes. Neighbouring sizes may swap on a busy machine, the ends may not.
        assert cells[-1].us > 2 * min(cell.us for cell in cells) > 0
        fitted = fit_transfer([cell.nbytes for cell in cells], [cell.us for cell in cells])
        assert fitted.latency_us > 0
        assert 0 < fitted.bytes_per_us < 1e6, "a terabyte a second is no loopback"
    assert [done for _, done, _ in seen] == list(range(2 * len(FEW)))
    assert {total for _, _, total in seen} == {2 * len(FEW)}
    assert not workers(), "no process outlives the measurement"


def test_killed_rank_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"rank 1 was ended by SIGKILL at all-to-all of") as caught:
        measure_collectives(3, "gloo", SIZES, signal_in_the_middle(1, signal.SIGKILL), repeats=200)
    assert "\n" not in str(caught.value)
    assert not workers()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
def test_stopped_rank_is_named_within_the_timeout() -> None:
    """Half of the timeout after it stopped, the other rank gives up. The start must fit in, on a busy machine too."""
    with pytest.raises(UnavailableError, match=r"rank 1 gave no answer in time, at all-to-all of"):
        measure_collectives(2, "gloo", SIZES, signal_in_the_middle(1, signal.SIGSTOP), repeats=200, timeout_s=120)
    assert not workers()


def test_error_in_the_caller_ends_the_workers() -> None:
    def report(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_collectives(2, "gloo", (4_096,), report)
    assert not workers()


def test_script_without_main_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from coterie.engines.calibration.collectives import measure_collectives\nmeasure_collectives(2, 'gloo')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "UnavailableError" in last
    assert 'if __name__ == "__main__"' in last


@given(st.data(), st.integers(2, 64), st.integers(2, 600))
def test_payload_tells_sender_receiver_and_place(data: st.DataObject, ranks: int, nbytes: int) -> None:
    routes = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1))
    one, other = data.draw(st.tuples(routes, routes))
    sent = payload(*one, nbytes)
    assert int(sent.max()) < POISON
    assert torch.equal(sent, payload(*other, nbytes)) == (one == other)
    assert not torch.equal(sent[1:], payload(*one, nbytes)[:-1])


@given(st.integers(1, 300), st.data())
def test_one_wrong_byte_raises(nbytes: int, data: st.DataObject) -> None:
    expected = payload(1, 0, nbytes)
    check_received(expected.clone(), expected)
    at = data.draw(st.integers(0, nbytes - 1))
    received = expected.clone()
    received[at] = POISON
    with pytest.raises(UnavailableError, match=f"1 bytes arrived wrong: byte {at} is 255, {int(expected[at])} was"):
        check_received(received, expected)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"processes": 1}, "processes=1 must be at least 2"),
        ({"backend": "mpi"}, "backend='mpi' must be one of auto, gloo, nccl"),
        ({"sizes": ()}, "sizes must not be empty"),
        ({"processes": 8, "sizes": (4_096, 6)}, "6 bytes must be at least one for each of 7 other ranks"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be positive"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be positive"),
    ],
)
def test_bad_settings(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        measure_collectives(**{"processes": 2, **settings})


def test_nccl_needs_a_device_for_each_rank() -> None:
    ranks = torch.cuda.device_count() + 2
    with pytest.raises(UnavailableError, match=f"backend 'nccl' needs {ranks} CUDA devices"):
        measure_collectives(ranks, "nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_auto_takes_nccl_where_there_are_devices() -> None:
    found = measure_collectives(2, "auto", FEW)
    assert found.backend == "nccl"
    assert all(cell.us > 0 for cell in found.cells)
    assert all(cell.us > 0 for cell in found.peers)


def test_default_sizes_span_4_kb_to_16_mb() -> None:
    assert (SIZES[0], SIZES[-1]) == (4_096, 16 * 1_024**2)
    assert list(SIZES) == sorted(set(SIZES))
