"""What the demo computes without workers: predicted steps, and what routers save at equal batch sizes."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from coterie.answers.demo.run import _draw as draw
from coterie.answers.demo.run import _verdict as verdict
from coterie.answers.demo.runs import REFERENCE_SHAPE, DemoAnswer, LoopResult, RouterRun, predicted_step_ms
from coterie.answers.demo.serving import change_of
from coterie.answers.figures import LIGHT
from coterie.cli.verbs.demo import print_result
from coterie.control.switchback import RouterChange
from coterie.costs.presets import step_model
from coterie.models import get_model
from coterie.wire.expert_events import RequestExperts
from demo_results import CPU, RESULT, ROWS

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


def test_the_cpu_time_of_an_expert_is_found_although_the_machine_is_slower_in_one_run(rng: np.random.Generator) -> None:
    """A router with fewer experts that ran while the machine was slow still shows what an expert costs."""
    event = event_of(np.array([rng.permutation(8)[:2] for _ in range(8)]).reshape(4, 2, 2), 2)

    def measured(fixed_s: float, most: float) -> RouterRun:
        rows = rng.integers(1, 12, 400)
        distinct = rng.uniform(2, most, 400)
        seconds = fixed_s + 7e-4 * rows + 2e-4 * distinct + rng.normal(0, 1e-4, 400)
        return RouterRun("any", [np.column_stack([np.arange(400), rows, distinct, seconds])], 1.0, [])

    result = LoopResult([measured(5e-3, 8.0), measured(9e-3, 6.0)], 0, run_of([(0.0, 1, 2.0)], event), cast(Any, None))
    expert, low, high = result.cpu_s_an_expert(rng)
    assert expert == pytest.approx(2e-4, rel=0.1)
    assert low < 2e-4 < high < 2.5e-4


def test_the_verdict_claims_no_time_that_was_not_measured() -> None:
    said = RESULT.verdict
    assert said.startswith(
        "Fewer experts for coterie-tiny on 3 decoders, 8 requests on each: latency_aware takes 10.6%"
    )
    assert "on an H200, which streams experts from memory, it takes 5.9% off the time of a step, predicted" in said
    assert "on this CPU one expert is 0.27 ms (95% 0.08 to 0.43) of a step of 13.0 ms, so 1.6 fewer are 3.2%" in said
    assert said.endswith("; runs differ by 20%.")
    assert "pays" not in said
    unsure = verdict([ROWS[0], ROWS[1]._replace(interval_pct=(-1.0, 20.0))], CPU._replace(interval_ms=(-0.1, 0.4)))
    assert unsure.startswith("It cannot be told whether experts are fewer")
    assert "too small to be measured" in unsure
    assert verdict([ROWS[0], ROWS[1]._replace(saving_pct=-2.0)], CPU).startswith("No fewer experts")


def test_terminal_figure_page_and_json_give_one_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, json=False)
    printed = capsys.readouterr().out
    assert "10.6% (5.2 to 14.4)" in printed
    assert "CPU\n" not in printed
    assert RESULT.verdict in " ".join(printed.split())
    print_result(RESULT, json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"][1]["saving_pct"], told["rows"][1]["interval_pct"]) == (10.6, [5.2, 14.4])
    assert told["cpu"] == {"step_ms": 13.0, "expert_ms": 0.27, "interval_ms": [0.08, 0.43], "spread_pct": 20.4}
    assert change_of(ROWS) == RouterChange(13.14, 14.70, -10.6, -14.4, -5.2)
    figure = Figure()
    draw(figure, LIGHT, ROWS)
    drawn = [text.get_text() for text in figure.findobj(Text)]
    assert {"14.7", "13.1", "4.26", "4.01"} <= set(drawn)
    assert not [text for text in drawn if "CPU" in text or "%" in text.replace("95% interval", "")]


def test_answers_that_differ_are_counted(rng: np.random.Generator) -> None:
    event = event_of(np.array([rng.permutation(8)[:2] for _ in range(8)]).reshape(4, 2, 2), 2)
    one = run_of([(0.0, 1, 2.0)], event)
    other = one._replace(answers=[DemoAnswer(0, event, "else")])
    assert LoopResult([one, one], 0, one, cast(Any, None)).differing() == 0
    assert LoopResult([one, one, other], 0, one, cast(Any, None)).differing() == 1
