"""Activation traces on disk: exact round trips, views and refusals."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from activation_cases import META, assert_same, make
from coterie.errors import ConfigError
from coterie.traces import ActivationTrace, ActivationWriter, LoadTable, TraceMeta
from coterie.traces.readers import read_trace
from coterie.types import DECODE, PREFILL

ragged = st.lists(st.integers(0, 7), min_size=1, max_size=12)


@given(ragged, st.integers(0, 2**32), st.booleans(), st.integers(1, 12))
def test_round_trip_of_ragged_requests(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, optional: bool, flush_tokens: int
) -> None:
    trace = make(np.random.default_rng(seed), lengths, optional)
    folder = tmp_path_factory.mktemp("trace")
    trace.save(folder / "saved")
    assert_same(ActivationTrace.open(folder / "saved"), trace)

    with ActivationWriter(folder / "recorded", META, flush_tokens) as out:
        for index in range(trace.num_requests):
            row = trace.request(index)
            out.append_many(row, np.array([0, len(row.phase)]), trace.requests.take(slice(index, index + 1)))
    found = read_trace(folder / "recorded")
    assert isinstance(found, ActivationTrace)
    assert_same(found, trace)
    found.validate()
    assert sorted(path.name for path in (folder / "recorded").iterdir()) == [
        "activations.safetensors",
        "meta.json",
        "requests.parquet",
    ]


@given(ragged, st.integers(1, 30), st.integers(1, 12))
def test_segments_chunks_and_requests_tell_the_same(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], max_tokens: int, flush_tokens: int
) -> None:
    trace = make(np.random.default_rng(0), lengths)
    folder = tmp_path_factory.mktemp("trace") / "t"
    out = ActivationWriter(folder, META, flush_tokens)
    for index in range(trace.num_requests):
        row = trace.request(index)
        out.append_many(row, np.array([0, len(row.phase)]), trace.requests.take(slice(index, index + 1)))
    out.flush()
    for found in (ActivationTrace.open(folder), trace):
        assert_same(found, trace)
        np.testing.assert_array_equal(found.lengths, lengths)
        seen = 0
        for chunk in found.chunks(max_tokens):
            assert chunk.first_request == seen
            assert len(chunk.tokens.phase) <= max_tokens or len(chunk.offsets) == 2, "whole requests, as few as fit"
            for at, (start, stop) in enumerate(pairwise(chunk.offsets)):
                one = found.request(seen + at)
                np.testing.assert_array_equal(chunk.tokens.expert_ids[start:stop], one.expert_ids)
                np.testing.assert_array_equal(chunk.tokens.phase[start:stop], one.phase)
            seen += len(chunk.offsets) - 1
        assert seen == trace.num_requests


def test_requests_are_views_of_the_mapped_file(tmp_path: Path, rng: np.random.Generator) -> None:
    make(rng, [3, 4]).save(tmp_path / "t")
    trace = ActivationTrace.open(tmp_path / "t")
    whole = trace.arrays()[0]
    for array, part in zip(whole, trace.request(1), strict=True):
        assert array is not None
        assert part is not None
        assert np.shares_memory(array, part)
        assert not part.flags.writeable
    assert trace.nbytes == 7 * 2 * 3 * 2, "300 experts need two bytes"


def test_the_narrowest_dtype_is_stored(tmp_path: Path, rng: np.random.Generator) -> None:
    for experts, dtype in ((256, np.uint8), (257, np.uint16)):
        meta = TraceMeta("demo", num_experts=experts, num_layers=2, top_k=3)
        make(rng, [5], meta=meta).save(tmp_path / str(experts))
        assert load_file(tmp_path / str(experts) / "activations.safetensors")["expert_ids"].dtype == dtype


def test_phase_splits_prompt_from_output(tmp_path: Path) -> None:
    with ActivationWriter(tmp_path / "t", TraceMeta("demo", 4, 1, 1)) as out:
        out.append(np.array([[[0]], [[1]], [[3]]]), [PREFILL, PREFILL, DECODE], id="a", arrival_s=0.5, domain="law")
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.request(0).only(DECODE).tolist() == [[[3]]]
    assert (trace.requests.prompt_tokens.tolist(), trace.requests.output_tokens.tolist()) == ([2], [1])
    assert trace.requests.ids == ["a"]


def test_optional_arrays_are_for_all_or_for_none(tmp_path: Path, rng: np.random.Generator) -> None:
    with ActivationWriter(tmp_path / "t", META) as out:
        whole, bare = make(rng, [2]), make(rng, [3], optional=False)
        out.append_many(*whole.arrays(), whole.requests)
        out.flush()
        with pytest.raises(ConfigError, match="gate_weights, token_ids: given for some requests and not for others"):
            out.append_many(*bare.arrays(), bare.requests)
    found = ActivationTrace.open(tmp_path / "t")
    assert found.num_tokens == 2
    assert found.request(0).gate_weights is not None, "what was recorded is not lost to a later request"


def test_an_empty_recording_reads_as_empty(tmp_path: Path) -> None:
    ActivationWriter(tmp_path / "t", META).close()
    trace = ActivationTrace.open(tmp_path / "t")
    assert (trace.num_requests, trace.num_tokens, len(trace.requests)) == (0, 0, 0)
    assert list(trace.chunks()) == []
    with pytest.raises(ConfigError, match="request 0 must be in"):
        trace.request(0)
    trace.save(tmp_path / "again")
    assert ActivationTrace.open(tmp_path / "again").num_tokens == 0


def test_a_recording_without_flush_reads_as_empty(tmp_path: Path, rng: np.random.Generator) -> None:
    """The first commit is made before the first request."""
    writer = ActivationWriter(tmp_path / "t", META)
    tokens, offsets = make(rng, [4]).arrays()
    writer.append_many(tokens, offsets, make(rng, [4]).requests)
    trace = ActivationTrace.open(tmp_path / "t")
    assert (trace.num_requests, trace.num_tokens, len(trace.requests), len(trace.lengths)) == (0, 0, 0, 0)
    assert list(trace.chunks()) == []
    assert trace.arrays()[0].expert_ids.shape == (0, 2, 3)


@pytest.mark.parametrize("bad", ["id", "negative", "shape", "rows", "gates", "phase"])
def test_append_after_error(tmp_path: Path, rng: np.random.Generator, bad: str) -> None:
    """What is refused leaves nothing behind, and the writer goes on."""
    good = make(rng, [3])
    tokens, offsets = good.arrays()
    requests = good.requests
    wide = tokens.expert_ids.astype(np.int64)
    if bad in ("id", "negative"):
        wide[1, 0, 2] = 300 if bad == "id" else -1
    assert tokens.gate_weights is not None
    broken = {
        "id": tokens._replace(expert_ids=cast(Any, wide)),
        "negative": tokens._replace(expert_ids=cast(Any, wide)),
        "shape": tokens._replace(expert_ids=tokens.expert_ids[:, :1]),
        "rows": tokens,
        "gates": tokens._replace(gate_weights=tokens.gate_weights[:2]),
        "phase": tokens._replace(phase=tokens.phase[:2]),
    }[bad]
    with ActivationWriter(tmp_path / "t", META, flush_tokens=1) as out:
        out.append_many(tokens, offsets, requests)
        with pytest.raises(ConfigError) as caught:
            out.append_many(broken, offsets, make(rng, [1, 1]).requests if bad == "rows" else requests)
        out.append_many(tokens, offsets, requests)
    if bad in ("id", "negative"):
        assert "expert_ids[1, 0, 2]=" in str(caught.value)
        assert "must be in 0 … 299" in str(caught.value)
    found = ActivationTrace.open(tmp_path / "t")
    np.testing.assert_array_equal(found.request(0).expert_ids, found.request(1).expert_ids)
    assert found.num_requests == 2


def test_an_error_while_recording_keeps_what_came_before(tmp_path: Path, rng: np.random.Generator) -> None:
    trace = make(rng, [3, 2])
    with contextlib.suppress(ZeroDivisionError), ActivationWriter(tmp_path / "t", META) as out:
        out.append_many(*trace.arrays(), trace.requests)
        1 / 0  # noqa: B018
    assert_same(ActivationTrace.open(tmp_path / "t"), trace)


def test_refuses_to_overwrite(tmp_path: Path, rng: np.random.Generator) -> None:
    trace = make(rng, [2])
    trace.save(tmp_path / "t")
    before = {path: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    load = LoadTable(np.ones((1, 1, 1), np.uint64))
    for attempt in (trace.save, trace.requests.save, load.save, lambda path: ActivationWriter(path, META)):
        with pytest.raises(ConfigError, match="holds a trace already"):
            attempt(tmp_path / "t")
    assert {path: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder; a trace is one"):
        trace.save(tmp_path / "file")


def test_closing_twice_keeps_the_trace(tmp_path: Path) -> None:
    meta = TraceMeta("m", num_experts=4, num_layers=1, top_k=1)
    with ActivationWriter(tmp_path / "t", meta) as out:
        out.append(np.array([[[3]]]), phase=[0])
        out.close()  # and once more when the block ends
    assert ActivationTrace.open(tmp_path / "t").request(0).expert_ids.tolist() == [[[3]]]
    with pytest.raises(ConfigError, match="is closed"):
        out.append(np.array([[[3]]]), phase=[0])


def test_what_was_appended_does_not_change_with_the_callers_buffers(tmp_path: Path) -> None:
    meta = TraceMeta("m", num_experts=4, num_layers=1, top_k=1)
    phase, token_ids = np.zeros(2, np.uint8), np.arange(2, dtype=np.int32)
    with ActivationWriter(tmp_path / "t", meta) as out:
        out.append(np.array([[[3]], [[1]]]), phase=phase, token_ids=token_ids)
        phase[:], token_ids[:] = 1, 99
    tokens = ActivationTrace.open(tmp_path / "t").request(0)
    assert tokens.phase.tolist() == [0, 0]
    assert tokens.token_ids is not None
    assert tokens.token_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ids", "phase", "extra", "message"),
    [
        (np.array([[[0.9]]]), [0], {"domain": "a"}, "expert_ids is float64; expected whole numbers"),
        (np.array([[[1]]]), [7], {"domain": "a"}, "phase=7 must be 0"),
        (np.array([[[1]]]), [0], {}, "domains: given for some requests and not for others"),
    ],
)
def test_a_request_unlike_the_others_is_refused_and_nothing_is_lost(
    tmp_path: Path, ids: np.ndarray, phase: list[int], extra: dict[str, Any], message: str
) -> None:
    meta = TraceMeta("m", num_experts=4, num_layers=1, top_k=1)
    with ActivationWriter(tmp_path / "t", meta) as out:
        out.append(np.array([[[3]]]), phase=[0], domain="law")
        with pytest.raises(ConfigError, match=message):
            out.append(ids, phase=phase, **extra)
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.requests.domains == ["law"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_reading_starts_no_threads(tmp_path: Path, rng: np.random.Generator) -> None:
    """Arrow's threads abort the process if it ends while they do: 11 of 150 short programs."""
    make(rng, [3, 5]).save(tmp_path / "trace")
    count = "len(os.listdir('/proc/self/task'))"
    script = f"""
import os, sys
import numpy, pyarrow.parquet
from coterie.traces import ActivationTrace
before = {count}
assert len(ActivationTrace.open({str(tmp_path / "trace")!r}).requests) == 2
assert "pyarrow" in sys.modules
print({count} - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr
