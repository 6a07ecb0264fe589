"""Token ids of a request, equal to the worker's own; needed for prefix hits and predicted footprints.

Ids are made by the gateway's own tokenizer where that is exact, else by a worker that is asked for them. Ids that may
differ from the worker's are never returned: from the first differing block on they would match no cached prefix.

A :class:`TokenService` caches results by a digest of the text, and tokenises in a few threads: the work runs in Rust,
without Python's lock. It never delays a request by more than its deadline: with a full queue, a late result or a text
that is too long it returns no ids but a reason, and counts the case.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coterie.errors import InputError, check, check_at_least, check_positive
from coterie.gateway.signals.messages import NoTokensError, messages_of
from coterie.gateway.signals.model_tokenizers import Ids, Tokenizer

CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
)
"""Fields of a chat body that determine its token ids."""
WORKER_FIELDS = (*CHAT_FIELDS, "model", "tool_choice", "response_format")
"""Fields that determine a worker's ids of a chat: some of vLLM's renderers write the last two into the prompt."""
RENDER, TOKENISE = "/v1/chat/completions/render", "/tokenize"
"""Endpoints of a worker. vLLM's ``/tokenize`` renders chats of gpt-oss by the template, which the model never gets."""
QUARTER_S = 900
"""Seconds in which a worker's ids of a chat are used again: a prompt may hold the date of the worker's time zone."""
MARGIN = 4096
"""Most ids of a prompt beyond two per byte of its body: what a renderer adds, such as how to call tools."""
MOST_ID = 1 << 31
ID_BYTES = 12
"""Most bytes of an id and its comma in a worker's answer."""
_ENTRY_BYTES = 400
"""Bytes of memory of a cached result besides its ids."""


class Question(NamedTuple):
    """Input of a tokenisation."""

    key: bytes
    path: str
    """A worker's endpoint that makes the ids; empty if the gateway's own tokenizer does."""
    body: dict[str, Any]
    """Fields that determine the ids: `prompt` and `add_special_tokens` of a text, else those of a chat."""
    most_ids: int
    """Most ids that a worker is believed to make of it."""


class Tokens(NamedTuple):
    """Token ids of a request's prompt."""

    ids: Ids | None
    """Equal to the worker's; None if those are unknown."""
    reason: str = ""
    """Reason why there are no ids."""
    question: Question | None = None
    """Question that no worker has answered in time, for :meth:`TokenService.learn`."""


class NoAnswerError(NoTokensError):
    """A worker did not answer in time, or with what cannot be the prompt's ids."""


@dataclass(slots=True, eq=False)
class _Job:
    task: asyncio.Task[Tokens] | None = None
    waiting: int = 0
    """Number of requests that wait for the job."""
    started: bool = False


