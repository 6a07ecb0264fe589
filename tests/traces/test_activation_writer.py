"""Going on with an interrupted recording: nothing flushed is lost, nothing shows in the end, and misuse is refused."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, TraceError
from coterie.traces import ActivationTrace, ActivationWriter, RequestTrace, TraceMeta
from full_disk import FULL, files_of_at_most

META = TraceMeta(
    "demo", num_experts=300, num_layers=2, top_k=3, layer_ids=(1, 3), source={"seed": 7, "shape": (1, 2)}
)  # a tuple is a list once written


class _Stopped(BaseException):
    """Not an Exception: nothing on the way may handle it."""


def make(lengths: list[int], seed: int = 0) -> ActivationTrace:
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    requests = RequestTrace(
        prompt_tokens=np.array(lengths),
        output_tokens=np.zeros(len(lengths), np.int64),
        ids=[f"r{i}" for i in range(len(lengths))],
        domains=["law"] * len(lengths),
        extra={"note": [i * 0.5 for i in range(len(lengths))]},
    )
    return ActivationTrace.from_arrays(
        META,
        rng.integers(0, 300, (count, 2, 3)),
        offsets,
        requests,
        rng.integers(0, 2, count).astype(np.uint8),
        rng.integers(0, 1000, count).astype(np.int32),
    )


def add(out: ActivationWriter, trace: ActivationTrace, index: int) -> None:
    row = trace.request(index)
    out.append_many(row, np.array([0, len(row.phase)]), trace.requests.take(slice(index, index + 1)))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=10), st.lists(st.integers(0, 10), max_size=4), st.integers(1, 12)
)
def test_a_resumed_recording_has_the_bytes_of_one_that_was_not_interrupted(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], stops: list[int], flush_tokens: int
) -> None:
    trace = make(lengths)
    folder = tmp_path_factory.mktemp("trace")
    trace.save(folder / "whole")
    out = ActivationWriter(folder / "parts", META, flush_tokens)
    for index in range(trace.num_requests):
        for _ in range(stops.count(index)):
            out.suspend()
            assert ActivationTrace.open(folder / "parts").num_requests == index
            out = ActivationWriter.resume(folder / "parts", META, flush_tokens)
        add(out, trace, index)
    out.close()
    assert bytes_of(folder / "parts") == bytes_of(folder / "whole")


CRASH_POINTS = ["pyarrow.parquet.write_table", "os.pwrite", "os.ftruncate", "os.fsync", "json.dump"]
CRASH_POINTS += ["pathlib.Path.replace", "pathlib.Path.unlink"]


@pytest.fixture
def short_collections() -> Iterator[None]:
    """What the tests before left behind is not looked at again: it would take longer than all else."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("step", ["flush", "close"])
@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.usefixtures("short_collections")
def test_after_a_crash_at_any_step_the_recording_goes_on_and_nothing_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, step: str
) -> None:
    """Stop at the n-th call of everything that touches the disk; resume; the files are as if nothing had happened."""
    trace = make([3, 2, 4, 1])
    trace.save(tmp_path / "whole")
    for attempt in range(1, 20):
        folder = tmp_path / str(attempt)
        out = ActivationWriter(folder, META)
        for index in range(2):
            add(out, trace, index)
        out.flush()
        add(out, trace, 2)
        done = not _stops(monkeypatch, point, attempt, getattr(out, step))
        del out  # a process that died has let go of the folder
        gc.collect()
        kept = ActivationTrace.open(folder).num_requests
        assert kept in (2, 3)
        if "activations.safetensors" in (folder / "meta.json").read_text():
            assert step == "close", "the crash came after the commit"
            with pytest.raises(ConfigError, match="is closed: its recording was finished"):
                ActivationWriter.resume(folder, META)
        else:
            with ActivationWriter.resume(folder, META) as again:
                for index in range(kept, trace.num_requests):
                    add(again, trace, index)
            assert bytes_of(folder) == bytes_of(tmp_path / "whole")
        if done:
            break
    else:
        pytest.fail("the step never completed")


