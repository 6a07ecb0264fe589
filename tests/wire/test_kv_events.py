"""KV events: vLLM's own bytes, every older form, there and back, and nothing but InputError on damaged ones."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError
from coterie.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvents,
    decode_kv_events,
    encode_kv_events,
)

VLLM_0_32 = bytes.fromhex(
    "93cb41d954fc40100000958ea474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c4080101010101010101cfff"
    "ffffffffffffffb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c"
    "6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c092a473616c7492a3696d6703a9"
    "67726f75705f69647801b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f73"
    "7065635f736c6964696e675f77696e646f77cc80a86c6f63616c697479a54c4f43414caa73657373696f6e5f6964a17388a474797065ab"
    "426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f636b5f68617368c4080101010101010101a9"
    "746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f696403a66d656469756da3435055a96c6f72615f6e616d65a3"
    "61646184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739207c402ff00a66d656469756da3475055a96772"
    "6f75705f6964780083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739108a66d656469756dc081a4747970"
    "65b0416c6c426c6f636b73436c656172656402"
)
"""Encoded by vLLM 0.32's own structs: what VLLM_EVENTS says, and the fields session_id and ownership."""

SALTED = [None, ["salt", ["img", 3]]]
VLLM_EVENTS: list[BlockStored | BlockRemoved | AllBlocksCleared] = [
    BlockStored(
        block_hashes=[b"\x01" * 8, 2**64 - 1],
        token_ids=[1, 2, 3, 4],
        block_size=2,
        medium="GPU",
        extra_keys=SALTED,
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
        locality="LOCAL",
    ),
    BlockStored(
        block_hashes=[7],
        parent_block_hash=b"\x01" * 8,
        token_ids=[5, 6],
        block_size=2,
        lora_id=3,
        medium="CPU",
        lora_name="ada",
    ),
    BlockRemoved(block_hashes=[7, b"\xff\x00"], medium="GPU", group_idx=0),
    BlockRemoved(block_hashes=[8]),
    AllBlocksCleared(),
]


def message(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def only(payload: bytes) -> Any:
    (event,) = decode_kv_events(payload).events
    return event


def test_vllms_bytes() -> None:
    batch = decode_kv_events(VLLM_0_32)
    assert (batch.timestamp, batch.rank) == (1700000000.25, 2)
    assert batch.events == VLLM_EVENTS


def test_a_message_without_a_rank() -> None:
    """vLLM before data parallelism, and SGLang then, sent two elements."""
    assert decode_kv_events(msgspec.msgpack.encode([1.5, []])) == KVEvents(1.5, [], None)
    unset = bytes.fromhex("93cb00000000000000009181a474797065b0416c6c426c6f636b73436c6561726564c0")
    assert decode_kv_events(unset) == KVEvents(0.0, [AllBlocksCleared()], None)


@pytest.mark.torch
def test_vllm_reads_what_is_written_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("vllm.distributed.kv_events")
    sent = KVEvents(1.5, [*VLLM_EVENTS, BlockStored(block_hashes=[1]), BlockRemoved(block_hashes=[])], 1)
    received = msgspec.msgpack.decode(encode_kv_events(sent), type=theirs.KVEventBatch)
    assert (received.ts, received.data_parallel_rank, len(received.events)) == (1.5, 1, 7)
    for ours, event in zip(sent.events, received.events, strict=True):
        assert type(event).__name__ == type(ours).__name__
        for field in set(ours.__struct_fields__) - {"cache_salt", "extra_keys"}:
            assert getattr(event, field) == getattr(ours, field)
    again = decode_kv_events(msgspec.msgpack.encode(received))
    assert again.events == sent.events


def test_every_field_is_written() -> None:
    """vLLM's structs give no default to parent_block_hash, lora_id, medium and others: a gap is an error there."""
    sent = KVEvents(1.5, [BlockStored(block_hashes=[1]), BlockRemoved(block_hashes=[1])])
    raw = msgspec.msgpack.decode(encode_kv_events(sent))
    vllm_needs = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert vllm_needs <= set(raw[1][0])
    assert {"block_hashes", "medium"} <= set(raw[1][1])


# ------------------------------------------------------------------------------------------------------ the older forms


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (["BlockStored", [1], None, [5, 6], 2, None], BlockStored(block_hashes=[1], token_ids=[5, 6], block_size=2)),
        (
            ["BlockStored", [b"ab"], 9, [5], 1, 4, "GPU"],
            BlockStored(
                block_hashes=[b"ab"], parent_block_hash=9, token_ids=[5], block_size=1, lora_id=4, medium="GPU"
            ),
        ),
        (
            ["BlockStored", [1], 9, [5], 1, 4, "GPU", "ada", [["a"]], 2, "full_attention", None],
            BlockStored(
                block_hashes=[1],
                parent_block_hash=9,
                token_ids=[5],
                block_size=1,
                lora_id=4,
                medium="GPU",
                lora_name="ada",
                extra_keys=[["a"]],
                group_idx=2,
            ),
        ),
        (["BlockRemoved", [1, 2]], BlockRemoved(block_hashes=[1, 2])),
        (["BlockRemoved", [1, 2], "CPU"], BlockRemoved(block_hashes=[1, 2], medium="CPU")),
        (["BlockRemoved", [1, 2], "CPU", 1, "later"], BlockRemoved(block_hashes=[1, 2], medium="CPU", group_idx=1)),
        (["AllBlocksCleared"], AllBlocksCleared()),
        (["AllBlocksCleared", "later"], AllBlocksCleared()),
    ],
)
def test_the_array_form(array: list[Any], expected: Any) -> None:
    assert only(message(array)) == expected


