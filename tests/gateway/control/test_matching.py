"""Expert events → whole requests and loads: halves are put together, and wrong events left out with their reason."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator

from control_cases import EXPERTS, LAYERS, SHAPE, load_event, request_event
from coterie.control import LoadSeen, RequestSeen
from coterie.footprints import footprint
from coterie.gateway.control import matching
from coterie.gateway.control.matching import PATIENCE_S, Matcher, SentRequests, request_name
from coterie.wire.expert_events import ExpertLoad, RequestExperts

PROMPT, OUTPUT = 12, 9
BEFORE = np.arange(PROMPT + OUTPUT - 1) < PROMPT


def halves(name: str, rng: Generator, suffixes: tuple[str, str] = ("", "")) -> tuple[RequestExperts, RequestExperts]:
    """The events of a prefill worker and of a decode worker that never saw the prompt's experts."""
    whole = request_event(name, "low", 0, rng, PROMPT, OUTPUT)
    ids, tokens = whole.ids(), whole.tokens()
    fields: dict[str, Any] = {"model": whole.model, "layer_ids": whole.layer_ids, "prompt_tokens": PROMPT}
    first = RequestExperts.pack(
        ids[:PROMPT],
        tokens[:PROMPT],
        np.ones(PROMPT, np.bool_),
        EXPERTS,
        request_id=name + suffixes[0],
        output_tokens=1,
        **fields,
    )
    second = RequestExperts.pack(
        ids, tokens, ~BEFORE, EXPERTS, request_id=name + suffixes[1], output_tokens=OUTPUT, **fields
    )
    return first, second


