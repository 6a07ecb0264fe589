"""Answers of vLLM or SGLang with their routed experts: JSONL, one answer per line; a file may mix the forms.

    vLLM     {"usage": {…}, "choices": [{"routed_experts": BASE64, …}, …], …}
    SGLang   {"meta_info": {"routed_experts": BASE64, "prompt_tokens": …, …}, …}     from /generate
    SGLang   {"usage": {…}, "choices": […], "sglext": {"routed_experts": BASE64}}    from the OpenAI endpoints

The prompt's rows come first: ``usage.prompt_tokens`` (or ``meta_info``'s) separates prefill from decode. The last
generated token was never an input of the model and has no row, so an answer must have prompt + completion - 1 rows. An
answer that has only later rows (SGLang's ``routed_experts_start_len``) raises, because the phases would be wrong.
Engines count dense layers too; those are dropped. SGLang does not send the number of layers and k: they are taken from
the model's shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import InputError, TraceError, UnknownNameError, check_file, check_found, file_errors
from coterie.traces.activations import ActivationTrace, TraceMeta
from coterie.traces.readers._rows import head_of
from coterie.traces.readers.base import Reader, ReadOptions, readers
from coterie.traces.requests import RequestTrace
from coterie.traces.store import value_errors
from coterie.types import DECODE, PREFILL, ModelSpec
from coterie.wire.routed_experts import RoutedAnswer, decode_vllm, listed_tokens, parse_sglang_answer, routed_layers


def find_model(*names: str | None) -> ModelSpec | None:
    """Return the shape of the first known model among these names; None if no name is known."""
    from coterie.models import get_model

    for name in filter(None, names):
        with suppress(UnknownNameError):
            return get_model(name)
    return None


def experts_of(path: Path, options: ReadOptions, name: str | None, stated: int | None = None) -> int:
    """Return the experts per layer, as given by the user, the file (`stated`) or the model called `name`.

    The largest id in the file + 1 is no substitute: some experts may never have been chosen.
    """
    if stated is not None:
        options.check_experts(path, "num_experts", stated)
        return stated
    if options.num_experts is not None:
        return options.num_experts
    spec = check_found(
        find_model(options.model, name),
        path,
        "num_experts",
        "is not in the file; give --num-experts or a known --model",
    )
    return spec.num_experts


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file; its errors name the file and the line."""

    path: Path
    number: int
    spec: ModelSpec | None

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(self.path, f"line {self.number}: {field}", problem)

    def count(self, place: Any, where: str, name: str) -> int:
        value = place.get(name) if isinstance(place, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{where}.{name}", f"is {value!r}, expected a whole number of at least 1")
        return value

    def answers(self, body: Any) -> Iterator[RoutedAnswer]:
        if not isinstance(body, dict):
            raise self.error("answer", "must be a JSON object")
        choices = body.get("choices")
        if "meta_info" not in body:
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
                raise self.error("choices", "is missing: neither an OpenAI answer nor one of SGLang's /generate")
            if any("routed_experts" in choice for choice in choices):
                yield from self.vllm(body, choices)
                return
        try:
            yield parse_sglang_answer(body, self.spec)
        except InputError as error:
            raise self.error("answer", str(error)) from None

    def vllm(self, body: Mapping[str, Any], choices: list[dict[str, Any]]) -> Iterator[RoutedAnswer]:
        usage = body.get("usage")
        prompt, total = (self.count(usage, "usage", name) for name in ("prompt_tokens", "completion_tokens"))
        rows = 0
        for index, choice in enumerate(choices):
            field = f"choices[{index}].routed_experts"
            if not isinstance(choice.get("routed_experts"), str):
                raise self.error(field, "is missing")
            try:
                ids = decode_vllm(choice["routed_experts"])
            except InputError as error:
                raise self.error(field, str(error)) from None
            rows += len(ids) + 1 - prompt
            tokens = listed_tokens(body.get("prompt_token_ids"), choice.get("token_ids"), len(ids))
            name = _text(body.get("id"))
            numbered = f"{name}/{index}" if name and len(choices) > 1 else name
            yield RoutedAnswer(ids, prompt, len(ids) + 1 - prompt, tokens, numbered)
        if rows != total:
            raise self.error(
                "routed_experts",
                f"describes {rows} generated tokens, usage.completion_tokens is {total} ({prompt} of prompt; "
                "the last token has no row)",
            )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def read_routed_experts(path: Path, options: ReadOptions) -> ActivationTrace:
    bodies = list(_bodies(path))
    name = (
        options.model
        or _text(next((body.get("model") for _, body in bodies if isinstance(body, dict)), None))
        or "unknown"
    )
    spec = find_model(name)
    answers = [answer for number, body in bodies for answer in _Line(path, number, spec).answers(body)]
    check_file(
        sum(len(answer.expert_ids) for answer in answers),
        path,
        "answers",
        f"found {len(answers)} with no routed token: the trace would be empty",
    )
    shapes = sorted({answer.expert_ids.shape[1:] for answer in answers})
    if len(shapes) > 1:
        raise TraceError(path, "routed_experts", f"has [layer, k] of {shapes[0]} and {shapes[1]}: not one model")
    ids = np.concatenate([answer.expert_ids for answer in answers])
    layers = _layers(path, ids, spec)
    ids = np.ascontiguousarray(ids[:, layers])
    lengths = np.array([len(answer.expert_ids) for answer in answers], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    prompts = np.array([answer.prompt_tokens for answer in answers], np.int64)
    places = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)  # [token] position in its sequence
    tokens = [answer.token_ids for answer in answers if answer.token_ids is not None]
    with value_errors(path, "routed_experts"):
        names = [answer.id for answer in answers if answer.id is not None]
        requests = RequestTrace(prompts, lengths + 1 - prompts, ids=names if len(names) == len(answers) else None)
        meta = TraceMeta(
            name,
            experts_of(path, options, name),
            ids.shape[1],
            ids.shape[2],
            layer_ids=tuple(int(n) for n in layers),
            source={"format": "routed-experts", "file": path.name},
        )
        return ActivationTrace.from_arrays(
            meta,
            ids,
            offsets,
            requests,
            np.where(places < np.repeat(prompts, lengths), PREFILL, DECODE).astype(np.uint8),
            np.concatenate(tokens) if len(tokens) == len(answers) else None,
        )


def _bodies(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the line number and each answer; a batch of SGLang's /generate is a list of answers on one line."""
    with file_errors(path), path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                body = json.loads(line) if line.strip() else []
            except (ValueError, RecursionError):
                raise TraceError(path, f"line {number}", "is not JSON") from None
            yield from ((number, answer) for answer in (body if isinstance(body, list) else [body]))


def _layers(path: Path, ids: NDArray[np.integer], spec: ModelSpec | None) -> NDArray[np.int64]:
    """Return the indices of the MoE layers. A row of zeros in an MoE layer raises: the engine did not capture it."""
    counted = ids.shape[1]
    if spec is not None and counted not in (spec.num_layers, spec.num_moe_layers):
        raise TraceError(
            path,
            "routed_experts",
            f"has {counted} layers; {spec.name} has {spec.num_layers}, {spec.num_moe_layers} of them MoE",
        )
    moe = routed_layers(ids)
    if spec is not None:
        moe = np.array(spec.moe_layer_ids) if counted == spec.num_layers else np.arange(counted)
    if ids.shape[2] > 1:
        for token, layer in np.argwhere((ids[:, moe] == 0).all(axis=2)):
            field = f"routed_experts[{token}, {moe[layer]}]"
            raise TraceError(path, field, "is all zero: the engine did not capture it")
    check_file(moe.size, path, "routed_experts", "is all zero: the engine captured nothing")
    return moe


def sniff_routed_experts(path: Path) -> bool:
    head, _, _ = head_of(path, 1 << 22).partition(b"\n")  # a first line may be megabytes of base64
    return head[:1] in (b"{", b"[") and b'"routed_experts"' in head


readers.add(
    "routed-experts",
    Reader(read_routed_experts, sniff_routed_experts, "JSONL of vLLM or SGLang answers that return routed experts"),
)