def test_both_forms_in_one_message() -> None:
    assert decode_kv_events(message(["BlockRemoved", [1]], {"type": "AllBlocksCleared"})).events == [
        BlockRemoved(block_hashes=[1]),
        AllBlocksCleared(),
    ]


def test_sglangs_salt_in_both_forms() -> None:
    """A block of a salted prompt must not pass for one of the plain prompt."""
    expected = BlockStored(block_hashes=[-7], token_ids=[5], block_size=1, medium="GPU", cache_salt="tenant")
    assert only(message(["BlockStored", [-7], None, [5], 1, None, "GPU", {"cache_salt": "tenant"}])) == expected
    as_map = {
        "type": "BlockStored",
        "block_hashes": [-7],
        "parent_block_hash": None,
        "token_ids": [5],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": "tenant",
        "session_id": "s",
    }
    assert only(message(as_map)) == expected


def test_sglangs_pairs_of_tokens() -> None:
    """With EAGLE a page lists each token beside the next; the page's tokens are the first of each."""
    pairs = [[5, 6], [6, 7], [7, 8]]
    assert only(message(["BlockStored", [1], None, pairs, 3, None, "GPU"])).token_ids == [5, 6, 7]
    assert only(message({"type": "BlockStored", "block_hashes": [1], "token_ids": pairs})).token_ids == [5, 6, 7]


def test_a_newer_map_may_have_more_fields_and_fewer() -> None:
    assert only(message({"type": "BlockRemoved", "block_hashes": [1], "added_later": {"x": 1}})) == BlockRemoved(
        block_hashes=[1]
    )
    assert only(message({"type": "BlockStored", "block_hashes": [1]})) == BlockStored(block_hashes=[1])


# ------------------------------------------------------------------------------------------------------- there and back

hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=33)
texts = st.none() | st.text(max_size=4)
numbers = st.none() | st.integers(0, 2**31)
events = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=st.lists(hashes, max_size=3),
        parent_block_hash=st.none() | hashes,
        token_ids=st.lists(st.integers(0, 2**31), max_size=4),
        block_size=st.integers(0, 256),
        lora_id=numbers,
        medium=texts,
        lora_name=texts,
        extra_keys=st.none() | st.lists(texts, max_size=2),
        group_idx=numbers,
        kv_cache_spec_kind=texts,
        kv_cache_spec_sliding_window=numbers,
        locality=texts,
        cache_salt=texts,
    ),
    st.builds(BlockRemoved, block_hashes=st.lists(hashes, max_size=3), medium=texts, group_idx=numbers, locality=texts),
    st.builds(AllBlocksCleared),
)
batches = st.builds(KVEvents, st.floats(allow_nan=False), st.lists(events, max_size=4), numbers)


