"""The same inputs give the same events, from a log on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from control_traffic import BATCH, NEW, OLD, SETTINGS, SHAPE, band, drive, fitted, made_requests
from coterie.control import ControlLoop, InputLog, LoadSeen, replay
from coterie.errors import TraceError
from coterie.routing import RouterFit
from coterie.types import Placement


@pytest.fixture(scope="module")
def fit() -> RouterFit:
    return fitted(made_requests(np.random.default_rng(0), OLD, 64))


def logged(path: Path, fit: RouterFit) -> ControlLoop:
    rng = np.random.default_rng(1)
    with InputLog(path) as log:
        loop = ControlLoop(SHAPE, fit, band, SETTINGS, batch=BATCH, log=log)
        drive(loop, made_requests(rng, OLD, 40))
        loop.observe("nonsense")  # type: ignore[arg-type]
        loop.observe(LoadSeen(40.0, "w0", np.ones((SHAPE.num_layers, SHAPE.num_experts)), 5, 1.0))
        loop.tick(float("nan"))
        drive(loop, made_requests(rng, NEW, 200, 40))
        loop.applied(3)
        loop.bind({"w0": 1, "w1": None}, {"w0": 0, "w1": 1})
        loop.written(3, "map.json", 60.0)
        loop.follow("w0", 1, Placement.linear(SHAPE.num_layers, SHAPE.num_experts, 2))
        loop.resize(3)
        loop.fit_failed("nothing was under way")
        loop.tick(300.0)
    return loop


def test_a_replay_gives_the_same_events(tmp_path: Path, fit: RouterFit) -> None:
    loop = logged(tmp_path / "log", fit)
    assert "refit_taken" in [event.kind for event in loop.events]
    again = ControlLoop(SHAPE, fit, band, SETTINGS, batch=BATCH)
    assert replay(tmp_path / "log", again) == list(loop.events)
    assert again.counters == loop.counters
    assert again.status() == loop.status()


def test_a_loop_made_otherwise_is_refused(tmp_path: Path, fit: RouterFit) -> None:
    logged(tmp_path / "log", fit)
    other = fitted(made_requests(np.random.default_rng(5), NEW, 64))
    with pytest.raises(TraceError, match="another fit"):
        replay(tmp_path / "log", ControlLoop(SHAPE, other, band, SETTINGS, batch=BATCH + 1))


def test_damaged_logs(tmp_path: Path, fit: RouterFit) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"do":"tick","now_s":1.0}\n{"do":"tick","now_s":2.')  # killed while writing
    loop = ControlLoop(SHAPE, fit, band, SETTINGS, batch=BATCH)
    assert replay(path, loop) == []
    assert loop.intake.now_s == 1.0
    for line in (b"{}\n", b"[1]\n", b'{"do":"dance"}\n', b'{"do":"load","tokens":{"data":"?"}}\n'):
        path.write_bytes(line)
        with pytest.raises(TraceError, match="line 1"):
            replay(path, loop)
    with pytest.raises(FileExistsError):
        InputLog(path)
