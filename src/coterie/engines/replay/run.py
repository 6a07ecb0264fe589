"""Run decode batches through real MoE layers on this device and measure their time.

Every MoE layer of the model has its own weights (random, of the right shape and dtype) and runs the kernels that
calibration measured. Weights therefore stream from memory as in a model: before a layer runs again, all others have
passed through the cache. The timed part is the experts (gate and up, activation, down) of all layers of a step; gating,
gathering and the weighted sum are not timed. Routers alternate step by step, so that clock drift affects all equally.

On CUDA a step is one graph that reads the tokens of each expert from device memory, so that host time does not count.
The times do not hold for engines with other kernels, nor for steps so short that the host cannot keep the device busy
(tiny shapes).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.engines.calibration.experts import Experts
from coterie.engines.calibration.timing import (
    allowed_dtype,
    captured,
    describe_hardware,
    describe_software,
    find_device,
    marks,
)
from coterie.engines.optional import torch
from coterie.engines.replay.batches import ReplayBatches, Steps, step_load
from coterie.errors import UnavailableError, check_at_least
from coterie.types import ModelSpec, Report, WeightDtype

Pending = Callable[[], float]
"""Returns the microseconds of a started step; on CUDA, call it only after the device is done."""

WARM_UP_STEPS = 20
"""Untimed steps of each router before the measurement: clocks rise within milliseconds."""
MEMORY_SHARE = 0.9
"""Maximum share of the free memory for weights."""
TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp8": 0.1}
"""Maximum ‖out − reference‖ ÷ ‖reference‖ by dtype: bf16 products give 0.005, fp8 activations 0.05."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the steps, and the model, device and kernels of the measurement."""

    model: str
    dtype: WeightDtype
    kernel: str
    hardware: dict[str, str | int | float]
    software: dict[str, str]
    layers_held: int
    """Number of MoE layers with their own weights; fewer than the model's if memory is short, then used in rotation."""
    repeats: int
    output_error: float
    """Largest relative error of the layers' outputs against products in float32."""
    spread_pct: float
    """Median over steps of (longest − shortest repeat) ÷ 2 ÷ the median."""
    step_us: dict[str, dict[str, list[float]]]
    """Microseconds of each step's experts over all layers, by group and router; median of the repeats."""


class _Plan(NamedTuple):
    """One step, ready to run."""

    tokens: int
    counts: NDArray[np.int64]
    """[layer, expert] number of rows."""
    sources: Any
    """[layer, row] token of each row, rows sorted by expert; a tensor on the device."""
    ends: Any
    """[layer, expert] row after each expert's last row; a tensor on the device."""


class _Graph(NamedTuple):
    """CUDA graph of all layers of a step, for one batch size; reads `rows` and `ends`."""

    graph: Any
    rows: Any
    ends: Any
    outputs: list[Any]


