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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


def decode_sglang(
    payload: str | bytes, rows: int, layers: Sequence[int], top_k: int, dtype: str | None = None
) -> NDArray[np.integer]:
    """Decode SGLang's ``meta_info.routed_experts`` to the ids of `rows` tokens, [token, layer, k].

    `layers` are the numbers of layers that the payload may have: all of the model, or its MoE layers only.
    `dtype` is the answer's ``routed_experts_dtype``.
    """
    check(
        dtype is None or dtype in SGLANG_DTYPES,
        f"has dtype {dtype!r}, expected one of {', '.join(SGLANG_DTYPES)}",
        InputError,
    )
    data, code = _decode_base64(payload), np.dtype(SGLANG_DTYPES[dtype or "int32"])
    for count in layers:
        if len(data) == rows * count * top_k * code.itemsize:
            return np.frombuffer(data, code).reshape(rows, count, top_k)
    size = len(data) / (layers[0] * top_k * code.itemsize)
    raise InputError(
        f"has {len(data)} bytes: {size:g} rows of {layers[0]} layers x {top_k} {code.name}, expected {rows}"
    )


# Answers of SGLang with routed experts:
#
#     /generate              {"output_ids": […], "prompt_token_ids": […],
#                             "meta_info": {"routed_experts": BASE64, "prompt_tokens": …, "completion_tokens": …}}
#     OpenAI's endpoints     {"choices": [{"token_ids": […], "prompt_token_ids": […], …}], "usage": {…},
#                             "sglext": {"routed_experts": BASE64}}       also "sgl_ext", and inside the choice
#
# The bytes carry no shape, so the model's is used. Token ids are present if the SGLang version can return them.


class NotReturnedError(InputError):
    """The answer is valid but has no routed experts; neither will this server's other answers."""


class RoutedAnswer(NamedTuple):
    """One generated sequence."""

    expert_ids: NDArray[np.integer]
    """[token, layer, k] expert ids, in all layers that the engine sends; the last generated token has no row."""
    prompt_tokens: int
    output_tokens: int
    token_ids: NDArray[np.int32] | None
    """[token] token id of every row; None if the engine does not list them."""
    id: str | None = None
    """Name that the engine gave the request."""


def parse_sglang_answer(body: Mapping[str, Any], spec: ModelSpec | None) -> RoutedAnswer:
    """Parse one answer of a model; any malformed answer raises InputError."""
    places = list(_places(body))
    payload = _first(places, "routed_experts", str)
    prompt, output = (_first(places, name, int) for name in ("prompt_tokens", "completion_tokens"))
    if prompt is None or output is None or prompt < 1 or output < 1:
        raise InputError(f"says prompt_tokens={prompt}, completion_tokens={output}: both must be at least 1")
    if payload is None:
        raise NotReturnedError("carries no routed_experts: the engine returns them only when started and asked to")
    if spec is None:
        raise InputError("carries routed_experts without a shape, as SGLang sends them: name a known model")
    try:
        ids = decode_sglang(
            payload,
            prompt + output - 1,
            (spec.num_layers, spec.num_moe_layers),
            spec.top_k,
            _first(places, "routed_experts_dtype", str),
        )
    except InputError as error:
        raise InputError(f"routed_experts {error} ({spec.name}); the last generated token has no row") from None
    before, after = _first(places, "prompt_token_ids", list), _first(places, "output_ids", list)
    after = after or _first(places, "token_ids", list)
    listed = len(before or ()) == prompt and len(after or ()) == output
    tokens = listed_tokens(before, after, len(ids)) if listed else None
    return RoutedAnswer(ids, prompt, output, tokens, _first(places, "id", str))


def _places(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects that may hold the fields, the most specific first."""
    choices = body.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        raise InputError(f"has {len(choices)} choices, expected one")
    choice = choices[0] if isinstance(choices, list) and choices else None
    for holder in (choice, body):
        if isinstance(holder, dict):
            for name in ("meta_info", "sglext", "sgl_ext", "usage"):
                if isinstance(holder.get(name), dict):
                    yield holder[name]
            yield holder


def _first(places: list[Mapping[str, Any]], name: str, kind: type) -> Any:
    """Return the first value of exactly this type: a bool is not accepted as an int."""
    return next((place[name] for place in places if type(place.get(name)) is kind), None)


def listed_tokens(prompt: Any, output: Any, rows: int) -> NDArray[np.int32] | None:
    """Return the token id of every row, [token]; None if the answer does not list valid token ids."""
    if not isinstance(prompt, list) or not isinstance(output, list):
        return None
    listed = [*prompt, *output][:rows]
    valid = len(listed) == rows and all(type(token) is int and 0 <= token < 2**31 for token in listed)
    return np.array(listed, np.int32) if valid else None


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
