"""A worker's engine stepped by hand in this process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import transformers_models as models
from books import check_blocks
from coterie.engines.worker.config import WorkerConfig
from coterie.engines.worker.engine import Engine
from coterie.engines.worker.model import PackedModel
from coterie.engines.worker.requests import Output, SamplingSettings, Text, WorkerRequest
from coterie.engines.worker.transfer import Prefilled
from coterie.errors import InputError
from coterie.wire.expert_events import RequestExperts, decode_expert_events
from coterie.wire.kv_events import decode_kv_events

FAMILY = "qwen3_moe"


@cache
def loaded(folder: Path, kv_blocks: int, copy: int) -> PackedModel:
    """Loading takes longer than most tests. Two engines at once need two copies: blocks of one are not the other's."""
    del copy
    return PackedModel(folder, "float32", "cpu", kv_blocks, 4)


class Driver:
    """An engine stepped by hand, and what it gave each request."""

    def __init__(self, folder: Path, copy: int = 0, **settings: Any) -> None:
        self.config = WorkerConfig(folder, **{"block_size": 4, "kv_blocks": 64, **settings})
        self.engine = Engine(loaded(folder, self.config.kv_blocks, copy), self.config, self, self)  # type: ignore[arg-type]
        self.outputs: dict[str, list[Output]] = {}
        self.events: list[RequestExperts] = []
        self.kv: list[Any] = []
        self.published = self.dropped = 0

    def publish(self, payload: bytes) -> None:
        try:
            self.events += [e for e in decode_expert_events(payload).events if isinstance(e, RequestExperts)]
        except InputError:
            self.kv += decode_kv_events(payload).events

    def submit(
        self,
        prompt: list[int],
        count: int = 8,
        hand_over: bool = False,
        prefilled: Prefilled | None = None,
        **sampling: Any,
    ) -> str:
        key = f"r{len(self.outputs)}"
        got = self.outputs.setdefault(key, [])
        settings = SamplingSettings(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **sampling})
        text = Text(lambda ids: self.engine.model.tokenizer.decode(ids, skip_special_tokens=True), settings.stop)
        self.engine.submit(
            WorkerRequest(key, f"client-{key}", prompt, settings, text, got.append, hand_over, prefilled)
        )
        return key

    def run(self) -> None:
        for _ in range(10_000):
            if not self.engine.step() and self.engine.idle:
                break
        else:
            raise AssertionError("it never ends")
        check_blocks(self.engine.blocks)

    def tokens(self, key: str) -> list[int]:
        return [token for output in self.outputs[key] for token in output.token_ids]

    def count(self, name: str, label: str = "") -> float:
        return self.engine.metrics.get(name, label)


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, models.VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def check_experts(driver: Driver, family: str = FAMILY) -> None:
    """Every published request against one forward pass over all its tokens."""
    for event in driver.events:
        if event.finish == "abort":
            continue
        key = event.request_id.removeprefix("client-")
        assert event.output_tokens == len(driver.tokens(key))
        assert len(event.tokens()) == event.prompt_tokens + event.output_tokens - 1, "the last was never fed back"
        np.testing.assert_array_equal(event.ids(), models.captured(family, event.tokens().tolist()))
