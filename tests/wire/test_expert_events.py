"""Expert events: there and back, every array checked against the shape its event claims, and nothing but InputError."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError
from coterie.wire.expert_events import (
    MAX_EXPERTS,
    ExpertEvents,
    ExpertLoad,
    RequestExperts,
    decode_expert_events,
    encode_expert_events,
)


def event(
    tokens: int = 5, layers: int = 2, top_k: int = 3, experts: int = 300, seed: int = 0, **change: Any
) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(seed)
    known = change.pop("known", rng.random(tokens) < 0.7)
    fields = {
        "request_id": "r",
        "model": "m",
        "layer_ids": list(range(1, layers + 1)),
        "prompt_tokens": tokens,
        "finish": "stop",
    }
    ids = rng.integers(0, experts, (tokens, layers, top_k))
    token_ids = rng.integers(0, 2**31, tokens)
    return RequestExperts.pack(ids, token_ids, known, experts, **fields, **change), ids, token_ids, known


def travel(*events: RequestExperts | ExpertLoad) -> list[Any]:
    return decode_expert_events(encode_expert_events(ExpertEvents(1.5, list(events), 3))).events


sizes = st.integers(1, 4)


@given(st.integers(0, 20), sizes, sizes, st.sampled_from([4, 256, 257, 65536]), st.integers(0, 99))
def test_a_request_round_trips(tokens: int, layers: int, top_k: int, experts: int, seed: int) -> None:
    sent, ids, token_ids, known = event(tokens, layers, top_k, experts, seed)
    (received,) = travel(sent)
    assert received == sent
    np.testing.assert_array_equal(received.ids()[known], ids[known])
    assert not received.ids()[~known].any(), "what was not seen is sent as zeros, not as whatever the memory held"
    np.testing.assert_array_equal(received.tokens(), token_ids)
    np.testing.assert_array_equal(received.seen(), known)
    assert received.ids().dtype.itemsize == (1 if experts <= 256 else 2)


def test_a_message_keeps_its_time_rank_and_order() -> None:
    first, second = event(seed=1)[0], event(seed=2, known=np.ones(5, bool))[0]
    load = ExpertLoad(
        model="m",
        layer_ids=[0, 2],
        num_experts=3,
        seconds=0.5,
        steps=4,
        tokens=6,
        counts=np.arange(6, dtype="<u4").tobytes(),
    )
    batch = decode_expert_events(encode_expert_events(ExpertEvents(1.5, [first, load, second], 3)))
    assert (batch.timestamp, batch.rank, batch.events) == (1.5, 3, [first, load, second])
    assert second.known == b"", "all seen takes no bytes"
    np.testing.assert_array_equal(load.load(), [[0, 1, 2], [3, 4, 5]])


def test_an_event_is_a_map_with_its_type() -> None:
    """So that a reader in another language needs no position of a field."""
    sent = event()[0]
    raw = msgspec.msgpack.decode(encode_expert_events(ExpertEvents(1.5, [sent])))
    assert raw[0] == 1.5
    assert raw[1][0]["type"] == "RequestExperts"
    assert raw[1][0]["num_experts"] == 300
    assert "cached_tokens" not in raw[1][0], "a default is not sent"


def test_a_newer_sender_may_add_fields() -> None:
    raw = msgspec.msgpack.decode(encode_expert_events(ExpertEvents(1.5, [event()[0]])))
    raw[1][0]["added_later"] = {"a": [1]}
    raw.append("also later")
    assert decode_expert_events(msgspec.msgpack.encode(raw)).events == [event()[0]]


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ((np.zeros((2, 1)), np.zeros(2), np.ones(2, bool)), "must be [token, layer, k]"),
        ((np.zeros((2, 1, 1), int), np.zeros(3), np.ones(2, bool)), "token_ids has 3"),
        ((np.zeros((2, 1, 1), int), np.zeros(2), np.ones(1, bool)), "known 1"),
        ((np.full((2, 1, 1), 8), np.zeros(2), np.ones(2, bool)), "expected 0 … 7"),
        ((np.full((2, 1, 1), -1), np.zeros(2), np.ones(2, bool)), "from -1"),
        ((np.full((2, 1, 1), 264), np.zeros(2), np.ones(2, bool)), "to 264"),
    ],
)
def test_arrays_that_do_not_fit_are_not_packed(arrays: tuple[Any, Any, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        RequestExperts.pack(*arrays, 8, request_id="r", model="m", layer_ids=[0], prompt_tokens=2)
    assert problem in str(caught.value)


def test_garbage_of_unseen_tokens_is_not_an_expert() -> None:
    ids = np.array([[[3]], [[255]]])
    packed = RequestExperts.pack(
        ids, np.zeros(2, int), np.array([True, False]), 8, request_id="r", model="m", layer_ids=[0], prompt_tokens=2
    )
    assert packed.ids().tolist() == [[[3]], [[0]]]


@pytest.mark.parametrize(
    ("change", "read", "problem"),
    [
        ({"top_k": 2}, "ids", "is expected"),
        ({"top_k": 2**63}, "ids", "expected 1 <= top_k"),
        ({"top_k": -1}, "ids", "top_k=-1"),
        ({"num_experts": 0}, "ids", "num_experts=0"),
        ({"num_experts": 2**64 - 1}, "ids", f"<= {MAX_EXPERTS}"),
        ({"num_experts": 256}, "ids", "uint8"),
        ({"layer_ids": []}, "ids", "0 layers"),
        ({"expert_ids": b""}, "ids", "0 bytes"),
        ({"expert_ids": b"\xff" * 60}, "ids", "holds 65535, expected 0 … 299"),
        ({"token_ids": b"123"}, "tokens", "3 bytes, not a multiple of 4"),
        ({"token_ids": b"123"}, "ids", "3 bytes, not a multiple of 4"),
        ({"token_ids": b"123"}, "seen", "3 bytes, not a multiple of 4"),
        ({"known": b"12"}, "seen", "2 bytes for 5 tokens, expected 1"),
    ],
)
def test_an_event_that_contradicts_itself(change: dict[str, Any], read: str, problem: str) -> None:
    (received,) = travel(msgspec.structs.replace(event()[0], **change))
    with pytest.raises(InputError) as caught:
        getattr(received, read)()
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(), max_size=3), st.integers(-2, 2**63), st.binary(max_size=30))
def test_a_load_is_an_array_of_its_shape_or_an_error(layers: list[int], experts: int, counts: bytes) -> None:
    load = ExpertLoad(model="m", layer_ids=layers, num_experts=experts, seconds=1.0, steps=1, tokens=1, counts=counts)
    try:
        decoded = load.load()
    except InputError:
        return
    assert decoded.shape == (len(layers), experts)


FIELDS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["RequestExperts", "ExpertLoad"]),
        "request_id": st.text(max_size=3),
        "model": st.text(max_size=3),
        "finish": st.text(max_size=3),
        "num_experts": st.integers(-(2**63), 2**64 - 1),
        "top_k": st.integers(-(2**63), 2**64 - 1),
        "layer_ids": st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3),
        "prompt_tokens": st.integers(-5, 5),
        "token_ids": st.binary(max_size=9),
        "expert_ids": st.binary(max_size=9),
        "known": st.binary(max_size=3),
        "seconds": st.floats(),
        "steps": st.integers(-5, 5),
        "tokens": st.integers(-5, 5),
        "counts": st.binary(max_size=9),
    }
)


@given(FIELDS)
def test_well_typed_nonsense_raises_only_input_errors(fields: dict[str, Any]) -> None:
    (received,) = decode_expert_events(msgspec.msgpack.encode([0.0, [fields], 0])).events
    for read in ("load",) if isinstance(received, ExpertLoad) else ("ids", "tokens", "seen"):
        with suppress(InputError):
            getattr(received, read)()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgspec.msgpack.encode([1.0, [{"type": "Other"}]]),
        msgspec.msgpack.encode([1.0, [1]]),
        msgspec.msgpack.encode([1.0, [{}]]),
        msgspec.msgpack.encode({"a": 1}),
        b"\x94\x01\x90\x00" + b"\x91" * 100_000,
        b"\x92\x01\x91\x81\xa4type\xa1\xff",
    ],
)
def test_what_is_no_message(payload: bytes) -> None:
    with pytest.raises(InputError, match="expert event") as caught:
        decode_expert_events(payload)
    assert "\n" not in str(caught.value)


@given(st.integers(0, 1000), st.integers(0, 255), st.booleans())
def test_any_damage_is_an_input_error_or_an_event(at: int, byte: int, cut: bool) -> None:
    data = encode_expert_events(ExpertEvents(1.5, [event()[0]], 3))
    at %= len(data)
    damaged = data[:at] if cut else data[:at] + bytes([byte]) + data[at + 1 :]
    with suppress(InputError):
        for found in decode_expert_events(damaged).events:
            assert isinstance(found, RequestExperts)
            assert len(found.ids()) == len(found.tokens()) == len(found.seen())


@given(st.binary(max_size=40))
def test_any_bytes_are_an_input_error_or_empty(data: bytes) -> None:
    with suppress(InputError):
        assert decode_expert_events(data).events == []
