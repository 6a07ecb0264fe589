"""What the demo computes without workers: predicted steps, and what routers save at equal batch sizes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from coterie.answers.demo.runs import REFERENCE_SHAPE, DemoAnswer, LoopResult, RouterRun, predicted_step_ms
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.wire.expert_events import RequestExperts

MODEL = step_model(get_model(REFERENCE_SHAPE), "h200")


def test_more_experts_and_more_requests_take_longer() -> None:
    few, more, most = (predicted_step_ms(distinct, 8, 100, MODEL) for distinct in (11, 11.5, 12))
    assert few < more < most
    assert more == pytest.approx((few + most) / 2)
    assert predicted_step_ms(10, 16, 100, MODEL) < predicted_step_ms(10, 24, 100, MODEL)
    assert predicted_step_ms(4, 1, 100, MODEL) < predicted_step_ms(10, 8, 100, MODEL)


def run_of(steps: list[tuple[float, int, float]], event: RequestExperts) -> RouterRun:
    return RouterRun("any", [np.array([(*step, 0.0) for step in steps])], 1.0, [DemoAnswer(0, event, "")])


def event_of(ids: np.ndarray, prompt_tokens: int, experts: int = 8) -> RequestExperts:
    tokens = np.arange(len(ids))
    return RequestExperts.pack(
        ids,
        tokens,
        np.ones(len(ids), bool),
        experts,
        request_id="a",
        model="m",
        layer_ids=list(range(ids.shape[1])),
        prompt_tokens=prompt_tokens,
    )


def random_steps(rng: np.random.Generator, ids: np.ndarray, sizes: list[int]) -> list[tuple[float, int, float]]:
    """Steps of tokens drawn at random, ids [token, layer, k]."""
    found = []
    for number, size in enumerate(sizes):
        rows = ids[rng.integers(0, len(ids), size)]
        distinct = np.mean([len(np.unique(rows[:, layer])) for layer in range(ids.shape[1])])
        found.append((float(number), size, float(distinct)))
    return found


def test_batches_at_random_save_nothing_however_uneven_they_are(rng: np.random.Generator) -> None:
    """Small steps touch fewer experts; counted by steps, an uneven router would seem to save."""
    ids = np.array([rng.permutation(8)[:2] for _ in range(600)]).reshape(300, 2, 2)
    event = event_of(ids, 0)
    even, uneven = (run_of(random_steps(rng, ids, sizes), event) for sizes in ([6] * 3000, [1, 11] * 1500))
    result = LoopResult([even, uneven], 0, even, cast(Any, None))
    saving, low, high = result.like_with_like(uneven, rng)
    assert saving == pytest.approx(0, abs=1.5)
    assert low < 0.5
    assert high > -0.5
    assert even.rows_per_step == uneven.rows_per_step == 6
    assert uneven.distinct_by_token > even.distinct_by_token


def test_answers_that_differ_are_counted(rng: np.random.Generator) -> None:
    event = event_of(np.array([rng.permutation(8)[:2] for _ in range(8)]).reshape(4, 2, 2), 2)
    one = run_of([(0.0, 1, 2.0)], event)
    other = one._replace(answers=[DemoAnswer(0, event, "else")])
    assert LoopResult([one, one], 0, one, cast(Any, None)).differing() == 0
    assert LoopResult([one, one, other], 0, one, cast(Any, None)).differing() == 1
