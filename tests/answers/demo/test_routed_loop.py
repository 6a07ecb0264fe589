"""What the loop computes without workers: prompts of whole blocks, and predicted steps."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.answers.demo.loop import whole_blocks
from coterie.answers.demo.runs import REFERENCE_SHAPE, LoopResult, RouterRun, predicted_step_ms
from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.gateway.proxy import FleetCounts, Served
from coterie.models import get_model
from coterie.wire.expert_events import RequestExperts
from routed_prediction import StepLine, line_model, step_line

MODEL = step_model(get_model(REFERENCE_SHAPE), "h200")


@given(st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=12), st.integers(1, 8), st.integers(1, 2))
def test_prompts_are_cut_to_whole_blocks(prompts: list[list[int]], block_size: int, over: int) -> None:
    tail = [7, 8]
    prompts = [[*prompt, *tail] for prompt in prompts]
    cut = whole_blocks(prompts, block_size, over)
    assert len({tuple(prompt) for prompt in cut}) == len(cut), "no request twice"
    for prompt in cut:
        assert len(prompt) >= block_size + over
        assert len(prompt) % block_size == over % block_size
        if len(prompts) > 1:
            assert prompt[-2:] == tail, "the template's last words stay"
            assert any(prompt[:-2] == whole[: len(prompt) - 2] for whole in prompts)


def test_whole_blocks_by_hand() -> None:
    one, two = [1, 2, 3, 4, 5, 6, 9], [3, 2, 1, 0, 9]
    assert whole_blocks([one, two], 4) == [[1, 2, 3, 4, 9], [3, 2, 1, 0, 9]]
    assert whole_blocks([one, two], 4, 2) == [[1, 2, 3, 4, 5, 9]]
    assert whole_blocks([one, one], 3) == [one]
    assert whole_blocks([], 4) == []


def test_more_experts_and_more_requests_take_longer() -> None:
    few, more, most = (predicted_step_ms(distinct, 8, 100, MODEL) for distinct in (10, 10.5, 11))
    assert few < more < most
    assert more == pytest.approx((few + most) / 2)
    assert predicted_step_ms(10, 8, 100, MODEL) < predicted_step_ms(10, 8.5, 100, MODEL)
    assert predicted_step_ms(4, 1, 100, MODEL) < predicted_step_ms(10, 8, 100, MODEL)


def run_of(*logs: list[tuple[float, int, float]], served: list[Served] = []) -> RouterRun:  # noqa: B006  (not kept)
    log = [np.array([(*step, 0.0) for step in steps]) for steps in logs]
    return RouterRun("any", log, 1.0, served, FleetCounts())


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
    even, uneven = (run_of(random_steps(rng, ids, sizes)) for sizes in ([6] * 3000, [1, 11] * 1500))
    result = LoopResult([even, uneven], 0, cast(Any, None), 0.0, 0.0, even, [], [event_of(ids, 0)])
    assert result.saving_pct(uneven) > 20
    assert result.saving_at_equal_rows_pct(uneven) == pytest.approx(0, abs=1.5)
    assert result.against_random(even) == pytest.approx(1, abs=0.015)
    assert even.rows_per_step == uneven.rows_per_step == 6
    assert uneven.distinct_by_token > uneven.distinct_per_step


def served_by(worker: int, start: float, end: float) -> Served:
    return Served("a", None, worker, None, "", start, 0.0, end - start)


def test_a_line_is_found_again_and_idle_time_is_left_out() -> None:
    """Steps of 2 + rows seconds; between the two requests the worker had nothing to do."""
    ends = np.cumsum([2 + rows for rows in (1, 3, 2, 3)])
    first = [(float(end), rows, 4.0) for end, rows in zip(ends, (1, 3, 2, 3), strict=True)]
    later = [(end + 100.0, rows, 4.0) for end, rows, _ in first]
    run = run_of(first + later, served=[served_by(0, 0.0, ends[-1]), served_by(0, 100.0, 100.0 + ends[-1])])
    line = step_line(run)
    assert (line.fixed_s, line.row_s) == pytest.approx((2, 1))
    assert line.steps == 6
    assert line.speeds == pytest.approx((1,))
    within = sum(rows * (2 + rows) for rows in (1, 3, 2, 3))
    assert line.outside_s == max(0, ends[-1] - within)
    waited = run._replace(served=[served_by(0, 0.0, ends[-1]), served_by(0, 100.0, 100.0 + ends[-1] + 60.0)])
    assert step_line(waited).outside_s == pytest.approx((2 * ends[-1] + 60.0 - 2 * within) / 2)


def test_a_worker_that_is_twice_as_fast_is_found() -> None:
    logs, served = [], []
    for worker, seconds in enumerate((1.0, 2.0)):
        logs.append([(seconds * step, 4, 4.0) for step in range(50)])
        served.append(served_by(worker, -1.0, 200.0))
    line = step_line(run_of(*logs, served=served))
    assert line.speeds[0] == pytest.approx(2 * line.speeds[1])
    assert line.fixed_s == pytest.approx(1.5)


@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.1), st.integers(1, 20))
def test_a_line_model_takes_what_the_line_says(fixed: float, row: float, rows: int) -> None:
    model = line_model(get_model(REFERENCE_SHAPE), StepLine(fixed, row, (1.0,), 0.0, 2))
    load = np.zeros((model.spec.num_moe_layers, model.spec.num_experts), np.int64)
    load[:, : model.spec.top_k] = rows
    seconds = model.step(load, Batch(decode_requests=rows, decode_context=0)).total_s
    assert seconds == pytest.approx(fixed + row * rows, rel=1e-5)
