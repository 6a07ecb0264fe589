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

from coterie.engines.recording import Sending
from coterie.engines.sglang.recording import NotReturnedError, SGLangRecording, parse_answer, record_sglang
from coterie.errors import ConfigError, InputError, UnavailableError, UnknownNameError
from coterie.prompts import Prompt
from coterie.traces import ActivationTrace, LoadTable
from coterie.types import DECODE, PREFILL
from routed_experts_payloads import encode_sglang
from sglang_peer import SPEC, Peer, Running, routing, tokens_of, with_dense_layers

PROMPTS = [Prompt(f"p{n}", ("math", "code")[n % 2], "en", f"prompt {'x' * n} {n}") for n in range(9)]


def record(peer: Peer, out: Path, **more: Any) -> SGLangRecording:
    own = {name: more.pop(name) for name in ("mode", "dump_dir", "model") if name in more}
    sending = Sending(**{"prompts": PROMPTS, "concurrency": 4, "max_tokens": 5, "chat": False, **more})
    return record_sglang(peer.url, out, sending, **own)


def check(trace: ActivationTrace, prompts: list[Prompt], tokens: bool = True) -> None:
    """Every token's experts, phase and id, computed anew."""
    trace.validate()
    assert trace.requests.ids == [prompt.id for prompt in prompts]
    for index, prompt in enumerate(prompts):
        found = trace.request(index)
        before = tokens_of(prompt.prompt)
        after = [500 + n for n in range(1 + len(prompt.prompt) % 5)]
        expected = [*before, *after[:-1]]
        np.testing.assert_array_equal(found.expert_ids, routing(expected))
        assert found.phase.tolist() == [PREFILL] * len(before) + [DECODE] * (len(after) - 1)
        assert trace.requests.prompt_tokens[index] == len(before)
        assert trace.requests.output_tokens[index] == len(after)
        if tokens:
            assert found.token_ids is not None
            assert found.token_ids.tolist() == expected
        else:
            assert found.token_ids is None


# -------------------------------------------------------------------------------------------------------------- routed


def test_every_token_of_every_prompt_in_the_order_sent(tmp_path: Path):
    """Answers come back in the reverse of the order sent, four at a time."""
    seen: list[tuple[str, int, int]] = []
    together = {"may_answer": lambda peer, _: peer.most_in_flight > 1}
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
def test_chat(tmp_path: Path, form: str):
    with Running(Peer(form=form)) as peer:
        found = record(peer, tmp_path / "t", chat=True)
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS)
    assert set(peer.calls) == {"/server_info", "/v1/chat/completions"}
    assert peer.bodies[0]["model"] == "lite"
    assert peer.bodies[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize("chat", [False, True])
def test_a_version_that_lists_no_token_ids(tmp_path: Path, chat: bool):
    with Running(Peer(lists_tokens=False)) as peer:
        found = record(peer, tmp_path / "t", chat=chat)
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS, tokens=False)


def test_an_older_server_and_one_that_counts_moe_layers_only(tmp_path: Path):
    with Running(Peer(info_path="/get_server_info", layers="moe")) as peer:
        found = record(peer, tmp_path / "t")
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS)


def test_prompts_without_domains(tmp_path: Path):
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


def test_requests_that_fail_are_counted_and_left_out(tmp_path: Path):
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


def test_a_first_answer_with_token_ids_and_a_later_one_without(tmp_path: Path):
    bare = {k: v for k, v in wrong().items() if k == "meta_info"}
    with Running(Peer(special={PROMPTS[4].prompt: lambda: bare})) as peer:
        found = record(peer, tmp_path / "t", concurrency=1)
    assert dict(found.tally.problems) == {"the answer lists no token ids, unlike the first": 1}
    assert isinstance(found.trace, ActivationTrace)
    check(found.trace, PROMPTS[:4] + PROMPTS[5:])


