"""The line through a fleet's measured steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.answers.demo.runs import REFERENCE_SHAPE
from coterie.costs.step import Batch
from coterie.models import get_model
from routed_fleet import FleetCounts, Served
from routed_prediction import StepLine, line_model, step_line
from routed_runs import RouterRun


def run_of(*logs: list[tuple[float, int, float]], served: list[Served] = []) -> RouterRun:  # noqa: B006  (not kept)
    log = [np.array([(*step, 0.0) for step in steps]) for steps in logs]
    return RouterRun("any", log, 1.0, served, FleetCounts())


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
