"""The tour: one bursty synthetic workload, two kinds of step, three ways to choose what runs together.

Everything is computed as the tour runs: routing is drawn by the generator, steps are timed by the cost model that was
calibrated on an H200. It shows the one idea Coterie is built on: whether to group like requests or to mix unlike ones
depends on what limits the step, so neither habit is right everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.presets import step_model
from coterie.costs.step import Batch, StepModel
from coterie.footprints.counting import footprint
from coterie.models import get_model
from coterie.traces import ActivationTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import generate, presets
from coterie.types import DECODE, PREFILL, Placement, Topology, balancedness

MODEL, RANKS = "qwen3-30b-a3b", 8
WAYS = ("as they come", "alike", "unlike")
Report = Callable[[str, int, int], None]


class DemoRow(NamedTuple):
    """One kind of step under one way of choosing its requests; means over its batches."""

    step: str
    requests: str
    distinct_experts: float
    """Per layer."""
    balancedness: float | None
    """Mean ÷ max rank load; None on one device."""
    experts_ms: float
    """The MoE layers' share of the step."""
    step_ms: float
    against_arrival_pct: float
    """Step time against the order of arrival; negative is faster."""


class DemoResult(NamedTuple):
    rows: list[DemoRow]
    requests: int
    tokens: int
    domains: int
    model: str
    hardware: str


def batches(way: str, domains: NDArray[np.str_], size: int) -> list[NDArray[np.int64]]:
    """The same requests cut into batches in one of three orders; a rest that fills no batch is left out."""
    order = np.arange(len(domains))
    if way == WAYS[1]:
        order = np.argsort(domains, kind="stable")
    elif way == WAYS[2]:
        turn = np.empty(len(domains))
        for name in np.unique(domains):  # spread every domain evenly over the whole
            mine = np.flatnonzero(domains == name)
            turn[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
        order = np.argsort(turn, kind="stable")
    return [order[at : at + size] for at in range(0, len(order) - size + 1, size)]


def run_demo(seed: int = 0, requests: int = 640, report: Report | None = None) -> DemoResult:
    """Draw the workload, then time decode on one device and prefill over eight: the same tokens, three ways."""
    report = report or (lambda *_: None)
    rng = np.random.default_rng(seed)
    spec = get_model(MODEL)
    report("drawing a bursty workload", 0, 1)
    lengths = LognormalLengths(prompt_mean=192, output_mean=48)
    trace = generate(replace(presets["bursty"].shaped_like(spec), lengths=lengths), rng, requests=requests)
    decode = partial(_decode, trace, _decode_positions(trace, rng), step_model(spec, "h200"))
    prefill = partial(_prefill, trace, step_model(spec, "h200", topology=Topology(RANKS)))
    rows = [
        *_rows("decode 1 GPU", trace, 32, decode, report),
        *_rows(f"prefill {RANKS} GPUs", trace, 64, prefill, report),
    ]
    domains = len(set(trace.requests.domains or ()))
    return DemoResult(rows, trace.num_requests, trace.num_tokens, domains, spec.name, "H200")


class _Step(NamedTuple):
    distinct: float
    balance: float | None
    experts_s: float
    seconds: float


def _rows(
    name: str, trace: ActivationTrace, size: int, time: Callable[[NDArray[np.int64]], _Step], report: Report
) -> list[DemoRow]:
    domains, rows = np.asarray(trace.requests.domains), list[DemoRow]()
    for number, way in enumerate(WAYS):
        chosen = batches(way, domains, size)
        steps = []
        for done, batch in enumerate(chosen):
            report(name, number * len(chosen) + done, len(WAYS) * len(chosen))
            steps.append(time(batch))
        seconds = float(np.mean([step.seconds for step in steps]))
        balance = [step.balance for step in steps if step.balance is not None]
        first_ms = rows[0].step_ms if rows else seconds * 1e3
        rows.append(
            DemoRow(
                name, way, float(np.mean([step.distinct for step in steps])),
                float(np.mean(balance)) if balance else None,
                float(np.mean([step.experts_s for step in steps])) * 1e3, seconds * 1e3,
                100 * (seconds * 1e3 / first_ms - 1),
            )
        )  # fmt: skip
    return rows


def _decode_positions(trace: ActivationTrace, rng: Generator) -> NDArray[np.int64]:
    """[request] a token of its answer, or its last where it has none."""
    out = np.empty(trace.num_requests, np.int64)
    for request in range(trace.num_requests):
        phase = trace.request(request).phase
        generated = np.flatnonzero(phase == DECODE)
        out[request] = rng.choice(generated) if len(generated) else len(phase) - 1
    return out


def _decode(
    trace: ActivationTrace, positions: NDArray[np.int64], model: StepModel, requests: NDArray[np.int64]
) -> _Step:
    """Every request generates one token, somewhere in its answer."""
    ids = np.stack([trace.request(int(request)).expert_ids[positions[request]] for request in requests])
    load = footprint(ids, model.spec.num_experts)
    batch = Batch(decode_requests=len(requests), decode_context=int(positions[requests].sum()))
    step = model.step(load, batch)
    return _Step(float((load > 0).sum(axis=1).mean()), None, float(step.moe_s.sum()), step.total_s)


def _prefill(trace: ActivationTrace, model: StepModel, requests: NDArray[np.int64]) -> _Step:
    """All prompts of the batch at once, experts spread over the ranks in order."""
    ids = np.concatenate([trace.request(int(request)).only(PREFILL) for request in requests])
    load = footprint(ids, model.spec.num_experts)
    placement = Placement.linear(len(load), model.spec.num_experts, RANKS)
    batch = Batch(prefill_tokens=len(ids) // RANKS, prefill_requests=max(1, len(requests) // RANKS))
    step = model.step(load, batch, placement)
    balance = balancedness(placement.rank_load(load))
    return _Step(float((load > 0).sum(axis=1).mean()), balance, float(step.moe_s.sum()), step.total_s)
