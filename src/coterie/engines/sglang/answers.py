"""What SGLang answers when asked to return routed experts, as rows of a trace.

    /generate              {"output_ids": […], "prompt_token_ids": […],
                            "meta_info": {"routed_experts": BASE64, "prompt_tokens": …, "completion_tokens": …}}
    OpenAI's endpoints     {"choices": [{"token_ids": […], "prompt_token_ids": […], …}], "usage": {…},
                            "sglext": {"routed_experts": BASE64}}       also "sgl_ext", and inside the choice

The bytes do not say their shape, which must come from the model's. Token ids are there if the version knows how to
return them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError
from coterie.types import ModelSpec
from coterie.wire.routed_experts import decode_sglang


class NotReturnedError(InputError):
    """The answer is sound but carries no routed experts: no other answer of this server will."""


class RoutedAnswer(NamedTuple):
    """One generated sequence."""

    expert_ids: NDArray[np.integer]
    """[token, MoE layer, k]; the last token generated has no row."""
    prompt_tokens: int
    output_tokens: int
    token_ids: NDArray[np.int32] | None
    """[token] of every row."""


def parse_answer(body: Mapping[str, Any], spec: ModelSpec) -> RoutedAnswer:
    """Raises InputError in one line, whatever the answer is."""
    places = list(_places(body))
    payload = _first(places, "routed_experts", str)
    prompt, output = (_first(places, name, int) for name in ("prompt_tokens", "completion_tokens"))
    if prompt is None or output is None or prompt < 1 or output < 1:
        raise InputError(f"says prompt_tokens={prompt}, completion_tokens={output}: both must be at least 1")
    if payload is None:
        raise NotReturnedError("carries no routed_experts")
    ids = _moe_rows(payload, _first(places, "routed_experts_dtype", str), prompt + output - 1, spec)
    _check_rows(ids, spec)
    return RoutedAnswer(ids, prompt, output, _token_ids(places, prompt, output))


def _places(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Where fields may lie, the nearest first."""
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
    """The first value of that type; True is no number."""
    return next((place[name] for place in places if type(place.get(name)) is kind), None)


def _moe_rows(payload: str, dtype: str | None, rows: int, spec: ModelSpec) -> NDArray[np.integer]:
    """SGLang counts all hidden layers; should a version count the MoE ones only, the number of rows tells."""
    problem = ""
    for layers in (spec.num_layers, spec.num_moe_layers):
        try:
            ids = decode_sglang(payload, layers, spec.top_k, dtype)
        except InputError as error:
            problem = problem or f"routed_experts {error}"
            continue
        if len(ids) == rows:
            return ids[:, list(spec.moe_layer_ids)] if layers == spec.num_layers else ids
        problem = f"routed_experts has {len(ids)} rows of {layers} layers x {spec.top_k}, expected {rows} ({spec.name})"
    raise InputError(problem)


def _check_rows(ids: NDArray[np.integer], spec: ModelSpec) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < spec.num_experts:
        raise InputError(f"routed_experts from {ids.min()} to {ids.max()}; {spec.name} has {spec.num_experts} experts")
    if spec.top_k > 1 and ids.size:  # a router picks k different experts: a row of zeros was never written
        empty = np.argwhere((ids == 0).all(axis=2))
        if empty.size:
            token, layer = int(empty[0][0]), spec.moe_layer_ids[int(empty[0][1])]
            raise InputError(f"routed_experts of token {token}, layer {layer} is all zero: it was not captured")


def _token_ids(places: list[Mapping[str, Any]], prompt: int, output: int) -> NDArray[np.int32] | None:
    before = _first(places, "prompt_token_ids", list)
    after = _first(places, "output_ids", list) or _first(places, "token_ids", list)
    if before is None or after is None or (len(before), len(after)) != (prompt, output):
        return None
    listed = [*before, *after[:-1]]
    valid = all(type(token) is int and 0 <= token < 2**31 for token in listed)
    return np.array(listed, np.int32) if valid else None
