"""Continuous batching for real, on the shipped model: the strategy's order, the same tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.torch

from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

from coterie.batching.scheduler import Scheduler, SchedulerConfig  # noqa: E402
from coterie.engines.tiny import tiny_model_path  # noqa: E402
from coterie.engines.transformers import load_model  # noqa: E402
from coterie.engines.transformers.dry_run import dry_run_table  # noqa: E402
from coterie.engines.transformers.scheduler import register_scheduler  # noqa: E402
from coterie.engines.waiting_settings import OrderingSettings  # noqa: E402
from coterie.errors import ConfigError, UnknownNameError  # noqa: E402
from coterie.predictors import PredictRequest, TokenTable  # noqa: E402

REQUESTS, PLACES, TOKENS = 60, 8, 3


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(tiny_model_path()).model


@pytest.fixture(scope="module")
def table_file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("table") / "table.safetensors"
    dry_run_table(model).save(file)
    return file


@pytest.fixture(scope="module")
def prompts(model: Any) -> list[list[int]]:
    """In bursts of like requests: each takes its tokens from a part of the vocabulary."""
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    starts = np.repeat(rng.integers(10, vocabulary - 64, REQUESTS // 10), 10)
    return [rng.integers(start, start + 64, rng.integers(4, 12)).tolist() for start in starts]


def serve(
    model: Any,
    prompts: list[list[int]],
    scheduler: str,
    cancel: tuple[str, ...] = (),
    tokens: int = TOKENS,
    **config: Any,
) -> dict[str, Any]:
    """All of them wait before the first starts. Finished outputs by id."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            **{
                "page_size": 16,
                "num_blocks": 64,
                "max_batch_tokens": 256,
                "max_requests_per_batch": PLACES,
                "allow_block_sharing": False,
                "scheduler_type": scheduler,
                **config,
            }
        ),
    )
    for number, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=f"r{number}")
    for request in cancel:
        manager.cancel_request(request)
    manager.start()
    try:
        found: dict[Any, Any] = {}
        while len(found) < len(prompts) - len(cancel):
            result = manager.get_result(timeout=60)
            assert result is not None, "the loop ended"
            if result.is_finished() and result.request_id not in cancel:
                found[result.request_id] = result
        return found
    finally:
        manager.stop(block=True)


def started(found: dict[str, Any]) -> list[int]:
    """Numbers of requests as they left the queue."""
    return [int(name[1:]) for name in sorted(found, key=lambda name: found[name].lifespan[0])]


def test_order_follows_the_strategy_and_no_token_changes(
    model: Any, table_file: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    plain = serve(model, prompts, "fifo")
    assert started(plain) == list(range(REQUESTS))
    table = TokenTable.load(table_file)
    loads = [table.predict(PredictRequest(token_ids=np.array(prompt), num_tokens=1)) for prompt in prompts]
    for strategy in ("greedy_variance", "power_of_d", "fcfs"):
        log = tmp_path / f"{strategy}.jsonl"
        settings = OrderingSettings(
            strategy=strategy, loads=str(table_file), max_skips=3, seed=4, decisions=str(log), window_size=32
        )
        ours = serve(model, prompts, register_scheduler(settings))
        assert {name: out.generated_tokens for name, out in ours.items()} == {
            name: out.generated_tokens for name, out in plain.items()
        }
        config = SchedulerConfig(strategy=strategy, max_skips=3, max_batch_size=PLACES)
        replay = Scheduler(config, config.make(), np.array(loads), np.random.default_rng(4))
        for number in range(len(loads)):
            replay.push(number, 0.0)
        expected: list[int] = []
        while len(replay):
            expected += replay.next_batch(np.zeros(loads[0].shape)).items
        assert started(ours) == expected, strategy
        assert (expected == list(range(REQUESTS))) is (strategy == "fcfs")
        assert max(max(json.loads(line)["skipped"]) for line in log.read_text().splitlines()) <= 3


def test_cancelled_requests_and_tight_memory(
    model: Any, table_file: Path, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that are put back for want of memory, or go away while they wait, change nothing for the others."""
    plain = serve(model, prompts[:24], "fifo", tokens=12)
    name = register_scheduler(OrderingSettings(strategy="random", loads=str(table_file)))
    cancelled = ("r3", "r17", "r23")
    library = logging.getLogger("ContinuousBatchingLogger")
    with caplog.at_level(logging.INFO, library.name):
        ours = serve(model, prompts[:24], name, cancelled, tokens=12, num_blocks=20, page_size=4, safety_margin=0.0)
    assert any("Offloaded" in record.message for record in caplog.records), "memory was not tight"
    assert set(ours) == set(plain) - set(cancelled)
    assert all(out.generated_tokens == plain[request].generated_tokens for request, out in ours.items())


def test_nothing_known_is_the_order_of_arrival(
    model: Any, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    name = register_scheduler(OrderingSettings(strategy="greedy_variance"))
    assert started(serve(model, prompts[:24], name)) == list(range(24))
    assert sum("known load" in record.message for record in caplog.records) == 1


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(UnknownNameError, match="strategy"):
        register_scheduler(OrderingSettings(strategy="none"))
    with pytest.raises(ConfigError, match="fifo"):
        register_scheduler(OrderingSettings(strategy="lpt"), "fifo")
