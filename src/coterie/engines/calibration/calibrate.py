"""Measure this machine for a model: whole steps in vLLM, and copies."""

from __future__ import annotations

import datetime
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from coterie.costs.cells import ContentionCell, CopyCell, Measurement, StepCell
from coterie.engines.calibration.collectives import measure_collectives
from coterie.engines.calibration.contention import measure_contention
from coterie.engines.calibration.step_grid import RoutedTokens, StepGrid, measure_steps
from coterie.engines.calibration.timing import describe_hardware, describe_software, event_us, find_device
from coterie.engines.optional import torch
from coterie.errors import check, check_new_file
from coterie.models import model_from_config, models
from coterie.traces.activations import ActivationTrace
from coterie.types import ModelSpec, Report

if TYPE_CHECKING:
    from coterie.costs.presets import Preset

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
