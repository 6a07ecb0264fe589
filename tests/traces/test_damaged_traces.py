"""Traces that are cut, wrong or unfinished: what is refused, and what a crash leaves to read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activation_cases import META, assert_same, make
from coterie.errors import InputError, TraceError
from coterie.traces import ActivationTrace, ActivationWriter


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("name", ["activations", "requests"])
def test_missing_and_cut_segments(tmp_path: Path, rng: np.random.Generator, name: str, segment: int) -> None:
    out = ActivationWriter(tmp_path / "t", META, flush_tokens=1)
    for _ in range(2):
        part = make(rng, [4])
        out.append_many(*part.arrays(), part.requests)
    file = tmp_path / "t" / f"{name}-{segment + 1:05d}.{'safetensors' if name == 'activations' else 'parquet'}"
    data = file.read_bytes()
    for length in range(0, len(data), max(1, len(data) // 40)):
        file.write_bytes(data[:length])
        with pytest.raises(TraceError, match=file.name):
            ActivationTrace.open(tmp_path / "t").requests  # noqa: B018
    file.unlink()
    with pytest.raises(TraceError, match=f"{file.name}: file: does not exist"):
        ActivationTrace.open(tmp_path / "t").requests  # noqa: B018


@pytest.mark.parametrize(
    "name", ["../mine.safetensors", "/etc/passwd", "notes.txt", "", ".", "activations-1.safetensors/.."]
)
@pytest.mark.parametrize("kind", ["activations", "requests"])
def test_segments_outside_the_folder_are_refused(
    tmp_path: Path, rng: np.random.Generator, kind: str, name: str
) -> None:
    """A writer that resumed such a trace and closed it would delete them."""
    out = ActivationWriter(tmp_path / "t", META, flush_tokens=1)
    part = make(rng, [4])
    out.append_many(*part.arrays(), part.requests)
    out.suspend()
    entry = json.loads((tmp_path / "t" / "meta.json").read_text())["segments"][0]
    shutil.copy(tmp_path / "t" / entry["activations"], tmp_path / "mine.safetensors")
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    meta["segments"][0][kind] = name
    (tmp_path / "t" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(TraceError, match="is not the name of a segment's file"):
        ActivationTrace.open(tmp_path / "t")
    with pytest.raises(TraceError, match="is not the name of a segment's file"):
        ActivationWriter.resume(tmp_path / "t", META)
    assert (tmp_path / "mine.safetensors").is_file()


def test_a_table_with_other_rows_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    make(rng, [1, 2]).save(tmp_path / "two")
    make(rng, [3]).save(tmp_path / "one")
    shutil.copy(tmp_path / "one" / "requests.parquet", tmp_path / "two" / "requests.parquet")
    with pytest.raises(TraceError, match=r"requests.parquet: rows: found 1, expected 2"):
        ActivationTrace.open(tmp_path / "two").requests  # noqa: B018


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("format", "other", "format"),
        ("version", 2, "version"),
        ("kind", "load", "kind"),
        ("kind", "x", "kind"),
        ("num_experts", 200, "shape"),
        ("num_experts", "300", "shape"),
        ("num_experts", 0, "shape"),
        ("num_layers", 3, "shape"),
        ("num_layers", None, "shape"),
        ("top_k", 2, "shape"),
        ("top_k", 3.0, "shape"),
        ("layer_ids", [1], "shape"),
        ("layer_ids", 5, "shape"),
        ("segments", None, "segments"),
        ("segments", [{}], "activations"),
        ("segments", [{"activations": "a", "requests": "b", "num_tokens": "many"}], "shape"),
        ("num_experts", ..., "num_experts"),
        ("model", ..., "model"),
        ("segments", ..., "segments"),
    ],
)
def test_wrong_meta(tmp_path: Path, rng: np.random.Generator, key: str, value: Any, field: str) -> None:
    make(rng, [2, 3]).save(tmp_path / "t")
    path = tmp_path / "t" / "meta.json"
    meta = json.loads(path.read_text())
    if value is ...:
        del meta[key]
    else:
        meta[key] = value
    path.write_text(json.dumps(meta))
    with pytest.raises(TraceError) as caught:
        ActivationTrace.open(tmp_path / "t")
    assert caught.value.field == field
    assert str(tmp_path) in str(caught.value)


def test_wrong_token_count_in_meta(tmp_path: Path, rng: np.random.Generator) -> None:
    make(rng, [2, 3]).save(tmp_path / "t")
    path = tmp_path / "t" / "meta.json"
    path.write_text(path.read_text().replace('"num_tokens": 5', '"num_tokens": 6'))
    with pytest.raises(TraceError, match=r"phase: has 5 tokens, meta\.json says 6"):
        ActivationTrace.open(tmp_path / "t")


def test_validate_names_the_first_bad_id(tmp_path: Path, rng: np.random.Generator) -> None:
    make(rng, [2, 3]).save(tmp_path / "t")
    path = tmp_path / "t" / "meta.json"
    trace = ActivationTrace.open(tmp_path / "t")
    highest = int(trace.arrays()[0].expert_ids.max())
    assert highest > 256, "the sample must need 16 bits either way"
    path.write_text(path.read_text().replace('"num_experts": 300', f'"num_experts": {highest}'))
    where = np.argwhere(trace.arrays()[0].expert_ids == highest)[0].tolist()
    with pytest.raises(TraceError) as caught:
        ActivationTrace.open(tmp_path / "t").validate()
    assert f"expert_ids{where}={highest} must be in 0 … {highest - 1}" in str(caught.value)


def test_validate_finds_offsets_that_fall(tmp_path: Path, rng: np.random.Generator) -> None:
    make(rng, [2, 3]).save(tmp_path / "t")
    file = tmp_path / "t" / "activations.safetensors"
    good = np.array([0, 2, 5], np.int64).tobytes()
    assert file.read_bytes().count(good) == 1
    file.write_bytes(file.read_bytes().replace(good, np.array([0, 6, 5], np.int64).tobytes()))
    with pytest.raises(TraceError, match=r"activations\.safetensors: offsets: .* must not fall"):
        ActivationTrace.open(tmp_path / "t").validate()


@pytest.mark.parametrize("offsets", [[0, 3], [0, 9], [-1, 5], [1, 5], [0, 3, 2, 5], [0], []])
def test_offsets_that_do_not_match(rng: np.random.Generator, offsets: list[Any]) -> None:
    tokens, _ = make(rng, [5]).arrays()
    with pytest.raises(InputError):
        ActivationTrace.from_arrays(META, tokens.expert_ids, np.array(offsets, np.int64), phase=tokens.phase)


RECORDER = """
import sys
import numpy as np
from coterie.traces import ActivationWriter, TraceMeta
out = ActivationWriter(sys.argv[1], TraceMeta("demo", 64, 2, 2), flush_tokens=40)
rng = np.random.default_rng(7)
for index in range(100_000):
    ids = rng.integers(0, 64, (10, 2, 2))
    out.append(ids, [0] * 5 + [1] * 5, id=str(index))
    if index % 4 == 3:
        print(index + 1, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 3, 8])
