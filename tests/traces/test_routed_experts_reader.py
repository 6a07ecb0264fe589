"""The reader of routed experts: answers of vLLM and SGLang, one a line, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.traces import ActivationTrace
from coterie.traces.readers import ReadOptions, detect, read_trace
from coterie.types import DECODE, PREFILL
from routed_experts_payloads import distinct_experts, encode_sglang, encode_vllm

# ------------------------------------------------------------------------------------------------------- routed experts


def vllm_answer(ids: np.ndarray, prompt: int, experts: int = 128, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids) + 1 - prompt}
    choice = {"index": 0, "text": "…", "routed_experts": encode_vllm(ids, experts)}
    return {"id": "r", "model": "any", "choices": [choice], "usage": usage, **more}


def write_lines(path: Path, bodies: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(body) for body in bodies) + "\n\n")
    return path


def test_vllm_answers(tmp_path: Path, rng: np.random.Generator) -> None:
    ids = [distinct_experts(rng, n, 3, 4) for n in (5, 3, 4)]
    bodies = [vllm_answer(ids[0], 2), vllm_answer(ids[1], 3, prompt_token_ids=[1, 2, 3])]
    two = vllm_answer(ids[2], 2)
    two["choices"].append({"routed_experts": encode_vllm(ids[2][:3], 128)})
    two["usage"]["completion_tokens"] = 3 + 2
    path = write_lines(tmp_path / "answers.jsonl", [*bodies, two])
    assert detect(path) == "routed-experts"
    trace = read_trace(path, options=ReadOptions(num_experts=128))
    assert isinstance(trace, ActivationTrace)
    for index, expected in enumerate([*ids, ids[2][:3]]):
        np.testing.assert_array_equal(trace.request(index).expert_ids, expected)
    assert trace.request(0).phase.tolist() == [PREFILL] * 2 + [DECODE] * 3
    assert trace.requests.prompt_tokens.tolist() == [2, 3, 2, 2]
    assert trace.requests.output_tokens.tolist() == [4, 1, 3, 2], "the last token has no row but was generated"
    assert trace.requests.ids == ["r", "r", "r/0", "r/1"]
    assert (trace.meta.model, trace.meta.layer_ids) == ("any", (0, 1, 2))
    assert trace.request(0).token_ids is None, "one of the answers does not list its tokens"


def test_token_ids_where_listed(tmp_path: Path, rng: np.random.Generator) -> None:
    body = vllm_answer(distinct_experts(rng, 4, 2, 2), 3, prompt_token_ids=[5, 6, 7])
    body["choices"][0]["token_ids"] = [8, 9]
    trace = read_trace(write_lines(tmp_path / "a.jsonl", [body]), options=ReadOptions(num_experts=128))
    assert isinstance(trace, ActivationTrace)
    assert np.asarray(trace.request(0).token_ids).tolist() == [5, 6, 7, 8]


def test_dense_layers_are_dropped(tmp_path: Path, rng: np.random.Generator) -> None:
    """DeepSeek-V2-Lite counts 27 layers, of which the first is dense and all zero."""
    ids = np.concatenate([np.zeros((5, 1, 6), int), distinct_experts(rng, 5, 26, 6, 64)], axis=1)
    path = write_lines(tmp_path / "a.jsonl", [vllm_answer(ids, 2)])
    for options in (ReadOptions(model="deepseek-v2-lite"), ReadOptions(num_experts=64)):
        trace = read_trace(path, options=options)
        assert isinstance(trace, ActivationTrace)
        assert (trace.meta.num_experts, trace.meta.layer_ids) == (64, tuple(range(1, 27)))
        np.testing.assert_array_equal(trace.request(0).expert_ids, ids[:, 1:])


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [None, "uint8"])
def test_sglang_answers(tmp_path: Path, rng: np.random.Generator, dense: bool, dtype: str | None) -> None:
    moe = distinct_experts(rng, 5, 26, 6, 64)
    ids = np.concatenate([np.zeros((5, 1, 6), int), moe], axis=1) if dense else moe
    payload = {"routed_experts": encode_sglang(ids, dtype or "int32")}
    if dtype:
        payload["routed_experts_dtype"] = dtype
    counts = {"prompt_tokens": 4, "completion_tokens": 2}
    bodies = [
        [{"text": "…", "meta_info": {"id": "x", **counts, **payload}}],
        {"id": "y", "choices": [{"text": "…"}], "usage": counts, "sglext": payload},
        {"id": "z", "choices": [{"text": "…", "sglext": payload}], "usage": counts},
    ]
    path = write_lines(tmp_path / "a.jsonl", bodies)
    assert detect(path) == "routed-experts"
    trace = read_trace(path, options=ReadOptions(model="deepseek-v2-lite"))
    assert isinstance(trace, ActivationTrace)
    assert trace.requests.ids == ["x", "y", "z"]
    assert trace.requests.output_tokens.tolist() == [2, 2, 2]
    for index in range(3):
        np.testing.assert_array_equal(trace.request(index).expert_ids, moe)
        assert trace.request(index).phase.tolist() == [PREFILL] * 4 + [DECODE]
    with pytest.raises(TraceError, match=r"line 1: answer: .* name a known model"):
        read_trace(path)


ALL_ZERO = np.full((4, 2, 2), 5)
ALL_ZERO[2, 1] = 0


def answer_without(*keys: str) -> dict[str, Any]:
    body: Any = vllm_answer(distinct_experts(np.random.default_rng(0), 4, 2, 2), 2)
    place = body
    for key in keys[:-1]:
        place = place[int(key)] if isinstance(place, list) else place[key]
    del place[keys[-1]]
    return dict(body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (answer_without("usage"), "line 1: usage.prompt_tokens: is None"),
        (answer_without("choices"), "line 1: choices: is missing"),
        (answer_without("choices", "0", "routed_experts"), "line 1: answer: carries no routed_experts"),
        ({"choices": []}, "line 1: choices: is missing"),
        (7, "line 1: answer: must be a JSON object"),
        ({"meta_info": {"prompt_tokens": 1, "completion_tokens": 1}}, "line 1: answer: carries no routed_experts"),
        ({"meta_info": {"prompt_tokens": True, "completion_tokens": 1}}, "line 1: answer: says prompt_tokens=None"),
        (
            vllm_answer(np.full((4, 2, 2), 1), 2) | {"usage": {"prompt_tokens": 2, "completion_tokens": 9}},
            "describes 3 generated tokens, usage.completion_tokens is 9",
        ),
        (vllm_answer(np.full((4, 2, 2), 100), 2), "expert_ids[0, 0, 0]=100 must be in 0 … 63"),
        (vllm_answer(np.full((4, 2, 2), 0), 2), "is all zero"),
        (vllm_answer(ALL_ZERO, 2), "routed_experts[2, 1]: is all zero"),
        (
            {"choices": [{"routed_experts": "!"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
            "choices[0].routed_experts: is not base64",
        ),
        (
            {"choices": [{"routed_experts": None}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
            "choices[0].routed_experts: is missing",
        ),
    ],
)
def test_answers_that_are_wrong(tmp_path: Path, body: Any, problem: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [body])
    with pytest.raises(TraceError) as caught:
        read_trace(path, "routed-experts", ReadOptions(num_experts=64))
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


def test_answers_of_another_shape(tmp_path: Path, rng: np.random.Generator) -> None:
    bodies = [vllm_answer(distinct_experts(rng, 4, 2, 2), 2), vllm_answer(distinct_experts(rng, 4, 3, 2), 2)]
    path = write_lines(tmp_path / "a.jsonl", bodies)
    with pytest.raises(TraceError, match=r"has \[layer, k\] of \(2, 2\) and \(3, 2\): not one model"):
        read_trace(path, options=ReadOptions(num_experts=128))
    with pytest.raises(TraceError, match=r"has 2 layers; gpt-oss-20b has 24, 24 of them MoE"):
        read_trace(write_lines(path, bodies[:1]), options=ReadOptions(model="gpt-oss-20b"))
    payload = {"routed_experts": encode_sglang(distinct_experts(rng, 9, 24, 4, 32))}
    body = {"meta_info": {"prompt_tokens": 4, "completion_tokens": 2, **payload}}
    with pytest.raises(TraceError, match="9 rows of 24 layers x 4 int32, expected 5"):
        read_trace(write_lines(path, [body]), options=ReadOptions(model="gpt-oss-20b"))


@pytest.mark.parametrize(
    ("text", "problem"), [("", "answers: found 0"), ('{"a": "routed_experts"', "line 1: is not JSON")]
)
def test_files_without_answers(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        read_trace(path, "routed-experts", ReadOptions(num_experts=64))
    with pytest.raises(TraceError, match="file: "):
        read_trace(tmp_path, "routed-experts", ReadOptions(num_experts=64))
