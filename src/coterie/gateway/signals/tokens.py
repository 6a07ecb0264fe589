"""Token ids of a request, equal to the worker's own; needed for prefix hits and predicted footprints.

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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coterie.errors import check_at_least, check_positive
from coterie.gateway.signals.messages import NoTokensError
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
_ENTRY_BYTES = 400
"""Bytes of memory of a cached result besides its ids."""


class Tokens(NamedTuple):
    """Token ids of a request's prompt."""

    ids: Ids | None
    exact: bool
    """Whether the worker's ids are the same. If not, they likely share a prefix, so that prefix hits still work."""
    reason: str = ""
    """Reason why there are no ids, or why they are not exact."""


@dataclass(slots=True, eq=False)
class _Job:
    task: asyncio.Task[Tokens] | None = None
    waiting: int = 0
    """Number of requests that wait for the job."""
    started: bool = False


class TokenService:
    """Makes token ids outside the event loop: cached, bounded in memory, threads and time. Belongs to one event loop.

    Without a tokenizer every result is the given `reason`, unless the prompt is already token ids.
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
        self.counters: Counter[str] = Counter()
        """Prompts by how their ids were found. With ids: cached; exact, tokenised here. Without: busy, the queue was
        full; late, at the deadline; too_long; none, for images, an own template or several prompts; failed, by an
        unexpected error."""
        self._none = Tokens(None, False, reason)
        self._queue, self._deadline_s = queue, deadline_s
        self._cache_bytes, self._max_bytes = cache_bytes, max_bytes
        self.observe = observe
        self._kept: dict[bytes, Tokens] = {}  # most recently used last
        self.kept_bytes = 0
        self._jobs: dict[bytes, _Job] = {}
        self._free = asyncio.Semaphore(threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokens") if tokenizer is not None else None

    async def ids(self, path: str, body: Mapping[str, Any]) -> Tokens:
        """Return the token ids of a request's prompt; `path` is its endpoint. Raises nothing but CancelledError."""
        if self.tokenizer is None and not _is_ids(body.get("prompt")):
            return self._none
        try:
            asked = self._asked(path, body)
        except NoTokensError as error:
            return self._without("none", str(error))
        if isinstance(asked, Tokens):
            return asked
        tokens = self._kept.pop(asked.key, None)
        if tokens is not None:
            self._kept[asked.key] = tokens
            self.counters["cached"] += 1
            return tokens
        job = self._jobs.get(asked.key)
        if job is None:
            if len(self._jobs) >= self._queue:
                return self._without("busy", f"{self._queue} texts are waiting for the tokenizer")
            job = self._jobs[asked.key] = _Job()
            job.task = asyncio.get_running_loop().create_task(self._make(asked, job))
        return await self._wait(asked.key, job)

    def close(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, key: bytes, job: _Job) -> Tokens:
        task = job.task
        assert task is not None
        job.waiting += 1
        try:
            done, _ = await asyncio.wait((task,), timeout=self._deadline_s)
        finally:
            job.waiting -= 1
            # A job that has started cannot be stopped, and a later request may need its result.
            if not job.waiting and not job.started and not task.done():
                self._end(key, job)
                task.cancel()
        if not done:
            return self._without("late", f"the tokenizer took longer than {self._deadline_s:g} s")
        return Tokens(None, False, "the service was closed") if task.cancelled() else task.result()

    def _end(self, key: bytes, job: _Job) -> None:
        if self._jobs.get(key) is job:  # a newer job may have the same key
            del self._jobs[key]

    async def _make(self, asked: _Asked, job: _Job) -> Tokens:
        try:
            await self._free.acquire()
            job.started = True
            assert self._pool is not None
            began, loop = time.perf_counter(), asyncio.get_running_loop()
            work = self._pool.submit(self._tokenise, asked)
            # Released by the thread's work, not by this task, which may be cancelled while the thread still runs.
            work.add_done_callback(lambda _: _call_soon(loop, self._free.release))
            tokens = await asyncio.wrap_future(work)
            self.counters["exact"] += 1
            if self.observe is not None:
                self.observe(time.perf_counter() - began)
        except NoTokensError as error:
            tokens = self._without("none", str(error))
        except Exception as error:  # a tokenizer's bug must not fail a request
            return self._without("failed", f"the tokenizer failed: {type(error).__name__}")
        finally:
            self._end(asked.key, job)
        self._keep(asked.key, tokens)
        return tokens

    def _without(self, kind: str, reason: str) -> Tokens:
        """Count a prompt without ids, and return the reason."""
        self.counters[kind] += 1
        return Tokens(None, False, reason)

    def _tokenise(self, asked: _Asked) -> Tokens:
        assert self.tokenizer is not None
        if asked.body is None:
            return Tokens(self.tokenizer.encode(asked.text, asked.ends), True)
        return Tokens(self.tokenizer.chat(asked.body), not self.tokenizer.exact_chat, self.tokenizer.exact_chat)

    def _keep(self, key: bytes, tokens: Tokens) -> None:
        size = _size(tokens)
        if size <= self._cache_bytes and key not in self._kept:
            self._kept[key] = tokens
            self.kept_bytes += size
        while self.kept_bytes > self._cache_bytes:
            self.kept_bytes -= _size(self._kept.pop(next(iter(self._kept))))

    def _asked(self, path: str, body: Mapping[str, Any]) -> _Asked | Tokens:
        if body.get("truncate_prompt_tokens") is not None or body.get("prompt_embeds") is not None:
            raise NoTokensError("the worker cuts the prompt, or is given its embeddings")
        if path.endswith("/chat/completions"):
            return self._asked_chat(body)
        if path.endswith("/completions"):
            return self._asked_text(body)
        raise NoTokensError(f"{path} has no prompt")

    def _asked_chat(self, body: Mapping[str, Any]) -> _Asked | Tokens:
        if self.tokenizer is None:
            return self._none
        chat = {field: body[field] for field in CHAT_FIELDS if field in body}
        try:
            packed = _PACK(chat)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            raise NoTokensError("the messages hold what is not text or a number of 64 bits") from None
        if len(packed) > self._max_bytes:
            return self._long(len(packed))
        digest = hashlib.blake2b(packed, digest_size=16, salt=b"chat")
        if self.tokenizer.tells_time:
            digest.update(time.strftime("%Y-%m-%d").encode())
        return _Asked(digest.digest(), "", False, chat)

    def _asked_text(self, body: Mapping[str, Any]) -> _Asked | Tokens:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return Tokens(_given_ids(prompt), True)
        if not isinstance(prompt, str):
            raise NoTokensError("prompt must be one text or a list of token ids")
        if len(prompt) > self._max_bytes:  # a character has at least one byte
            return self._long(len(prompt))
        try:
            raw = prompt.encode()
        except UnicodeEncodeError:
            raise NoTokensError("prompt holds half a surrogate pair") from None
        ends = body.get("add_special_tokens") is not False
        digest = hashlib.blake2b(raw, digest_size=16, salt=b"text" if ends else b"bare")
        return _Asked(digest.digest(), prompt, ends, None)

    def _long(self, size: int) -> Tokens:
        return self._without("too_long", f"the prompt has {size} bytes, more than {self._max_bytes}")


class _Asked(NamedTuple):
    """Input of a tokenisation: a text, or the body of a chat."""

    key: bytes
    text: str
    ends: bool
    """Whether to add special tokens at the ends of the text."""
    body: Mapping[str, Any] | None


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
