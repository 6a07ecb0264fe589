"""Tokenise text in a bounded thread pool, off the event loop.

A text that is too long for any prompt is refused without tokenising. A text that waits for a thread is cancelled if
its client disconnects or it waits too long. A text that is being tokenised keeps its thread and counts as pending
until it is done, so that slow texts cannot pile up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from coterie.engines.worker.protocol import Asked, RequestError, check_request

THREADS = 2
MAX_QUEUED = 64
"""Maximum number of texts that wait for a thread."""


class Tokenising:
    def __init__(self, tokenizer: Any, most_characters: int, deadline_s: float) -> None:
        self._tokenizer, self._most, self._deadline_s = tokenizer, most_characters, deadline_s
        self._pool = ThreadPoolExecutor(THREADS, "coterie-tokenise")
        self._lock = threading.Lock()
        self.pending = 0
        """Number of texts in the pool, waiting or being tokenised."""

    async def tokens(self, asked: Asked) -> list[int]:
        """Return the token ids of a request's prompt; raises RequestError if it is too long or takes too long."""
        if asked.chat:
            check_request(
                self._tokenizer.chat_template, "this model has no chat template; use /v1/completions", "messages"
            )
            messages: Any = asked.prompt
            self._check(sum(len(turn["content"]) + len(turn["role"]) for turn in messages), "messages")
            return await self._run(lambda: self._chat_tokens(messages))
        if isinstance(asked.prompt, str):
            text = asked.prompt
            self._check(len(text), "prompt")
            return await self._run(lambda: list(self._tokenizer.encode(text)))
        return asked.prompt  # type: ignore[return-value]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, characters: int, param: str) -> None:
        check_request(
            characters <= self._most,
            f"{param} has {characters} characters; no text of more than {self._most} fits this model's context",
            param,
            code="context_length_exceeded",
        )

    async def _run(self, work: Callable[[], list[int]]) -> list[int]:
        with self._lock:
            check_request(
                self.pending < THREADS + MAX_QUEUED,
                "too many prompts wait to be tokenised; try again",
                status=429,
                code="overloaded",
            )
            self.pending += 1
        future = self._pool.submit(work)
        future.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise RequestError(
                f"the prompt was not tokenised within {self._deadline_s:g} s; try again", status=429, code="overloaded"
            ) from None

    def _done(self, _: Future[list[int]]) -> None:
        with self._lock:
            self.pending -= 1

    def _chat_tokens(self, messages: Any) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates run code: any error is caused by these messages
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))
