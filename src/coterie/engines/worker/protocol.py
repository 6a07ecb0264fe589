"""Parse OpenAI request bodies and build OpenAI answers: pure functions, no sockets.

A body is checked completely before anything runs. Unsupported fields that would change the answer are refused, not
ignored. Unknown fields are ignored, since OpenAI's clients keep adding new ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, cast

from coterie.engines.worker.config import Role
from coterie.engines.worker.requests import Output, SamplingSettings
from coterie.engines.worker.transfer import GRANT_FIELD
from coterie.net.access import Address
from coterie.net.http1 import HttpError

DEFAULT_MAX_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API; a chat answer may fill the remaining context."""
MAX_STOPS = 16
MAX_SALT = 1024
"""Maximum characters of a cache salt; a random salt of 256 bits has 43 in base64."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
}
"""Unsupported fields and the values with which they have no effect; null is always allowed."""
REMOTE = {
    "remote_host": "a host name",
    "remote_port": "in 1 … 65535",
    "remote_request_id": "as the prefill worker gave it",
}
"""Fields of ``kv_transfer_params`` that locate prefilled KV, and what each must be."""
_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}")


class RequestError(HttpError):
    """A request that cannot be served."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message, code, param, [(b"retry-after", b"1")] if status == 429 else [])


def check_request(
    holds: object, problem: str, param: str | None = None, status: int = 400, code: str | None = None
) -> None:
    """Raise RequestError unless `holds`."""
    if not holds:
        raise RequestError(problem, param, status, code)