def test_time_ends_the_sending(tmp_path: Path):
    with Running(Peer(delay=lambda _: 0.2)) as peer:
        found = record(peer, tmp_path / "t", concurrency=1, duration_s=1)
    assert isinstance(found.trace, ActivationTrace)
    assert 1 <= found.trace.num_requests < len(PROMPTS)
    check(found.trace, PROMPTS[: found.trace.num_requests])


def test_an_interrupted_recording_keeps_what_it_has(tmp_path: Path):
    def interrupt(_: str, done: int, __: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with Running(Peer()) as peer, pytest.raises(KeyboardInterrupt):
        record(peer, tmp_path / "t", concurrency=1, report=interrupt)
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.num_requests == 5
    check(trace, PROMPTS[:5])


# ---------------------------------------------------------------------------------------------------- refused, in words


def test_a_server_that_is_not_there(tmp_path: Path):
    with Running(Peer()) as peer:
        pass
    with pytest.raises(UnavailableError, match="does not answer"):
        record(peer, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_server_that_returns_no_experts_is_not_asked_to_generate(tmp_path: Path):
    with Running(Peer(info={"enable_return_routed_experts": False})) as peer:
        with pytest.raises(ConfigError, match="start it with --enable-return-routed-experts or --expert-distribution"):
            record(peer, tmp_path / "t")
        with pytest.raises(ConfigError, match="returns no experts: start it with --enable-return-routed-experts"):
            record(peer, tmp_path / "t", mode="routed")
    assert set(peer.calls) == {"/server_info"}
    assert not (tmp_path / "t").exists()


def test_answers_without_experts_end_the_run_at_once(tmp_path: Path):
    """As behind a router that drops them: the server's settings say yes."""
    bare = {"output_ids": [1], "meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}
    special = {prompt.prompt: lambda: bare for prompt in PROMPTS}
    with Running(Peer(special=special)) as peer, pytest.raises(ConfigError, match="answers without routed_experts"):
        record(peer, tmp_path / "t", concurrency=1)
    assert len(peer.bodies) == 1
    assert not (tmp_path / "t").exists()


def test_nothing_but_failures(tmp_path: Path):
    special = {prompt.prompt: lambda: web.Response(status=500, text="broken") for prompt in PROMPTS}
    with Running(Peer(special=special)) as peer, pytest.raises(UnavailableError) as caught:
        record(peer, tmp_path / "t")
    assert "9 of 9 requests failed, 9 of them so: HTTP 500: broken" in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_the_shape_must_be_known_and_may_be_given(tmp_path: Path):
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


def test_another_shape_than_the_servers(tmp_path: Path):
    with Running(Peer()) as peer, pytest.raises(UnavailableError, match=r"nothing was recorded.*routed_experts has"):
        record(peer, tmp_path / "t", model="qwen3-30b-a3b")


def test_not_an_sglang_server(tmp_path: Path):
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
def test_settings_that_cannot_work(tmp_path: Path, change: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as caught:
        record(Peer(url="http://localhost:1"), tmp_path / "t", **change)
    assert problem in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_a_folder_in_use_is_refused_before_the_server_is_asked(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with Running(Peer()) as peer, pytest.raises(ConfigError, match="is not empty"):
        record(peer, tmp_path)
    assert peer.calls == []


# ---------------------------------------------------------------------------------------------------------- any answer


def test_an_answer_without_experts_is_told_from_a_wrong_one():
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
        (wrong(prompt_tokens=4), "has 3 rows of 27 layers x 6, expected 4"),
        (wrong(routed_experts=encode_sglang(with_dense_layers(routing([1, 2, 3])) + 60)), "has 64 experts"),
        (wrong(routed_experts=encode_sglang(with_dense_layers(routing([1, 2, 3])) - 1)), "from -1"),
    ],
)
def test_answers_that_are_wrong(body: dict[str, Any], problem: str):
    with pytest.raises(InputError) as caught:
        parse_answer(body, SPEC)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
def test_a_named_dtype(dtype: str):
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
def test_token_ids_that_do_not_fit_are_left_out(change: dict[str, Any]):
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
def test_any_answer_raises_only_input_errors(body: dict[str, Any]):
    with suppress(InputError):
        assert parse_answer(body, SPEC).expert_ids.shape[1:] == (26, 6)


# ------------------------------------------------------------------------------------------------------------- recorder

EXPERTS, LAYERS = 5, 3
IDENTITY = np.tile(np.arange(EXPERTS), (LAYERS, 1))


def test_the_recorder_is_never_touched_where_it_is_not_configured(tmp_path: Path):
    """Starting one that is not there raises inside the scheduler, up to some version."""
    for info in ({}, {"expert_distribution_recorder_mode": ""}):
        with Running(Peer(info=info)) as peer:
            with pytest.raises(ConfigError, match="start it with --expert-distribution-recorder-mode"):
                record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
            with pytest.raises(ConfigError, match="records nothing: start it with --expert-distribution-recorder-mode"):
                record(peer, tmp_path / "t", prompts=(), duration_s=1.0)
        assert set(peer.calls) == {"/server_info"}


def configured(mode: str, **more: Any) -> Peer:
    return Peer(info={"expert_distribution_recorder_mode": mode, **more.pop("info", {})}, **more)


def test_a_dump_folder_that_is_not_here(tmp_path: Path):
    with Running(configured("stat")) as peer, pytest.raises(ConfigError, match="is no folder here"):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path / "nowhere")
    assert set(peer.calls) == {"/server_info"}


def test_a_recorder_that_does_not_start(tmp_path: Path):
    peer = configured("stat", recorder_status=400)
    with Running(peer), pytest.raises(UnavailableError, match="does not start its recorder: HTTP 400"):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)


def test_no_dump_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coterie.engines.sglang.dumps.DUMP_WAIT_S", 0.3)
    with Running(configured("stat")) as peer, pytest.raises(UnavailableError, match="no new dump appeared"):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert not (tmp_path / "t").exists()


def test_an_interrupted_recording_stops_the_recorder(tmp_path: Path):
    def interrupt(what: str, done: int, _: int) -> None:
        if "Recording" in what and done == 2:
            raise KeyboardInterrupt

    with Running(configured("stat")) as peer, pytest.raises(KeyboardInterrupt):
        record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path, concurrency=1, report=interrupt)
    controls = [call for call in peer.calls if "expert_distribution" in call]
    assert controls == ["/start_expert_distribution_record", "/stop_expert_distribution_record"]


