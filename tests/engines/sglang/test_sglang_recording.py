"""Recording from SGLang's endpoints, against a protocol peer over real sockets (sglang_peer.py).

SGLang needs CUDA and does not run here: these tests hold the recorder to the documented requests and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.sglang.recording import parse_answer
from coterie.errors import ConfigError, InputError, UnavailableError, UnknownNameError
from coterie.traces import ActivationTrace
from coterie.wire.routed_experts import NotReturnedError
from routed_experts_payloads import encode_sglang
from sglang_peer import SPEC, Peer, Running, routing, with_dense_layers
from sglang_recordings import PROMPTS, check, record

# -------------------------------------------------------------------------------------------------------------- routed


def test_every_token_of_every_prompt_in_the_order_sent(tmp_path: Path) -> None:
    """Answers come back in the reverse of the order sent, four at a time."""
    seen: list[tuple[str, int, int]] = []
    together: dict[str, Any] = {"may_answer": lambda peer, _: peer.most_in_flight > 1}
    with Running(Peer(delay=lambda text: 0.02 * (9 - int(text[-1])), **together)) as peer:
        found = record(peer, tmp_path / "t", report=lambda *step: seen.append(step))
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS)
    assert found.tally.summary == "9 requests, none failed"
    assert found.trace.meta.layer_ids == tuple(range(1, 27)), "the dense layer is left out"
    assert (found.trace.meta.model, found.trace.meta.num_experts) == ("deepseek-v2-lite", 64)
    assert found.trace.meta.source["version"] == "0.5.23"
    arrivals = found.trace.requests.arrival_s
    assert arrivals is not None
    assert (np.diff(arrivals) >= 0).all()
    assert found.trace.requests.domains == [prompt.domain for prompt in PROMPTS]
    assert 1 < peer.most_in_flight <= 4
    assert seen[-1] == ("Recording requests", 9, 9)
    body = peer.bodies[0]
    assert (body["return_routed_experts"], body["sampling_params"]["max_new_tokens"]) == (True, 5)
    assert body["sampling_params"]["temperature"] == 0


@pytest.mark.parametrize("form", ["sglext", "sgl_ext", "choice"])
def test_chat(tmp_path: Path, form: str) -> None:
    with Running(Peer(form=form)) as peer:
        found = record(peer, tmp_path / "t", chat=True)
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS)
    assert set(peer.calls) == {"/server_info", "/v1/chat/completions"}
    assert peer.bodies[0]["model"] == "lite"
    assert peer.bodies[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize("chat", [False, True])
def test_a_version_that_lists_no_token_ids(tmp_path: Path, chat: bool) -> None:
    with Running(Peer(lists_tokens=False)) as peer:
        found = record(peer, tmp_path / "t", chat=chat)
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS, tokens=False)


def test_an_older_server_and_one_that_counts_moe_layers_only(tmp_path: Path) -> None:
    with Running(Peer(info_path="/get_server_info", layers="moe")) as peer:
        found = record(peer, tmp_path / "t")
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS)


def test_prompts_without_domains(tmp_path: Path) -> None:
    plain = [prompt._replace(domain="") for prompt in PROMPTS[:2]]
    with Running(Peer()) as peer:
        assert record(peer, tmp_path / "t", prompts=plain).trace.requests.domains is None  # type: ignore[union-attr]
        mixed = [plain[0], PROMPTS[1]]
        again = record(peer, tmp_path / "u", prompts=mixed).trace
    assert isinstance(again, ActivationTrace)
    assert again.requests.domains == ["unknown", "code"]


def wrong(**meta: Any) -> dict[str, Any]:
    ids = routing([1, 2, 3])
    whole = encode_sglang(with_dense_layers(ids))
    fields = {"routed_experts": whole, "prompt_tokens": 3, "completion_tokens": 1, **meta}
    return {"output_ids": [4], "prompt_token_ids": [1, 2, 3], "meta_info": fields}


def test_requests_that_fail_are_counted_and_left_out(tmp_path: Path) -> None:
    texts = [prompt.prompt for prompt in PROMPTS]
    hole = with_dense_layers(routing([1, 2, 3]))
    hole[1, 5] = 0
    special: dict[str, Callable[[], Any]] = {
        texts[1]: lambda: web.json_response({"error": {"message": "too long"}}, status=400),
        texts[3]: lambda: "reset",
        texts[4]: lambda: wrong(completion_tokens=3),
        texts[5]: lambda: wrong(routed_experts=encode_sglang(hole)),
        texts[6]: lambda: web.Response(text="half an ans"),
    }
    with Running(Peer(special=special)) as peer:
        found = record(peer, tmp_path / "t")
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, [PROMPTS[n] for n in (0, 2, 7, 8)])
    assert (found.tally.done, found.tally.failed) == (4, 5)
    problems = " | ".join(found.tally.problems)
    for words in ("HTTP 400: too long", "rows of 27 layers", "token 1, layer 5 is all zero", "not a JSON object"):
        assert words in problems
    assert len(peer.bodies) == 9, "no retry"


def test_a_first_answer_with_token_ids_and_a_later_one_without(tmp_path: Path) -> None:
    bare = {k: v for k, v in wrong().items() if k == "meta_info"}
    with Running(Peer(special={PROMPTS[4].prompt: lambda: bare})) as peer:
        found = record(peer, tmp_path / "t", concurrency=1)
    assert dict(found.tally.problems) == {"the answer lists no token ids, unlike the first": 1}
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS[:4] + PROMPTS[5:])


def test_time_ends_the_sending(tmp_path: Path) -> None:
    with Running(Peer(delay=lambda _: 0.2)) as peer:
        found = record(peer, tmp_path / "t", concurrency=1, duration_s=1)
    assert isinstance(found.trace, ActivationTrace)
    assert 1 <= found.trace.num_requests < len(PROMPTS)
    check(found.trace, PROMPTS[: found.trace.num_requests])


def test_an_interrupted_recording_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupt(_: str, done: int, __: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with Running(Peer()) as peer, pytest.raises(KeyboardInterrupt):
        record(peer, tmp_path / "t", concurrency=1, report=interrupt)
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.num_requests == 5
    check(trace, PROMPTS[:5])


# ---------------------------------------------------------------------------------------------------- refused, in words


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with Running(Peer()) as peer:
        pass
    with pytest.raises(UnavailableError, match="nothing listens"):
        record(peer, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_server_that_returns_no_experts_is_not_asked_to_generate(tmp_path: Path) -> None:
    with Running(Peer(info={"enable_return_routed_experts": False})) as peer:
        with pytest.raises(ConfigError, match="start it with --enable-return-routed-experts or --expert-distribution"):
            record(peer, tmp_path / "t")
        with pytest.raises(ConfigError, match="returns no experts: start it with --enable-return-routed-experts"):
            record(peer, tmp_path / "t", mode="routed")
    assert set(peer.calls) == {"/server_info"}
    assert not (tmp_path / "t").exists()


def test_answers_without_experts_end_the_run_at_once(tmp_path: Path) -> None:
    """As behind a router that drops them: the server's settings say yes."""
    bare = {"output_ids": [1], "meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}
    special = {prompt.prompt: lambda: bare for prompt in PROMPTS}
    with Running(Peer(special=special)) as peer, pytest.raises(ConfigError, match="answers without routed_experts"):
        record(peer, tmp_path / "t", concurrency=1)
    assert len(peer.bodies) == 1
    assert not (tmp_path / "t").exists()


def test_nothing_but_failures(tmp_path: Path) -> None:
    special = {prompt.prompt: lambda: web.Response(status=500, text="broken") for prompt in PROMPTS}
    with Running(Peer(special=special)) as peer, pytest.raises(UnavailableError) as caught:
        record(peer, tmp_path / "t")
    assert "9 of 9 requests failed, 9 of them so: HTTP 500: broken" in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_the_shape_must_be_known_and_may_be_given(tmp_path: Path) -> None:
    with Running(Peer(info={"model_path": "/models/my-own"})) as peer:
        with pytest.raises(ConfigError, match="model '/models/my-own' has no known shape"):
            record(peer, tmp_path / "t")
        with pytest.raises(UnknownNameError):
            record(peer, tmp_path / "t", model="deepseek-v9")
        assert peer.bodies == []
        found = record(peer, tmp_path / "t", model="deepseek-v2-lite")
        config = {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 27,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 102400,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "torch_dtype": "bfloat16",
        }
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "config.json").write_text(json.dumps(config))
        peer.info["model_path"] = str(tmp_path / "own")
        again = record(peer, tmp_path / "u")
    for trace in (found.trace, again.trace):
        assert isinstance(trace, ActivationTrace)
        check(trace, PROMPTS)