def _stops(monkeypatch: pytest.MonkeyPatch, point: Any, attempt: Any, action: Any) -> bool:
    module, _, name = point.rpartition(".")
    owner = Path if module == "pathlib.Path" else __import__(module, fromlist=[name])
    real, calls = getattr(owner, name), 0

    def stop(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == attempt:
            raise _Stopped
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        try:
            action()
        except _Stopped:
            return True
    return False


@pytest.mark.parametrize("point", ["pathlib.Path.unlink", "json.dump", "os.fsync"])
def test_a_crash_while_resuming_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    trace = make([3, 2])
    out = ActivationWriter(tmp_path / "t", META)
    add(out, trace, 0)
    out.suspend()
    (tmp_path / "t" / "activations-00002.safetensors").write_bytes(b"of a flush that was not committed")
    (tmp_path / "t" / "requests-00002.parquet.tmp").write_bytes(b"half")
    before = (tmp_path / "t" / "meta.json").read_bytes()
    _stops(monkeypatch, point, 1, lambda: ActivationWriter.resume(tmp_path / "t", META).suspend())
    assert (tmp_path / "t" / "meta.json").read_bytes() == before, "resuming alone writes nothing"
    with ActivationWriter.resume(tmp_path / "t", META) as again:
        assert sorted(bytes_of(tmp_path / "t")) == [
            "activations-00001.safetensors",
            "meta.json",
            "requests-00001.parquet",
        ]
        add(again, trace, 1)
    trace.save(tmp_path / "whole")
    assert bytes_of(tmp_path / "t") == bytes_of(tmp_path / "whole")


def test_an_error_suspends_and_the_recording_goes_on(tmp_path: Path) -> None:
    trace = make([3, 2])
    with contextlib.suppress(_Stopped), ActivationWriter(tmp_path / "t", META) as out:
        add(out, trace, 0)
        raise _Stopped
    with pytest.raises(ConfigError, match="is closed; nothing can be appended"):
        add(out, trace, 1)
    with ActivationWriter.resume(tmp_path / "t", META) as again:
        add(again, trace, 1)
    assert ActivationTrace.open(tmp_path / "t").requests.ids == ["r0", "r1"]


def test_a_full_disk_ends_the_recording_and_keeps_what_was_flushed(tmp_path: Path) -> None:
    trace = make([5, 4000])
    out = ActivationWriter(tmp_path / "t", META)
    add(out, trace, 0)
    out.flush()
    add(out, trace, 1)
    with files_of_at_most(8000), pytest.raises(OSError, match=FULL) as full, out:
        out.flush()
    assert Path(full.value.filename).is_relative_to(tmp_path / "t")
    left = ActivationTrace.open(tmp_path / "t")
    assert (left.unfinished, left.num_requests) == (True, 1)
    assert len(bytes_of(tmp_path / "t")) == 3, "meta.json and the first segment"
    with ActivationWriter.resume(tmp_path / "t", META) as again:
        add(again, trace, 1)
    assert ActivationTrace.open(tmp_path / "t").num_requests == 2


def test_a_disk_too_full_to_join_keeps_all_segments(tmp_path: Path) -> None:
    trace = make([200, 200])
    out = ActivationWriter(tmp_path / "t", META)
    for index in (0, 1):
        add(out, trace, index)
        out.flush()
    largest = max(len(data) for data in bytes_of(tmp_path / "t").values())
    with files_of_at_most(largest), pytest.raises(OSError, match=FULL):
        out.close()
    left = ActivationTrace.open(tmp_path / "t")
    assert (left.unfinished, left.num_requests) == (True, 2)
    assert len(bytes_of(tmp_path / "t")) == 5
    ActivationWriter.resume(tmp_path / "t", META).close()
    assert not ActivationTrace.open(tmp_path / "t").unfinished


def test_a_recording_of_nothing_is_resumed_too(tmp_path: Path) -> None:
    ActivationWriter(tmp_path / "t", META).suspend()
    trace = make([2])
    with ActivationWriter.resume(tmp_path / "t", META) as out:
        add(out, trace, 0)
    assert ActivationTrace.open(tmp_path / "t").num_tokens == 2


def test_a_closed_trace_is_refused(tmp_path: Path) -> None:
    make([2]).save(tmp_path / "t")
    ActivationWriter(tmp_path / "empty", META).close()
    for name in ("t", "empty"):
        before = bytes_of(tmp_path / name)
        with pytest.raises(ConfigError, match=f"{name} is closed: its recording was finished and cannot be resumed"):
            ActivationWriter.resume(tmp_path / name, META)
        assert bytes_of(tmp_path / name) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "model='demo', not 'other'"),
        ({"num_experts": 301}, "num_experts=300, not 301"),
        ({"layer_ids": (1, 2)}, r"layer_ids=\(1, 3\), not \(1, 2\)"),
        ({"source": {"seed": 8, "shape": [1, 2]}}, "recorded with seed=7, not 8$"),
        ({"source": {"seed": 7}}, r"shape=\[1, 2\], not None"),
    ],
)
def test_other_meta_is_refused_and_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    ActivationWriter(tmp_path / "t", META).suspend()
    with pytest.raises(ConfigError, match=message):
        ActivationWriter.resume(tmp_path / "t", replace(META, **change))
    ActivationWriter.resume(tmp_path / "t", META).close()  # a refusal leaves it as it was, and unlocked