class Remote(NamedTuple):
    """Location of prefilled KV as given in a request body, so untrusted: see :mod:`fetching`."""

    address: Address
    key: str
    grant: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request body, not tokenised yet."""

    chat: bool
    prompt: str | list[int] | list[dict[str, str]]
    """Text, token ids, or chat messages."""
    max_tokens: int | None
    """Maximum tokens to generate; None: as many as fit the context."""
    sampling: SamplingSettings
    """Sampling settings; their max_tokens is set later."""
    stream: bool
    include_usage: bool
    return_token_ids: bool
    hand_over: bool
    """Whether to prefill only and stage the KV for another worker."""
    remote: Remote | None
    """Location of KV prefilled by another worker."""
    salt: str | None = None
    """Cache salt of the tenant."""


def parse_json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:  # wrong encodings also raise ValueError
        raise RequestError(f"the body is not JSON: {error}") from None
    check_request(isinstance(body, dict), f"the body must be a JSON object, found {_kind(body)}")
    return cast(dict[str, Any], body)


def parse_body(body: Mapping[str, Any], chat: bool, served: str, role: Role) -> Asked:
    """Check everything that does not need the tokenizer; raises RequestError."""
    model = body.get("model")
    check_request(
        model in (None, served),
        f"model {_short(model)} is not served here; the one that is: {served!r}",
        "model",
        404,
        "model_not_found",
    )
    for name, neutral in NEUTRAL.items():
        _neutral(body, name, neutral)
    stream = _flag(body, "stream")
    hand_over, remote = _transfer(body.get("kv_transfer_params"), role)
    asked = Asked(
        chat=chat,
        prompt=_messages(body.get("messages")) if chat else _prompt(body.get("prompt")),
        max_tokens=_max_tokens(body, chat),
        sampling=_sampling(body),
        stream=stream,
        include_usage=_stream_options(body.get("stream_options"), stream),
        return_token_ids=_flag(body, "return_token_ids"),
        hand_over=hand_over,
        remote=remote,
        salt=_salt(body.get("cache_salt")),
    )
    check_request(
        not hand_over or (asked.max_tokens == 1 and not stream),
        f"max_tokens={asked.max_tokens}, stream={stream}: a prefill for another worker (do_remote_decode) must "
        "have max_tokens=1 and stream=false",
        "kv_transfer_params",
    )
    return asked


def check_max_tokens(prompt: Sequence[int], max_tokens: int | None, limit: int, vocab_size: int) -> int:
    """Return the maximum number of tokens to generate; raises RequestError if the request cannot fit."""
    check_request(prompt, "the prompt has no tokens; give at least one", "prompt")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    check_request(wrong is None, f"prompt holds token {wrong}; it must be in 0 … {vocab_size - 1}", "prompt")
    room = limit - len(prompt)
    if room < 1:
        problem = f"the prompt has {len(prompt)} tokens; with one generated it must fit {limit}"
        raise RequestError(problem, "prompt", code="context_length_exceeded")
    if max_tokens is not None and max_tokens > room:
        both = f"the prompt has {len(prompt)} tokens and both must fit {limit}"
        problem = f"max_tokens={max_tokens} must be at most {room}: {both}"
        raise RequestError(problem, "max_tokens", code="context_length_exceeded")
    return room if max_tokens is None else max_tokens


# -------------------------------------------------------------------------------------------------------------- fields


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _text(value, "prompt")
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise RequestError(f"prompt must be a text or a list of token ids, one a request; found {_kind(value)}", "prompt")


def _messages(value: Any) -> list[dict[str, str]]:
    check_request(
        isinstance(value, list) and value,
        f"messages must be a list of at least one message, found {_kind(value)}",
        "messages",
    )
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        check_request(
            isinstance(message, dict) and isinstance(message.get("role"), str),
            f'{where} must be an object such as {{"role": "user", "content": "…"}}',
            "messages",
        )
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(_part(part, where) for part in content)  # as vLLM does
        check_request(isinstance(content, str), f"{where}.content must be a text, found {_kind(content)}", "messages")
        messages.append({"role": _text(message["role"], "messages"), "content": _text(content, "messages")})
    return messages


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(f'{where}.content may hold parts {{"type": "text", "text": "…"}} only', "messages")


def _max_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    given = [_number(body, name, 1, 1 << 31, whole=True) for name in ("max_completion_tokens", "max_tokens")]
    return next((value for value in given if value is not None), None if chat else DEFAULT_MAX_TOKENS)


def _sampling(body: Mapping[str, Any]) -> SamplingSettings:
    stops = body.get("stop")
    stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
    check_request(
        isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) and s for s in stops),
        f"stop must be a text or at most {MAX_STOPS} texts, none empty",
        "stop",
    )
    tokens = [] if body.get("stop_token_ids") is None else body["stop_token_ids"]
    check_request(
        isinstance(tokens, list) and all(type(token) is int for token in tokens),
        f"stop_token_ids must be a list of token ids, found {_kind(tokens)}",
        "stop_token_ids",
    )
    temperature, top_p = _number(body, "temperature", 0, 100), _number(body, "top_p", 0, 1)
    check_request(top_p != 0, "top_p=0 must be greater than 0 and at most 1", "top_p")
    return SamplingSettings(
        max_tokens=0,
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        seed=_number(body, "seed", -(1 << 63), (1 << 63) - 1, whole=True),
        stop=tuple(_text(stop, "stop") for stop in stops),
        stop_token_ids=frozenset(tokens),
        ignore_eos=_flag(body, "ignore_eos"),
    )


def _stream_options(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    check_request(isinstance(value, dict), f"stream_options must be an object, found {_kind(value)}", "stream_options")
    check_request(stream, "stream_options needs stream=true", "stream_options")
    return _flag(value, "include_usage")


def _transfer(params: Any, role: Role) -> tuple[bool, Remote | None]:
    params = {} if params is None else params
    check_request(
        isinstance(params, dict), f"kv_transfer_params must be an object, found {_kind(params)}", "kv_transfer_params"
    )
    hand_over, take_over = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    check_request(
        not hand_over or not take_over,
        "do_remote_decode and do_remote_prefill must not both be true",
        "kv_transfer_params",
    )
    check_request(
        role != "prefill" or hand_over,
        'this worker has role prefill: send kv_transfer_params {"do_remote_decode": true} with max_tokens=1, or '
        "use a worker of role decode or both",
        "kv_transfer_params",
    )
    check_request(
        role != "decode" or not hand_over,
        "this worker has role decode: send do_remote_decode to one of role prefill or both",
        "kv_transfer_params",
    )
    return hand_over, _remote(params) if take_over else None


def _remote(params: Mapping[str, Any]) -> Remote:
    host, port, key, grant = (params.get(name) for name in (*REMOTE, GRANT_FIELD))
    valid = (
        isinstance(host, str) and _HOST.fullmatch(host),
        type(port) is int and 1 <= port <= 65535,
        isinstance(key, str) and _KEY.fullmatch(key),
    )
    for holds, (name, rule) in zip(valid, REMOTE.items(), strict=True):
        check_request(holds, f"{name} must be {rule}, found {_short(params.get(name))}", "kv_transfer_params")
    address = Address(host.removeprefix("[").removesuffix("]").lower(), port)  # type: ignore[union-attr, arg-type]
    return Remote(address, key, grant if isinstance(grant, str) else None)  # type: ignore[arg-type]


def _salt(value: Any) -> str | None:
    if value is None:
        return None
    check_request(
        isinstance(value, str) and 0 < len(value) <= MAX_SALT,
        f"cache_salt must be a text of 1 to {MAX_SALT} characters",
        "cache_salt",
    )
    return _text(value, "cache_salt")


def _neutral(body: Mapping[str, Any], name: str, neutral: tuple[Any, ...]) -> None:
    value = body.get(name)
    same = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
    if value is not None and not any(same):
        right = " or ".join(map(json.dumps, neutral))
        raise RequestError(
            f"{name}={_short(value)} is not supported; leave it out{right and f' or give {right}'}", name
        )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, found {_short(value)}", name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, low: int, high: int, whole: bool = False) -> Any:
    """Return the number in a field, an int if `whole`; None if the field is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int and (whole or type(value) is not float or not math.isfinite(value)):
        raise RequestError(f"{name} must be a {'whole ' if whole else ''}number, found {_short(value)}", name)
    check_request(low <= value <= high, f"{name}={_short(value)} must be in {low} … {high}", name)
    return value


