"""Tokens to text, drawing tokens, bodies and metrics: all that needs no model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from coterie.engines.worker import server
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.metrics import METRICS, PREFIX, WorkerMetrics
from coterie.engines.worker.protocol import Remote, RequestError, check_max_tokens, parse_body, parse_json
from coterie.engines.worker.requests import MAX_HELD, Output, SamplingSettings, Text, WorkerRequest, draw_token
from coterie.errors import ConfigError, UnavailableError
from coterie.net.access import Address


def decode(ids: list[int]) -> str:
    """Bytes as tokens, so that a character may take several; 256 is special and has no text."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def run(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Text]:
    text = Text(decode, stop)
    pieces = []
    for token in tokens:
        pieces.append(text.add(token))
        if text.stopped is not None:
            break
    return [*pieces, text.end()], text


@given(st.text(max_size=40))
def test_pieces_are_the_text_and_never_half_a_character(text: str) -> None:
    pieces, _ = run(list(text.encode()))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 256), max_size=12))
def test_any_tokens_come_out_as_one_decoding_would(tokens: list[int]) -> None:
    pieces, _ = run(tokens)
    assert "".join(pieces) == decode(tokens)


def test_what_never_becomes_a_character_is_not_held_for_ever() -> None:
    text = Text(decode)
    pieces = [text.add(0x80) for _ in range(3 * MAX_HELD)]
    assert sum(map(len, pieces)) >= 2 * MAX_HELD


