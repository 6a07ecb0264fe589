"""Token ids off the event loop: equal to the worker's, cached, bounded in memory and time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_templates import BODIES
from coterie.engines.tiny import tiny_model_path
from coterie.engines.worker.numpy_model import BytePairs
from coterie.engines.worker.protocol import parse_body
from coterie.errors import ConfigError, UnavailableError
from coterie.gateway.signals.messages import NoTokensError
from coterie.gateway.signals.model_tokenizers import FolderTokenizer, Ids, TinyTokenizer, Tokenizer, load_tokenizer
from coterie.gateway.signals.tokens import Tokens, TokenService

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FOLDER = tiny_model_path()
WORKER = BytePairs(FOLDER)
TOKENIZERS: list[Tokenizer] = [FolderTokenizer(FOLDER), TinyTokenizer(FOLDER)]
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("ab <|im_start|>\n'é日1", max_size=80),
    st.sampled_from(["word" * 3000, "<|im_end|>", "don't 123 ﬁ ½ Ⅷ \u3000x", " \n\t ", "<|im_start|>system\n"]),
)


def worker_chat_ids(body: Mapping[str, Any]) -> list[int]:
    """As the reference worker makes them from an OpenAI body."""
    asked = parse_body(body, True, "m", "both")
    return WORKER.encode(WORKER.apply_chat_template(asked.prompt), add_special_tokens=False)


@given(TEXTS)
def test_texts_as_the_worker(text: str) -> None:
    for tokenizer in TOKENIZERS:
        found = tokenizer.encode(text)
        assert found.dtype == np.int64
        assert found.tolist() == WORKER.encode(text)


@pytest.mark.parametrize("name", ["one", "turns", "parts", "empty", "long word", "settings"])
def test_chats_as_the_worker(name: str) -> None:
    for tokenizer in TOKENIZERS:
        assert tokenizer.chat(BODIES[name]).tolist() == worker_chat_ids(BODIES[name])


class Slow:
    """A tokenizer that waits until it is told to go on."""

    inexact_chat, tells_time = "", False

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        self.texts.append(text)
        self.began.set()
        assert self.go.wait(60)
        if text == "a bug":
            raise KeyError(text)
        return np.arange(len(text) + add_special_tokens)

    def chat(self, body: Mapping[str, Any]) -> Ids:
        raise NoTokensError(f"no chat of {len(body)}")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_cached_by_what_decides_the_ids() -> None:
    async def test() -> None:
        service = TokenService(TOKENIZERS[0])
        first = await service.ids(CHAT, {**BODIES["turns"], "temperature": 0.1, "user": "ada"})
        again = await service.ids(CHAT, {**BODIES["turns"], "temperature": 0.9, "stream": True})
        assert first.ids is not None
        assert again.ids is first.ids
        other = await service.ids(CHAT, {**BODIES["turns"], "add_generation_prompt": False})
        assert other.ids is not None
        assert first.ids is not None
        assert len(other.ids) < len(first.ids)
        assert (service.counters["cached"], service.counters["exact"]) == (1, 2)
        text = await service.ids(COMPLETIONS, {"prompt": "one"})
        assert text.ids is not None
        assert text.ids.tolist() == WORKER.encode("one")
        assert (await service.ids(COMPLETIONS, {"prompt": ["one"]})).ids is text.ids
        assert (await service.ids(COMPLETIONS, {"prompt": "one", "add_special_tokens": False})).ids is not text.ids
        service.close()

    run(test())


def test_memory_is_bounded() -> None:
    async def test() -> None:
        service = TokenService(TOKENIZERS[0], cache_bytes=5_000)
        kept = {"prompt": "kept"}
        for number in range(40):
            await service.ids(COMPLETIONS, {"prompt": f"number {number}"})
            await service.ids(COMPLETIONS, kept)
        assert service.counters["cached"] == 39
        assert 0 < service.kept_bytes <= 5_000
        await service.ids(COMPLETIONS, {"prompt": "x y z " * 1000})
        assert service.kept_bytes <= 5_000, "larger than the cache: not kept"
        service.close()

    run(test())


def test_ids_that_are_given_are_taken() -> None:
    async def test() -> None:
        for service in (TokenService(None, "none here"), TokenService(TOKENIZERS[0])):
            for prompt in ([1, 2, 3], [[1, 2, 3]]):
                found = await service.ids(COMPLETIONS, {"prompt": prompt})
                assert found.ids is not None
                assert found.ids.tolist() == [1, 2, 3]
            service.close()
        reason = "prompt must be one text or a list of token ids"
        assert await service.ids(COMPLETIONS, {"prompt": [1, 10**30]}) == Tokens(None, reason)

    run(test())


def test_without_a_tokenizer_it_says_so() -> None:
    async def test() -> None:
        service = TokenService(None, "none here")
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        for path, body in (
            (CHAT, BODIES["one"]),
            (COMPLETIONS, {"prompt": "x"}),
            (CHAT, {"prompt": [1]}),
            (COMPLETIONS, {"prompt": deep}),
        ):
            assert await service.ids(path, body) == Tokens(None, "none here")

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/embeddings", {"input": "x"}, "has no prompt"),
        (COMPLETIONS, {}, "must be one text"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "must be one text"),
        (COMPLETIONS, {"prompt": [1.5]}, "must be one text"),
        (COMPLETIONS, {"prompt": "half \ud800"}, "surrogate"),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 5}, "cuts the prompt"),
        (CHAT, {}, "at least one message"),
        (CHAT, {"messages": [3]}, "must be an object"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "not text"),
        (CHAT, {"messages": [{"role": "user", "content": 10**30}]}, "64 bits"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 7 * 7 }}"},
            "its own chat template",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}, "kwargs"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}, "both be true"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": []}, "at least one tool"),
    ],
)
def test_bodies_without_ids_say_why(path: str, body: dict[str, Any], reason: str) -> None:
    async def test() -> None:
        service = TokenService(TOKENIZERS[0])
        found = await service.ids(path, body)
        assert found.ids is None
        assert reason in found.reason
        assert service.counters["none"] == 1
        service.close()

    run(test())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "tools",
    "prompt",
    "chat_template_kwargs",
    "add_generation_prompt",
    "documents",
    "role",
    "content",
]


@given(
    st.sampled_from([COMPLETIONS, CHAT]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON, max_size=3), max_size=3),
)
def test_any_body_is_answered(path: str, body: dict[str, Any], messages: list[Any]) -> None:
    async def test() -> None:
        for tokenizer in TOKENIZERS:
            service = TokenService(tokenizer)
            for sent in (body, {**body, "messages": [{"role": "user", **one} for one in messages]}):
                found = await service.ids(path, sent)
                assert (found.ids is None) == bool(found.reason)
            assert service.counters["failed"] == 0
            service.close()

    run(test())


def test_a_text_that_is_too_long_is_left_alone() -> None:
    async def test() -> None:
        slow = Slow()
        service = TokenService(slow, max_bytes=100)
        assert "more than 100" in (await service.ids(COMPLETIONS, {"prompt": "x" * 101})).reason
        assert "more than 100" in (await service.ids(CHAT, {"messages": ["x" * 101]})).reason
        assert service.counters["too_long"] == 2
        assert not slow.texts
        service.close()

    run(test())


def test_one_text_is_made_once_and_a_full_queue_gives_up() -> None:
    async def test() -> None:
        slow = Slow()
        service = TokenService(slow, threads=1, queue=2, deadline_s=60)
        twins = [asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "one"})) for _ in range(3)]
        second = asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "two"}))
        await asyncio.to_thread(slow.began.wait, 60)
        busy = await service.ids(COMPLETIONS, {"prompt": "three"})
        assert busy.ids is None
        assert service.counters["busy"] == 1
        slow.go.set()
        assert all(found.ids is not None for found in await asyncio.gather(*twins, second))
        assert slow.texts == ["one", "two"]
        assert (await service.ids(COMPLETIONS, {"prompt": "three"})).ids is not None
        service.close()

    run(test())


def test_a_late_answer_is_not_waited_for_but_kept() -> None:
    async def test() -> None:
        slow = Slow()
        service = TokenService(slow, threads=1, deadline_s=0.01)
        late = await service.ids(COMPLETIONS, {"prompt": "one"})
        assert (late.ids, service.counters["late"]) == (None, 1)
        queued = await service.ids(COMPLETIONS, {"prompt": "two"})
        assert queued.ids is None
        slow.go.set()
        while service.counters["exact"] == 0:
            await asyncio.sleep(0.001)
        assert (await service.ids(COMPLETIONS, {"prompt": "one"})).ids is not None
        assert slow.texts == ["one"], "what no one waits for any more is not begun"
        service.close()

    run(test())


def test_a_client_that_leaves_takes_its_text_along() -> None:
    async def test() -> None:
        slow = Slow()
        service = TokenService(slow, threads=1, queue=8, deadline_s=60)
        first = asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "one"}))
        await asyncio.to_thread(slow.began.wait, 60)
        gone = [asyncio.create_task(service.ids(COMPLETIONS, {"prompt": f"gone {n}"})) for n in range(6)]
        shared = [asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "shared"})) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in (*gone, shared[0]):
            task.cancel()
        await asyncio.gather(*gone, shared[0], return_exceptions=True)
        slow.go.set()
        assert (await first).ids is not None
        assert (await shared[1]).ids is not None
        assert slow.texts == ["one", "shared"]
        assert not service._jobs
        service.close()

    run(test())


def test_a_text_that_was_given_up_and_comes_again() -> None:
    async def test() -> None:
        slow = Slow()
        service = TokenService(slow, threads=1, deadline_s=60)
        first = asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "one"}))
        await asyncio.to_thread(slow.began.wait, 60)
        gone = asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "two"}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        again = [asyncio.create_task(service.ids(COMPLETIONS, {"prompt": "two"})) for _ in range(2)]
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(service._jobs) == 2, "the old job's end is not the new one's"
        slow.go.set()
        assert all(found.ids is not None for found in await asyncio.gather(first, *again))
        assert slow.texts == ["one", "two"]
        service.close()

    run(test())


def test_a_tokenizers_bug_is_counted() -> None:
    async def test() -> None:
        slow = Slow()
        slow.go.set()
        service = TokenService(slow)
        found = await service.ids(COMPLETIONS, {"prompt": "a bug"})
        assert found == Tokens(None, "the tokenizer failed: KeyError")
        assert service.counters["failed"] == 1
        assert (await service.ids(CHAT, BODIES["one"])).reason == "no chat of 1"
        service.close()

    run(test())


@pytest.mark.parametrize("missing", ["tokenizers", "coterie.gateway.signals.templates"])
def test_without_the_libraries(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    found = load_tokenizer(FOLDER)
    assert isinstance(found, TinyTokenizer)
    assert found.chat(BODIES["one"]).tolist() == worker_chat_ids(BODIES["one"])
    (tmp_path / "tokenizer.json").write_text((FOLDER / "tokenizer.json").read_text().replace('"Digits"', '"Words"'))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    if missing == "tokenizers":
        with pytest.raises(UnavailableError, match="is not installed: pip install"):
            load_tokenizer(tmp_path)


def test_folders_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((FOLDER / "tokenizer.json").read_text())
    with pytest.raises(NoTokensError, match="no chat template"):
        load_tokenizer(tmp_path).chat(BODIES["one"])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert "without a template" in load_tokenizer(tmp_path).inexact_chat
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"one": 1}}')
    with pytest.raises(ConfigError, match="added_tokens_decoder cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        load_tokenizer(tmp_path)