def test_only_requests_that_were_sent_to_the_worker_count_and_each_once(rng: Generator) -> None:
    """Five forged events for each real one: of requests never sent, under true names, and again."""
    sent, seen = SentRequests(), []
    matcher = Matcher(SHAPE, sent)
    for number in range(20):
        sent.add(f"r{number}", "decode-0")
        forged = [request_event(f"forged-{number}", "odd", 0, rng), request_event(f"cmpl-{number}", "odd", 0, rng)]
        seen += [matcher.take("decode-0", event, 1.0) for event in forged]
        seen.append(matcher.take("decode-1", request_event(f"r{number}", "odd", 0, rng), 1.0))
        seen.append(matcher.take("decode-0", request_event(f"r{number}", "low", 0, rng), 1.0))
        seen += [matcher.take("decode-0", request_event(f"r{number}", "odd", kind, rng), 1.0) for kind in (0, 1)]
    counted = [one for one in seen if one is not None]
    assert [one.request_id for one in counted if isinstance(one, RequestSeen)] == [f"r{number}" for number in range(20)]
    assert not any(one.decode[:, EXPERTS // 2 :].any() for one in counted if isinstance(one, RequestSeen)), (
        "all are low"
    )
    assert matcher.counters["not_sent"] == 100


@pytest.mark.parametrize(
    "engine_id",
    ["x", "cmpl-x", "chatcmpl-x", "cmpl-x-0", "cmpl-x-0-0a1b2c3d", "chatcmpl-x-0a1b2c3d", "1_chatcmpl-x-0a1b2c3d"],
)
@pytest.mark.parametrize("name", ["x", "x-7", "x-0a1b2c3d", "cmpl-x"])
def test_names_are_found_in_the_ids_of_engines(engine_id: str, name: str) -> None:
    sent = SentRequests()
    sent.add(name, "w")
    engine_id = engine_id.replace("x", name)
    assert sent.name_of(engine_id, "w") == name
    assert sent.name_of(engine_id, "v") is None
    assert sent.name_of("cmpl-y", "w") is None
    sent.count(name)
    assert sent.name_of(engine_id, "w") is None


def test_halves_of_a_sent_request_meet_and_count_once(rng: Generator) -> None:
    sent = SentRequests()
    matcher = Matcher(SHAPE, sent)
    first, second = halves("cmpl-x", rng, ("-0a1b2c3d", "-deadbeef"))
    sent.add("x", "prefill-0")
    assert matcher.take("prefill-0", first, 1.0) is None
    sent.add("x", "decode-1")
    assert isinstance(matcher.take("decode-1", second, 2.0), RequestSeen)
    assert matcher.take("decode-1", second, 3.0) is None
    assert matcher.counters["not_sent"] == 1


def test_requests_that_were_sent_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MOST_SENT", 3)
    sent = SentRequests()
    for number in range(5):
        sent.add(str(number), "w")
    assert [sent.name_of(str(number), "w") for number in range(5)] == [None, None, "2", "3", "4"]


def test_an_event_that_knows_its_prompt_is_whole(rng: Generator) -> None:
    event = request_event("a", "low", 0, rng, PROMPT, OUTPUT)
    seen = Matcher(SHAPE).take("decode-0", event, 5.0)
    assert isinstance(seen, RequestSeen)
    assert (seen.at_s, seen.request_id, seen.worker) == (5.0, "a", "decode-0")
    np.testing.assert_array_equal(seen.prefill, footprint(event.ids()[BEFORE], EXPERTS))
    np.testing.assert_array_equal(seen.decode, footprint(event.ids()[~BEFORE], EXPERTS))
    assert seen.prefill.dtype == seen.decode.dtype == np.int64


@pytest.mark.parametrize("prefill_first", [True, False])
@pytest.mark.parametrize("suffixes", [("", ""), ("-0a1b2c3d", "-deadbeef")])
def test_halves_meet_in_any_order(rng: Generator, prefill_first: bool, suffixes: tuple[str, str]) -> None:
    matcher = Matcher(SHAPE)
    pair = [*zip(("prefill-0", "decode-1"), halves("cmpl-x", rng, suffixes), strict=True)]
    first, second = pair if prefill_first else pair[::-1]
    assert matcher.take(*first, 1.0) is None
    assert len(matcher.halves) == 1
    seen = matcher.take(*second, 2.0)
    assert isinstance(seen, RequestSeen)
    assert seen.worker == "decode-1"
    assert seen.prefill.sum() == PROMPT * LAYERS * 2
    assert seen.decode.sum() == (OUTPUT - 1) * LAYERS * 2
    assert len(matcher.halves) == 0
    assert not any(matcher.counters.values())


def test_halves_of_different_requests_do_not_meet(rng: Generator) -> None:
    matcher = Matcher(SHAPE)
    assert matcher.take("prefill-0", halves("a", rng)[0], 0.0) is None
    assert matcher.take("decode-0", halves("b", rng)[1], 0.0) is None
    assert len(matcher.halves) == 2
    matcher.expire(PATIENCE_S + 1)
    assert len(matcher.halves) == 0
    assert (matcher.counters["no_decode"], matcher.counters["unmatched"]) == (1, 1)


def test_an_answer_of_one_token_has_no_decode_to_learn_from(rng: Generator) -> None:
    matcher = Matcher(SHAPE)
    first = halves("a", rng)[0]  # the decode worker computes no further token, and tells the same
    assert matcher.take("prefill-0", first, 0.0) is None
    assert matcher.take("decode-0", first, 0.0) is None
    matcher.expire(PATIENCE_S + 1)
    assert +matcher.counters == {"no_decode": 1}


def test_halves_that_wait_are_bounded(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MOST_WAITING", 5)
    matcher = Matcher(SHAPE)
    for number in range(8):
        matcher.take("decode-0", halves(str(number), rng)[1], 0.0)
    assert len(matcher.halves) == 5
    assert matcher.counters["unmatched"] == 3


def test_an_event_counts_once_and_a_name_may_be_used_again(rng: Generator) -> None:
    matcher = Matcher(SHAPE)
    event = request_event("client's own", "low", 0, rng)
    assert matcher.take("decode-0", event, 0.0) is not None
    assert matcher.take("decode-0", event, 1.0) is None
    assert matcher.counters["doubled"] == 1
    other = matcher.take("decode-0", request_event("client's own", "low", 1, rng), 2.0)
    assert other is not None


def test_a_load_is_taken_over(rng: Generator) -> None:
    event = load_event("odd", rng, tokens=64)
    seen = Matcher(SHAPE).take("decode-0", event, 3.0)
    assert isinstance(seen, LoadSeen)
    assert (seen.at_s, seen.worker, seen.steps, seen.seconds) == (3.0, "decode-0", 8, 0.01)
    np.testing.assert_array_equal(seen.tokens, event.load())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_ids": [0, 1, 2]}, "other_shape"),
        ({"num_experts": 32}, "other_shape"),
        ({"counts": b"short"}, "malformed"),
        ({"steps": 0}, "nonsense"),
        ({"steps": -3}, "nonsense"),
        ({"seconds": 0.0}, "nonsense"),
        ({"seconds": float("nan")}, "nonsense"),
        ({"seconds": 1e9}, "nonsense"),
        ({"tokens": 1}, "nonsense"),
        ({"tokens": -1}, "nonsense"),
    ],
)
def test_a_wrong_load_is_left_out(rng: Generator, changes: dict[str, Any], reason: str) -> None:
    matcher = Matcher(SHAPE)
    event = msgspec.structs.replace(load_event("odd", rng), **changes)
    assert matcher.take("decode-0", event, 0.0) is None
    assert matcher.counters[reason] == sum(matcher.counters.values()) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_ids": [0]}, "other_shape"),
        ({"num_experts": 15}, "other_shape"),
        ({"top_k": 1}, "other_shape"),
        ({"expert_ids": b"\x00"}, "malformed"),
        ({"expert_ids": bytes([200]) * 80}, "malformed"),
        ({"expert_ids": bytes(80)}, "nonsense"),
        ({"token_ids": b"123"}, "malformed"),
        ({"known": b"\xff"}, "malformed"),
        ({"prompt_tokens": -1}, "nonsense"),
    ],
)
def test_a_wrong_request_is_left_out(rng: Generator, changes: dict[str, Any], reason: str) -> None:
    matcher = Matcher(SHAPE)
    event = msgspec.structs.replace(request_event("a", "low", 0, rng, PROMPT, OUTPUT), **changes)
    assert matcher.take("decode-0", event, 0.0) is None
    assert matcher.counters[reason] == sum(matcher.counters.values()) == 1