def _text(value: str, param: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds half a surrogate pair at {error.start}; send whole characters", param
        ) from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", NoneType: "nothing"}
    return next((text for kind, text in names.items() if isinstance(value, kind)), "a number")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


# ------------------------------------------------------------------------------------------------------------- answers


class AnswerBuilder:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(self, asked: Asked, name: str, model: str, created: int, prompt: Sequence[int]) -> None:
        self._asked, self._prompt = asked, list(prompt)
        self.name = name
        kind, prefix = ("chat.completion", "chatcmpl") if asked.chat else ("text_completion", "cmpl")
        self._head = {"id": f"{prefix}-{name}", "object": kind, "created": created, "model": model}
        self._chunk = f"{kind}.chunk" if asked.chat else kind
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._first = True

    def add(self, output: Output) -> None:
        self._tokens += output.token_ids
        self._text.append(output.text)

    def whole(self, last: Output) -> dict[str, Any]:
        """Return the answer to a request that is not streamed; all outputs, including `last`, must have been added."""
        text = "".join(self._text)
        answer = {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
        choice: dict[str, Any] = {"index": 0, **answer, "logprobs": None}
        choice |= {"finish_reason": last.finish, "stop_reason": last.stop_reason}
        out: dict[str, Any] = {**self._head, "choices": [choice], "usage": self.usage(last)}
        if self._asked.return_token_ids:
            choice["token_ids"] = self._tokens
            (out if self._asked.chat else choice)["prompt_token_ids"] = self._prompt
        out["kv_transfer_params"] = last.kv_transfer_params
        return out

    def chunk(self, output: Output) -> dict[str, Any]:
        """Return one chunk of a streamed answer; `output` must have been added."""
        role = {"role": "assistant"} if self._first else {}
        piece = {"delta": {**role, "content": output.text}} if self._asked.chat else {"text": output.text}
        choice: dict[str, Any] = {"index": 0, **piece, "logprobs": None, "finish_reason": output.finish}
        if output.finish:
            choice["stop_reason"] = output.stop_reason
        out: dict[str, Any] = {**self._head, "object": self._chunk, "choices": [choice]}
        if self._asked.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if self._first:
                (out if self._asked.chat else choice)["prompt_token_ids"] = self._prompt
        if self._asked.include_usage:
            out["usage"] = None
        self._first = False
        return out

    def usage_chunk(self, last: Output) -> dict[str, Any]:
        return {**self._head, "object": self._chunk, "choices": [], "usage": self.usage(last)}

    def usage(self, last: Output) -> dict[str, Any]:
        prompt, generated = len(self._prompt), len(self._tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        }