class Layers:
    """A model's MoE layers on one device."""

    def __init__(self, spec: ModelSpec, dtype: WeightDtype, device: Any, max_tokens: int) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.held = layers_that_fit(spec, dtype, _free_bytes(device))
        self.experts = Experts(spec, dtype, device, self.held)
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        self.x = torch.randn(max_tokens, spec.hidden_size, device=device).to(kind)
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def plan(self, ids: NDArray[np.unsignedinteger]) -> _Plan:
        counts = step_load(ids, self.spec.num_experts)
        sources = np.argsort(ids.transpose(1, 0, 2).reshape(ids.shape[1], -1), axis=1, kind="stable") // ids.shape[2]
        ends = np.cumsum(counts, axis=1).astype(np.int32)
        on_device = (torch.from_numpy(array).to(self.device) for array in (sources, ends))
        return _Plan(len(ids), counts, *on_device)

    def start(self, plan: _Plan) -> Pending:
        """Start one step; on CUDA without waiting, so that the device never waits for the host."""
        if self.device.type != "cuda":
            rows, counts = self.x[plan.sources], plan.counts.tolist()
            began = time.perf_counter()
            for _ in self._run(rows, counts):
                pass
            us = (time.perf_counter() - began) * 1e6
            return lambda: us
        graph = self._fill(plan)
        before, after = marks(2)
        before.record()
        graph.graph.replay()
        after.record()
        return lambda: float(before.elapsed_time(after)) * 1e3

    def outputs(self, plan: _Plan) -> list[Any]:
        """Return each layer's output [row, hidden], computed by the timed path."""
        if self.device.type == "cuda":
            graph = self._fill(plan)
            for output in graph.outputs:
                output.fill_(float("nan"))
            graph.graph.replay()
            return graph.outputs
        return list(self._run(self.x[plan.sources], plan.counts.tolist()))

    def _run(self, rows: Any, counts: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Compute each layer's output on a CPU."""
        return (self.experts.forward(at % self.held, rows[at], None, count) for at, count in enumerate(counts))

    def error(self, plan: _Plan) -> float:
        """Return ‖out − reference‖ ÷ ‖reference‖ with a float32 reference; NaN if an output was not written."""
        rows, difference, norm = self.x[plan.sources], 0.0, 0.0
        for layer, output in enumerate(self.outputs(plan)):
            expected = self._reference(layer, rows[layer].float(), plan.counts[layer])
            difference += float((output.float() - expected).square().sum())
            norm += float(expected.square().sum())
        return float(np.sqrt(difference / norm))

    def _reference(self, layer: int, rows: Any, counts: NDArray[np.int64]) -> Any:
        up, down = self.experts.layers[layer % self.held]
        out, start = torch.empty_like(rows), 0
        for expert in np.flatnonzero(counts):
            mine = slice(start, start + int(counts[expert]))
            start = mine.stop
            first, second = up[expert].float(), down[expert].float()
            if self.dtype == "fp8":
                first, second = first * self.experts.up_scale[expert], second * self.experts.down_scale[expert]
            gate, value = (rows[mine] @ first).chunk(2, dim=-1)
            out[mine] = (torch.nn.functional.silu(gate) * value) @ second
        return out

    def _fill(self, plan: _Plan) -> _Graph:
        """Return the graph for this batch size, with its inputs set to this step."""
        graph = self._graphs[plan.tokens] = self._graphs.get(plan.tokens) or self._capture(plan)
        torch.index_select(self.x, 0, plan.sources.view(-1), out=graph.rows.view(-1, self.spec.hidden_size))
        graph.ends.copy_(plan.ends)
        return graph

    def _capture(self, plan: _Plan) -> _Graph:
        rows, ends = self.x[plan.sources], plan.ends.clone()

        def run() -> list[Any]:
            return [self.experts.forward(at % self.held, rows[at], ends[at], ()) for at in range(len(ends))]

        graph, outputs = captured(run, self._pool)
        return _Graph(graph, rows, ends, outputs)


def layers_that_fit(spec: ModelSpec, dtype: WeightDtype, free_bytes: float) -> int:
    """Return the number of MoE layers whose weights fit in free memory, at most the model's."""
    layer_bytes = spec.num_experts * spec.expert_bytes(dtype)
    fit = int(MEMORY_SHARE * free_bytes / layer_bytes)
    if fit < 1:
        raise UnavailableError(
            f"one MoE layer of {spec.name} in {dtype} takes {layer_bytes / 1e9:.1f} GB, "
            f"and {free_bytes / 1e9:.1f} GB are free"
        )
    return min(spec.num_moe_layers, fit)


def _free_bytes(device: Any) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def measure_batches(
    batches: ReplayBatches,
    spec: ModelSpec,
    device: str = "auto",
    dtype: WeightDtype | None = None,
    repeats: int = 3,
    report: Report | None = None,
) -> Measured:
    """Time every step `repeats` times. Default dtype: bf16 on CUDA, fp32 on a CPU."""
    check_at_least(1, repeats=repeats)
    at = find_device(device, "replay")
    dtype = allowed_dtype(dtype, at, "replayed")
    batches.check(spec)
    report = report or (lambda *_: None)
    report("weights", 0, 1)
    most = max(len(ids) for routers in batches.groups.values() for steps in routers.values() for ids in steps)
    errors: dict[int, float] = {}
    step_us: dict[str, dict[str, list[float]]] = {}
    spreads: list[float] = []
    with torch.inference_mode():
        layers = Layers(spec, dtype, at, most)
        for group, routers in batches.groups.items():
            samples = _measure_group(layers, routers, repeats, errors, partial(report, group))
            step_us[group] = {
                router: [round(statistics.median(times), 3) for times in per_step]
                for router, per_step in zip(routers, samples, strict=True)
            }
            spreads += [
                (max(times) - min(times)) / 2 / statistics.median(times) for times in chain.from_iterable(samples)
            ]
    return Measured(
        model=spec.name,
        dtype=dtype,
        kernel=layers.experts.kernel,
        hardware=describe_hardware(at),
        software=describe_software(),
        layers_held=layers.held,
        repeats=repeats,
        output_error=float(f"{max(errors.values()):.3g}"),
        spread_pct=round(100 * statistics.median(spreads), 3),
        step_us=step_us,
    )


def _measure_group(
    layers: Layers,
    routers: Mapping[str, Steps],
    repeats: int,
    errors: dict[int, float],
    report: Callable[[int, int], None],
) -> list[list[list[float]]]:
    """Return microseconds [router][step][repeat]; add each new batch size's output error to `errors`."""
    plans = [[layers.plan(ids) for ids in steps] for steps in routers.values()]
    for plan in chain.from_iterable(plans):
        if plan.tokens not in errors:
            errors[plan.tokens] = error = layers.error(plan)
            if not error <= TOLERANCE[layers.dtype]:
                raise UnavailableError(
                    f"{layers.experts.kernel} is wrong on this machine: at {plan.tokens} tokens its outputs are "
                    f"{error:.2g} off, at most {TOLERANCE[layers.dtype]} is right"
                )
    turns = _turns([len(steps) for steps in plans])
    for router, step in turns[: WARM_UP_STEPS * len(plans)]:
        layers.start(plans[router][step])
    samples: list[list[list[float]]] = [[[] for _ in steps] for steps in plans]
    for repeat in range(repeats):
        report(repeat, repeats)
        pending = [(router, step, layers.start(plans[router][step])) for router, step in turns]
        if layers.device.type == "cuda":
            torch.cuda.synchronize()
        for router, step, microseconds in pending:
            samples[router][step].append(microseconds())
    return samples


def _turns(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the order of (router, step): step 0 of every router, then step 1, …; the first router rotates."""
    routers = len(steps)
    return [
        (router, step)
        for step in range(max(steps))
        for router in ((step + place) % routers for place in range(routers))
        if step < steps[router]
    ]
