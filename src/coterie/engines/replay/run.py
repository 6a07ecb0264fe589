"""Run decode batches in vLLM on this machine and time whole steps.

Every token takes its recorded experts in every layer (:mod:`coterie.engines.calibration.imposed`); weights are random.
Steps of equal size run one after the other, routers in turn, so that clock drift affects all equally. All requests have
the same number of cached tokens, whatever they had where the batches were formed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from coterie.engines.calibration.calibrate import model_config
from coterie.engines.calibration.imposed import ImposedEngine
from coterie.engines.calibration.timing import describe_hardware, find_device
from coterie.engines.replay.batches import ReplayBatches
from coterie.errors import check_at_least
from coterie.types import Report, WeightDtype

CHUNK = 96
"""Steps after which new requests take the place of the old, so that their contexts stay alike."""
PROMPT = 2048
"""Tokens of a step that computes contexts."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the steps, and the model, device and engine of the measurement."""

    model: str
    dtype: WeightDtype
    hardware: dict[str, str | int | float]
    software: str
    """Versions of the engine and of torch."""
    context: int
    """Cached tokens per request, on average."""
    repeats: int
    spread_pct: float
    """Median over steps of (longest − shortest repeat) ÷ 2 ÷ the median."""
    step_us: dict[str, dict[str, list[float]]]
    """Microseconds of each step from forward pass to sampled token, by group and router; median of the repeats."""


def measure_batches(
    batches: ReplayBatches, model: Path, context: int = 1024, repeats: int = 3, report: Report = lambda *_: None
) -> Measured:
    """Time every step `repeats` times in vLLM; `model` is a model's folder or its config.json. One run per process."""
    check_at_least(1, repeats=repeats, context=context)
    config, spec = model_config(model)
    device = find_device("auto", "replay")
    batches.check(spec)
    runs = [steps for routers in batches.groups.values() for steps in routers.values()]
    order = _turns([len(steps) for steps in runs])
    ends = np.cumsum([len(runs[run][step]) for run, step in order])
    ids = np.concatenate([runs[run][step] for run, step in order])
    sizes: dict[int, list[int]] = {}
    for place, (run, step) in enumerate(order):
        sizes.setdefault(len(runs[run][step]), []).append(place)
    report("start vLLM", 0, len(order))
    engine = ImposedEngine(config, spec, ids, (PROMPT,), context + 2 * CHUNK, max(sizes))
    samples: list[list[float]] = [[] for _ in order]
    done = 0
    for rows, places in sizes.items():
        at = np.array([np.arange(ends[place] - rows, ends[place]) for place in places])
        for first in range(0, len(places) * repeats, CHUNK):
            turn = np.arange(first, min(first + CHUNK, len(places) * repeats)) % len(places)
            report("steps", done, len(order) * repeats)
            for timed in engine.decode(context, at[turn]):
                samples[places[turn[timed.number]]].append(timed.us)
            done += len(turn)
    medians: dict[tuple[int, int], float] = dict(zip(order, map(statistics.median, samples), strict=True))
    named = [(group, router) for group, routers in batches.groups.items() for router in routers]
    step_us: dict[str, dict[str, list[float]]] = {group: {} for group in batches.groups}
    for run, (group, router) in enumerate(named):
        step_us[group][router] = [round(medians[run, step], 3) for step in range(len(runs[run]))]
    spreads = [(max(times) - min(times)) / 2 / statistics.median(times) for times in samples]
    return Measured(
        model=spec.name,
        dtype=spec.weight_dtype,
        hardware=describe_hardware(device),
        software=engine.version,
        context=context + CHUNK // 2,
        repeats=repeats,
        spread_pct=round(100 * statistics.median(spreads), 3),
        step_us=step_us,
    )


def _turns(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the order of (run, step): step 0 of every run, then step 1, …; the first run rotates."""
    runs = len(steps)
    return list(
        chain.from_iterable(
            [(run, step) for run in ((step + place) % runs for place in range(runs)) if step < steps[run]]
            for step in range(max(steps))
        )
    )
