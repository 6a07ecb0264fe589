"""Made traffic for the live loop: requests of groups that each like some experts, and fits to them."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.control import ControlLoop, ControlSettings, FitJob, LoopShape, RequestSeen
from coterie.routing import Calibration, LocalityBand, Router, RouterFit

SHAPE = LoopShape("made", num_layers=4, num_experts=16, top_k=2, workers=2)
SETTINGS = ControlSettings(cooldown_s=0.0, score_requests=64, min_requests=64)
BATCH = 4
OLD = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
"""[group, expert] that requests of a group like."""
NEW = np.array([[0, 4, 8, 12], [1, 5, 9, 13]])


def made_requests(rng: Generator, groups: NDArray[np.int64], count: int, first: int = 0) -> list[RequestSeen]:
    """One request a second, from the first on; each of a random group."""
    found = []
    for at in range(first, first + count):
        weights = np.full(SHAPE.num_experts, 0.02)
        weights[groups[rng.integers(len(groups))]] = 1.0
        found.append(
            RequestSeen(float(at), f"r{at}", f"w{at % 2}", _counts(rng, weights, 20), _counts(rng, weights, 40))
        )
    return found


def _counts(rng: Generator, weights: NDArray[np.float64], tokens: int) -> NDArray[np.int64]:
    """[layer, expert] of tokens that draw their top-k without replacement."""
    keys = np.log(weights) + rng.gumbel(size=(tokens, SHAPE.num_layers, SHAPE.num_experts))
    picked = np.argpartition(-keys, SHAPE.top_k, axis=2)[:, :, : SHAPE.top_k]
    counts = np.zeros((SHAPE.num_layers, SHAPE.num_experts), np.int64)
    layers = np.arange(SHAPE.num_layers)[None, :, None]
    np.add.at(counts, (np.broadcast_to(layers, picked.shape), picked), 1)
    return counts


def calibration_of(seen: list[RequestSeen]) -> Calibration:
    return Calibration(
        np.stack([one.prefill for one in seen]).astype(np.uint32),
        np.stack([one.decode for one in seen]).astype(np.uint32),
        None,
        np.arange(len(seen)),
        False,
        SHAPE.model,
        SHAPE.top_k,
    )


def fitted(seen: list[RequestSeen]) -> RouterFit:
    return FitJob(calibration_of(seen), SHAPE.workers, BATCH, 0).run()


def band(fit: RouterFit) -> Router:
    return LocalityBand(fit, band=0.2)


def loop_of(fit: RouterFit, settings: ControlSettings = SETTINGS) -> ControlLoop:
    return ControlLoop(SHAPE, fit, band, settings, batch=BATCH)


def drive(loop: ControlLoop, seen: list[RequestSeen]) -> list[str]:
    """Observe and tick one by one, run every job and do every swap at once; the kinds of all events."""
    kinds: list[str] = []
    for one in seen:
        loop.observe(one)
        tick = loop.tick(max(one.at_s, loop.intake.now_s))
        kinds += [event.kind for event in tick.events]
        if tick.job is not None:
            loop.candidate(tick.job.run(), 0.1)
        if tick.use is not None:
            loop.swapped(one.at_s)
    return kinds
