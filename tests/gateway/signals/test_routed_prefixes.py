"""Prefixes guessed from routing: longest shared run, expiry, bounds."""

from __future__ import annotations

import json
from typing import Any

from coterie.gateway.exchange.call import make_call
from coterie.gateway.signals.prefixes import BLOCK_BYTES, MOST_BLOCKS, PromptKeys, RoutedPrefixes, keys_of_text

TEXT = "".join(chr(97 + i * i % 26) for i in range(4 * BLOCK_BYTES))


def keys_of_body(body: dict[str, Any]) -> PromptKeys:
    """As the gateway makes them of a client's bytes."""
    call = make_call("/v1/completions", json.dumps(body).encode())
    return keys_of_text(call.prompt, call.prompt_bytes, call.salt)


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)], **more}


def test_the_shared_beginning_counts() -> None:
    known = RoutedPrefixes()
    known.routed(keys_of_body({"prompt": TEXT}), 1, now=0.0)
    known.routed(keys_of_body({"prompt": TEXT[: 2 * BLOCK_BYTES]}), 2, now=0.0)
    found = known.cached(keys_of_body({"prompt": TEXT + "more"}), 4, now=1.0)
    assert found.tolist() == [0, 256, 128, 0]
    assert known.cached(keys_of_body({"prompt": TEXT}), 4, now=1.0).tolist() == [0, 255, 128, 0], "one is computed"
    assert not known.cached(keys_of_body({"prompt": "x" + TEXT}), 4, now=1.0).any()
    assert not known.cached(keys_of_body({"prompt": TEXT, "cache_salt": "tenant"}), 4, now=1.0).any()


def test_a_turn_more_keeps_the_beginning() -> None:
    known = RoutedPrefixes()
    known.routed(keys_of_body(chat(TEXT)), 0, now=0.0)
    assert known.cached(keys_of_body(chat(TEXT, "an answer", "and then?")), 1, now=0.0)[0] == 256
    assert not known.cached(keys_of_body(chat(TEXT, tools=[{"type": "function"}])), 1, now=0.0).any()


def test_a_prompt_whose_tokens_are_known_shares_blocks_with_one_whose_are_not() -> None:
    known, text = RoutedPrefixes(), TEXT.encode()
    known.routed(keys_of_text(text, len(text)), 0, now=0.0)
    half = keys_of_text(text[: 2 * BLOCK_BYTES], 2 * BLOCK_BYTES, tokens=100)
    assert known.cached(half, 1, now=0.0).tolist() == [99], "all but one of its own tokens"
    longer = text + b"x" * len(text)
    assert known.cached(keys_of_text(longer, len(longer), tokens=80), 1, now=0.0).tolist() == [40]


def test_what_is_old_or_gone_does_not_count() -> None:
    known, keys = RoutedPrefixes(keep_s=10), keys_of_body({"prompt": TEXT})
    known.routed(keys, 0, now=0.0)
    known.routed(keys, 1, now=8.0)
    assert known.cached(keys, 2, now=10.0).all()
    assert known.cached(keys, 2, now=11.0).tolist() == [0, 255]
    known.drop(1)
    assert not known.cached(keys, 2, now=9.0)[1]
    known.drop(0)
    assert len(known) == 0


def test_memory_is_bounded() -> None:
    known = RoutedPrefixes(max_blocks=10)
    for number in range(100):
        known.routed(keys_of_body({"prompt": f"{number:4}" + TEXT}), 0, now=0.0)
    assert len(known) == 10
    assert known.cached(keys_of_body({"prompt": "  99" + TEXT}), 1, now=0.0)[0] == 256
    assert not known.cached(keys_of_body({"prompt": "   0" + TEXT}), 1, now=0.0).any()
    assert len(keys_of_body({"prompt": "x" * BLOCK_BYTES * 2 * MOST_BLOCKS}).keys) == MOST_BLOCKS


def test_any_body_has_keys() -> None:
    for body in ({}, {"prompt": 10**30}, {"messages": 3}, {"prompt": ["a", "b"]}):
        assert not RoutedPrefixes().cached(keys_of_body(body), 1, now=0.0).any()


def test_a_long_prompt_counts_whole() -> None:
    keys = keys_of_body({"prompt": "x" * (1 << 20)})
    assert keys.tokens == (1 << 20) // 4
    assert len(keys.keys) == MOST_BLOCKS
