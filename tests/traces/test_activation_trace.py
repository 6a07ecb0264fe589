"""Activation traces and load tables: exact round trips, views, refusals, and what a crash leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from coterie.errors import ConfigError, InputError, TraceError
from coterie.traces import ActivationTrace, ActivationWriter, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers import read_trace
from coterie.types import DECODE, PREFILL

META = TraceMeta("demo", num_experts=300, num_layers=2, top_k=3, layer_ids=(1, 3), source={"file": "x"}, block_tokens=4)


def make(
    rng: np.random.Generator, lengths: list[int], optional: bool = True, meta: TraceMeta = META
) -> ActivationTrace:
    count, offsets = sum(lengths), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shape = (count, meta.num_layers, meta.top_k)
    requests = RequestTrace(
        prompt_tokens=rng.integers(0, 9, len(lengths)),
        output_tokens=rng.integers(0, 9, len(lengths)),
        arrival_s=np.sort(rng.random(len(lengths))),
        ids=[f"r{i}" for i in range(len(lengths))],
        domains=[str(rng.choice(["law", "math"])) for _ in lengths],
        prefix_blocks=[rng.integers(-(2**60), 2**60, int(rng.integers(0, 4))) for _ in lengths],
        block_tokens=4,
        extra={"note": [i * 0.5 for i in range(len(lengths))]},
        source={"file": "x"},
    )
    return ActivationTrace.from_arrays(
        meta,
        rng.integers(0, meta.num_experts, shape),
        offsets,
        requests,
        rng.integers(0, 2, count).astype(np.uint8),
        rng.integers(0, 2**31 - 1, count).astype(np.int32) if optional else None,
        rng.random(shape).astype(np.float16) if optional else None,
    )


def assert_same(found: ActivationTrace, expected: ActivationTrace) -> None:
    assert found.meta == expected.meta
    for mine, theirs in zip(found.arrays()[0], expected.arrays()[0], strict=True):
        if theirs is None:
            assert mine is None
        else:
            assert mine is not None
            assert mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()
    np.testing.assert_array_equal(found.arrays()[1], expected.arrays()[1])
    assert_same_requests(found.requests, expected.requests)


def assert_same_requests(found: RequestTrace, expected: RequestTrace) -> None:
    np.testing.assert_array_equal(found.prompt_tokens, expected.prompt_tokens)
    np.testing.assert_array_equal(found.output_tokens, expected.output_tokens)
    np.testing.assert_array_equal(found.arrival_s, expected.arrival_s)
    assert found.ids == expected.ids
    assert found.domains == expected.domains
    assert found.block_tokens == expected.block_tokens
    assert dict(found.extra) == dict(expected.extra)
    assert found.prefix_blocks is not None
    assert expected.prefix_blocks is not None
    for mine, theirs in zip(found.prefix_blocks, expected.prefix_blocks, strict=True):
        np.testing.assert_array_equal(mine, theirs)


ragged = st.lists(st.integers(0, 7), min_size=1, max_size=12)


@given(ragged, st.integers(0, 2**32), st.booleans(), st.integers(1, 12))
def test_round_trip_of_ragged_requests(tmp_path_factory, lengths, seed, optional, flush_tokens):
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
def test_segments_chunks_and_requests_tell_the_same(tmp_path_factory, lengths, max_tokens, flush_tokens):
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


def test_requests_are_views_of_the_mapped_file(tmp_path, rng):
    make(rng, [3, 4]).save(tmp_path / "t")
    trace = ActivationTrace.open(tmp_path / "t")
    whole = trace.arrays()[0]
    for array, part in zip(whole, trace.request(1), strict=True):
        assert array is not None
        assert part is not None
        assert np.shares_memory(array, part)
        assert not part.flags.writeable
    assert trace.nbytes == 7 * 2 * 3 * 2, "300 experts need two bytes"


def test_the_narrowest_dtype_is_stored(tmp_path, rng):
    for experts, dtype in ((256, np.uint8), (257, np.uint16)):
        meta = TraceMeta("demo", num_experts=experts, num_layers=2, top_k=3)
        make(rng, [5], meta=meta).save(tmp_path / str(experts))
        assert load_file(tmp_path / str(experts) / "activations.safetensors")["expert_ids"].dtype == dtype


def test_phase_splits_prompt_from_output(tmp_path):
    with ActivationWriter(tmp_path / "t", TraceMeta("demo", 4, 1, 1)) as out:
        out.append(np.array([[[0]], [[1]], [[3]]]), [PREFILL, PREFILL, DECODE], id="a", arrival_s=0.5, domain="law")
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.request(0).only(DECODE).tolist() == [[[3]]]
    assert (trace.requests.prompt_tokens.tolist(), trace.requests.output_tokens.tolist()) == ([2], [1])
    assert trace.requests.ids == ["a"]


def test_optional_arrays_are_for_all_or_for_none(tmp_path, rng):
    with ActivationWriter(tmp_path / "t", META) as out:
        whole, bare = make(rng, [2]), make(rng, [3], optional=False)
        out.append_many(*whole.arrays(), whole.requests)
        out.flush()
        with pytest.raises(ConfigError, match="gate_weights, token_ids: given for some requests and not for others"):
            out.append_many(*bare.arrays(), bare.requests)
    found = ActivationTrace.open(tmp_path / "t")
    assert found.num_tokens == 2
    assert found.request(0).gate_weights is not None, "what was recorded is not lost to a later request"


def test_an_empty_recording_reads_as_empty(tmp_path):
    ActivationWriter(tmp_path / "t", META).close()
    trace = ActivationTrace.open(tmp_path / "t")
    assert (trace.num_requests, trace.num_tokens, len(trace.requests)) == (0, 0, 0)
    assert list(trace.chunks()) == []
    with pytest.raises(ConfigError, match="request 0 must be in"):
        trace.request(0)
    trace.save(tmp_path / "again")
    assert ActivationTrace.open(tmp_path / "again").num_tokens == 0


def test_a_recording_without_flush_reads_as_empty(tmp_path, rng):
    """The first commit is made before the first request."""
    writer = ActivationWriter(tmp_path / "t", META)
    tokens, offsets = make(rng, [4]).arrays()
    writer.append_many(tokens, offsets, make(rng, [4]).requests)
    trace = ActivationTrace.open(tmp_path / "t")
    assert (trace.num_requests, trace.num_tokens, len(trace.requests), len(trace.lengths)) == (0, 0, 0, 0)
    assert list(trace.chunks()) == []
    assert trace.arrays()[0].expert_ids.shape == (0, 2, 3)


@pytest.mark.parametrize("bad", ["id", "negative", "shape", "rows", "gates", "phase"])
def test_append_after_error(tmp_path, rng, bad):
    """What is refused leaves nothing behind, and the writer goes on."""
    good = make(rng, [3])
    tokens, offsets = good.arrays()
    requests = good.requests
    wide = tokens.expert_ids.astype(np.int64)
    if bad in ("id", "negative"):
        wide[1, 0, 2] = 300 if bad == "id" else -1
    broken = {
        "id": tokens._replace(expert_ids=wide),
        "negative": tokens._replace(expert_ids=wide),
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


def test_an_error_while_recording_keeps_what_came_before(tmp_path, rng):
    trace = make(rng, [3, 2])
    with contextlib.suppress(ZeroDivisionError), ActivationWriter(tmp_path / "t", META) as out:
        out.append_many(*trace.arrays(), trace.requests)
        1 / 0  # noqa: B018
    assert_same(ActivationTrace.open(tmp_path / "t"), trace)


def test_refuses_to_overwrite(tmp_path, rng):
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


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("name", ["activations", "requests"])
def test_missing_and_cut_segments(tmp_path, rng, name, segment):
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


def test_a_table_with_other_rows_is_refused(tmp_path, rng):
    make(rng, [1, 2]).save(tmp_path / "two")
    make(rng, [3]).save(tmp_path / "one")
    shutil.copy(tmp_path / "one" / "requests.parquet", tmp_path / "two" / "requests.parquet")
    with pytest.raises(TraceError, match=r"requests.parquet: rows: found 1; the activations hold 2 requests"):
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
def test_wrong_meta(tmp_path, rng, key, value, field):
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


def test_wrong_token_count_in_meta(tmp_path, rng):
    make(rng, [2, 3]).save(tmp_path / "t")
    path = tmp_path / "t" / "meta.json"
    path.write_text(path.read_text().replace('"num_tokens": 5', '"num_tokens": 6'))
    with pytest.raises(TraceError, match=r"phase: has 5 tokens, meta\.json says 6"):
        ActivationTrace.open(tmp_path / "t")


def test_validate_names_the_first_bad_id(tmp_path, rng):
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


def test_validate_finds_offsets_that_fall(tmp_path, rng):
    make(rng, [2, 3]).save(tmp_path / "t")
    file = tmp_path / "t" / "activations.safetensors"
    good = np.array([0, 2, 5], np.int64).tobytes()
    assert file.read_bytes().count(good) == 1
    file.write_bytes(file.read_bytes().replace(good, np.array([0, 6, 5], np.int64).tobytes()))
    with pytest.raises(TraceError, match=r"activations\.safetensors: offsets: .* must not fall"):
        ActivationTrace.open(tmp_path / "t").validate()


@pytest.mark.parametrize("offsets", [[0, 3], [0, 9], [-1, 5], [1, 5], [0, 3, 2, 5], [0], []])
def test_offsets_that_do_not_match(rng, offsets):
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
def test_a_killed_recording_reads_up_to_its_last_flush(tmp_path, lines):
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


CRASH_POINTS = ["pyarrow.parquet.write_table", "os.pwrite", "os.ftruncate", "os.fsync", "json.dump"]
CRASH_POINTS += ["pathlib.Path.replace", "pathlib.Path.unlink"]


@pytest.mark.parametrize(
    ("point", "closing"), [*((point, True) for point in CRASH_POINTS), *((point, False) for point in CRASH_POINTS[:-1])]
)
def test_a_crash_at_any_step_loses_no_flushed_request(tmp_path, rng, monkeypatch, point, closing):
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

            def stop(*args, real=real, attempt=attempt, **kwargs):
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


def test_load_table_round_trip(tmp_path, rng):
    table = LoadTable(
        rng.integers(0, 2**40, (3, 2, 5)).astype(np.uint64),
        "demo",
        ["a", "b", "c"],
        np.array([1, 2, 3]),
        np.array([4, 9]),
        {"file": "x"},
    )
    table.save(tmp_path / "t")
    found = read_trace(tmp_path / "t")
    assert isinstance(found, LoadTable)
    np.testing.assert_array_equal(found.counts, table.counts)
    np.testing.assert_array_equal(found.tokens, table.tokens)
    np.testing.assert_array_equal(found.layer_ids, table.layer_ids)
    assert (found.model, found.labels, found.source) == ("demo", ["a", "b", "c"], {"file": "x"})
    assert (len(found), found.num_layers, found.num_experts) == (3, 2, 5)
    bare = LoadTable(np.ones((1, 1, 1), np.uint64))
    bare.save(tmp_path / "bare")
    assert LoadTable.open(tmp_path / "bare").labels is None


def test_damaged_load_tables(tmp_path, rng):
    for counts in (np.ones((2, 2)), np.ones((0, 1, 1)), np.ones((1, 1, 0))):
        with pytest.raises(ConfigError, match="counts has shape"):
            LoadTable(counts.astype(np.uint64))
    with pytest.raises(ConfigError, match="labels has 1 rows; counts has 2"):
        LoadTable(np.ones((2, 1, 1), np.uint64), labels=["a"])
    LoadTable(np.ones((2, 1, 1), np.uint64), labels=["a", "b"]).save(tmp_path / "t")
    file = tmp_path / "t" / "load.safetensors"
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"load\.safetensors"):
            LoadTable.open(tmp_path / "t")
    file.write_bytes(data)
    meta = tmp_path / "t" / "meta.json"
    for labels in ('["a"]', "7"):
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "labels": json.loads(labels)}))
        with pytest.raises(TraceError):
            LoadTable.open(tmp_path / "t")
    make(rng, [1]).save(tmp_path / "activations")
    with pytest.raises(TraceError, match="kind: found 'activations', expected 'load'"):
        LoadTable.open(tmp_path / "activations")


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
def test_a_request_unlike_the_others_is_refused_and_nothing_is_lost(tmp_path, ids, phase, extra, message) -> None:
    meta = TraceMeta("m", num_experts=4, num_layers=1, top_k=1)
    with ActivationWriter(tmp_path / "t", meta) as out:
        out.append(np.array([[[3]]]), phase=[0], domain="law")
        with pytest.raises(ConfigError, match=message):
            out.append(ids, phase=phase, **extra)
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.requests.domains == ["law"]
