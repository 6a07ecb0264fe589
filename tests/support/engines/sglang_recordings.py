"""Recordings from the peer that plays SGLang, and checks of what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coterie.engines.recording import Sending
from coterie.engines.sglang.recording import SGLangRecording, record_sglang
from coterie.prompts import Prompt
from coterie.traces import ActivationTrace
from coterie.types import DECODE, PREFILL
from sglang_peer import Peer, routing, tokens_of

PROMPTS = [Prompt(f"p{n}", ("math", "code")[n % 2], "en", f"prompt {'x' * n} {n}") for n in range(9)]


def record(peer: Peer, out: Path, **more: Any) -> SGLangRecording:
    own = {name: more.pop(name) for name in ("mode", "dump_dir", "model") if name in more}
    sending = Sending(**{"prompts": PROMPTS, "concurrency": 4, "max_tokens": 5, "chat": False, **more})
    return record_sglang(peer.url, out, sending, **own)


def check(trace: ActivationTrace, prompts: list[Prompt], tokens: bool = True) -> None:
    """Every token's experts, phase and id, computed anew."""
    trace.validate()
    assert trace.requests.ids == [prompt.id for prompt in prompts]
    for index, prompt in enumerate(prompts):
        found = trace.request(index)
        before = tokens_of(prompt.prompt)
        after = [500 + n for n in range(1 + len(prompt.prompt) % 5)]
        expected = [*before, *after[:-1]]
        np.testing.assert_array_equal(found.expert_ids, routing(expected))
        assert found.phase.tolist() == [PREFILL] * len(before) + [DECODE] * (len(after) - 1)
        assert trace.requests.prompt_tokens[index] == len(before)
        assert trace.requests.output_tokens[index] == len(after)
        if tokens:
            assert found.token_ids is not None
            assert found.token_ids.tolist() == expected
        else:
            assert found.token_ids is None
