"""Readers of npz files: real data in full, small files of every layout, and damage of every kind."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import TraceError
from coterie.traces import ActivationTrace, LoadTable
from coterie.traces.readers import ReadOptions, detect, read_trace, readers
from coterie.traces.readers.npz import read_placements
from coterie.types import DECODE, PREFILL

OURS = ("npz", "routed-experts", "trtllm", "load-history")

# ------------------------------------------------------------------------------------------------------------ real data


def test_gpt_oss(data_dir: Path) -> None:
    trace = read_trace(data_dir / "activations" / "gpt-oss-20b")
    assert isinstance(trace, ActivationTrace)
    assert (trace.num_requests, trace.num_tokens) == (410, 126_853)
    meta = trace.meta
    assert (meta.model, meta.num_experts, meta.num_layers, meta.top_k) == ("gpt-oss-20b", 32, 24, 4)
    assert meta.layer_ids == tuple(range(24))
    tokens, _ = trace.arrays()
    assert set(tokens.phase.tolist()) == {DECODE}
    raw = np.load(data_dir / "activations" / "gpt-oss-20b" / "routing.npz")
    np.testing.assert_array_equal(tokens.expert_ids, raw["expert_ids"])
    np.testing.assert_array_equal(tokens.gate_weights, raw["gate_probs_f16"])
    with gzip.open(data_dir / "activations" / "gpt-oss-20b" / "requests.jsonl.gz") as stream:
        rows = [json.loads(line) for line in stream]
    assert trace.requests.domains == [row["category"] for row in rows]
    assert list(trace.requests.extra["dataset"]) == [row["dataset"] for row in rows]
    assert trace.requests.prompt_tokens.tolist() == [row["n_prompt_tokens"] for row in rows]
    listed = [len(row["generated_tokens"]) for row in rows if row["generated_tokens"] is not None]
    counted = [n for n, row in zip(trace.requests.output_tokens, rows, strict=True) if row["generated_tokens"]]
    assert sorted(int(a) - b for a, b in zip(counted, listed, strict=True)) == [-1] + [0] * 353 + [1]


def test_gpt_oss_rows_are_the_generated_tokens(data_dir: Path) -> None:
    """Equal tokens choose equal experts in layer 0 (which has seen little context) only if aligned."""
    trace = read_trace(data_dir / "activations" / "gpt-oss-20b" / "routing.npz")
    assert isinstance(trace, ActivationTrace)
    with gzip.open(data_dir / "activations" / "gpt-oss-20b" / "requests.jsonl.gz") as stream:
        texts = [json.loads(line)["generated_tokens"] for line in stream]
    agree = {}
    for shift in (0, 1):
        choices: dict[str, list[bytes]] = {}
        for index in range(100):
            if texts[index]:
                rows = np.sort(trace.request(index).expert_ids[:, 0], axis=1)
                for token, row in zip(texts[index][shift:], rows, strict=False):
                    choices.setdefault(token, []).append(row.tobytes())
        common = [rows for rows in choices.values() if len(rows) >= 20]
        agree[shift] = sum(max(map(rows.count, rows)) for rows in common) / sum(map(len, common))
    assert agree[0] > 2 * agree[1]


def test_deepseek_v2_lite(data_dir: Path) -> None:
    trace = read_trace(data_dir / "activations" / "deepseek-v2-lite")
    assert isinstance(trace, ActivationTrace)
    assert (trace.num_requests, trace.num_tokens) == (213, 33_279)
    assert (trace.meta.num_experts, trace.meta.num_layers, trace.meta.top_k) == (64, 26, 6)
    assert trace.meta.layer_ids == tuple(range(1, 27))
    domains = list(trace.requests.domains or [])
    assert {name: domains.count(name) for name in sorted(set(domains))} == {
        "intent": 127,
        "law": 33,
        "summary": 13,
        "translation": 40,
    }
    tokens, _ = trace.arrays()
    assert set(tokens.phase.tolist()) == {PREFILL}
    raw = np.load(data_dir / "activations" / "deepseek-v2-lite" / "routing_tokens.npz")["gate_weight_x1e4"]
    assert tokens.gate_weights is not None
    np.testing.assert_allclose(tokens.gate_weights.astype(float), raw / 1e4, rtol=2**-11, atol=1e-7)
    # Every sequence starts with the same token, whose first layer saw no context at all.
    starts = {trace.request(index).expert_ids[0, 0].tobytes() for index in range(trace.num_requests)}
    assert len(starts) == 1


def test_glm(data_dir: Path) -> None:
    table = read_trace(data_dir / "activations" / "glm-5.2")
    assert isinstance(table, LoadTable)
    assert table.counts.shape == (94, 75, 256)
    assert table.labels is not None
    assert table.tokens is not None
    assert table.layer_ids is not None
    assert (table.labels[0], int(table.tokens[0])) == ("merged_all", 1_931_616)
    assert table.layer_ids.tolist() == list(range(3, 78))
    np.testing.assert_array_equal(table.counts.sum(axis=2), np.repeat(8 * table.tokens[:, None], 75, axis=1))
    labels = list(table.labels)
    shards = [index for index, label in enumerate(labels) if label.startswith("books/")]
    assert len(shards) == 8
    np.testing.assert_array_equal(table.counts[shards].sum(axis=0), table.counts[labels.index("merged_books")])


def test_olmoe_and_mixtral(data_dir: Path) -> None:
    folder = data_dir / "activations" / "olmoe-mixtral"
    for model, experts, top_k, windows in (("olmoe", 64, 8, 6), ("mixtral-8x7b", 8, 2, 5), ("olmoe-sft", 64, 8, 1)):
        table = read_trace(folder, options=ReadOptions(model=model))
        assert isinstance(table, LoadTable)
        assert table.counts.shape == (windows, 3, experts)
        assert (table.model, np.asarray(table.layer_ids).tolist()) == (model, [0, 7, 15])
        choices = table.counts.sum(axis=2)
        assert (choices == choices[:, :1]).all()
        assert not (choices % top_k).any()
    with pytest.raises(
        TraceError, match="must be chosen with --model: one of mixtral-8x7b, olmoe-dpo, olmoe-sft, olmoe"
    ):
        read_trace(folder)


def test_token_tables_are_no_trace(data_dir: Path) -> None:
    path = data_dir / "activations" / "olmoe-mixtral" / "eid2token_coo.npz"
    assert not readers["npz"].sniff(path)
    with pytest.raises(TraceError, match="not a layout of traces"):
        read_trace(path, "npz")


def test_placements(data_dir: Path) -> None:
    path = data_dir / "placements" / "deepseek-v3" / "placements_rank_layer_expert.npz"
    found = read_placements(path)
    assert sorted(array.shape for array in found.values()) == [(16, 58, 256)] * 3 + [(32, 58, 256)]
    assert not readers["npz"].sniff(path)
    assert not readers["npz"].sniff(path.parent)


def test_each_real_file_is_claimed_by_its_own_reader(data_dir: Path) -> None:
    claimed = {
        str(path.relative_to(data_dir)): [name for name in OURS if readers[name].sniff(path)]
        for path in sorted(data_dir.rglob("*"))
    }
    expected = ["deepseek-v2-lite/routing_tokens.npz", "glm-5.2/expert_counts.npz", "gpt-oss-20b/routing.npz"]
    expected += ["olmoe-mixtral/expert_counts.npz"]
    files = {f"activations/{name}" for name in expected}
    assert {name for name, by in claimed.items() if by} == files | {name.rpartition("/")[0] for name in files}
    assert all(by in ([], ["npz"]) for by in claimed.values())
    for name in files:
        assert detect(data_dir / name) == "npz"


# ------------------------------------------------------------------------------------------------------------------ npz


def own(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "expert_ids": rng.integers(0, 8, (6, 2, 3)).astype(np.uint8),
        "offsets": np.array([0, 2, 2, 6]),
        "phase": np.array([0, 1, 0, 0, 1, 1], np.uint8),
        "token_ids": np.arange(6),
        "gate_weights": rng.random((6, 2, 3)).astype(np.float16),
        "num_experts": np.array(8),
    }


def gpt_oss(folder: Path, rng: np.random.Generator) -> Path:
    arrays = own(rng)
    np.savez(
        folder / "routing.npz",
        expert_ids=arrays["expert_ids"],
        offsets=arrays["offsets"],
        gate_probs_f16=arrays["gate_weights"],
    )
    rows = [
        {"category": "law", "dataset": "d", "n_prompt_tokens": 9, "n_routed_tokens": n, "offset": o}
        for n, o in ((2, 0), (0, 2), (4, 2))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder / "routing.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_own_npz(tmp_path: Path, rng: np.random.Generator, save: Any) -> None:
    arrays = own(rng)
    save(tmp_path / "t.npz", **arrays, layer_ids=np.array([3, 5]))
    for path in (tmp_path / "t.npz", tmp_path):
        trace = read_trace(path)
        assert isinstance(trace, ActivationTrace)
        tokens, offsets = trace.arrays()
        for name, found in (*tokens._asdict().items(), ("offsets", offsets)):
            np.testing.assert_array_equal(found, arrays[name])
        assert (trace.meta.num_experts, trace.meta.layer_ids, trace.meta.model) == (8, (3, 5), "t")
        assert trace.requests.prompt_tokens.tolist() == [1, 0, 2]
        assert trace.requests.output_tokens.tolist() == [1, 0, 2]


def test_own_npz_with_requests(tmp_path: Path, rng: np.random.Generator) -> None:
    table = {"prompt_tokens": [9, 8, 7], "output_tokens": [3, 1, 5], "domains": ["law", "", "math"]}
    np.savez(tmp_path / "t.npz", **own(rng), **table)  # type: ignore[arg-type]
    trace = read_trace(tmp_path)
    assert isinstance(trace, ActivationTrace)
    requests = trace.requests
    assert (requests.prompt_tokens.tolist(), requests.output_tokens.tolist()) == ([9, 8, 7], [3, 1, 5])
    assert requests.domains == ["law", "", "math"]


def test_own_npz_with_the_least(tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = own(rng)
    np.savez(tmp_path / "t.npz", expert_ids=arrays["expert_ids"], offsets=arrays["offsets"])
    with pytest.raises(TraceError, match=r"num_experts: is not in the file; give --num-experts or a known --model"):
        read_trace(tmp_path)
    trace = read_trace(tmp_path, options=ReadOptions(num_experts=9, model="m"))
    assert isinstance(trace, ActivationTrace)
    assert (trace.meta.num_experts, trace.meta.model, trace.meta.layer_ids) == (9, "m", None)
    assert set(trace.arrays()[0].phase.tolist()) == {DECODE}
    known = read_trace(tmp_path, options=ReadOptions(model="gpt-oss-20b"))
    assert isinstance(known, ActivationTrace)
    assert known.meta.num_experts == 32


def test_own_counts(tmp_path: Path) -> None:
    counts = np.arange(12, dtype=np.uint64).reshape(2, 2, 3)
    np.savez(tmp_path / "t.npz", counts=counts, tokens=np.array([4, 5]), layer_ids=np.array([1, 2]))
    table = read_trace(tmp_path / "t.npz", options=ReadOptions(model="m", num_experts=3))
    assert isinstance(table, LoadTable)
    np.testing.assert_array_equal(table.counts, counts)
    assert (np.asarray(table.tokens).tolist(), np.asarray(table.layer_ids).tolist()) == ([4, 5], [1, 2])
    with pytest.raises(TraceError, match="counts: has 3 experts, --num-experts says 4"):
        read_trace(tmp_path, options=ReadOptions(num_experts=4))


def test_gpt_oss_layout(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tmp_path / "gpt-oss-20b"
    folder.mkdir()
    trace = read_trace(gpt_oss(folder, rng))
    assert isinstance(trace, ActivationTrace)
    assert (trace.meta.num_experts, trace.num_requests, trace.requests.domains) == (32, 3, ["law"] * 3)
    assert trace.requests.output_tokens.tolist() == [3, 1, 5]


def bad(name: str, value: Any) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value(arrays[name]) if callable(value) else np.array(value)

    return change


def put(where: tuple[int | slice, ...], value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[where] = value
        return array

    return change


def lengths(values: Any, **more: Any) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        given = {"prompt_tokens": values, "output_tokens": values, **more}
        arrays.update({name: np.array(value) for name, value in given.items()})

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (bad("expert_ids", put((3, 1, 2), 8)), "expert_ids[3, 1, 2]=8 must be in 0 … 7"),
        (bad("expert_ids", lambda a: put((2, 0, 1), -1)(a.astype(int))), "expert_ids[2, 0, 1]=-1"),
        (bad("expert_ids", lambda a: a[0]), "expert_ids: is uint8 (2, 3), expected integers of 3 dimensions"),
        (bad("expert_ids", lambda a: a.astype(float)), "expert_ids: is float64"),
        (bad("expert_ids", lambda a: a[:0]), "describe 3 requests of 0 tokens: empty"),
        (bad("expert_ids", lambda a: a[:, :, :0]), "top_k=0"),
        (bad("expert_ids", lambda a: a[:, :0]), "num_layers=0"),
        (bad("expert_ids", lambda a: a.astype(object)), "expert_ids: holds pickled objects"),
        (bad("offsets", [0]), "offsets: describe 0 requests"),
        (bad("offsets", [0, 5]), "offsets: run from 0 to 5; expert_ids has 6 tokens"),
        (bad("offsets", [1, 6]), "offsets: run from 1 to 6"),
        (bad("offsets", [0, 4, 2, 6]), "offsets[2]: is 2, below 4 before it"),
        (bad("offsets", [[0, 6]]), "offsets: is int64 (1, 2)"),
        (bad("offsets", [0.0, 6.0]), "offsets: is float64"),
        (bad("phase", [0, 1, 2, 0, 1, 1]), "phase[2]: is 2, expected 0 … 1"),
        (bad("phase", [0, 1]), "expert_ids is uint8 (6, 2, 3); expected uint8 (2, 2, 3)"),
        (bad("token_ids", [1, 2, -3, 4, 5, 6]), "token_ids[2]: is -3"),
        (bad("token_ids", [1, 2, 3, 4, 2**31, 6]), "token_ids[4]: is 2147483648"),
        (bad("token_ids", [1, 2]), "token_ids is int32 (2,)"),
        (bad("gate_weights", put((1, 0, 2), np.nan)), "gate weights[1, 0, 2]: is nan"),
        (bad("gate_weights", put((0, 1, 2), np.inf)), "gate weights[0, 1, 2]: is inf"),
        (bad("gate_weights", lambda a: a[1:]), "gate_weights is float16 (5, 2, 3)"),
        (bad("gate_weights", lambda a: a.astype(int)), "gate_weights: is int64"),
        (bad("num_experts", [8]), "num_experts: is int64 (1,)"),
        (bad("num_experts", 0), "num_experts=0 must be a whole number of at least 1"),
        (bad("num_experts", 2), "must be at most num_experts=2"),
        (bad("prompt_tokens", [1, 2, 3]), "output_tokens: is missing"),
        (bad("domains", ["a", "b", "c"]), "prompt_tokens: is missing"),
        (lengths([1, 2]), "requests has 2 rows; offsets describe 3 requests"),
        (lengths([1.0, 2.0, 3.0]), "prompt_tokens: is float64 (3,), expected integers"),
        (lengths([1, -2, 3]), "requests: prompt_tokens=-2 must be in 0"),
        (lengths([1, 2, 3], domains=[1, 2, 3]), "domains: is int64 (3,), expected text of 1 dimensions"),
        (lengths([1, 2, 3], domains=["a"]), "domains has 1 rows; prompt_tokens has 3"),
        (bad("expert_ids", None), "not a layout of traces"),
        (bad("offsets", None), "not a layout of traces"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*pickl.*")
def test_npz_that_is_wrong(
    tmp_path: Path, rng: np.random.Generator, change: Callable[[dict[str, np.ndarray]], None], problem: str
) -> None:
    arrays = own(rng)
    change(arrays)
    np.savez(tmp_path / "t.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "t.npz", "npz")
    assert problem in str(caught.value)
    assert str(tmp_path / "t.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stated_and_given_experts_must_agree(tmp_path: Path, rng: np.random.Generator) -> None:
    np.savez(tmp_path / "t.npz", **own(rng))  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="num_experts: has 8 experts, --num-experts says 9"):
        read_trace(tmp_path, options=ReadOptions(num_experts=9))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"hello" * 9])
def test_not_a_zip(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.npz").write_bytes(data)
    assert not readers["npz"].sniff(tmp_path / "t.npz")
    with pytest.raises(TraceError, match=r"t\.npz: file: is not a \.npz archive, or is cut"):
        read_trace(tmp_path / "t.npz", "npz")
    with pytest.raises(TraceError, match=r"folder: holds t\.npz"):
        read_trace(tmp_path, "npz")


def test_missing_or_several_files(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "t.npz", "npz")
    with pytest.raises(TraceError, match=r"folder: holds no \.npz file"):
        read_trace(tmp_path, "npz")
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", **own(rng))  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"folder: holds a\.npz, b\.npz"):
        read_trace(tmp_path, "npz")
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(TraceError, match=r"not a \.npz archive"):
        read_trace(tmp_path / "single.npy", "npz")


def test_members_that_are_no_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        for name in ("expert_ids.npy", "offsets.npy"):
            archive.writestr(name, "text")
    with pytest.raises(TraceError, match=r"expert_ids: is not a \.npy file"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda rows: rows[:-1], "rows: found 2, the arrays hold 3"),
        (lambda rows: [*rows, rows[0]], "rows: found 4, the arrays hold 3"),
        (lambda rows: [{**rows[0], "n_routed_tokens": 3}, *rows[1:]], "line 1, n_routed_tokens: is 3, offsets say 2"),
        (lambda rows: [*rows[:2], {**rows[2], "offset": 1}], "line 3, offset: is 1, offsets say 2"),
        (lambda rows: [{**rows[0], "n_prompt_tokens": -1}, *rows[1:]], "line 1, n_prompt_tokens: is -1"),
        (lambda rows: [{**rows[0], "n_prompt_tokens": float("nan")}, *rows[1:]], "n_prompt_tokens: is nan"),
        (lambda rows: [{**rows[0], "category": None}, *rows[1:]], "line 1, category: found None"),
        (lambda rows: [[], *rows[1:]], "line 1: holds []"),
    ],
)
def test_sidecar_that_does_not_fit(
    tmp_path: Path, rng: np.random.Generator, edit: Callable[..., Any], problem: str
) -> None:
    file = gpt_oss(tmp_path, rng)
    path = tmp_path / "requests.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in edit(rows)).encode()))
    with pytest.raises(TraceError) as caught:
        read_trace(file, options=ReadOptions(num_experts=8))
    assert problem in str(caught.value)
    assert caught.value.path == path


def test_sidecar_missing_or_cut(tmp_path: Path, rng: np.random.Generator) -> None:
    file = gpt_oss(tmp_path, rng)
    path = tmp_path / "requests.jsonl.gz"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"requests\.jsonl\.gz"):
            read_trace(file, options=ReadOptions(num_experts=8))
    path.unlink()
    with pytest.raises(TraceError, match=r"requests\.jsonl\.gz: file: does not exist; routing\.npz needs it"):
        read_trace(file, options=ReadOptions(num_experts=8))


def test_index_that_does_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", counts=np.ones((2, 1, 3), np.uint32), layer_ids=np.array([3]))
    index = tmp_path / "index.jsonl"
    row = {"domain": "books", "chunk": 0, "tokens": 1}
    for sums, problem in (((3.0, 4.0), "line 2, cnt_sum_layer0: is 4, counts say 3"), ((3.0,), "rows: found 1")):
        lines = [json.dumps({**row, "i": i, "cnt_sum_layer0": value}) for i, value in enumerate(sums)]
        index.write_text("\n".join(lines))
        with pytest.raises(TraceError, match=problem):
            read_trace(tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_npz_is_refused_or_read_alike(
    tmp_path_factory: pytest.TempPathFactory, compressed: bool, at: int, byte: int, cut: bool
) -> None:
    stream = io.BytesIO()
    arrays = own(np.random.default_rng(0))
    (np.savez_compressed if compressed else np.savez)(stream, **arrays)  # type: ignore[arg-type]
    data = bytearray(stream.getvalue())
    at %= len(data)
    path = tmp_path_factory.mktemp("damaged") / "t.npz"
    path.write_bytes(data[:at] if cut else data[:at] + bytes([byte]) + data[at + 1 :])
    readers["npz"].sniff(path)
    try:
        trace = read_trace(path, "npz")
    except TraceError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert problem.startswith(f"{path}: ")
        return
    assert isinstance(trace, ActivationTrace)
    tokens, offsets = trace.arrays()
    for name, found in (*tokens._asdict().items(), ("offsets", offsets)):
        np.testing.assert_array_equal(found, arrays[name])
    assert trace.meta.num_experts == 8


def test_damaged_placements(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    held = np.ones((2, 1, 3), np.uint8)
    for change, problem in (
        (held * 2, "must hold 0 or 1"),
        (held[0], "of 3 dimensions"),
        (put((slice(None), 0, 2), 0)(held), "expert 2 of layer 0"),
    ):
        np.savez(path, plan=change)
        with pytest.raises(TraceError, match=problem):
            read_placements(path)


@pytest.mark.parametrize("name", OURS)
def test_sniffing_never_raises(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "long").write_bytes(b"x" * (5 << 20))
    for path in (tmp_path, tmp_path / "missing", tmp_path / "empty", tmp_path / "noise", tmp_path / "long"):
        assert readers[name].sniff(path) is False
