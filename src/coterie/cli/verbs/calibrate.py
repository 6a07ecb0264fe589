"""``coterie calibrate``: measure this machine for a model's shape and fit the step-time model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from coterie.cli.output import JsonOption, print_json, print_table, reporting
from coterie.errors import ConfigError, check_new_file


def calibrate_command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model whose layer shapes to measure (see coterie models); may be repeated. Default: qwen3-30b-a3b."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Hugging Face config.json to read the layer shapes from.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write the fitted preset to (JSON).")
    ] = None,
    name: Annotated[str, typer.Option(help="Name to give the preset.")] = "local",
    device: Annotated[
        str,
        typer.Option(
            help="Device to measure: auto, cpu, cuda or cuda:N; with --from, a system of the tables: h200_sxm."
        ),
    ] = "auto",
    tables: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Measure nothing, but take an engine's kernels from public tables: aiconfigurator, or a folder.",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="With --from, the engine whose kernels to take: vllm, sglang or trtllm.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Weight dtype of the experts: bf16, fp8 or fp32; may be repeated. Default: what the device supports."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Largest batch to measure, in tokens.", min=1)] = 8192,
    cell_ms: Annotated[
        float, typer.Option(help="Milliseconds to spend on one measurement in one pass.", min=0.1)
    ] = 20.0,
    passes: Annotated[int, typer.Option(help="Passes over the MoE measurements.", min=1)] = 3,
    processes: Annotated[
        int, typer.Option(help="Also measure collectives between this many processes; 0 measures none.", min=0)
    ] = 0,
    contention: Annotated[
        bool,
        typer.Option(
            "--contention",
            help="Also time decode steps of the first model beside copies of its weights: what staged moves cost. "
            "Needs CUDA, and memory for all of the model's layers in bf16.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure the MoE layer, attention, dense projections and copies on this machine, and fit the step-time model.

    On a GPU this takes about half a minute per shape. Without a GPU it measures the CPU, which takes minutes up to
    --max-tokens 128 and far longer above that.
    """
    import msgspec

    from coterie.costs.aiconfigurator import read_tables
    from coterie.costs.presets import fit_preset, save_preset
    from coterie.engines.calibration.calibrate import calibrate
    from coterie.engines.calibration.timing import CalibrationSettings, find_device
    from coterie.models import get_model, model_from_config
    from coterie.types import WeightDtype, check_dtype

    check_new_file(output)
    if output is not None and not output.parent.is_dir():  # fail before measuring
        raise ConfigError(f"{output.parent} is not a folder; the preset cannot be written there")
    specs = [get_model(one) for one in model or ([] if config else ["qwen3-30b-a3b"])]
    if config:
        specs.append(model_from_config(config))
    for one in dtype or []:
        check_dtype(one)
    settings = CalibrationSettings(
        dtypes=cast(tuple[WeightDtype, ...], tuple(dtype or ())),
        tokens=tuple(tokens for tokens in CalibrationSettings().tokens if tokens <= max_tokens),
        cell_ms=cell_ms,
        passes=passes,
    )
    if bool(tables) != bool(engine) or (tables and (processes or contention)):
        raise ConfigError(
            "--from and --engine go together: kernels of vllm, sglang or trtllm; nothing else is measured"
        )
    with reporting("measure") as report:
        if tables and engine:
            measurement = read_tables(specs, device, engine, None, tables, dtype or ())
        else:
            measurement = calibrate(specs, settings, device, report)
        if processes:
            from coterie.engines.calibration.collectives import measure_collectives

            collectives = measure_collectives(processes, report=report)
            # Direct copies between devices, if possible, are already measured; messages of processes take another path.
            direct = any(cell.path == "peer" for cell in measurement.copies)
            measurement = msgspec.structs.replace(
                measurement,
                collectives=collectives.cells,
                copies=measurement.copies if direct else (*measurement.copies, *collectives.peers),
                note="; ".join(filter(None, (measurement.note, collectives.note))),
            )
        if contention:
            from coterie.costs.cells import ContentionCell
            from coterie.engines.calibration.contention import measure_contention

            timings = measure_contention(specs[0], find_device(device, "calibration"), report=report)
            cells = msgspec.convert([one._asdict() for one in timings], tuple[ContentionCell, ...])
            measurement = msgspec.structs.replace(measurement, contention=cells)
        preset = fit_preset(name, measurement, report)
    if output is not None:
        save_preset(preset, output)
    rows = [
        {"preset": name, "model": shape, "dtype": kind, **msgspec.structs.asdict(fit.held_out)}
        for shape, fits in preset.fits.items()
        for kind, fit in fits.moe.items()
    ]
    if json:
        print_json({"preset": msgspec.to_builtins(preset), "rows": rows})
        return
    if preset.contention:
        print_table(
            f"Decode steps of {specs[0].name} beside copies of its weights",
            ["path", "exposed", "largest", "cells"],
            [[path, one.exposed, one.largest_exposed, one.cells] for path, one in preset.contention.items()],
            note="Exposed: share of the copies' own time by which steps take longer; 1 is an engine that stops.",
        )
    print_table(
        f"Fit on {measurement.hardware['device']}: error on measurements held out of the fit",
        ["model", "dtype", "cells", "mean error %", "worst %", "worst cell"],
        [[r["model"], r["dtype"], r["cells"], r["mape_pct"], r["worst_pct"], r["worst_cell"]] for r in rows],
        note=measurement.note or None,
    )