def test_what_is_no_unfinished_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        ActivationWriter.resume(tmp_path / "none", META)
    make([1]).requests.save(tmp_path / "requests")
    with pytest.raises(TraceError, match="expected 'activations'"):
        ActivationWriter.resume(tmp_path / "requests", META)
    out = ActivationWriter(tmp_path / "t", META)
    add(out, make([2]), 0)
    out.suspend()
    (tmp_path / "t" / "requests-00001.parquet").write_bytes(b"cut")
    with pytest.raises(TraceError, match=r"requests-00001\.parquet"):
        ActivationWriter.resume(tmp_path / "t", META)


def test_columns_are_for_all_requests_across_a_resume(tmp_path: Path) -> None:
    trace = make([2, 3])
    out = ActivationWriter(tmp_path / "t", META)
    add(out, trace, 0)
    out.suspend()
    again = ActivationWriter.resume(tmp_path / "t", META)
    row = trace.request(1)
    with pytest.raises(ConfigError, match=r"extra\.note, ids, token_ids: given for some requests"):
        again.append(row.expert_ids, row.phase, domain="law")
    add(again, trace, 1)
    again.close()
    assert ActivationTrace.open(tmp_path / "t").requests.extra["note"] == [0.0, 0.5]


def test_two_writers_cannot_have_one_folder(tmp_path: Path) -> None:
    out = ActivationWriter(tmp_path / "t", META)
    for _ in range(2):
        with pytest.raises(ConfigError, match="t is being recorded by another process"):
            ActivationWriter.resume(tmp_path / "t", META)
    add(out, make([2]), 0)
    out.suspend()
    out.close()  # after that it does nothing
    ActivationWriter.resume(tmp_path / "t", META).close()


RECORDER = """
import sys, time
import numpy as np
from coterie.traces import ActivationWriter, TraceMeta
out = ActivationWriter(sys.argv[1], TraceMeta("demo", 64, 2, 2), flush_tokens=1)
out.append(np.ones((1, 2, 2), int), [0], id="0")
print("ready", flush=True)
time.sleep(100)
"""


def test_a_living_recorder_keeps_its_folder_and_a_killed_one_does_not(tmp_path: Path) -> None:
    meta = TraceMeta("demo", 64, 2, 2)
    child = subprocess.Popen([sys.executable, "-c", RECORDER, str(tmp_path / "t")], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(ConfigError, match="is being recorded by another process"):
            ActivationWriter.resume(tmp_path / "t", meta)
        assert ActivationTrace.open(tmp_path / "t").num_requests == 1, "reading beside it is free"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    with ActivationWriter.resume(tmp_path / "t", meta) as out:
        out.append(np.zeros((1, 2, 2), int), [1], id="1")
    assert ActivationTrace.open(tmp_path / "t").requests.ids == ["0", "1"]
    assert len(json.loads((tmp_path / "t" / "meta.json").read_text())["segments"]) == 1