def save(folder: Path, name: str, dump: Any) -> None:
    import torch

    torch.save(dump, folder / f"expert_distribution_recorder_{name}.pt")


def token_dump(first_token: int, length: int, rank: int = 0) -> dict[str, Any]:
    """One prompt, one pass: layer 0 dense, token t of layer l chose expert (t + l) and the next."""
    import torch

    slots = np.full((LAYERS, length, 8), -1)
    for layer in (1, 2):
        for token in range(length):
            slots[layer, token, :2] = [(first_token + token + layer + j) % EXPERTS for j in range(2)]
    record = {
        "forward_pass_id": 0,
        "rank": rank,
        "gatherer_key": "primary",
        "forward_mode": 1,
        "extend_seq_lens": [length],
        "input_ids": list(range(first_token, first_token + length)),
        "positions": list(range(length)),
        "topk_ids_of_layer": torch.from_numpy(slots),
        "global_physical_count": torch.zeros(LAYERS, EXPERTS, dtype=torch.int64),
    }
    return {"records": [record], "last_physical_to_logical_map": torch.from_numpy(IDENTITY)}


@pytest.mark.torch
def test_listening_to_a_server_per_token(tmp_path: Path):
    """No prompts: the recorder is started, time passes, its dump is read; an older dump in the folder is not."""
    pytest.importorskip("torch")
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    save(dumps, "1.5_0", token_dump(70, 9))
    peer = configured("per_token", on_dump=lambda: save(dumps, "2.5_0", token_dump(10, 4)))
    seconds: list[str] = []
    with Running(peer):
        found = record(
            peer,
            tmp_path / "t",
            prompts=(),
            duration_s=0.3,
            dump_dir=dumps,
            model="mine",
            report=lambda what, *_: seconds.append(what),
        )
    assert isinstance(found.trace, ActivationTrace)
    assert peer.bodies == []
    assert [c.split("_")[0] for c in peer.calls[1:]] == ["/start", "/stop", "/dump"]
    trace = ActivationTrace.open(tmp_path / "t")
    assert trace.meta.model == "mine"
    expected = [[[(token + layer) % 5, (token + layer + 1) % 5] for layer in (1, 2)] for token in range(10, 14)]
    assert trace.request(0).expert_ids.tolist() == expected
    assert "Listening, seconds" in seconds