def test_a_killed_recording_reads_up_to_its_last_flush(tmp_path: Path, lines: int) -> None:
    """SIGKILL gives no chance to tidy up; the process says after each flush how many requests are safe."""
    child = subprocess.Popen([sys.executable, "-c", RECORDER, str(tmp_path / "t")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    safe = [int(child.stdout.readline()) for _ in range(lines)][-1]
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.num_requests >= safe
    assert trace.num_requests % 4 == 0, "only whole flushes count"
    assert trace.requests.ids == [str(index) for index in range(trace.num_requests)]
    rng = np.random.default_rng(7)
    for index in range(trace.num_requests):
        np.testing.assert_array_equal(trace.request(index).expert_ids, rng.integers(0, 64, (10, 2, 2)))


class _Crash(BaseException):
    """Not an Exception: nothing on the way may handle it."""


CRASH_POINTS = ["pyarrow.parquet.write_table", "os.pwrite", "os.ftruncate", "os.fsync", "json.dumps"]
CRASH_POINTS += ["pathlib.Path.replace", "pathlib.Path.unlink"]


@pytest.mark.parametrize(
    ("point", "closing"), [*((point, True) for point in CRASH_POINTS), *((point, False) for point in CRASH_POINTS[:-1])]
)
def test_a_crash_at_any_step_loses_no_flushed_request(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, point: Any, closing: Any
) -> None:
    """Stop at the n-th call of everything that touches the disk, for every n until the step completes."""
    first, second = make(rng, [3, 2]), make(rng, [4])
    for attempt in range(1, 20):
        folder = tmp_path / str(attempt)
        out = ActivationWriter(folder, META)
        out.append_many(*first.arrays(), first.requests)
        out.flush()
        out.append_many(*second.arrays(), second.requests)
        calls = 0

        with monkeypatch.context() as patch:
            module, _, name = point.rpartition(".")
            owner = Path if module == "pathlib.Path" else __import__(module, fromlist=[name])
            real = getattr(owner, name)

            def stop(*args: Any, real: Any = real, attempt: Any = attempt, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == attempt:
                    raise _Crash
                return real(*args, **kwargs)

            patch.setattr(owner, name, stop)
            try:
                if closing:
                    out.close()
                else:
                    out.flush()
                done = True
            except _Crash:
                done = False
        (folder / "activations.safetensors.tmp").write_bytes(b"leftover of another crash")
        found = ActivationTrace.open(folder)
        assert found.num_requests in (2, 3)
        if found.num_requests == 2:
            assert not done
            assert_same(found, first)
        else:
            np.testing.assert_array_equal(found.request(2).expert_ids, second.request(0).expert_ids)
            np.testing.assert_array_equal(found.request(0).expert_ids, first.request(0).expert_ids)
            assert found.requests.ids == ["r0", "r1", "r0"]
        if done:
            assert calls == attempt - 1
            break
    else:
        pytest.fail("the step never completed")
    assert attempt > 1, f"{point} is not on the way of a flush any more"
