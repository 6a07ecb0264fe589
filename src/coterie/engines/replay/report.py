"""Report of a replay: each router's measured and predicted time, and its saving against the first router.

Intervals come from a bootstrap over blocks of n^(1/3) neighbouring steps, since neighbours share their requests. The
intervals are too narrow if requests stay much longer than a block; use steps that are further apart then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.cells import step_load
from coterie.costs.step import Batch, StepModel
from coterie.engines.replay.batches import ReplayBatches, Steps
from coterie.engines.replay.run import Measured
from coterie.errors import TraceError, check

DRAWS = 2000


class ReplayRow(NamedTuple):
    """Result of one router in one group. Times are of whole steps."""

    group: str
    router: str
    steps: int
    tokens: float
    """Mean tokens per step."""
    active_experts: float
    """Mean number of distinct experts per layer and step."""
    mean_us: float
    median_us: float
    predicted_us: float
    """Mean predicted microseconds per step."""
    saving_pct: float
    """Saving of mean step time against the group's first router, in percent."""
    saving_low_pct: float
    saving_high_pct: float
    """Upper end of the saving's 95% interval; `saving_low_pct` is the lower end."""
    paired: bool
    """Whether step i has the same number of tokens as step i of the first router; steps are then resampled in pairs."""
    predicted_saving_pct: float
    mape_pct: float
    """Mean over steps of |predicted ÷ measured − 1|."""
    bias_pct: float
    """Mean over steps of predicted ÷ measured − 1."""


def predict_us(steps: Steps, model: StepModel, context: int) -> NDArray[np.float64]:
    """Predict the microseconds of decode steps whose requests have `context` cached tokens each, [step]."""
    batches = [Batch(decode_requests=len(ids), decode_context=len(ids) * context) for ids in steps]
    loads = (step_load(ids, model.spec.num_experts) for ids in steps)
    return np.array([1e6 * model.step(load, batch).total_s for load, batch in zip(loads, batches, strict=True)])


def _saving_pct(base: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return 100.0 * (1.0 - float(other.mean() / base.mean()))


def saving_interval(
    base: NDArray[np.float64], other: NDArray[np.float64], paired: bool, rng: Generator, draws: int = DRAWS
) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the saving in mean step time; `paired` draws the same steps of both."""
    first = _blocks(len(base), draws, rng)
    second = first if paired else _blocks(len(other), draws, rng)
    savings = 1.0 - other[second].mean(axis=1) / base[first].mean(axis=1)
    low, high = np.percentile(savings, [2.5, 97.5]).tolist()
    return low, high


def _blocks(steps: int, draws: int, rng: Generator) -> NDArray[np.int64]:
    """Draw step indices [draw, step] in blocks of neighbours; the first step follows the last."""
    length = max(1, round(steps ** (1 / 3)))
    starts = rng.integers(0, steps, size=(draws, -(-steps // length)))
    return ((starts[:, :, None] + np.arange(length)) % steps).reshape(draws, -1)[:, :steps]


def replay_rows(batches: ReplayBatches, measured: Measured, model: StepModel, rng: Generator) -> list[ReplayRow]:
    """Return one row per group and router."""
    check_step_times(batches, measured)
    rows = []
    for group, routers in batches.groups.items():
        runs = [
            _Run(
                router,
                steps,
                [len(ids) for ids in steps],
                np.array(measured.step_us[group][router]),
                predict_us(steps, model, measured.context),
            )
            for router, steps in routers.items()
        ]
        rows += [_row(group, run, runs[0], model.spec.num_experts, rng) for run in runs]
    return rows


class _Run(NamedTuple):
    router: str
    steps: Steps
    tokens: list[int]
    us: NDArray[np.float64]
    predicted_us: NDArray[np.float64]


def _row(group: str, run: _Run, first: _Run, num_experts: int, rng: Generator) -> ReplayRow:
    paired = run.tokens == first.tokens
    low, high = (0.0, 0.0) if run is first else saving_interval(first.us, run.us, paired, rng)
    off = run.predicted_us / run.us - 1.0
    active = [(step_load(ids, num_experts) > 0).sum(axis=1).mean() for ids in run.steps]
    return ReplayRow(
        group=group,
        router=run.router,
        steps=len(run.steps),
        tokens=round(float(np.mean(run.tokens)), 3),
        active_experts=round(float(np.mean(active)), 3),
        mean_us=round(float(run.us.mean()), 3),
        median_us=round(float(np.median(run.us)), 3),
        predicted_us=round(float(run.predicted_us.mean()), 3),
        saving_pct=round(_saving_pct(first.us, run.us), 3),
        saving_low_pct=round(100.0 * low, 3),
        saving_high_pct=round(100.0 * high, 3),
        paired=paired,
        predicted_saving_pct=round(_saving_pct(first.predicted_us, run.predicted_us), 3),
        mape_pct=round(100.0 * float(np.abs(off).mean()), 3),
        bias_pct=round(100.0 * float(off.mean()), 3),
    )


def check_step_times(batches: ReplayBatches, measured: Measured) -> None:
    """Raise ConfigError unless the times have the groups, routers and step counts of the batches."""
    wanted = {g: {r: len(steps) for r, steps in routers.items()} for g, routers in batches.groups.items()}
    counts = {g: {r: len(times) for r, times in routers.items()} for g, routers in measured.step_us.items()}
    check(wanted == counts, f"times of other batches: they hold {counts} steps; the batches hold {wanted}")


def read_measured(path: Path) -> Measured:
    """Read the times from a file that ``coterie replay -o`` wrote."""

    class File(msgspec.Struct):
        measured: Measured

    if not path.is_file():
        raise TraceError(path, "file", "not found; expected what coterie replay -o wrote (JSON)")
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=File).measured
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, "measured", str(error)) from None
    for group, routers in measured.step_us.items():
        for router, times in routers.items():
            if not all(np.isfinite(us) and us > 0 for us in times):
                raise TraceError(path, "measured", f"{group}, {router}: every step_us must be above 0")
    return measured


def replay_notes(measured: Measured, model: StepModel, preset: str) -> list[str]:
    """Return caveats for reading the numbers."""
    notes = [
        f"{measured.model} in {measured.dtype} on {measured.hardware['device']}, {measured.software}; predicted for "
        f"{preset}",
        f"{measured.context} cached tokens a request; repeats of a step differ by ±{measured.spread_pct:.2g}% "
        f"({measured.repeats} each)",
    ]
    if model.caveat:
        notes.append(model.caveat)
    return notes


def replay_json(measured: Measured, rows: Sequence[ReplayRow], notes: Sequence[str]) -> dict[str, Any]:
    return {"rows": [row._asdict() for row in rows], "notes": list(notes), "measured": msgspec.to_builtins(measured)}
