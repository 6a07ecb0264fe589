"""Invariants of traces that span several modules: docs/invariants.md gives each its number and its reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import TraceError
from coterie.footprints import footprint
from coterie.traces import ActivationTrace, ActivationWriter, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers import Trace, detect, read_trace, readers
from coterie.traces.store import write_arrays
from coterie.traces.writers import write_trace, writers

ROOT = Path(__file__).parents[2]
META = TraceMeta("demo", num_experts=8, num_layers=2, top_k=2, layer_ids=(1, 2))


def activations(rng: np.random.Generator, lengths: tuple[int, ...] = (3, 1, 4)) -> ActivationTrace:
    ids = rng.permuted(np.tile(np.arange(8), (sum(lengths), 2, 1)), axis=2)[:, :, :2]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    requests = RequestTrace(
        prompt_tokens=np.array(lengths),
        output_tokens=np.zeros(len(lengths), np.int64),
        arrival_s=np.arange(len(lengths), dtype=np.float64) * 0.5,
        domains=["law"] * len(lengths),
    )
    return ActivationTrace.from_arrays(META, ids, offsets, requests, np.zeros(len(ids), np.uint8))


def requests() -> RequestTrace:
    return RequestTrace(
        np.array([600, 3]),
        np.array([5, 7]),
        np.array([0.0, 1.5]),
        prefix_blocks=[np.array([11, 12]), np.array([13])],
        block_tokens=512,
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# The documents ------------------------------------------------------------------------------------------------------


def test_every_invariant_names_tests_that_exist() -> None:
    page = (ROOT / "docs/invariants.md").read_text()
    sections = re.split(r"^## (?=INV-)", page, flags=re.MULTILINE)[1:]
    assert [section.split(":")[0] for section in sections] == [f"INV-{n}" for n in range(1, len(sections) + 1)]
    for section in sections:
        cited = re.findall(r"`(tests/[\w/.]+)::(\w+)`", section)
        assert cited or "`make lint`" in section, section.splitlines()[0]
        for file, test in cited:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


# INV-1: a trace reads whole or raises ------------------------------------------------------------------------------


def test_every_file_of_a_folder_is_needed(tmp_path: Path, rng: np.random.Generator) -> None:
    for name, trace in (("a", activations(rng)), ("l", LoadTable(np.ones((1, 2, 3), np.uint64))), ("r", requests())):
        trace.save(tmp_path / name)
        for file in list((tmp_path / name).iterdir()):
            kept = file.read_bytes()
            file.unlink()
            with pytest.raises(TraceError, match=file.name):
                whole(TraceOpener[type(trace)](tmp_path / name))
            file.write_bytes(kept)
        whole(TraceOpener[type(trace)](tmp_path / name))


TraceOpener: dict[type, Callable[[Path], Trace]] = {
    ActivationTrace: ActivationTrace.open,
    LoadTable: LoadTable.open,
    RequestTrace: RequestTrace.open,
}


def whole(trace: Trace) -> None:
    """Read all there is to read."""
    if isinstance(trace, ActivationTrace):
        trace.validate()
        assert len(trace.requests) == trace.num_requests


# INV-3: recording only adds ----------------------------------------------------------------------------------------


def test_a_reader_beside_the_recording_sees_a_growing_beginning(tmp_path: Path, rng: np.random.Generator) -> None:
    source = activations(rng, (2, 3, 1, 4, 2))
    expected, _ = source.arrays()
    opened = []
    with ActivationWriter(tmp_path / "t", META, flush_tokens=3) as out:
        for index in range(source.num_requests):
            row = source.request(index)
            out.append(row.expert_ids, row.phase)
            opened.append(ActivationTrace.open(tmp_path / "t"))
    seen = [trace.num_requests for trace in opened]
    assert seen == [0, 2, 2, 4, 4]
    for trace in opened:  # the segments they map are joined and removed by now
        found = trace.arrays()[0].expert_ids
        np.testing.assert_array_equal(found, expected.expert_ids[: len(found)])
    assert ActivationTrace.open(tmp_path / "t").num_requests == 5


# INV-6: one trace, one sequence of bytes ---------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_files_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the order of sets, nor the number of threads, nor the clock may show in any file."""
    arguments = ["generate", "t", "--requests", "20", "--seed", "7"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": "1", "NUMBA_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [str(Path(sys.executable).with_name("coterie")), *arguments]
    done = subprocess.run(command, cwd=tmp_path / "one", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path / "two")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    one, two = (bytes_of(tmp_path / name) for name in ("one", "two"))
    assert sorted(one) == ["t/activations.safetensors", "t/meta.json", "t/requests.parquet"]
    assert one == two


def test_a_copy_of_a_copy_has_the_same_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    for name, trace in (("a", activations(rng)), ("l", LoadTable(np.ones((1, 2, 3), np.uint64))), ("r", requests())):
        trace.save(tmp_path / name)
        write_trace(read_trace(tmp_path / name), tmp_path / f"{name}-copy")
        assert bytes_of(tmp_path / name) == bytes_of(tmp_path / f"{name}-copy")


def test_how_it_was_recorded_does_not_show(tmp_path: Path, rng: np.random.Generator) -> None:
    trace = activations(rng)
    for name, flush_tokens in (("often", 1), ("once", 1000)):
        with ActivationWriter(tmp_path / name, META, flush_tokens) as out:
            for index in range(trace.num_requests):
                row = trace.request(index)
                out.append_many(row, np.array([0, len(row.phase)]), trace.requests.take(slice(index, index + 1)))
    assert bytes_of(tmp_path / "often") == bytes_of(tmp_path / "once")


# INV-7: a reader never claims another's file -----------------------------------------------------------------------


def azure(path: Path) -> None:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,5,6\n")


def burstgpt(path: Path) -> None:
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,3,4,7,API\n")


def trtllm(path: Path) -> None:
    path.mkdir()
    (path / "meta_info.json").write_text(json.dumps({"num_experts": 3, "num_experts_per_token": 1}))
    write_arrays(path / "rank0.safetensors", {"0_0": np.array([1, 2, 3])})


def servegen(path: Path) -> None:
    path.mkdir()
    lengths = {"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{5: 1.0}"}}
    (path / "chunk-0-trace.csv").write_text("0,1.0,1.0,Gamma,1.0,1.0\n600,1.0,1.0,Gamma,1.0,1.0\n")
    (path / "chunk-0-dataset.json").write_text(json.dumps(lengths))


