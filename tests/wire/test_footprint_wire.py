"""Footprints on the wire: there and back, sizes as stated, and nothing but InputError on damaged ones."""

from __future__ import annotations

import base64
import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from coterie.errors import InputError
from coterie.wire import footprints as wire
from coterie.wire.footprints import (
    KEY,
    MAX_COUNTS,
    WireFootprint,
    attach_footprint,
    check_possible,
    decode_footprint,
    encode_footprint,
    footprint_of,
    without_footprint,
)

SMALL = WireFootprint(np.array([[3, 0, 1], [2, 2, 0]], np.uint8), (1, 4), 2, 1)

all_counts = st.sampled_from([3, 255, 256, 70_000, 2**40]).flatmap(
    lambda high: arrays(np.int64, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.integers(0, high))
)


def same(left: WireFootprint, right: WireFootprint) -> bool:
    return np.array_equal(left.counts, right.counts) and left[1:] == right[1:]


@given(all_counts, st.integers(0, 2**40), st.integers(0, 2**40), st.booleans())
def test_round_trip(counts: np.ndarray, tokens: int, missing: int, deflate: bool) -> None:
    sent = WireFootprint(counts, tuple(range(3, 3 + 2 * len(counts), 2)), tokens, missing)
    received = decode_footprint(encode_footprint(sent, deflate))
    assert same(received, sent)
    assert received.counts.dtype == np.min_scalar_type(int(counts.max())), "the narrowest that holds them"


def test_any_integer_dtype_and_order_sends_the_same() -> None:
    expected = encode_footprint(SMALL)
    for counts in (
        SMALL.counts.astype(np.int64),
        SMALL.counts.astype(">u4"),
        np.asfortranarray(SMALL.counts),
        np.repeat(SMALL.counts, 2, axis=1)[:, ::2],
    ):
        layers = np.array(SMALL.layer_ids)  # NumPy's integers too
        assert encode_footprint(SMALL._replace(counts=counts, layer_ids=layers)) == expected  # type: ignore[arg-type]


def counted(tokens: int, *experts: int, shape: tuple[int, int] = (2, 6)) -> WireFootprint:
    """Every token takes these experts, in every layer."""
    counts = np.zeros(shape, np.uint16)
    counts[:, list(experts)] = tokens
    return WireFootprint(counts, tuple(range(len(counts))), tokens)