@pytest.mark.torch
def test_ranks_that_share_their_tokens_are_read_once(tmp_path: Path):
    pytest.importorskip("torch")

    def dump() -> None:
        for rank in range(2):
            save(tmp_path, f"2.5_{rank}", token_dump(10, 4, rank))

    with Running(configured("per_token", info={"tp_size": 2}, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, ActivationTrace)
    assert (found.trace.num_requests, found.trace.num_tokens) == (1, 4)
    assert (found.tally.done, len(peer.bodies)) == (9, 9)
    assert "return_routed_experts" not in peer.bodies[0]


@pytest.mark.torch
def test_data_parallel_attention_adds_the_ranks_up(tmp_path: Path):
    """Four ranks in two groups: 0 and 1 share tokens, 2 and 3 share others."""
    pytest.importorskip("torch")

    def dump() -> None:
        for rank in range(4):
            save(tmp_path, f"2.5_{rank}", token_dump(*((10, 4) if rank < 2 else (50, 3)), rank))

    info = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    with Running(configured("per_token", info=info, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    trace = found.trace
    assert isinstance(trace, ActivationTrace)
    assert [trace.request(n).token_ids.tolist() for n in range(2)] == [[10, 11, 12, 13], [50, 51, 52]]  # type: ignore[union-attr]
    assert trace.requests.prompt_tokens.tolist() == [4, 3]
    ActivationTrace.open(tmp_path / "t").validate()


@pytest.mark.torch
def test_coarser_modes_give_a_load_table(tmp_path: Path):
    torch = pytest.importorskip("torch")
    counts = torch.arange(2 * LAYERS * EXPERTS).reshape(2, LAYERS, EXPERTS)
    peer = configured("stat", on_dump=lambda: save(tmp_path, "1700000000.25", {"rank": 0, "logical_count": counts}))
    with Running(peer):
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, LoadTable)
    np.testing.assert_array_equal(LoadTable.open(tmp_path / "t").counts, counts.numpy())


@pytest.mark.torch
def test_per_pass_sums_the_ranks(tmp_path: Path):
    torch = pytest.importorskip("torch")

    def one(rank: int) -> dict[str, Any]:
        count = torch.full((LAYERS, EXPERTS), rank + 1, dtype=torch.int64)
        records = [{"forward_pass_id": n, "rank": rank, "global_physical_count": count} for n in range(2)]
        return {"records": records, "last_physical_to_logical_map": torch.from_numpy(IDENTITY)}

    def dump() -> None:
        for rank in range(3):
            save(tmp_path, f"2.5_{rank}", one(rank))

    save(tmp_path, "1.5_0", one(40))
    with Running(configured("per_pass", info={"tp_size": 3}, on_dump=dump)) as peer:
        found = record(peer, tmp_path / "t", mode="recorder", dump_dir=tmp_path)
    assert isinstance(found.trace, LoadTable)
    assert found.trace.counts.shape == (2, LAYERS, EXPERTS)
    assert (found.trace.counts == 1 + 2 + 3).all()
