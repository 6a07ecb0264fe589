"""Single steps of a fleet, drawn from its newest requests: what a placement is planned for and scored on.

A request that decodes n tokens is in n steps, and brings to each, on average, 1/n of its footprint. As many requests
are drawn into a step as make up the tokens a step that the workers report; the steps are then brought to the mean load
that they report. Wrong where requests of one kind come together: they are drawn as if in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.random import Generator

from coterie.control.traffic import Kept
from coterie.placement import Load
from coterie.placement.scenarios import at_mean, steps_of_requests

SCENARIOS = 32
"""Steps that are drawn."""
FEWEST = 16
"""Requests below which none are drawn."""
MOST_REQUESTS = 256
"""Newest requests that steps are drawn from."""


def with_steps(load: Load, requests: Sequence[Kept], rng: Generator) -> Load:
    """The load with steps of these requests; the load itself where they are too few."""
    newest = requests[-MOST_REQUESTS:]
    if len(newest) < FEWEST:
        return load
    # Summed as integers first: an array of single precision, not of double, for hundreds of footprints.
    shares = np.stack([(one.prefill + one.decode).astype(np.float32) / max(1.0, one.tokens) for one in newest])
    mean = load.tokens / load.steps
    each, total = float(shares.sum(dtype=np.float64)) / len(newest), float(mean.sum())
    if each <= 0 or total <= 0:
        return load
    steps = steps_of_requests(shares, max(1, round(total / each)), SCENARIOS, rng)
    return replace(load, scenarios=at_mean(steps, None, mean))
