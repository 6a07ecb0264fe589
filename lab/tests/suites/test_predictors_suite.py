"""The predictors suite: what is split, what is known, and scores that theory fixes."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.engines.tiny import TINY, tiny_model_path
from coterie.errors import TraceError, UnavailableError
from coterie.predictors.scoring import TEST_SHARE
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta
from coterie.traces.readers import _rows
from coterie.types import DECODE, PREFILL
from coterie_lab.suites.predictors.cases import longest_match, sidecar_texts
from coterie_lab.suites.predictors.suite import run
from simulate_traces import quiet

KEYS = (
    "trace predictor requests cosine cosine_low cosine_high recall_top_k recall_top_2k recall_16 recall_16_low "
    "recall_16_high hit_rate published"
)
RECENT = {
    ("recent_popularity", knows)
    for knows in ("before it, as listed", "before it, shuffled", "before it, of its worker")
}
EXPERTS, LAYERS, TOP_K, VOCABULARY = 16, 2, 2, 30


def by_name(result: Any, predicts: Any = None) -> dict[Any, Any]:
    return {
        (row["predictor"], row["knows"]): row for row in result.rows if predicts is None or row["predicts"] == predicts
    }


def make(path: Path, phases: bool = True, ids: bool = True, requests: int = 40, length: int = 60) -> Path:
    """Experts are a function of the token; a request's tokens lie around a topic of its own."""
    rng = np.random.default_rng(5)
    function = np.argsort(rng.random((VOCABULARY, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    topics = rng.dirichlet(np.full(VOCABULARY, 0.2), requests)
    token_ids = np.concatenate([rng.choice(VOCABULARY, length, p=p) for p in topics]).astype(np.int32)
    phase = np.tile(np.repeat([PREFILL, DECODE], length // 2), requests) if phases else np.zeros(len(token_ids))
    half = np.full(requests, length // 2)
    table = RequestTrace(half, half + 1, domains=[f"d{i % 3}" for i in range(requests)])
    trace = ActivationTrace.from_arrays(
        TraceMeta("demo", EXPERTS, LAYERS, TOP_K),
        function[token_ids],
        np.arange(0, len(token_ids) + 1, length),
        table,
        phase.astype(np.uint8),
        token_ids if ids else None,
    )
    trace.save(path)
    return path


def test_a_trace_of_two_phases(tmp_path: Path) -> None:
    result = run(SuiteOptions(trace=make(tmp_path / "t")), quiet)
    prefill, decode = by_name(result, "prefill"), by_name(result, "decode")
    assert len(result.rows) == len(prefill) + len(decode)
    always = {("popularity", "nothing"), ("domain", "domain"), *RECENT}
    assert set(prefill) == {*always, ("similar_prefix", "prompt's tokens"), ("token_table", "prompt's tokens")}
    assert set(decode) == {
        *always,
        ("recorded", "prompt's footprint"),
        ("prefix", "prompt's footprint"),
        ("similar_prefix", "prompt's tokens"),
        ("token_table", "prompt's tokens"),
        ("token_table", "the tokens predicted"),
    }
    for row in result.rows:
        assert set(row) >= set(KEYS.split())
        assert row["published"] is None
        assert row["requests"] == round(TEST_SHARE * 40)
        assert row["recall_16"] == 1.0 or row["predictor"] != "popularity", "it predicts all of the 16 there are"
        assert row["hit_rate"] == (0.0 if row["predictor"] == "similar_prefix" else None), "no two prompts are alike"
    # Theory: tokens decide the experts, so a table that is given the tokens is right, and a request's prefill
    # footprint says what its prompt's tokens do.
    for exact in (prefill["token_table", "prompt's tokens"], decode["token_table", "the tokens predicted"]):
        np.testing.assert_allclose([exact["cosine"], exact["recall_top_k"], exact["recall_top_2k"]], 1.0)
    assert decode["token_table", "prompt's tokens"]["cosine"] == pytest.approx(
        decode["recorded", "prompt's footprint"]["cosine"]
    )
    floor = decode["popularity", "nothing"]["cosine"]
    assert decode["prefix", "prompt's footprint"]["cosine_low"] > floor, "topics differ, and a prefix shows which"
    json.dumps(result.rows, allow_nan=False)


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    path = make(tmp_path / "t")
    one, same, other = (run(SuiteOptions(trace=path, seed=seed), quiet).rows for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_a_large_trace_is_drawn_from(tmp_path: Path) -> None:
    result = run(SuiteOptions(trace=make(tmp_path / "t"), requests=20), quiet)
    assert "t: 20 of 40 requests, drawn by seed." in result.notes
    assert {row["requests"] for row in result.rows} == {6}


def test_a_file_beside_the_trace_that_is_no_sidecar_is_left_alone(tmp_path: Path) -> None:
    path = make(tmp_path / "t", ids=False)
    for data in (b"{", b"[1]", b"\xff", b'{"generated_tokens": null}'):
        (path / "requests.jsonl").write_bytes(data)
        assert run(SuiteOptions(trace=path), quiet).rows


def test_a_trace_of_one_phase_is_asked_for_its_second_half(tmp_path: Path) -> None:
    result = run(SuiteOptions(trace=make(tmp_path / "t", phases=False)), quiet)
    assert {row["predicts"] for row in result.rows} == {"all prefill", "second half"}
    half = by_name(result, "second half")
    assert ("recorded", "first half's footprint") in half
    np.testing.assert_allclose(half["token_table", "the tokens predicted"]["cosine"], 1.0)
    assert ("recorded", "first half's footprint") not in by_name(result, "all prefill")


def test_without_token_ids_there_is_no_table(tmp_path: Path) -> None:
    result = run(SuiteOptions(trace=make(tmp_path / "t", ids=False)), quiet)
    left = {"popularity", "recent_popularity", "domain", "recorded", "prefix"}
    assert {row["predictor"] for row in result.rows} == left


def test_token_strings_beside_an_archive(tmp_path: Path) -> None:
    """The layout of gpt-oss: rows of decode, one string more than rows, prompts as text."""
    rng = np.random.default_rng(7)
    words = [f"w{i} " for i in range(20)]
    function = np.argsort(rng.random((20, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    ids, rows, at = [], [], 0
    for i in range(20):
        tokens = rng.integers(0, 20, 12)
        listed = [words[t] for t in tokens] + ["."]
        if i == 3:
            listed = listed[1:]  # does not match its rows
        prompt = None if i == 4 else "".join(words[t] for t in tokens)
        row = {"category": "c", "dataset": "d", "n_prompt_tokens": 3, "n_routed_tokens": 12, "offset": at}
        rows.append(row | {"prompt": prompt, "generated_tokens": None if i == 5 else listed})
        ids.append(function[tokens])
        at += 12
    expert_ids = np.concatenate(ids).astype(np.uint8)
    folder = tmp_path / "gpt-oss-20b"
    folder.mkdir()
    gates = np.full(expert_ids.shape, 0.5, np.float16)
    np.savez(folder / "routing.npz", expert_ids=expert_ids, gate_probs_f16=gates, offsets=np.arange(0, at + 1, 12))
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    result = run(SuiteOptions(trace=folder), quiet)
    assert any("17 of 20 requests" in note for note in result.notes)
    whole = by_name(result, "all decode")
    # Prompts here are the very tokens generated, so their text, cut up, tells all.
    np.testing.assert_allclose(whole["token_table", "prompt's text"]["cosine"], 1.0)
    np.testing.assert_allclose(whole["token_table", "the tokens predicted"]["cosine"], 1.0)


def families(path: Path, arrival_s: Any = None) -> Path:
    """Ten prompts, each asked four times with another last token; what the experts do follows from the prompt alone."""
    rng = np.random.default_rng(2)
    prompts = np.repeat(rng.integers(0, 99, (10, 10)), 4, axis=0)
    prompts[:, 9] = 1000 + np.arange(40)
    token_ids = np.concatenate([prompts, rng.integers(0, 99, (40, 6))], axis=1).astype(np.int32).ravel()
    sets = np.argsort(rng.random((10, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    experts = np.repeat(np.repeat(sets, 4, axis=0), 16, axis=0)
    phase = np.tile(np.repeat([PREFILL, DECODE], [10, 6]), 40).astype(np.uint8)
    lengths = np.full(40, 10), np.full(40, 6)
    table = RequestTrace(*lengths, arrival_s=arrival_s)
    ActivationTrace.from_arrays(
        TraceMeta("demo", EXPERTS, LAYERS, TOP_K), experts, np.arange(0, 641, 16), table, phase, token_ids
    ).save(path)
    return path


def test_a_prompt_that_began_alike_tells_all(tmp_path: Path) -> None:
    """Theory: 9 of 10 tokens are shared, and families of requests do the same; the last token differs, so groups do."""
    result = run(SuiteOptions(trace=families(tmp_path / "t")), quiet)
    decode = by_name(result, "decode")
    similar, floor = decode["similar_prefix", "prompt's tokens"], decode["popularity", "nothing"]
    assert similar["hit_rate"] == 1.0, "no family is wholly in the test part"
    np.testing.assert_allclose([similar["cosine"], similar["recall_top_k"]], 1.0)
    assert floor["cosine_high"] < 0.9


def test_recent_requests_tell_more_where_families_come_one_after_the_other(tmp_path: Path) -> None:
    listed = by_name(run(SuiteOptions(trace=families(tmp_path / "t")), quiet), "decode")
    drift = listed["recent_popularity", "before it, as listed"]
    mixed = listed["recent_popularity", "before it, shuffled"]
    assert drift["cosine"] > mixed["cosine"]
    times = np.random.default_rng(1).permutation(40).astype(np.float64)
    arrived = by_name(run(SuiteOptions(trace=families(tmp_path / "u", times)), quiet), "decode")
    mixed_times = arrived["recent_popularity", "before it, as they arrived"]
    assert mixed_times["cosine"] < drift["cosine"]


def test_a_worker_that_serves_its_own_domains_tells_more(tmp_path: Path) -> None:
    """Theory: three domains, each with experts and a worker of its own, are known but for the start."""
    rng = np.random.default_rng(0)
    sets = np.argsort(rng.random((3, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    of = np.arange(300) % 3
    table = RequestTrace(np.zeros(300, np.int64), np.full(300, 5), domains=[f"d{n}" for n in of])
    ActivationTrace.from_arrays(
        TraceMeta("demo", EXPERTS, LAYERS, TOP_K), np.repeat(sets[of], 4, axis=0), np.arange(0, 1201, 4), table
    ).save(tmp_path / "t")
    rows = by_name(run(SuiteOptions(trace=tmp_path / "t"), quiet), "all decode")
    assert rows["recent_popularity", "before it, of its worker"]["cosine"] > 0.97
    assert rows["recent_popularity", "before it, shuffled"]["cosine_high"] < 0.9


def test_a_test_request_is_predicted_from_those_before_it_alone(tmp_path: Path) -> None:
    """By hand: a trace of which every request uses one expert more than the last."""
    count = 12
    experts = np.repeat(np.arange(count), 4)[:, None, None]
    path = tmp_path / "t"
    ActivationTrace.from_arrays(TraceMeta("demo", count, 1, 1), experts, np.arange(0, 4 * count + 1, 4)).save(path)
    result = run(SuiteOptions(trace=path), quiet)
    row = by_name(result, "all decode")["recent_popularity", "before it, as listed"]
    assert row["cosine"] == 0, "its own expert was never seen"


def test_how_often_a_service_repeats_itself_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "requests" / "mooncake"
    folder.mkdir(parents=True)
    blocks = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8], [9], [9]]
    rows = [
        {"timestamp": i, "input_length": 512 * len(b), "output_length": 1, "hash_ids": b} for i, b in enumerate(blocks)
    ]
    (folder / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    notes = run(SuiteOptions(data=tmp_path), quiet).notes
    assert any("mooncake: 40% of 5 requests of a service share 80%" in note for note in notes), notes
    assert not any("mooncake" in note for note in run(SuiteOptions(trace=make(tmp_path / "t")), quiet).notes)


def test_longest_match() -> None:
    numbers = {"a": 0, "ab": 1, "abc": 2, " b": 3}
    assert longest_match("abcab bxa", numbers).tolist() == [2, 1, 3, -1, 0]
    assert longest_match("", numbers).tolist() == []
    assert longest_match("zz", {}).tolist() == [-1, -1]


def test_requests_with_the_same_prompt_stay_together(tmp_path: Path) -> None:
    """Ten prompts four times: 3 of them are test, 12 requests."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(0, 99, (10, 6)), 4, axis=0)
    token_ids = np.concatenate([prompts, rng.integers(0, 99, (40, 6))], axis=1).astype(np.int32).ravel()
    ids = np.argsort(rng.random((480, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    phase = np.tile(np.repeat([PREFILL, DECODE], 6), 40).astype(np.uint8)
    trace = ActivationTrace.from_arrays(
        TraceMeta("demo", EXPERTS, LAYERS, TOP_K), ids, np.arange(0, 481, 12), phase=phase, token_ids=token_ids
    )
    trace.save(tmp_path / "t")
    result = run(SuiteOptions(trace=tmp_path / "t"), quiet)
    assert {row["requests"] for row in result.rows} == {12}
    assert "t: 28 requests calibrate, 12 test." in result.notes


def test_what_cannot_be_scored_is_said(tmp_path: Path) -> None:
    assert run(SuiteOptions(), quiet).rows == []
    assert "COTERIE_DATA" in run(SuiteOptions(), quiet).notes[0]
    assert "does not exist" in run(SuiteOptions(data=tmp_path), quiet).notes[0]
    LoadTable(np.ones((1, 2, 4), np.uint64)).save(tmp_path / "load")
    with pytest.raises(TraceError, match="found 'load', expected 'activations'"):
        run(SuiteOptions(trace=tmp_path / "load"), quiet)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is here")
def test_a_model_without_torch_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnavailableError, match="needs torch and transformers"):
        run(SuiteOptions(model=tmp_path), quiet)


def test_on_real_routing(data_dir: Path) -> None:
    """The order that the documentation states."""
    result = run(SuiteOptions(data=data_dir), quiet)
    rows = {(row["trace"], row["predicts"], row["predictor"], row["knows"]): row for row in result.rows}
    half = ("gpt-oss-20b", "second half")
    prefix = rows[(*half, "prefix", "first half's footprint")]
    assert prefix["cosine_low"] > rows[(*half, "domain", "domain")]["cosine_high"]
    assert prefix["cosine_low"] > rows[(*half, "popularity", "nothing")]["cosine_high"]
    whole = ("gpt-oss-20b", "all decode")
    assert rows[(*whole, "token_table", "prompt's text")]["cosine"] > rows[(*whole, "popularity", "nothing")]["cosine"]
    similar = rows[(*whole, "similar_prefix", "prompt's text")]
    assert similar["hit_rate"] < 0.05, "the prompts of a benchmark hardly share prefixes"
    assert abs(similar["recall_16"] - rows[(*whole, "popularity", "nothing")]["recall_16"]) < 0.02
    esft = ("deepseek-v2-lite", "second half")
    floor = rows[(*esft, "popularity", "nothing")]["cosine"]
    recorded = rows[(*esft, "recorded", "first half's footprint")]
    assert recorded["cosine_high"] < floor, "second halves are more like each other than like their first"
    assert rows[(*esft, "prefix", "first half's footprint")]["cosine"] > floor


def test_token_strings_beside_a_trace_are_not_unpacked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "ALWAYS_BYTES", 1 << 20)
    bomb = 40 << 20
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(bytes(bomb)))
    tracemalloc.start()
    try:
        assert sidecar_texts(tmp_path) is None
        assert tracemalloc.get_traced_memory()[1] < bomb
    finally:
        tracemalloc.stop()


@pytest.mark.torch
def test_the_suite_scores_a_model() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    result = run(SuiteOptions(model=tiny_model_path(), requests=10), lambda *_: None)
    first, second = (
        {(row["predicts"], row["predictor"], row["knows"]): row for row in result.rows if row["trace"] == name}
        for name in (TINY, f"{TINY}, second turns")
    )
    assert len(first) + len(second) == len(result.rows)
    both = {("popularity", "nothing"), ("domain", "domain"), *RECENT}
    both |= {("similar_prefix", "prompt's tokens"), ("token_table", "prompt's tokens"), ("dry_run", "prompt's tokens")}
    decode = {("recorded", "prompt's footprint"), ("prefix", "prompt's footprint")}
    decode |= {("token_table", "the tokens predicted"), ("dry_run", "the tokens predicted")}
    asked = {("prefill", *known) for known in both} | {("decode", *known) for known in both | decode}
    tables = {question for question in asked if question[1] == "dry_run"}
    assert set(first) == asked
    assert set(second) == set(first) - tables
    assert {row["requests"] for row in first.values()} == {3}
    assert {row["requests"] for row in second.values()} == {10}
    for part in ("prefill", "decode"):
        similar = second[part, "similar_prefix", "prompt's tokens"]
        assert similar["hit_rate"] == 1.0, "a conversation that goes on begins as it did"
        assert similar["cosine"] > second[part, "popularity", "nothing"]["cosine"]
        assert first[part, "similar_prefix", "prompt's tokens"]["hit_rate"] == 0.0
    for row in result.rows:
        assert 0 < row["cosine_low"] <= row["cosine"] <= row["cosine_high"] < 1
        assert 0 < row["recall_top_k"] < 1
        assert row["published"] is None
    assert any("10 shipped prompts" in note for note in result.notes)
