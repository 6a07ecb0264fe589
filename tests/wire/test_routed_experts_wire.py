"""Routed-experts payloads: both engines' forms, there and back, and nothing but InputError on damaged ones."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from coterie.errors import InputError
from coterie.wire.routed_experts import decode_npy, decode_sglang, decode_vllm, routed_layers
from routed_experts_payloads import encode_sglang, encode_vllm

IDS = np.arange(2 * 3 * 4).reshape(2, 3, 4) % 16

payloads = arrays(np.int64, array_shapes(min_dims=3, max_dims=3, max_side=5), elements=st.integers(0, 299))


@given(payloads)
def test_vllm_round_trip(ids: Any) -> None:
    decoded = decode_vllm(encode_vllm(ids, 300))
    assert decoded.dtype == np.uint16
    np.testing.assert_array_equal(decoded, ids)


@given(payloads, st.sampled_from([None, "int32", "int16", "uint16"]))
def test_sglang_round_trip(ids: Any, dtype: str | None) -> None:
    text = encode_sglang(ids, dtype or "int32")
    np.testing.assert_array_equal(decode_sglang(text, len(ids), ids.shape[1:2], ids.shape[2], dtype), ids)


def test_vllm_is_one_byte_up_to_256_experts() -> None:
    assert decode_vllm(encode_vllm(IDS, 256)).dtype == np.uint8
    assert decode_vllm(encode_vllm(IDS, 257)).dtype == np.uint16


def test_vllm_reads_what_numpy_saves() -> None:
    """vLLM calls np.save on a [token, layer, k] array, which need not be C-ordered."""
    for array in (IDS.astype(np.uint8), np.asfortranarray(IDS.astype(np.uint16))):
        stream = io.BytesIO()
        np.save(stream, array)
        np.testing.assert_array_equal(decode_vllm(base64.b64encode(stream.getvalue())), IDS)


def test_sglang_is_plain_int32() -> None:
    assert base64.b64decode(encode_sglang(IDS)) == IDS.astype("<i4").tobytes()


def test_dense_layers_are_zero_rows() -> None:
    ids = np.array([[[0, 0], [0, 1], [2, 3]], [[0, 0], [0, 3], [1, 0]]])
    assert routed_layers(ids).tolist() == [1, 2]
    assert routed_layers(np.zeros((2, 3, 1), int)).tolist() == [0, 1, 2], "one choice of expert 0 is a choice"


def npy(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("not base64!", "is not base64"),
        ("é", "is not base64"),
        (base64.b64encode(b"hello").decode(), "is not a .npy file"),
        (npy(np.zeros((2, 3))), "expected integers [token, layer, k]"),
        (npy(np.zeros((2, 3, 4))), "is float64 (2, 3, 4)"),
        (npy(np.array([[[None]]])), "pickled objects"),
        (
            base64.b64encode(base64.b64decode(npy(IDS))[:-1]).decode(),
            "has 191 bytes of data; int64 (2, 3, 4) needs 192",
        ),
    ],
)
def test_damaged_vllm(payload: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_vllm(payload)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_that_claims_terabytes_allocates_nothing() -> None:
    data = base64.b64decode(npy(IDS)).replace(b"(2, 3, 4)", b"(2, 3, 9)")
    with pytest.raises(InputError, match="needs 432"):
        decode_npy(data)
    huge = base64.b64decode(npy(IDS)).replace(b"(2, 3, 4), }     ", b"(9999999999,), } ")
    with pytest.raises(InputError, match="needs 79999999992"):
        decode_npy(huge)


def test_damaged_sglang() -> None:
    with pytest.raises(InputError, match=r"96.* 5 .* 4 int32"):
        decode_sglang(encode_sglang(IDS), 2, [5], 4)
    with pytest.raises(InputError, match=r"'float8'.*uint8"):
        decode_sglang(encode_sglang(IDS), 2, [3], 4, "float8")
    with pytest.raises(InputError, match="is not base64"):
        decode_sglang("****", 2, [3], 4)


@given(st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_any_damage_is_an_input_error_or_an_array(at: int, byte: int, cut: bool) -> None:
    data = bytearray(base64.b64decode(npy(IDS.astype(np.uint8))))
    at %= len(data)
    damaged = bytes(data[:at]) if cut else bytes(data[:at]) + bytes([byte]) + bytes(data[at + 1 :])
    try:
        array = decode_npy(damaged)
    except InputError:
        return
    assert array.nbytes <= len(damaged)