def test_a_footprint_that_is_possible() -> None:
    check_possible(counted(100, 0, 1))
    check_possible(counted(100, 0, 1), (2, 6), 2)
    few_dropped = counted(100, 0, 1)
    few_dropped.counts[0, 0] -= 3
    check_possible(few_dropped, (2, 6), 2)


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        (counted(3, 0, 1, shape=(3, 6)), r"\(3, 6\).*\(2, 6\)"),
        (counted(3, 0, 1, shape=(2, 5)), r"\(2, 5\)"),
        (counted(100, 0, 1)._replace(tokens=0), "of 0 tokens"),
        (counted(100, 0, 1)._replace(tokens=2**63), f"{2**63} tokens"),
        (counted(100, 0, 1)._replace(tokens=50), "50 tokens, with 100"),
        (counted(100, 0, 1, 2), "3 to 3"),
        (counted(100, 0), "1 to 1"),
        (counted(100), "0 to 0"),
        (counted(100, 0, 1)._replace(tokens=110), "expected 2"),
        (counted(100, 0, 1)._replace(counts=np.array([[100, 100, 0], [100, 50, 0]], np.uint8)), "1.5|shape|2, 3"),
    ],
)
def test_lies(lie: WireFootprint, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        check_possible(lie, (2, 6), 2)


# ------------------------------------------------------------------------------------------------------- stated sizes


def routed(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """[58, 256] counts of top-8 routing, popularity falling as rank^-0.7, a token's experts all different.

    For a long prompt that matters little to the size, and eight free draws take less time.
    """
    counts = np.empty((58, 256), np.int64)
    for layer in counts:
        weights = rng.permutation(np.arange(1, 257) ** -0.7)
        if tokens > 4096:
            layer[:] = rng.multinomial(8 * tokens, weights / weights.sum())
            continue
        keys = np.log(weights) + rng.gumbel(size=(tokens, 256))
        layer[:] = np.bincount(np.argpartition(-keys, 7, axis=1)[:, :8].ravel(), minlength=256)
    return counts


@pytest.mark.parametrize(("tokens", "kilobytes"), [(16, 4), (1024, 20), (32_768, 30)])
def test_sizes_are_as_the_docstring_says(tokens: int, kilobytes: int, rng: np.random.Generator) -> None:
    counts = routed(tokens, rng)
    assert (counts.sum(axis=1) == 8 * tokens).all()
    sent = WireFootprint(counts, tuple(range(3, 61)), tokens)
    assert len(encode_footprint(sent)) == pytest.approx(kilobytes * 1000, rel=0.15)
    assert len(encode_footprint(sent, deflate=False)) == pytest.approx(20_000 if tokens < 256 else 40_000, rel=0.05)
    assert f"{kilobytes} KB" in (wire.__doc__ or "")


# ----------------------------------------------------------------------------------------------------- damaged, hostile


def packed(**change: Any) -> str:
    """A message as any sender could make it."""
    fields = {
        "version": 1,
        "layers": 2,
        "experts": 3,
        "itemsize": 1,
        "tokens": 2,
        "missing": 1,
        "layer_ids": [1, 4],
        "counts": zlib.compress(SMALL.counts.tobytes()),
        **change,
    }
    return base64.b64encode(msgspec.msgpack.encode(list(fields.values()))).decode()


def test_any_deflate_stream_is_read() -> None:
    assert same(decode_footprint(packed()), SMALL)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not base64!", "is not a footprint"),
        ("é", "is not a footprint"),
        (7, "is not a footprint"),
        (base64.b64encode(b"hello").decode(), "is not a footprint"),
        (base64.b64encode(b"\x98\x01" + b"\x91" * 100_000).decode(), "is not a footprint"),
        (packed(version=2), "version 2, expected 1"),
        (packed(layers=3), "3 layers (2 named)"),
        (packed(layers=0, layer_ids=[]), "0 layers"),
        (packed(experts=-3), "-3 experts"),
        (packed(itemsize=3), "3 bytes"),
        (packed(experts=2**62), f"{2**62} experts"),
        (packed(tokens=-1), "at least 0"),
        (packed(layer_ids=[1, -4]), "from layer -4"),
        (packed(layer_ids="ab"), "is not a footprint"),
        (packed(counts=b"not deflated"), "is a damaged footprint"),
        (packed(counts=zlib.compress(bytes(5))), "5 bytes or more, expected 6"),
        (packed(counts=zlib.compress(bytes(7))), "7 bytes or more, expected 6"),
        (packed(counts=zlib.compress(bytes(6))[:-1]), "expected 6"),
        (packed(counts=zlib.compress(bytes(6)) + b"x"), "no more"),
    ],
)
def test_damaged(text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_footprint(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_decompression_bomb_is_refused_without_inflating_it() -> None:
    """200 MB of zeros in 200 KB, behind a small header and behind the largest one that is let through."""
    bomb = zlib.compress(bytes(200_000_000), 9)
    for shape in ({}, {"layers": 2, "experts": MAX_COUNTS // 2, "itemsize": 8}):
        text = packed(counts=bomb, **shape)
        tracemalloc.start()
        try:
            with pytest.raises(InputError, match="no more"):
                decode_footprint(text)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 30_000_000, "the 8 MB of the header, while the buffer grows, and the message"


@given(st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_any_damage_is_an_input_error_or_a_footprint(at: int, byte: int, cut: bool) -> None:
    data = bytearray(base64.b64decode(encode_footprint(SMALL)))
    at %= len(data)
    damaged = bytes(data[:at]) if cut else bytes(data[:at]) + bytes([byte]) + bytes(data[at + 1 :])
    try:
        received = decode_footprint(base64.b64encode(damaged))
    except InputError:
        return
    assert received.counts.shape[0] == len(received.layer_ids)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_input_error(data: bytes) -> None:
    with pytest.raises(InputError):
        decode_footprint(data)


# -------------------------------------------------------------------------------------------------- kv_transfer_params


def test_travels_beside_a_connectors_own_parameters() -> None:
    params: dict[str, Any] = {"remote_engine_id": "a", "remote_block_ids": [1, 2]}
    before = dict(params)
    attach_footprint(params, SMALL)
    assert set(params) == {*before, KEY}
    received = footprint_of(params)
    assert received is not None
    assert same(received, SMALL)
    assert without_footprint(params) == before
    assert KEY in params, "a copy: the answer itself is left as it was"


def test_an_answer_without_one() -> None:
    assert footprint_of(None) is None
    assert footprint_of({}) is None
    assert footprint_of({KEY: None}) is None
    with pytest.raises(InputError):
        footprint_of({KEY: {"a": 1}})
