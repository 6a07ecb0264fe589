"""The loop reads no clock and draws nothing of its own: the same inputs give the same events."""

from __future__ import annotations

from typing import Any

import numpy as np

from control_traffic import BATCH, NEW, OLD, SETTINGS, SHAPE, band, drive, fitted, made_requests
from coterie.control import ControlLoop, LoadSeen
from coterie.types import Placement

INPUTS = ("applied", "bind", "candidate", "fit_failed", "follow", "observe", "resize", "swapped", "tick", "written")


class Noted:
    """A loop whose inputs are noted."""

    def __init__(self, loop: ControlLoop) -> None:
        self.loop = loop
        self.inputs: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.loop, name)
        if name not in INPUTS:
            return found

        def note(*values: Any) -> Any:
            self.inputs.append((name, values))
            return found(*values)

        return note


def test_the_same_inputs_give_the_same_events() -> None:
    rng = np.random.default_rng(1)
    fit = fitted(made_requests(np.random.default_rng(0), OLD, 64))
    noted = Noted(ControlLoop(SHAPE, fit, band, SETTINGS, batch=BATCH))
    drive(noted, made_requests(rng, OLD, 40))  # type: ignore[arg-type]
    noted.observe("nonsense")
    noted.observe(LoadSeen(40.0, "w0", np.ones((SHAPE.num_layers, SHAPE.num_experts)), 5, 1.0))
    noted.tick(float("nan"))
    drive(noted, made_requests(rng, NEW, 200, 40))  # type: ignore[arg-type]
    noted.bind({"w0": 1, "w1": None}, {"w0": 0, "w1": 1})
    noted.written(3, "map.json", 60.0)
    noted.follow("w0", 1, Placement.linear(SHAPE.num_layers, SHAPE.num_experts, 2))
    noted.resize(3)
    noted.fit_failed("nothing was under way")
    noted.tick(300.0)
    loop, again = noted.loop, ControlLoop(SHAPE, fit, band, SETTINGS, batch=BATCH)
    assert "refit_taken" in [event.kind for event in loop.events]
    job = None
    for name, values in noted.inputs:
        if name == "candidate":
            assert job is not None, "a fit comes from a job"
            values = (job.run(), values[1])  # a job is pure
        told = getattr(again, name)(*values)
        job = told.job or job if name == "tick" else job
    assert list(again.events) == list(loop.events)
    assert again.counters == loop.counters
    assert again.status() == loop.status()
