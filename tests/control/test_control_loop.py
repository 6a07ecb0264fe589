"""The loop on made traffic: it notices a shift, fits anew, takes what is better and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.control import ControlLoop, ControlSettings, FitJob, RequestSeen, Shape
from coterie.routing import Calibration, LocalityBand, Router, RouterFit

SHAPE = Shape("made", num_layers=4, num_experts=16, top_k=2, workers=2)
SETTINGS = ControlSettings(cooldown_s=0.0, score_requests=64, min_requests=64)


def requests(rng: Generator, groups: NDArray[np.int64], count: int, first: int = 0) -> Iterator[RequestSeen]:
    """Requests that each use the experts of one group [group, expert]."""
    for at in range(count):
        liked = groups[rng.integers(len(groups))]
        counts = np.zeros((2, SHAPE.num_layers, SHAPE.num_experts), np.int64)
        for part, tokens in enumerate((20, 40)):
            for layer in range(SHAPE.num_layers):
                for _ in range(tokens):
                    noisy = rng.random() < 0.1
                    pick = rng.choice(SHAPE.num_experts if noisy else liked, SHAPE.top_k, replace=False)
                    counts[part, layer, pick] += 1
        yield RequestSeen(float(first + at), f"r{first + at}", f"w{at % 2}", counts[0], counts[1])


OLD = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
NEW = np.array([[0, 4, 8, 12], [1, 5, 9, 13]])


def fitted(seen: list[RequestSeen]) -> RouterFit:
    known = Calibration(
        np.stack([one.prefill for one in seen]).astype(np.uint32),
        np.stack([one.decode for one in seen]).astype(np.uint32),
        None,
        np.arange(len(seen)),
        False,
        SHAPE.model,
        SHAPE.top_k,
    )
    return FitJob(known, SHAPE.workers, 4, 0).run()


def band(fit: RouterFit) -> Router:
    return LocalityBand(fit, band=0.2)


@pytest.fixture(scope="module")
def old_fit() -> RouterFit:
    return fitted(list(requests(np.random.default_rng(0), OLD, 64)))


def loop_of(fit: RouterFit, settings: ControlSettings = SETTINGS) -> ControlLoop:
    return ControlLoop(SHAPE, fit, band, settings, batch=4)


def drive(loop: ControlLoop, seen: list[RequestSeen]) -> list[str]:
    """Every job is run at once, every swap done at once; the kinds of all events."""
    kinds: list[str] = []
    for one in seen:
        loop.observe(one)
        tick = loop.tick(one.at_s)
        kinds += [event.kind for event in tick.events]
        if tick.job is not None:
            loop.candidate(tick.job.run(), 0.1)
        if tick.use is not None:
            loop.swapped(one.at_s)
    return kinds


def test_an_abrupt_shift_is_noticed_and_the_new_fit_is_taken(old_fit: RouterFit) -> None:
    rng, loop = np.random.default_rng(1), loop_of(old_fit)
    kinds = drive(loop, list(requests(rng, OLD, 96)))
    assert kinds == ["no_drift"]
    kinds = drive(loop, list(requests(rng, NEW, 224, 96)))
    assert kinds[:3] == ["drift", "refit_started", "refit_taken"]
    assert loop.fit is not old_fit
