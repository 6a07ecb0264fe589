"""A client that times answers: first content, every later piece, the end, and how a request failed.

Failures are classified by what a user sees. Before the first byte of content: `refused` (no connection), `http_429`,
`http_4xx`, `http_5xx`, `reset` (the connection was closed), `timeout`, `malformed` (the answer is not in OpenAI's
format). After the first byte: `cut`, whatever the reason. A request is sent again only if the server closed a
kept-alive connection before it answered anything: a client cannot know that in advance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import msgspec

from coterie.answers.load.workload import LoadRequest, Message
from coterie.errors import UnavailableError, check_not_negative, check_positive
from coterie.net.http1.messages import is_event_stream
from coterie.net.http1.upstream import Answer, Upstream, UpstreamError, UpstreamLimits
from coterie.net.http_client import CONNECT_S, completion_path, json_headers, server_url

Kind = Literal["refused", "http_429", "http_4xx", "http_5xx", "reset", "timeout", "malformed", "cut"]

METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "gap": "gap_s", "e2e": "e2e_s"}
"""Metric → attribute of an outcome. The gap is the longest time between two pieces of a stream."""
LIMITS = UpstreamLimits(connect_s=CONNECT_S, head_s=86_400.0, idle_s=86_400.0, keep_s=2.0, idle_connections=10_000)
"""Limits of connections. An answer's own time limit is `Asking.timeout_s`. Idle connections are kept for less time than
servers keep them (vLLM: 5 s), so that few are closed as they are reused."""
MOST_LINE = 4 << 20
"""Most bytes of one event of a stream, or of a whole answer; a longer one is malformed."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Settings common to all requests of a run."""

    model: str
    chat: bool = True
    """Use the chat endpoint; if False, the completions endpoint, with all messages as one text."""
    stream: bool = True
    """Stream the answers; if False, there is no TTFT or TPOT, only the time of the whole answer."""
    temperature: float = 0.0
    ignore_eos: bool = False
    """Generate exactly max_tokens tokens, if the server knows this option (vLLM, SGLang, the reference worker)."""
    timeout_s: float = 300.0
    """Seconds within which an answer must be complete."""
    keep_text: bool = False
    """Keep the text of answers, to compare them."""

    def __post_init__(self) -> None:
        check_positive(timeout_s=self.timeout_s)
        check_not_negative(temperature=self.temperature)

    def body(self, request: LoadRequest, marker: str = "") -> dict[str, Any]:
        """Return the JSON body. The prompt begins with `marker`: prefixes cached under other markers do not match."""
        begin = f"[{marker}] " if marker else ""
        if self.chat:
            messages = [{"role": role, "content": content} for role, content in request.messages]
            messages[0]["content"] = begin + messages[0]["content"]
            asked: dict[str, Any] = {"messages": messages}
        else:
            asked = {"prompt": begin + request.text}
        body = {"model": self.model, **asked, "max_tokens": request.max_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class RequestOutcome(NamedTuple):
    """Outcome of one request; times are in seconds on the event loop's clock."""

    request: int
    """Index of the request in the workload."""
    planned: float
    """Planned time of sending, from which TTFT and E2E are counted; equal to `sent` in a closed loop."""
    sent: float
    end: float
    first: float | None = None
    """Time of the first content; None if the request failed before it, or the answer is not streamed."""
    pieces: tuple[float, ...] = ()
    """Times of the later pieces of content."""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    """Output tokens as counted by the server; the number of content pieces if the server does not report them."""
    cached_tokens: int | None = None
    """Prompt tokens that the server found in a prefix cache; None if the server does not report them."""
    failure: Kind | None = None
    problem: str = ""
    """Reason for the failure, in one line."""
    text: str = ""
    """Text of the answer, if `keep_text` is set."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None or self.failure else self.first - self.planned

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for answers of one token or one piece."""
        if self.first is None or self.failure or self.output_tokens < 2 or not self.pieces:
            return None
        return (self.pieces[-1] - self.first) / (self.output_tokens - 1)

    @property
    def gap_s(self) -> float | None:
        """Longest time between two consecutive pieces of content, in seconds."""
        if self.first is None or self.failure or not self.pieces:
            return None
        return max(b - a for a, b in zip((self.first, *self.pieces), self.pieces, strict=False))

    @property
    def e2e_s(self) -> float | None:
        return None if self.failure else self.end - self.planned


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def any(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Piece(msgspec.Struct):
    """Decoded event of a stream, or a whole answer that is not streamed."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Piece)


class _FailedError(Exception):
    def __init__(self, kind: Kind, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


@dataclass(slots=True)
class _Answer:
    """Answer as far as it has been received."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: bool = False
    begun: bool = False
    """Whether any content was received; if the answer is not streamed, any byte."""
    usage: _Usage = field(default_factory=_Usage)

    def take(self, data: bytes, now: float) -> None:
        try:
            piece = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _FailedError("malformed", f"the answer is not of OpenAI's form: {error}") from None
        if piece.error is not None:
            raise _FailedError(*_error(piece.error))
        self.usage = piece.usage or self.usage
        for choice in piece.choices[:1]:
            said = choice.delta or choice.message
            self.texts.append(choice.text or (said.content if said is not None else None) or "")
            ends = choice.finish_reason is not None
            if choice.text or (said is not None and said.any) or (ends and not self.begun):
                self.times.append(now)  # without any text, the end of the answer counts as its first content
                self.begun = True
            self.finished |= ends


class LoadClient:
    """Client of one server: ``async with LoadClient(url) as client: outcome = await client.ask(…)``."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = server_url(url)
        self._key = key
        self._upstream = Upstream(self.url, LIMITS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._upstream.close()

    async def ask(
        self, request: LoadRequest, asking: Asking, planned: float | None = None, marker: str = "", name: str = ""
    ) -> RequestOutcome:
        """Send one request and read its answer to the end; a failure is returned in the outcome, not raised."""
        clock = asyncio.get_running_loop().time
        sent = clock()
        answer = _Answer()
        failure: Kind | None = None
        problem = ""
        try:
            async with asyncio.timeout(asking.timeout_s):
                await self._exchange(asking, asking.body(request, marker), answer, name)
        except _FailedError as error:
            failure, problem = error.kind, str(error)
        except UpstreamError as error:
            failure, problem = _KINDS.get(error.kind, "malformed"), str(error)
        except TimeoutError:
            failure, problem = "timeout", f"no whole answer within {asking.timeout_s:g} s"
        if failure is not None:
            failure, problem = ("cut" if answer.begun else failure), " ".join(problem.split())[:200]
        end, usage = clock(), answer.usage
        times = answer.times if asking.stream else []
        return RequestOutcome(
            request=request.number,
            planned=sent if planned is None else planned,
            sent=sent,
            end=end,
            first=times[0] if times else None,
            pieces=tuple(times[1:]),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=len(answer.times) if usage.completion_tokens is None else usage.completion_tokens,
            cached_tokens=(usage.prompt_tokens_details or _Details()).cached_tokens,
            failure=failure,
            problem=problem,
            text="".join(answer.texts) if asking.keep_text else "",
        )

    async def _exchange(self, asking: Asking, body: Mapping[str, Any], answer: _Answer, name: str) -> None:
        headers = json_headers(self._key, name or None)
        path = completion_path(asking.chat)
        response = await self._upstream.send("POST", path, headers, msgspec.json.encode(body))
        try:
            if response.status != 200:
                raise _FailedError(_status_kind(response.status), await _reason(response))
            if not asking.stream:
                await _read_whole(response, answer)
                return
            if not is_event_stream(response.headers):
                kind = next((value for name, value in response.headers if name == b"content-type"), b"no type")
                raise _FailedError("malformed", f"a stream was asked for, {kind.decode('latin-1')} came")
            await _read_stream(response, answer)
            if not answer.finished:
                raise _FailedError("reset", "the stream ended before the answer did")
        except _FailedError:
            response.close()  # what follows must not hold the connection
            raise


async def _read_stream(response: Answer, answer: _Answer) -> None:
    """Read events until ``[DONE]`` or the end of the stream."""
    rest, clock = b"", asyncio.get_running_loop().time
    async for data in response:
        now = clock()
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MOST_LINE:
            raise _FailedError("malformed", f"an event of more than {MOST_LINE} bytes came")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # skip comments and other fields of server-sent events
            event = line[5:].strip()
            if event == b"[DONE]":
                return
            answer.take(event, now)


async def _read_whole(response: Answer, answer: _Answer) -> None:
    body = bytearray()
    async for data in response:
        answer.begun = True
        body += data
        if len(body) > MOST_LINE:
            raise _FailedError("malformed", f"an answer of more than {MOST_LINE} bytes came")
    answer.begun = False  # the answer is complete: an error in it is not a cut
    answer.take(bytes(body), asyncio.get_running_loop().time())
    if not answer.finished:
        raise _FailedError("malformed", "the answer has no finish_reason")


async def _reason(response: Answer) -> str:
    """Return the HTTP status, and the error message if the answer has one."""
    try:
        data = await response.read(MOST_LINE)
        return f"HTTP {response.status}: {_error(_decoder.decode(data).error)[1]}"
    except (UpstreamError, msgspec.MsgspecError, UnicodeDecodeError):
        return f"HTTP {response.status}"


def _error(error: Any) -> tuple[Kind, str]:
    """Return kind and message of an error object. Without an HTTP code in it, the error counts as http_5xx."""
    if not isinstance(error, dict):
        return "http_5xx", str(error)
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return _status_kind(status), str(error.get("message") or error)


def _status_kind(status: int) -> Kind:
    return "http_429" if status == 429 else "http_5xx" if status >= 500 else "http_4xx"


_KINDS: Mapping[str, Kind] = {"connect": "refused", "reset": "reset", "timeout": "timeout"}
"""Kind of an UpstreamError → kind of failure; any other is malformed."""


async def chars_per_token(client: LoadClient, asking: Asking, text: str) -> float:
    """Estimate the characters per token of `text` from the server's token count; raise UnavailableError without one."""
    asked = LoadRequest(0, 0, "", (Message("user", text),), 1)
    outcome = await client.ask(asked, asking, name="coterie-load-probe")
    if outcome.failure is not None or not outcome.prompt_tokens:
        raise UnavailableError(
            f"{client.url} does not say how many tokens a prompt has, which a trace's lengths need: "
            f"{outcome.problem or 'no usage.prompt_tokens in its answer'}"
        )
    return len(text) / outcome.prompt_tokens
