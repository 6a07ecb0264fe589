"""``coterie replay``: run the decode batches that routers formed through real MoE layers on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from coterie.cli.output import JsonOption, print_json, print_table, reporting
from coterie.errors import ConfigError, check_new_file


def replay_command(
    batches: Annotated[Path, typer.Argument(help="Batches to run (.npz, see docs/engines/replay.md).")],
    device: Annotated[str, typer.Option(help="Device to run on: auto, cpu, cuda or cuda:N.")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Model whose shape to use (see coterie models). Default: the one named in the file."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Hugging Face config.json to read the shape from.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Weight dtype of the experts: bf16 or fp8 on CUDA, fp32 or bf16 on a CPU.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of every step; its time is their median.", min=1)] = 3,
    preset: Annotated[
        str, typer.Option(help="Device to predict for: a shipped preset, or a file written by coterie calibrate.")
    ] = "h200",
    times: Annotated[
        Path | None, typer.Option(help="Read the times of an earlier run (its -o file) instead of measuring.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write rows and times to (JSON).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run decode batches through real MoE layers of the model's shape and compare routers, measured and predicted.

    Every MoE layer has its own weights, so gpt-oss-20b takes 38 GB of a GPU in bf16. If not all layers fit, the layers
    that fit are used in rotation.
    """
    import msgspec
    import numpy as np

    from coterie.costs.presets import load_preset, step_model
    from coterie.engines.replay.batches import read_batches
    from coterie.engines.replay.report import check_step_times, read_measured, replay_json, replay_notes, replay_rows
    from coterie.engines.replay.run import measure_batches
    from coterie.models import get_model, model_from_config
    from coterie.types import WeightDtype, check_dtype

    check_new_file(output)
    if output is not None and not output.parent.is_dir():  # fail before measuring
        raise ConfigError(f"{output.parent} is not a folder; the result cannot be written there")
    if dtype is not None:
        check_dtype(dtype)
    read = read_batches(batches)
    if model is not None and config is not None:
        raise ConfigError(f"--model {model} and --config {config}: give only one of them")
    spec = model_from_config(config) if config else get_model(model or read.model)
    device_preset = load_preset(preset)
    if times is not None:
        measured = read_measured(times)
        if (measured.model, dtype or measured.dtype) != (spec.name, measured.dtype):
            raise ConfigError(
                f"{times} holds {measured.model} in {measured.dtype}; "
                f"asked for {spec.name} in {dtype or measured.dtype}"
            )
        read.check(spec)
        check_step_times(read, measured)
    else:
        with reporting("replay") as report:
            measured = measure_batches(read, spec, device, cast(WeightDtype | None, dtype), repeats, report)
    predictor = step_model(spec, device_preset, measured.dtype)
    rows = replay_rows(read, measured, predictor, np.random.default_rng(0))
    notes = replay_notes(measured, predictor, preset)
    result = replay_json(measured, rows, notes)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    if json:
        print_json(result)
        return
    print_table(
        "Experts of all MoE layers of a step: measured and predicted",
        ["group", "router", "tokens", "experts", "mean us", "predicted us", "error"],
        [
            [r.group, r.router, r.tokens, r.active_experts, r.mean_us, r.predicted_us, f"{r.mape_pct:.1f}%"]
            for r in rows
        ],
        note="\n".join(notes),
    )
    if len(read.routers) > 1:
        print_table(
            f"Saved against {read.routers[0]}, % of the mean step",
            ["group", "router", "steps", "measured", "95% interval", "predicted"],
            [
                [
                    r.group,
                    r.router,
                    r.steps,
                    f"{r.saving_pct:.2f}",
                    f"{r.saving_low_pct:.2f} … {r.saving_high_pct:.2f}",
                    f"{r.predicted_saving_pct:.2f}",
                ]
                for r in rows
                if r.router != read.routers[0]
            ],
        )
