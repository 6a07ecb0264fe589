"""A client's request as workers get it, and its outcome.

Fields that a client may not set are removed from its body here: the source of KV, the rank that serves it, its id.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET

from coterie.gateway.signals.tokens import TOKENISE
from coterie.gateway.watching.spans import NO_SPAN, Span
from coterie.net.http1.messages import Headers, HttpError, check_http
from coterie.routing.base import Decision
from coterie.wire.footprints import WireFootprint
from coterie.wire.handoff import REQUEST_ID_HEADER

OWNED = frozenset(
    (
        "kv_transfer_params",
        "ec_transfer_params",
        "request_id",
        "rid",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "routed_dp_rank",
        "routed_data_parallel_rank",
        "disagg_prefill_dp_rank",
    )
)
"""Fields of a body that only the gateway may set: they make a worker fetch KV, or name a request or a rank."""
EXTRA_ARGUMENTS = "vllm_xargs"
"""Field with further arguments for vLLM, which may include `kv_transfer_params`: its entries are checked too."""
OWNED_ARGUMENTS = OWNED | {"kv_cache_report_mode"}
PASSED = frozenset((b"accept", b"content-type", b"user-agent", b"traceparent", b"tracestate", b"baggage"))
"""Headers of a client that are passed on to workers."""
NO_HEADERS: Headers = []
MAX_ID = 256
PROMPT_BYTES = 1 << 17
"""Leading bytes of a prompt that are compared with other prompts."""
_PROCESS, _NUMBERS = secrets.token_hex(12), itertools.count()
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS, DETOKENISE, MODELS = "/v1/embeddings", "/detokenize", "/v1/models"
GENERATING = frozenset((COMPLETIONS, CHAT, RESPONSES))
"""Paths of requests that generate tokens from a prompt."""
SERVED = GENERATING | {EMBEDDINGS, TOKENISE, DETOKENISE}
"""Paths of the requests of callers, all of them POST."""
STORED = {
    "previous_response_id": "a worker keeps responses in its own memory until it restarts, and the next request may go "
    "to another: send the earlier turns in input",
    "background": "its answer would be fetched later, from the one worker that has it: leave it out",
}
"""Field of a response's body that would need one worker's memory → why it is refused, and what to do."""


class Call(msgspec.Struct):
    """A checked request."""

    key: str
    """Name inside the gateway, unique among all requests ever."""
    name: str
    """Name sent to workers, unique among the requests in flight."""
    id: str
    """Request id that the client sent; `key` if it sent none."""
    path: str
    raw: bytes
    """Body to send to a worker if no fields need to be added."""
    prompt: bytes
    """Beginning of the prompt as JSON (tools and messages, or the text), see :func:`prompt_of`."""
    prompt_bytes: int
    """Length of the whole prompt as JSON, in bytes."""
    salt: str | None
    """Salt of the prompt's cached prefixes; None if they are shared."""
    listed: bool
    """Whether the prompt is a list, of token ids or of texts."""
    stream: bool
    headers: Headers
    """Headers to send to the worker."""
    caller: str = ""
    """Name of the caller's key; empty without keys."""
    domain: str | None = None
    span: Span = NO_SPAN
    parsed: dict[str, Any] | None = None
    """Cache of `body`; None until it is first read."""

    @property
    def body(self) -> dict[str, Any]:
        """Fields of the body, parsed on first use: most requests are passed on without parsing a long body."""
        if self.parsed is None:
            self.parsed = parse_object(self.raw)
        return self.parsed


class Outcome(msgspec.Struct):
    """Result of a request."""

    status: int
    """HTTP status that the client got; 499 if it disconnected."""
    worker: str | None = None
    prefill: str | None = None
    """Id of the prefill worker; None without a handoff."""
    footprint: WireFootprint | None = None
    decision: Decision | None = None
    """Last routing decision for the request."""
    tokens: int = 0
    """Prompt tokens; 0 if unknown."""
    output_tokens: int = 0
    """Generated tokens, as the worker reports them."""
    cached_tokens: int | None = None
    """Prompt tokens found in the worker's cache, as it reports them; None if it does not."""
    prefill_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    problem: str | None = None
    """Reason of the failure; None if the request succeeded."""
    cut: bool = False
    """Whether the answer broke off after its first byte."""
    drained: bool = False
    """Whether the gateway ended the request when its time to drain was over."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a request's body; raise HttpError unless it is a JSON object."""
    try:
        body: dict[str, Any] = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    check_http(isinstance(body, dict), 400, f"the body must be a JSON object, found {type(body).__name__}")
    return body


class _Fields(msgspec.Struct):
    """Fields of a body that the gateway reads. The others are passed on to the worker unread."""

    stream: Any = None
    model: Any = None
    cache_salt: Any = UNSET
    vllm_xargs: Any = UNSET
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    previous_response_id: Any = None
    background: Any = None

    @property
    def said(self) -> msgspec.Raw:
        """The prompt without tools and instructions: messages, a text, or the input of a response."""
        return self.messages or self.prompt or self.input


