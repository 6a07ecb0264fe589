"""Measure this machine for a model: whole steps in vLLM, and copies. The steps have even and drawn routing."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.costs.cells import ContentionCell, CopyCell, Measurement, StepCell, step_load
from coterie.engines.calibration.collectives import measure_collectives
from coterie.engines.calibration.contention import measure_contention
from coterie.engines.calibration.imposed import LARGEST_GRAPH, LEFT_OUT, ImposedEngine, TimedStep
from coterie.engines.calibration.timing import describe_hardware, describe_software, event_us, find_device
from coterie.engines.optional import torch
from coterie.errors import check, check_new_file
from coterie.models import model_from_config, models
from coterie.traces.activations import ActivationTrace
from coterie.types import ModelSpec, Report

if TYPE_CHECKING:
    from coterie.costs.presets import Preset


Rows = NDArray[np.int64]

ZIPF = 0.8
"""Exponent of the popularity of experts that are drawn."""
DECODED = 20
"""Tokens that a request has decoded when a step is timed, about the mean."""
DECODED_MOST = 256
"""Room for the tokens that a request decodes in one job."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """Sizes of the steps to time."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    """Requests of decode steps: all sizes of vLLM's graphs, since the time between two of them is no straight line."""
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Cached tokens per request of decode steps; levels of distinct experts are timed at the second."""
    prompts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    draws: int = 16
    """Drawn batches of a cell; even ones are a quarter of that for each number of experts."""
    repeats: int = 3

    def within(self, longest: int) -> StepGrid:
        """Return the sizes that a model with so many positions can run."""
        contexts = tuple(context for context in self.contexts if context + DECODED_MOST <= longest)
        prompts = tuple(tokens for tokens in self.prompts if tokens + DECODED_MOST <= longest)
        check(
            len(contexts) >= 2 and prompts, f"a model of {longest} positions is too short for contexts {self.contexts}"
        )
        return StepGrid(self.rows, contexts, prompts, self.draws, self.repeats)


class _Job(NamedTuple):
    prompts: int
    context: int
    at: Rows
    """[step, token] rows of the ids."""
    even: tuple[bool, ...]
    """[step]"""
    left_out: bool = False


class RoutedTokens(NamedTuple):
    """Experts of tokens by request."""

    ids: NDArray[np.integer]
    """[token, layer, k]"""
    offsets: NDArray[np.int64]
    """[request + 1] the first token of each request."""

    @classmethod
    def of(cls, trace: ActivationTrace) -> RoutedTokens:
        tokens, offsets = trace.arrays()
        return cls(tokens.expert_ids, np.asarray(offsets))

    @classmethod
    def draw(cls, spec: ModelSpec, requests: int = 96, tokens: int = 96) -> RoutedTokens:
        """Draw tokens with some experts more popular than others, and requests that differ in which."""
        rng, shape = np.random.default_rng(0), (spec.num_moe_layers, spec.num_experts)
        popular = -ZIPF * np.log1p(rng.permuted(np.broadcast_to(np.arange(shape[1]), shape), axis=1))
        parts = []
        for _ in range(requests):
            likely = popular + rng.normal(size=shape) + rng.gumbel(size=(tokens, *shape))
            parts.append(np.argpartition(-likely, spec.top_k, axis=2)[:, :, : spec.top_k].astype(np.uint16))
        return cls(np.concatenate(parts), np.arange(requests + 1) * tokens)


class _Tokens:
    """All tokens of a calibration: those given, then those made for even routing."""

    def __init__(self, spec: ModelSpec, given: RoutedTokens, rng: Generator) -> None:
        self.spec, self.rng, self.offsets = spec, rng, given.offsets
        self.parts, self.size = [given.ids], len(given.ids)

    def drawn(self, rows: int) -> Rows:
        """Draw a token of each of `rows` requests; half of the time of neighbours, which are alike."""
        requests = len(self.offsets) - 1
        near, first = self.rng.random() < 0.5, self.rng.integers(requests)
        chosen = (first + np.arange(rows)) % requests if near else self.rng.integers(requests, size=rows)
        return self.rng.integers(self.offsets[chosen], self.offsets[chosen + 1])

    def stretch(self, tokens: int) -> Rows:
        """Draw `tokens` neighbouring tokens; a short trace is repeated."""
        total = int(self.offsets[-1])
        return np.asarray((self.rng.integers(total) + np.arange(tokens)) % total, np.int64)

    def even(self, rows: int, distinct: int) -> Rows:
        """Make tokens that take `distinct` experts in turn, others in every layer."""
        spec = self.spec
        turn = (np.arange(rows * spec.top_k) % distinct).reshape(rows, spec.top_k)
        ids = np.stack([self.rng.permutation(spec.num_experts)[turn] for _ in range(spec.num_moe_layers)], axis=1)
        self.parts.append(ids.astype(self.parts[0].dtype))
        self.size += rows
        return np.arange(self.size - rows, self.size)


def _levels(spec: ModelSpec, rows: int) -> list[int]:
    most = min(spec.num_experts, rows * spec.top_k)
    step = max(spec.top_k, spec.num_experts // 8)
    return sorted({spec.top_k, *range(step, most + 1, step), most})


def _jobs(grid: StepGrid, tokens: _Tokens) -> Iterator[_Job]:
    spec, rng = tokens.spec, tokens.rng
    for rows in grid.rows:
        for context in grid.contexts:
            steps = [tokens.drawn(rows) for _ in range(grid.draws)]
            levels = _levels(spec, rows) if context == grid.contexts[1] else []
            steps += [tokens.even(rows, level) for level in levels for _ in range(max(1, grid.draws // 8))]
            order = np.concatenate([rng.permutation(len(steps)) for _ in range(grid.repeats)])
            yield _Job(0, context, np.array(steps)[order], tuple((order >= grid.draws).tolist()))
    for size in grid.prompts:
        spread, drawn = tokens.even(size, spec.num_experts), [tokens.stretch(size) for _ in range(grid.repeats)]
        yield _Job(1, 0, np.array([spread] * grid.repeats), (True,) * grid.repeats)
        yield _Job(1, 0, np.array(np.repeat(drawn, 2, axis=0)), (False,) * (2 * grid.repeats))
        several = [8] if size == max(n for n in grid.prompts if n <= LARGEST_GRAPH) else []
        for prompts in (1, *several):
            at = np.array([tokens.stretch(size + LEFT_OUT)] * grid.repeats)
            yield _Job(prompts, 0, at, (True,) * grid.repeats, left_out=True)


def measure_steps(
    config: dict[str, Any], spec: ModelSpec, given: RoutedTokens, grid: StepGrid, report: Report
) -> tuple[str, list[StepCell]]:
    """Run the grid in vLLM; return its version and a cell for every batch. One run per process.

    vLLM 0.32 on a CPU does not start in a process that has imported Numba; nothing here does.
    """
    tokens = _Tokens(spec, given, np.random.default_rng(0))
    longest = max(*grid.contexts, *grid.prompts) + DECODED_MOST
    jobs = list(_jobs(grid, tokens))
    ids = np.concatenate(tokens.parts)
    report("start vLLM", 0, len(jobs))
    engine = ImposedEngine(config, spec, ids, grid.prompts, longest, max(grid.rows))
    cells: list[StepCell] = []
    for number, job in enumerate(jobs):
        report(f"{spec.name} steps", number, len(jobs))
        steps = engine.prefill(job.prompts, job.at) if job.prompts else engine.decode(job.context, job.at)
        cells += _cells(job, ids, spec, steps)
    return engine.version, cells


def _cells(job: _Job, ids: NDArray[np.integer], spec: ModelSpec, steps: list[TimedStep]) -> Iterator[StepCell]:
    """Yield a cell for every batch of a job: medians over its repeats."""
    repeats: dict[bytes, list[TimedStep]] = {}
    for step in steps:
        repeats.setdefault(job.at[step.number].tobytes(), []).append(step)
    for same in repeats.values():
        rows = job.at[same[0].number]
        load = step_load(ids[rows], spec.num_experts)
        periods = [step.period_us for step in same if step.period_us is not None]
        yield StepCell(
            tokens=len(rows),
            prompts=job.prompts,
            cached=0.0 if job.prompts else len(rows) * (job.context + DECODED),
            load=np.zeros_like(load) if job.left_out else load,
            even=job.even[same[0].number],
            us=float(np.median([step.us for step in same])),
            forward_us=float(np.median([step.forward_us for step in same])),
            period_us=float(np.median(periods)) if periods else np.nan,
        )


LONGEST = 16384
"""Positions of a model whose config does not say."""
COPIES = (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
"""Sizes of copies, in bytes."""
REPEATS = 12
NAMES = ("name", "source", "weight_dtype")
"""Fields in which two configs of one shape may differ."""


def measure_copies(device: Any) -> tuple[CopyCell, ...]:
    """Time copies inside the device, from and to pinned host memory, and to a peer device if there is one."""
    cells = []
    for nbytes in COPIES:
        data = torch.arange(256, dtype=torch.uint8).repeat(nbytes // 256).to(device)
        paths: dict[Any, Any] = {"device": (torch.empty_like(data), data)}  # path → target and source
        if device.type == "cuda":
            host = data.cpu().pin_memory()
            paths |= {"host-to-device": (data, host), "device-to-host": (host, data)}
            if torch.cuda.device_count() > 1:
                paths["peer"] = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1"), data
        for path, (to, source) in paths.items():
            cells.append(CopyCell(path, nbytes, _copy_us(device, to, source)))
    return tuple(cells)


def _copy_us(device: Any, to: Any, source: Any) -> float:
    def once() -> float:
        if device.type == "cuda":
            return event_us(lambda: to.copy_(source, non_blocking=True))
        start = time.perf_counter()
        to.copy_(source)
        return 1e6 * (time.perf_counter() - start)

    return round(statistics.median([once() for _ in range(REPEATS)][2:]), 3)


def model_config(path: Path) -> tuple[dict[str, Any], ModelSpec]:
    """Return the Hugging Face config of a model's folder or file, and its shape, by a known model's name if equal."""
    file = path / "config.json" if path.is_dir() else path
    spec = model_from_config(file)
    known = (one for one in models().values() if one == replace(spec, **{name: getattr(one, name) for name in NAMES}))
    config: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return config, replace(spec, name=next((one.name for one in known), spec.name))


def routed_tokens(spec: ModelSpec, trace: ActivationTrace | None) -> RoutedTokens:
    """Return the tokens of a trace, which must fit the model; drawn ones without a trace."""
    if trace is None:
        return RoutedTokens.draw(spec)
    meta = trace.meta
    check(
        (meta.num_layers, meta.num_experts, meta.top_k) == (spec.num_moe_layers, spec.num_experts, spec.top_k),
        f"the trace is of {meta.model} with {meta.num_layers} MoE layers, top {meta.top_k} of {meta.num_experts}; "
        f"{spec.name} has {spec.num_moe_layers}, top {spec.top_k} of {spec.num_experts}",
    )
    return RoutedTokens.of(trace)


def calibrate(
    config_path: Path,
    name: str,
    trace: ActivationTrace | None = None,
    grid: StepGrid | None = None,
    cells_path: Path | None = None,
    processes: int = 0,
    contention: bool = False,
    report: Report = lambda *_: None,
) -> Preset:
    """Run a model's steps in vLLM on this machine, and return their fit with the copies' as a preset.

    vLLM gets `config_path` (a model's folder or its config.json) and makes random weights. `trace` has the routing of
    half of the steps. `cells_path` is a new .npz file for every timed step, to plot or fit again.
    With `processes`, collectives between as many are measured too; with `contention`, steps beside copies of weights.
    """
    check_new_file(cells_path)
    config, spec = model_config(config_path)
    device, tokens = find_device("auto", "calibration"), routed_tokens(spec, trace)
    slower: tuple[ContentionCell, ...] = ()
    if contention:  # before vLLM takes the memory
        slower = tuple(measure_contention(spec, device, report=report))
        torch.cuda.empty_cache()
    sizes = (grid or StepGrid()).within(int(config.get("max_position_embeddings", LONGEST)))
    software, cells = measure_steps(config, spec, tokens, sizes, report)
    if cells_path is not None:
        write_cells(cells_path, cells, software)
    report("copies", 0, 1)
    copies, hardware = measure_copies(device), describe_hardware(device)
    between = measure_collectives(processes, report=report) if processes else None
    if between and not any(cell.path == "peer" for cell in copies):  # direct copies take another path
        copies += between.peers
    # They import Numba, and vLLM must have started before.
    from coterie.costs.presets import fit_preset
    from coterie.costs.whole_steps import fit_steps

    report("fit", 0, 1)
    fit = fit_steps(spec, spec.weight_dtype, cells, software, int(hardware.get("multiprocessors", 0)))
    today = datetime.date.today().isoformat()
    collectives, note = (between.cells, between.note) if between else ((), "")
    versions = describe_software() | dict(part.split(" ", 1) for part in software.split(", "))  # names the engine
    preset = fit_preset(name, Measurement(hardware, versions, today, (), copies, collectives, slower, note))
    return msgspec.structs.replace(preset, engines={"vllm": {spec.name: {spec.weight_dtype: fit}}})


def write_cells(path: Path, cells: list[StepCell], software: str) -> None:
    """Write timed steps to an .npz file: an array for each field."""
    columns: dict[str, Any] = {name: np.array([getattr(cell, name) for cell in cells]) for name in cells[0]._fields}
    np.savez_compressed(path, software=np.array(software), **columns)