@given(batches)
def test_round_trip(batch: KVEvents) -> None:
    assert decode_kv_events(encode_kv_events(batch)) == batch


@given(batches)
def test_the_array_form_of_any_batch(batch: KVEvents) -> None:
    """As an engine before the maps would have sent it: without the fields that came with them."""
    fields = {"BlockStored": 9, "BlockRemoved": 3, "AllBlocksCleared": 0}
    arrays, expected = [], []
    for event in batch.events:
        kind = type(event)
        names = event.__struct_fields__[: fields[kind.__name__]]
        arrays.append([kind.__name__, *(getattr(event, name) for name in names)])
        expected.append(kind(**{name: getattr(event, name) for name in names}))
    received = decode_kv_events(msgspec.msgpack.encode([batch.timestamp, arrays, batch.rank]))
    assert received == KVEvents(batch.timestamp, expected, batch.rank)


# ----------------------------------------------------------------------------------------------------- damaged, unknown


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (message({"type": "BlockMoved", "block_hashes": [1]}), "type 'BlockMoved', expected one of BlockStored"),
        (message(["BlockMoved", [1]]), "type 'BlockMoved'"),
        (message({"block_hashes": [1]}), "type None"),
        (message([]), "type None"),
        (message([["BlockStored"]]), "type ['BlockStored']"),
        (message({"type": 3}), "type 3"),
        (message({"type": "BlockStored"}), "missing required field `block_hashes`"),
        (message(["BlockStored"]), "missing required field `block_hashes`"),
        (message(["BlockRemoved", ["YWJj"]]), "got `str`"),
        (message({"type": "BlockRemoved", "block_hashes": ["YWJj"]}), "got `str`"),
        (message({"type": "BlockRemoved", "block_hashes": [1.5]}), "got `float`"),
        (message(["BlockStored", [1], None, [[1, 2], 3], 1, None]), "got `array`"),
        (message(["BlockStored", [1], None, [5], 1, None, "GPU", {"cache_salt": 3}]), "cache_salt"),
        (message(["BlockStored", [1], None, [5], 1, None, "GPU", 3]), "lora_name"),
        (message("BlockStored"), "is not a batch"),
        (b"", "is not a batch"),
        (b"\x93", "is not a batch"),
        (b"\xdd\xff\xff\xff\xff", "is not a batch"),
        (msgspec.msgpack.encode({"ts": 1}), "is not a batch"),
        (b"\x92\x01\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + b"\x91" * 100_000 + b"\xc0", "is not a batch"),
        (b"\x92\x01\x91" + b"\x91" * 100_000 + b"\xc0", "is not a batch"),
        (b"\x92\x01\x91\x81\xa4type\xa1\xff", "is not a batch"),
    ],
)
def test_what_is_refused(payload: bytes, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_kv_events(payload)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


ARRAYS = message(["BlockStored", [1, b"ab"], None, [[5, 6]], 1, None, "GPU"], ["BlockRemoved", [1]])


@given(st.sampled_from([VLLM_0_32, ARRAYS]), st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_any_damage_is_an_input_error_or_events(data: bytes, at: int, byte: int, cut: bool) -> None:
    at %= len(data)
    damaged = data[:at] if cut else data[:at] + bytes([byte]) + data[at + 1 :]
    with suppress(InputError):
        batch = decode_kv_events(damaged)
        assert all(isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared) for event in batch.events)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just(7), inner, max_size=3),
    max_leaves=10,
)


kinds = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])


@given(kinds, st.lists(plain, max_size=9), plain)
def test_any_values_raise_only_input_errors(name: str, values: list[Any], more: Any) -> None:
    named = dict(zip(BlockStored.__struct_fields__, values, strict=False))
    for event in ([name, *values], {"type": name, **named}, more):
        with suppress(InputError):
            decode_kv_events(message(event))