def test_another_shape_than_the_servers(tmp_path: Path) -> None:
    with Running(Peer()) as peer, pytest.raises(UnavailableError, match=r"nothing was recorded.*routed_experts has"):
        record(peer, tmp_path / "t", model="qwen3-30b-a3b")


def test_not_an_sglang_server(tmp_path: Path) -> None:
    with Running(Peer(info_path=None)) as peer, pytest.raises(ConfigError, match="is it an SGLang server"):
        record(peer, tmp_path / "t")
    assert peer.calls == ["/server_info", "/get_server_info"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"duration_s": 0.0}, "duration_s=0.0"),
        ({"duration_s": float("nan")}, "duration_s=nan"),
        ({"prompts": []}, "give prompts to send"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        record(Peer(url="http://localhost:1"), tmp_path / "t", **change)
    assert problem in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_a_folder_in_use_is_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with Running(Peer()) as peer, pytest.raises(ConfigError, match="is not empty"):
        record(peer, tmp_path)
    assert peer.calls == []


# ---------------------------------------------------------------------------------------------------------- any answer


def test_an_answer_without_experts_is_told_from_a_wrong_one() -> None:
    with pytest.raises(NotReturnedError):
        parse_answer(wrong(routed_experts=None), SPEC)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "prompt_tokens=None"),
        ({"choices": []}, "prompt_tokens=None"),
        ({"choices": [{}, {}]}, "2 choices"),
        (wrong(prompt_tokens=True), "prompt_tokens=None"),
        (wrong(prompt_tokens=0), "prompt_tokens=0"),
        (wrong(completion_tokens=-1), "completion_tokens=-1"),
        (wrong(routed_experts="****"), "is not base64"),
        (wrong(routed_experts="AAAA"), "has 3 bytes"),
        (wrong(routed_experts_dtype="float8"), "dtype 'float8'"),
        (wrong(prompt_tokens=4), "3 rows of 27 layers x 6 int32, expected 4"),
        (wrong(routed_experts=encode_sglang(with_dense_layers(routing([1, 2, 3])) + 60)), "has 64 experts"),
        (wrong(routed_experts=encode_sglang(with_dense_layers(routing([1, 2, 3])) - 1)), "from -1"),
    ],
)
def test_answers_that_are_wrong(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_answer(body, SPEC)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
def test_a_named_dtype(dtype: str) -> None:
    text = encode_sglang(with_dense_layers(routing([1, 2, 3])), dtype)
    found = parse_answer(wrong(routed_experts=text, routed_experts_dtype=dtype), SPEC)
    np.testing.assert_array_equal(found.expert_ids, routing([1, 2, 3]))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": None},
        {"output_ids": []},
        {"output_ids": [1, 2]},
        {"prompt_token_ids": [1, 2, "x"]},
        {"prompt_token_ids": [1, 2, -1]},
        {"prompt_token_ids": [1, 2, 2**31]},
    ],
)
def test_token_ids_that_do_not_fit_are_left_out(change: dict[str, Any]) -> None:
    assert parse_answer({**wrong(), **change}, SPEC).token_ids is None
    assert parse_answer(wrong(), SPEC).token_ids is not None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "choices",
        "meta_info",
        "usage",
        "sglext",
        "sgl_ext",
        "routed_experts",
        "routed_experts_dtype",
        "prompt_tokens",
        "completion_tokens",
        "output_ids",
        "prompt_token_ids",
        "token_ids",
    ]
)
nested = st.dictionaries(names, values | st.dictionaries(names, values, max_size=6), max_size=6)


@given(nested | st.builds(lambda inner: {"choices": [inner]}, nested) | st.builds(lambda m: wrong(**m), nested))
def test_any_answer_raises_only_input_errors(body: dict[str, Any]) -> None:
    with suppress(InputError):
        assert parse_answer(body, SPEC).expert_ids.shape[1:] == (26, 6)