_WITH_OWNED: Any = msgspec.defstruct("_WithOwned", [(name, Any, UNSET) for name in sorted(OWNED)], bases=(_Fields,))
_FIELDS: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_WITH_OWNED)
_owned_of = attrgetter(*sorted(OWNED))
_NONE_OWNED = (UNSET,) * len(OWNED)


def read_fields(data: bytes) -> _Fields:
    """Read the gateway's fields of a body; raise HttpError unless it is a JSON object."""
    try:
        if not data.isascii():
            data.decode()  # the decoder does not check the UTF-8 of skipped fields
        return _FIELDS.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        parse_object(data)  # raises with a better message if it can
        raise HttpError(400, f"the body is not JSON: {error}") from None


def without_owned(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without the fields that only the gateway may set, in the body and in `vllm_xargs`."""
    kept = {field: value for field, value in body.items() if field not in OWNED}
    arguments = kept.get(EXTRA_ARGUMENTS)
    if isinstance(arguments, dict):
        kept[EXTRA_ARGUMENTS] = {name: value for name, value in arguments.items() if name not in OWNED_ARGUMENTS}
    return kept


def prompt_of(fields: _Fields) -> bytes:
    """Return the start of the prompt as raw JSON: tools, instructions, then what is said, in chat templates' order.

    The closing byte is dropped, so that a conversation begins with the bytes of its earlier turns.
    """
    said = fields.said
    begin = bytes(said)[:-1] if len(said) <= PROMPT_BYTES else bytes(memoryview(said)[:PROMPT_BYTES])
    before = [bytes(memoryview(part)[:PROMPT_BYTES]) for part in (fields.tools, fields.instructions) if part]
    return b"".join((*before, begin)) if before else begin


def with_last(data: bytes, salt: str) -> bytes:
    """Append `cache_salt` to a JSON body that has other fields but no salt."""
    return b'%b,"cache_salt":%b}' % (data.rstrip(b" \t\r\n")[:-1], msgspec.json.encode(salt))


def new_name() -> str:
    """Return a request name that is unique across processes and cannot be guessed by other users."""
    return f"{_PROCESS}-{next(_NUMBERS):x}"


def checked_id(given: bytes) -> str:
    """Return a request id for headers and logs; raise HttpError unless it is short and printable."""
    printable = 0 < len(given) <= MAX_ID and given.isascii() and given.decode().isprintable()
    check_http(printable, 400, f"{REQUEST_ID_HEADER} must be 1 to {MAX_ID} printable ASCII characters")
    return given.decode()


def encode_object(body: Mapping[str, Any]) -> bytes:
    """Encode a body for a worker; raise HttpError for numbers or nesting that can be decoded but not encoded."""
    try:
        return msgspec.json.encode(body)
    except (OverflowError, RecursionError, ValueError) as error:
        raise HttpError(400, f"the body cannot be passed on: {error}") from None


def make_call(
    path: str,
    data: bytes,
    *,
    request_id: str | None = None,
    name: str | None = None,
    headers: Headers = NO_HEADERS,
    caller: str = "",
    domain: str | None = None,
    span: Span = NO_SPAN,
    salt: str | None = None,
    trusted: bool = False,
    form: bool = False,
) -> Call:
    """Check a body and remove the fields that only the gateway may set, unless its sender is `trusted` with them.

    `request_id` is the client's id; `name`, if given, is sent to workers instead. `headers` are sent to the worker.
    `salt` keeps this caller's cached prefixes apart. A `form` is no JSON and is passed on unread.
    """
    fields = _WITH_OWNED() if form else read_fields(data)
    if not trusted and (_owned_of(fields) != _NONE_OWNED or fields.vllm_xargs is not UNSET):
        data = encode_object(without_owned(parse_object(data)))
        fields = read_fields(data)
    stream = fields.stream or False
    own = None if fields.cache_salt is UNSET else fields.cache_salt
    check_http(stream is True or stream is False, 400, "stream must be true or false", "stream")
    check_http(own is None or isinstance(own, str), 400, "cache_salt must be a text", "cache_salt")
    check_http(fields.model is None or isinstance(fields.model, str), 400, "model must be a text", "model")
    if path == RESPONSES:
        for name, reason in STORED.items():
            check_http(not getattr(fields, name), 400, f"{name} is not served: {reason}", name)
    if salt is not None and not form:
        own = salt if own is None else f"{salt}/{own}"
        added = fields.cache_salt is UNSET and fields.said
        data = with_last(data, own) if added else encode_object({**parse_object(data), "cache_salt": own})
    key = new_name()
    return Call(
        key=key,
        name=name or request_id or key,
        id=request_id or key,
        path=path,
        raw=data,
        prompt=prompt_of(fields),
        prompt_bytes=len(fields.tools) + len(fields.instructions) + len(fields.said),
        salt=own,
        listed=bool(fields.prompt) and memoryview(fields.prompt)[0] == ord("["),
        stream=stream,
        headers=headers,
        caller=caller,
        domain=domain,
        span=span,
    )