def mooncake(path: Path) -> None:
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n')


def load_history(path: Path) -> None:
    path.write_text('{"load_history": [{"logical_expert_load": [[1, 2, 3], [4, 5, 6]]}]}')


def written(format: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        kinds: dict[type, Trace] = {
            RequestTrace: requests(),
            LoadTable: LoadTable(np.ones((1, 2, 3), np.uint64)),
            ActivationTrace: activations(np.random.default_rng(0)),
        }
        write_trace(kinds[writers[format].kinds[0]], path, format)

    return write


SAMPLES: dict[str, Callable[[Path], None]] = {
    "azure": azure,
    "burstgpt": burstgpt,
    "trtllm": trtllm,
    "servegen": servegen,
    "mooncake": mooncake,
    "load-history": load_history,
}
SAMPLES |= {name: written(name) for name in writers}


@pytest.mark.parametrize("format", SAMPLES)
def test_exactly_one_reader_claims_a_file(tmp_path: Path, format: str) -> None:
    SAMPLES[format](tmp_path / "sample")
    assert [name for name in readers if readers[name].sniff(tmp_path / "sample")] == [format]
    assert detect(tmp_path / "sample") == format
    read_trace(tmp_path / "sample")


def test_every_reader_has_a_sample_here_or_a_test_of_its_own() -> None:
    own = {"routed-experts", "sglang-recorder"}  # whole answers of an engine, and files that only torch writes
    assert set(readers) == set(SAMPLES) | own


# INV-8: reading changes nothing ------------------------------------------------------------------------------------


def test_reading_leaves_every_file_as_it_was(tmp_path: Path, rng: np.random.Generator) -> None:
    activations(rng).save(tmp_path / "t")
    before, times = bytes_of(tmp_path), {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    trace = ActivationTrace.open(tmp_path / "t")
    whole(trace)
    assert sum(len(chunk.tokens.phase) for chunk in trace.chunks(2)) == 8
    trace.save(tmp_path / "elsewhere")
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert {name: data for name, data in bytes_of(tmp_path).items() if name in before} == before


# INV-9: activations are conserved ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [name for name in writers if ActivationTrace in writers[name].kinds])
def test_no_activation_is_lost_or_made(tmp_path: Path, rng: np.random.Generator, format: str) -> None:
    trace = activations(rng)
    expected = footprint(trace.arrays()[0].expert_ids, 8)  # [layer, expert] tokens
    assert expected.sum() == 8 * 2 * 2, "tokens x layers x top-k"
    write_trace(trace, tmp_path / "t", format)
    found = read_trace(tmp_path / "t")
    assert isinstance(found, ActivationTrace)
    parts = [footprint(found.request(index).expert_ids, 8) for index in range(found.num_requests)]
    np.testing.assert_array_equal(sum(parts), expected)
    chunks = [footprint(chunk.tokens.expert_ids, 8) for chunk in found.chunks(2)]
    np.testing.assert_array_equal(sum(chunks), expected)