@given(
    prompt_tokens=st.integers(-(2**63), 2**63 - 1),
    output_tokens=st.integers(-5, 2**40),
    data=st.binary(max_size=200),
    known=st.binary(max_size=8),
    count=st.integers(0, 20),
)
def test_whatever_a_request_holds_nothing_is_raised(
    prompt_tokens: int, output_tokens: int, data: bytes, known: bytes, count: int
) -> None:
    event = RequestExperts(
        request_id="x",
        model="",
        num_experts=EXPERTS,
        layer_ids=[0, 1],
        top_k=2,
        prompt_tokens=prompt_tokens,
        token_ids=bytes(4 * count),
        expert_ids=data,
        known=known,
        output_tokens=output_tokens,
    )
    matcher = Matcher(SHAPE)
    seen = matcher.take("decode-0", event, 0.0)
    assert (seen is not None) + len(matcher.halves) + sum(matcher.counters.values()) == 1


@given(seconds=st.floats(), steps=st.integers(-9, 2**40), tokens=st.integers(-9, 2**40), counts=st.binary(max_size=128))
def test_whatever_a_load_holds_nothing_is_raised(seconds: float, steps: int, tokens: int, counts: bytes) -> None:
    event = ExpertLoad(
        model="",
        layer_ids=[0, 1],
        num_experts=EXPERTS,
        seconds=seconds,
        steps=steps,
        tokens=tokens,
        counts=counts.ljust(128, b"\0"),
    )
    matcher = Matcher(SHAPE)
    assert (matcher.take("decode-0", event, 0.0) is not None) + sum(matcher.counters.values()) == 1


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("f0e1-3a", "f0e1-3a"),
        ("cmpl-f0e1-3a-0-01234567", "cmpl-f0e1-3a-0"),
        ("chatcmpl-f0e1-3a-89abcdef", "chatcmpl-f0e1-3a"),
        ("chatcmpl-f0e1-3a", "chatcmpl-f0e1-3a"),
        ("mine-01234567", "mine-01234567"),
    ],
)
def test_names_of_vllm_lose_their_random_end(id: str, name: str) -> None:
    assert request_name(id) == name
