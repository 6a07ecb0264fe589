"""``coterie replay``: run the decode batches that routers formed in vLLM on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.output import JsonOption, print_json, print_table, reporting
from coterie.errors import ConfigError, check, check_new_file


def replay_command(
    batches: Annotated[Path, typer.Argument(help="Batches to run (.npz, see docs/engines/replay.md).")],
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model as vLLM loads it, or its config.json; weights are random.")
    ] = None,
    context: Annotated[int, typer.Option(help="Cached tokens of every request.", min=1)] = 1024,
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
    """Run decode batches in vLLM, every token with its recorded experts; compare routers, measured and predicted.

    Whole steps are timed, under CUDA graphs on a GPU. Needs vLLM in this environment, unless --times is given.
    """
    import msgspec
    import numpy as np

    from coterie.engines.calibration.calibrate import model_config
    from coterie.engines.replay.batches import read_batches
    from coterie.engines.replay.run import measure_batches

    check_new_file(output)
    if output is not None and not output.parent.is_dir():  # fail before measuring
        raise ConfigError(f"{output.parent} is not a folder; the result cannot be written there")
    read, measured = read_batches(batches), None
    check(model or times, "give --model, the folder of a model to run in vLLM, or --times, of an earlier run")
    if model is not None and times is None:
        with reporting("replay") as report:  # before the imports below, which compile: vLLM must start first
            measured = measure_batches(read, model, context, repeats, report)
    from coterie.costs.presets import load_preset, step_model
    from coterie.engines.replay.report import check_step_times, read_measured, replay_json, replay_notes, replay_rows
    from coterie.models import get_model

    if measured is None:
        assert times is not None
        measured = read_measured(times)
        check_step_times(read, measured)
    spec = get_model(measured.model) if model is None else model_config(model)[1]
    read.check(spec)
    predictor = step_model(spec, load_preset(preset), measured.dtype)
    rows = replay_rows(read, measured, predictor, np.random.default_rng(0))
    notes = replay_notes(measured, predictor, preset)
    result = replay_json(measured, rows, notes)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    if json:
        print_json(result)
        return
    print_table(
        "Whole decode steps: measured and predicted",
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
