"""``coterie calibrate``: measure whole steps of a model in vLLM on this machine, and fit the step-time model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.output import JsonOption, print_json, print_table, print_verdict, reporting, shell
from coterie.errors import ConfigError, check_new_file, check_one_of


def calibrate_command(
    model: Annotated[Path, typer.Argument(help="Folder of a model as vLLM loads it, or its config.json.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write the fitted preset to (JSON).")
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine to run the steps in: vllm, if it is installed here.")] = "vllm",
    trace: Annotated[
        Path | None, typer.Option(help="Trace whose routing half of the steps take. Default: drawn, unevenly popular.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name to give the preset.")] = "local",
    cells: Annotated[
        Path | None, typer.Option(help="File to write every timed step to (.npz), to plot or to fit again.")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Also measure collectives between this many processes; 0 measures none.", min=0)
    ] = 0,
    contention: Annotated[
        bool,
        typer.Option(
            "--contention",
            help="Also time decode steps beside copies of the weights: what staged moves cost. Needs CUDA, and memory "
            "for all of the model's layers in bf16.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run a model's decode steps and prompts in vLLM on this machine, and fit the step-time model to them.

    Weights are random: only the model's config is read. Which experts a token takes is imposed. On a GPU this takes two
    to five minutes, most of which is vLLM's start.
    """
    import msgspec

    from coterie.engines.calibration.calibrate import calibrate
    from coterie.traces.activations import ActivationTrace
    from coterie.traces.readers import read_trace

    check_one_of(("vllm",), engine=engine)
    check_new_file(output)
    if output is not None and not output.parent.is_dir():  # fail before measuring
        raise ConfigError(f"{output.parent} is not a folder; the preset cannot be written there")
    routing = None if trace is None else read_trace(trace)
    if routing is not None and not isinstance(routing, ActivationTrace):
        raise ConfigError(f"{trace} has no routing: steps are imposed from recorded activations")
    with reporting("measure") as report:
        preset = calibrate(
            model, name, routing, cells_path=cells, processes=processes, contention=contention, report=report
        )
    from coterie.costs.presets import save_preset

    if output is not None:
        save_preset(preset, output)
    rows = [
        {"model": shape, "dtype": dtype, "steps": steps, **msgspec.structs.asdict(quality)}
        for shape, fits in preset.engines[engine].items()
        for dtype, fit in fits.items()
        for steps, quality in (("decode", fit.moe.held_out), ("prefill", fit.rest.held_out))
    ]
    if json:
        print_json({"preset": msgspec.to_builtins(preset), "rows": rows})
        return
    if preset.contention:
        print_table(
            f"Decode steps of {rows[0]['model']} beside copies of its weights",
            ["path", "exposed", "largest", "cells"],
            [[path, one.exposed, one.largest_exposed, one.cells] for path, one in preset.contention.items()],
            note="Exposed: share of the copies' own time by which steps take longer; 1 is an engine that stops.",
        )
    print_table(
        f"Steps on {preset.measurement.hardware['device']}: error on steps held out of the fit",
        ["model", "dtype", "steps", "cells", "mean error %", "worst %"],
        [[r["model"], r["dtype"], r["steps"], r["cells"], r["mape_pct"], r["worst_pct"]] for r in rows],
    )
    kept = f"saved as {output}" if output else "not saved: give -o FILE to keep it"
    print_verdict(
        f"Decode steps of {rows[0]['model']} in {rows[0]['dtype']} are predicted within {rows[0]['mape_pct']}% on "
        f"average; {kept}.",
        shell("coterie", "fleet", "TRACE", "--preset", output or "FILE"),
    )