class TokenService:
    """Makes token ids outside the event loop: cached, bounded in memory, threads and time. Belongs to one event loop.

    Without a tokenizer and `ask` every result is the given `reason`, unless the prompt is already token ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        reason: str = "no tokenizer is configured",
        *,
        threads: int = 2,
        queue: int = 128,
        deadline_s: float = 0.5,
        cache_bytes: int = 64 << 20,
        max_bytes: int = 1 << 20,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        """`max_bytes` limits the text; `observe` is called with the seconds that each tokenisation took."""
        check_at_least(1, threads=threads, queue=queue, max_bytes=max_bytes)
        check_at_least(0, cache_bytes=cache_bytes)
        check_positive(deadline_s=deadline_s)
        self.tokenizer = tokenizer
        self.ask: Callable[[Question], Awaitable[Ids]] | None = None
        """Asks a worker for the ids that the tokenizer cannot make exactly; None if workers cannot be asked. Raises
        NoTokensError."""
        self.counters: Counter[str] = Counter()
        """Prompts by how their ids were found. With ids: cached; exact, tokenised here; asked, made by a worker;
        learned, from a prefill's answer. Without: busy, the queue was full; late, at the deadline; too_long; none, for
        images, an own template or several prompts; unanswered, by the worker that was asked, or with what cannot be the
        ids; failed, by an unexpected error."""
        self.last_error = ""
        """Worker that last left a prompt unanswered, and how; empty if none has."""
        self._none = Tokens(None, reason)
        self._queue, self._deadline_s = queue, deadline_s
        self._cache_bytes, self._max_bytes = cache_bytes, max_bytes
        self.observe = observe
        self._kept: dict[bytes, Tokens] = {}  # most recently used last
        self.kept_bytes = 0
        self._jobs: dict[bytes, _Job] = {}
        self._free = asyncio.Semaphore(threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokens") if tokenizer is not None else None

    async def ids(self, path: str, body: Mapping[str, Any], ask: bool = False) -> Tokens:
        """Return the token ids of a request's prompt; `path` is its endpoint. Raises nothing but CancelledError.

        `ask`: whether a worker is asked for ids that the tokenizer cannot make exactly.
        """
        ask = ask and self.ask is not None
        if self.tokenizer is None and not ask and not _is_ids(body.get("prompt")):
            return self._none
        try:
            question = self._question(path, body, ask)
            if isinstance(question, Tokens):
                return question
            tokens = self._kept.pop(question.key, None)
            if tokens is not None:
                self._kept[question.key] = tokens
                self.counters["cached"] += 1
                return tokens
            if question.path == RENDER:
                messages_of(question.body, wrapped=True)  # refuses images: with equal ids their prompts differ
        except NoTokensError as error:
            return self._without("none", str(error))
        job = self._jobs.get(question.key)
        if job is None:
            if len(self._jobs) >= self._queue:
                return self._without("busy", f"{self._queue} texts are waiting for the tokenizer", question)
            job = self._jobs[question.key] = _Job()
            job.task = asyncio.get_running_loop().create_task(self._make(question, job))
        return await self._wait(question, job)

    def learn(self, question: Question, raw: bytes, worker_id: str) -> Ids | None:
        """Keep the ids of an unanswered question, as JSON in a prefill's answer; None if they cannot be its ids."""
        try:
            ids = read_ids(raw, question.most_ids)
        except InputError as error:
            self._without("unanswered", f"worker {worker_id!r}, prefill: {error}")
            return None
        self.counters["learned"] += 1
        self._keep(question.key, Tokens(ids))
        return ids

    def close(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, question: Question, job: _Job) -> Tokens:
        task = job.task
        assert task is not None
        job.waiting += 1
        try:
            done, _ = await asyncio.wait((task,), timeout=self._deadline_s)
        finally:
            job.waiting -= 1
            # A job that has started cannot be stopped, and a later request may need its result.
            if not job.waiting and not job.started and not task.done():
                self._end(question.key, job)
                task.cancel()
        if not done:
            return self._without("late", f"the tokenizer took longer than {self._deadline_s:g} s", question)
        return Tokens(None, "the service was closed") if task.cancelled() else task.result()

    def _end(self, key: bytes, job: _Job) -> None:
        if self._jobs.get(key) is job:  # a newer job may have the same key
            del self._jobs[key]

    async def _make(self, question: Question, job: _Job) -> Tokens:
        began = time.perf_counter()
        try:
            if question.path:
                assert self.ask is not None
                job.started = True
                tokens = Tokens(await self.ask(question))
            else:
                tokens = Tokens(await self._tokenised(question, job))
            self.counters["asked" if question.path else "exact"] += 1
            if self.observe is not None:
                self.observe(time.perf_counter() - began)
        except NoTokensError as error:
            tokens = self._without("unanswered" if isinstance(error, NoAnswerError) else "none", str(error), question)
            if question.path:  # a worker may answer the next time
                return tokens
        except Exception as error:  # a tokenizer's bug must not fail a request
            return self._without("failed", f"the tokenizer failed: {type(error).__name__}")
        finally:
            self._end(question.key, job)
        self._keep(question.key, tokens)
        return tokens

    async def _tokenised(self, question: Question, job: _Job) -> Ids:
        await self._free.acquire()
        job.started = True
        assert self._pool is not None
        loop = asyncio.get_running_loop()
        work = self._pool.submit(self._tokenise, question.body)
        # Released by the thread's work, not by this task, which may be cancelled while the thread still runs.
        work.add_done_callback(lambda _: _call_soon(loop, self._free.release))
        return await asyncio.wrap_future(work)

    def _tokenise(self, body: dict[str, Any]) -> Ids:
        assert self.tokenizer is not None
        if "prompt" in body:
            return self.tokenizer.encode(body["prompt"], body["add_special_tokens"])
        return self.tokenizer.chat(body)

    def _without(self, kind: str, reason: str, question: Question | None = None) -> Tokens:
        """Count a prompt without ids, and return the reason."""
        self.counters[kind] += 1
        self.last_error = reason if kind == "unanswered" else self.last_error
        return Tokens(None, reason, question if question is not None and question.path else None)

    def _keep(self, key: bytes, tokens: Tokens) -> None:
        size = _size(tokens)
        if size <= self._cache_bytes and key not in self._kept:
            self._kept[key] = tokens
            self.kept_bytes += size
        while self.kept_bytes > self._cache_bytes:
            self.kept_bytes -= _size(self._kept.pop(next(iter(self._kept))))

    def _question(self, path: str, body: Mapping[str, Any], ask: bool) -> Question | Tokens:
        check(
            all(body.get(field) is None for field in ("truncate_prompt_tokens", "prompt_embeds", "suffix")),
            "the worker cuts the prompt or adds to it, or is given its embeddings",
            NoTokensError,
        )
        if path.endswith("/chat/completions"):
            return self._of_chat(body, ask)
        if path.endswith("/completions"):
            return self._of_text(body)
        raise NoTokensError(f"{path} has no prompt")

    def _of_chat(self, body: Mapping[str, Any], ask: bool) -> Question | Tokens:
        inexact = self._none.reason if self.tokenizer is None else self.tokenizer.inexact_chat
        if inexact and not ask:
            return self._none if self.tokenizer is None else self._without("none", inexact)
        chat = {field: body[field] for field in (WORKER_FIELDS if inexact else CHAT_FIELDS) if field in body}
        if inexact:
            return self._sized(b"asked %d" % (time.time() // QUARTER_S), RENDER, chat)
        dated = self.tokenizer is not None and self.tokenizer.tells_time
        return self._sized(time.strftime("%Y-%m-%d").encode() if dated else b"chat", "", chat)

    def _of_text(self, body: Mapping[str, Any]) -> Question | Tokens:
        prompt: Any = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return Tokens(_given_ids(prompt))
        check(isinstance(prompt, str), "prompt must be one text or a list of token ids", NoTokensError)
        if len(prompt) > self._max_bytes:  # a character has at least one byte
            return self._long(len(prompt))
        text = {"prompt": prompt, "add_special_tokens": body.get("add_special_tokens") is not False}
        if self.tokenizer is not None:
            return self._sized(b"text", "", text)
        return self._sized(b"asked", TOKENISE, {**text, **({"model": body["model"]} if "model" in body else {})})

    def _sized(self, kind: bytes, path: str, body: dict[str, Any]) -> Question | Tokens:
        """Make the question; `kind`, of at most 16 bytes, and `body` determine the ids."""
        try:
            packed = _PACK(body)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            raise NoTokensError("the prompt is not text (half a surrogate pair?), or a number beyond 64 bits") from None
        if len(packed) > self._max_bytes:
            return self._long(len(packed))
        digest = hashlib.blake2b(packed, digest_size=16, salt=kind)
        return Question(digest.digest(), path, body, 2 * len(packed) + MARGIN)

    def _long(self, size: int) -> Tokens:
        return self._without("too_long", f"the prompt has {size} bytes, more than {self._max_bytes}")


def read_ids(raw: bytes, most: int) -> Ids:
    """Return the token ids in a worker's answer, a JSON list; raise InputError if they cannot be a prompt's."""
    check(
        len(raw) <= ID_BYTES * most,
        f"token ids of {len(raw)} bytes, more than {ID_BYTES * most} for this prompt",
        InputError,
    )
    try:
        ids = np.frombuffer(array("q", msgspec.json.decode(raw, type=list[int])), np.int64)
    except (msgspec.DecodeError, OverflowError, RecursionError, ValueError) as error:
        raise InputError(f"token ids cannot be read: {error}") from None
    check(0 < len(ids) <= most, f"{len(ids)} token ids, expected 1 to {most}", InputError)
    check(
        ids.min() >= 0 and ids.max() < MOST_ID,
        f"token ids from {ids.min()} to {ids.max()}, expected at least 0 and below {MOST_ID}",
        InputError,
    )
    return ids


_PACK = msgspec.msgpack.Encoder().encode


def _size(tokens: Tokens) -> int:
    return _ENTRY_BYTES + (0 if tokens.ids is None else tokens.ids.nbytes)


def _is_ids(prompt: Any) -> bool:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return type(first[0] if isinstance(first, list) and first else first) is int


def _given_ids(prompt: list[Any]) -> Ids:
    try:
        return np.frombuffer(array("q", prompt), np.int64)
    except (TypeError, OverflowError, ValueError):
        raise NoTokensError("prompt must be one text or a list of token ids") from None


def _call_soon(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(what)
