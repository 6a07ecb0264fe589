"""Tokenising in a bounded pool: what is too long, too slow or too much is refused, and clients that leave free it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from coterie.engines.worker.protocol import Asked, RequestError, parse_body
from coterie.engines.worker.tokenising import MAX_QUEUED, THREADS, Tokenising


class Held:
    """A tokenizer that waits to be let go."""

    chat_template = "one"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        self.calls += 1
        assert self.go.wait(60)
        return list(text.encode())

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        if messages[0]["role"] == "bad":
            raise KeyError("role")
        return "".join(one["content"] for one in messages)


def text(prompt: str) -> Asked:
    return parse_body({"prompt": prompt}, False, "m", "both")


def chat(content: str, role: str = "user") -> Asked:
    return parse_body({"messages": [{"role": role, "content": content}]}, True, "m", "both")


def test_texts_and_chats_become_tokens() -> None:
    async def run() -> None:
        tokenizer = Held()
        tokenizer.go.set()
        tokenising = Tokenising(tokenizer, 8, 60.0)
        assert await tokenising.tokens(text("ab")) == [97, 98]
        assert await tokenising.tokens(chat("ab")) == [97, 98]
        assert await tokenising.tokens(parse_body({"prompt": [5]}, False, "m", "both")) == [5]
        with pytest.raises(RequestError, match="refuses these messages"):
            await tokenising.tokens(chat("ab", "bad"))
        for asked in (text("x" * 9), chat("x" * 5)):
            calls = tokenizer.calls
            with pytest.raises(RequestError, match="9 characters; no text of more than 8") as refused:
                await tokenising.tokens(asked)
            assert (refused.value.code, tokenizer.calls) == ("context_length_exceeded", calls), "unread"
        assert tokenising.pending == 0
        tokenising.close()

    asyncio.run(run())


def test_the_pool_is_bounded_and_cancelled_requests_leave_it() -> None:
    async def run() -> None:
        tokenizer = Held()
        tokenising = Tokenising(tokenizer, 8, 60.0)
        tasks = [asyncio.create_task(tokenising.tokens(text("a"))) for _ in range(THREADS + MAX_QUEUED)]
        while tokenizer.calls < THREADS:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="too many prompts") as refused:
            await tokenising.tokens(text("a"))
        assert (refused.value.status, refused.value.code) == (429, "overloaded")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert tokenising.pending == THREADS, "those under way count until they are done"
        tokenizer.go.set()
        assert await tokenising.tokens(text("ab")) == [97, 98]
        assert tokenizer.calls == THREADS + 1, "what was cancelled was never read"
        tokenising.close()

    asyncio.run(run())


def test_a_text_that_takes_too_long_is_refused() -> None:
    async def run() -> None:
        tokenizer = Held()
        tokenising = Tokenising(tokenizer, 8, 0.01)
        with pytest.raises(RequestError, match=r"not tokenised within 0\.01 s") as refused:
            await tokenising.tokens(text("a"))
        assert refused.value.status == 429
        tokenizer.go.set()
        tokenising.close()

    asyncio.run(run())