@given(st.text("ab", max_size=25), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_against_the_whole_text(text: str, stop: list[str]) -> None:
    """Byte by byte the stop string that is complete first wins; of its text nothing is sent, at any time."""
    pieces, state = run(list(text.encode()), tuple(stop))
    ends = [(at + len(word), at, word) for word in stop if (at := text.find(word)) >= 0]
    if not ends:
        assert ("".join(pieces), state.stopped) == (text, None)
        return
    end = min(ends)[0]
    at, word = min((at, word) for stop_end, at, word in ends if stop_end == end)
    assert (len("".join(pieces)), state.stopped) == (at, word)
    assert text.startswith("".join(pieces))


def test_draw_follows_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rng = np.random.default_rng(0)
    for settings, expected in (
        (SamplingSettings(1, temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
        (SamplingSettings(1, temperature=1.0, top_p=0.79), [0.625, 0.375, 0, 0]),
        (SamplingSettings(1, temperature=1.0, top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (SamplingSettings(1, temperature=0.5), np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
        (SamplingSettings(1, temperature=1e-9), [1, 0, 0, 0]),
        (SamplingSettings(1, temperature=1.0, top_p=1e-9), [1, 0, 0, 0]),
    ):
        counts = np.bincount([draw_token(logits, settings, rng) for _ in range(8000)], minlength=4) / 8000
        np.testing.assert_allclose(counts, expected, atol=0.02)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    st.floats(0, 100),
    st.floats(1e-12, 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_draw_is_always_a_token(logits: list[float], temperature: float, top_p: float, seed: int) -> None:
    settings = SamplingSettings(1, temperature, top_p, seed)
    request = WorkerRequest("k", "n", [1], settings, Text(decode), lambda _: None)
    again = WorkerRequest("k", "n", [1], settings, Text(decode), lambda _: None)
    array = np.array(logits, np.float32)
    token = draw_token(array, settings, request.rng)
    assert 0 <= token < len(logits)
    assert token == draw_token(array, settings, again.rng)


def test_tokens_of_prompt_and_output_together() -> None:
    request = WorkerRequest("k", "n", [1, 2, 3], SamplingSettings(9), Text(decode), lambda _: None)
    request.output = [4, 5, 6]
    whole = [1, 2, 3, 4, 5, 6]
    for start in range(7):
        for end in range(start, 7):
            assert request.tokens(start, end) == whole[start:end]


def test_a_stop_string_that_shows_only_at_the_end_counts() -> None:
    """Its last byte came with the last token allowed."""
    request = WorkerRequest("k", "n", [1], SamplingSettings(3, stop=("abc",)), Text(decode, ("abc",)), lambda _: None)
    outputs: list[Output] = [request.append(byte, frozenset()) for byte in b"abc"]
    assert [output.text for output in outputs] == ["", "", ""]
    assert (outputs[-1].finish, outputs[-1].stop_reason) == ("stop", "abc")


# -------------------------------------------------------------------------------------------------------------- bodies


def parse(body: dict[str, Any], chat: bool = False, role: Any = "both") -> Any:
    return parse_body(body, chat, "tiny", role)


def test_defaults_are_openais() -> None:
    asked = parse({"prompt": "x"})
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (16, 1.0, 1.0)
    assert not any((asked.stream, asked.hand_over, asked.return_token_ids, asked.sampling.ignore_eos))
    assert parse({"messages": [{"role": "user", "content": "x"}]}, chat=True).max_tokens is None
    assert parse({"prompt": ["x"]}).prompt == "x"
    assert parse({"prompt": [[1, 2]]}).prompt == [1, 2]


def test_fields_that_change_nothing_are_let_through() -> None:
    body = {
        "prompt": "x",
        "n": 1,
        "logprobs": None,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "best_of": None,
        "presence_penalty": 0,
        "user": "me",
        "never_heard_of": [1],
    }
    assert parse(body).prompt == "x"
    for name, value in (("n", True), ("logprobs", 0), ("top_k", 5), ("echo", True), ("min_tokens", 2)):
        with pytest.raises(RequestError, match=f"{name}=.*is not supported"):
            parse({"prompt": "x", name: value})


def test_where_kv_is_fetched() -> None:
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 8100, "remote_request_id": "a-1"}
    here = Remote(Address("10.0.0.1", 8100), "a-1")
    assert parse({"prompt": "x", "kv_transfer_params": params}).remote == here
    granted = {**params, "coterie_grant": "1.2.3"}
    assert parse({"prompt": "x", "kv_transfer_params": granted}).remote == here._replace(grant="1.2.3")
    assert str(here.address) == "10.0.0.1:8100"
    for host in ("::1", "[::1]"):
        found = parse({"prompt": "x", "kv_transfer_params": {**params, "remote_host": host}}).remote
        assert str(found.address) == "[::1]:8100"
    for wrong in (
        {"remote_host": "a/../b"},
        {"remote_host": "a@b"},
        {"remote_port": 0},
        {"remote_port": True},
        {"remote_request_id": "../metrics"},
        {"remote_request_id": ""},
    ):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            parse({"prompt": "x", "kv_transfer_params": {**params, **wrong}})


def test_lengths() -> None:
    assert check_max_tokens([1, 2], None, 10, 5) == 8
    assert check_max_tokens([1, 2], 8, 10, 5) == 8
    for prompt, count, words in (
        ([], 1, "no tokens"),
        ([5], 1, "0 … 4"),
        ([1] * 10, 1, "must fit 10"),
        ([1] * 9, 2, "at most 1"),
    ):
        with pytest.raises(RequestError, match=words):
            check_max_tokens(prompt, count, 10, 5)


@given(st.binary(max_size=30))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_json(data), dict)
    except RequestError:
        with pytest.raises((ValueError, AssertionError)):
            assert isinstance(json.loads(data), dict)


def test_errors_can_always_be_sent() -> None:
    body = json.loads(RequestError("half \ud800 a\n\n pair").body())
    assert body["error"]["message"].encode() == b"half \\ud800 a pair"


# ------------------------------------------------------------------------------------------------- metrics and settings


def test_metrics_are_prometheus_text_with_few_series() -> None:
    model = 'a "quoted"\\name'
    metrics = WorkerMetrics({"model": model, "role": "both"})
    metrics.add("requests_total", "stop")
    metrics.add("requests_total", "stop", 2)
    metrics.add("distinct_experts_sum", "max", 12)
    metrics.add("distinct_experts_steps_total")
    families = list(text_string_to_metric_families(metrics.render().decode()))
    samples = {
        (sample.name.removeprefix(PREFIX), *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    constant = ("model", model), ("role", "both")
    assert samples["requests_total", constant[0], ("outcome", "stop"), constant[1]] == 3
    assert samples["distinct_experts_sum", constant[0], ("over_layers", "max"), constant[1]] == 12
    assert samples["distinct_experts_count", constant[0], ("over_layers", "max"), constant[1]] == 1
    assert {name for name, *_ in samples} == {*METRICS, "distinct_experts_count"}, "documented names, no more"
    assert all(set(labels) >= set(constant) for _, *labels in samples)
    assert len(samples) == sum(max(1, len(metric.values)) for metric in METRICS.values()) + 3 < 60
    with pytest.raises(KeyError, match="no outcome='lost'"):
        metrics.add("requests_total", "lost")
    with pytest.raises(KeyError):
        metrics.add("no_such")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"role": "all"}, "role='all' must be one of prefill, decode, both"),
        ({"port": 70000}, "port=70000"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"max_step_tokens": 8}, "max_step_tokens=8 must be at least max_batch=16"),
        ({"kv_ttl_s": math.nan}, "kv_ttl_s=nan"),
        ({"kv_events": "5601"}, "must begin with tcp://"),
        ({"kv_events": "tcp://*:1", "expert_events": "tcp://*:1"}, "each needs its own endpoint"),
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        WorkerConfig(tmp_path, **wrong)


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(UnavailableError, match=re.escape("needs torch: pip install 'coterie[torch]'")):
        server.check_requirements()
