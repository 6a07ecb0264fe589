"""The routed-experts payload of an engine's answer: base64 text → expert ids [token, layer, k].

Two forms exist. vLLM sends a whole ``.npy`` file, so the array carries its own shape. SGLang sends bare integers, so
the number of layers and k must be known; the dtype is int32 unless the answer names another.

Both count *all* hidden layers, dense ones included, and fill the rows of a dense layer with zeros
(:func:`routed_layers` finds the MoE layers). The last generated token was never an input of the model, so a sequence
of n tokens has n - 1 rows. Malformed input raises :class:`~coterie.errors.InputError` with a one-line message.
"""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError, check
from coterie.types import ModelSpec

SGLANG_DTYPES = {"uint8": "|u1", "uint16": "<u2", "int16": "<i2", "int32": "<i4"}
"""NumPy dtype of each name in SGLang's ``routed_experts_dtype``, a field that some answers omit."""


def decode_npy(data: bytes) -> NDArray[Any]:
    """Parse a ``.npy`` file in memory without copying its data. Never unpickles.

    NumPy's own reader is not used: it allocates the size in the header before it checks the number of bytes.
    """
    stream = io.BytesIO(data)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(stream)
        check(version in readers, f"is .npy version {version}, expected (1, 0) or (2, 0)", InputError)
        shape, fortran, dtype = readers[version](stream)
    except InputError:
        raise
    except Exception as error:  # NumPy's header parser raises any exception on a damaged header
        raise InputError(f"is not a .npy file: {error!r}") from None
    check(not dtype.hasobject, "holds pickled objects, expected numbers", InputError)
    start, count = stream.tell(), math.prod(shape)
    check(
        min(shape, default=0) >= 0 and len(data) - start == count * dtype.itemsize,
        f"has {len(data) - start} bytes of data; {dtype} {shape} needs {count * dtype.itemsize}",
        InputError,
    )
    try:
        return np.frombuffer(data, dtype, count, start).reshape(shape, order="F" if fortran else "C")
    except (ValueError, OverflowError) as error:  # shape [0, 2**70], or more dimensions than NumPy supports
        raise InputError(f"has a shape that no array has: {error}") from None


def decode_vllm(payload: str | bytes) -> NDArray[np.integer]:
    """Decode vLLM's ``choices[i].routed_experts`` to expert ids [token, layer, k]."""
    ids = decode_npy(_decode_base64(payload))
    check(
        ids.ndim == 3 and ids.dtype.kind in "ui",
        f"is {ids.dtype} {ids.shape}, expected integers [token, layer, k]",
        InputError,
    )
    return ids


def decode_sglang(payload: str | bytes, num_layers: int, top_k: int, dtype: str | None = None) -> NDArray[np.integer]:
    """Decode SGLang's ``meta_info.routed_experts`` to ids [token, layer, k]; `dtype`: its ``routed_experts_dtype``."""
    if dtype is not None and dtype not in SGLANG_DTYPES:
        raise InputError(f"has dtype {dtype!r}, expected one of {', '.join(SGLANG_DTYPES)}")
    data, code = _decode_base64(payload), np.dtype(SGLANG_DTYPES[dtype or "int32"])
    row = num_layers * top_k * code.itemsize
    check(
        row >= 1 and len(data) % row == 0,
        f"has {len(data)} bytes, not a multiple of {num_layers} layers x {top_k} {code.name}",
        InputError,
    )
    return np.frombuffer(data, code).reshape(-1, num_layers, top_k)


def decode_sglang_rows(payload: str, spec: ModelSpec, rows: int, dtype: str | None = None) -> NDArray[np.integer]:
    """Decode the ids of `rows` tokens; the payload has all hidden layers of the model, or its MoE layers only."""
    problem = ""
    for layers in (spec.num_layers, spec.num_moe_layers):
        try:
            ids = decode_sglang(payload, layers, spec.top_k, dtype)
        except InputError as error:
            problem = problem or str(error)
            continue
        if len(ids) == rows:
            return ids
        problem = f"has {len(ids)} rows of {layers} layers x {spec.top_k}, expected {rows} ({spec.name})"
    raise InputError(problem)


def listed_tokens(prompt: Any, output: Any, rows: int) -> NDArray[np.int64] | None:
    """Return the token id of every row, [token]; None if the answer does not list valid token ids."""
    if not isinstance(prompt, list) or not isinstance(output, list):
        return None
    listed = [*prompt, *output][:rows]
    valid = len(listed) == rows and all(type(token) is int and 0 <= token < 2**31 for token in listed)
    return np.array(listed, np.int64) if valid else None


def routed_layers(expert_ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the indices of MoE layers in ids [token, layer, k]: a dense layer's rows are all zero.

    A router picks k *different* experts, so for k > 1 a row of zeros cannot come from a router. At k = 1 it can: a
    dense layer looks like one that always picked expert 0, so every layer counts as routed.
    """
    return np.flatnonzero(expert_ids.any(axis=(0, 2)) | (expert_ids.shape[2] == 1))


def _decode_base64(payload: str | bytes) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (ValueError, TypeError) as error:
        raise InputError(f"is not base64: {error!r}") from None
