"""``coterie calibrate``: whole steps of a model in vLLM on this machine, or public tables, to a step-time model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.output import JsonOption, print_json, print_table, print_verdict, reporting, shell
from coterie.errors import ConfigError, check, check_new_file, check_one_of

if TYPE_CHECKING:
    from coterie.costs.presets import Preset
    from coterie.costs.roofline import Quality


def calibrate_command(
    model: Annotated[
        str, typer.Argument(help="Folder of a model as vLLM loads it, or its config.json; with --from, or a name.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write the fitted preset to (JSON).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Engine to run the steps in: vllm, installed here; with --from also sglang, trtllm.")
    ] = "vllm",
    tables: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Measure nothing, but take an engine's kernels from public tables: aiconfigurator, or a folder.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="With --from, the system of the tables.")] = "h200_sxm",
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
    to five minutes, most of which is vLLM's start. With --from, kernels that others measured are fitted instead.
    """
    import msgspec

    check_new_file(output)
    if output is not None and not output.parent.is_dir():  # fail before measuring
        raise ConfigError(f"{output.parent} is not a folder; the preset cannot be written there")
    with reporting("measure") as report:
        if tables is not None:
            check(not (trace or cells or processes or contention), "--from measures nothing: only its tables are read")
            preset = _by_tables(model, device, engine, tables, name)
        else:
            preset = _measured(
                model,
                engine,
                trace,
                name=name,
                cells_path=cells,
                processes=processes,
                contention=contention,
                report=report,
            )
    from coterie.costs.presets import save_preset

    if output is not None:
        save_preset(preset, output)
    judged: list[tuple[str, str, str, Quality]] = [
        (shape, dtype, what, quality)
        for by_model in preset.engines.values()
        for shape, fits in by_model.items()
        for dtype, fit in fits.items()
        for what, quality in (("decode steps", fit.moe.held_out), ("prefill steps", fit.rest.held_out))
    ]
    for shape, kernels in preset.fits.items():
        judged += [(shape, dtype, "experts", moe.held_out) for dtype, moe in kernels.moe.items()]
    rows = [
        {"model": shape, "dtype": dtype, "of": what, **msgspec.structs.asdict(quality)}
        for shape, dtype, what, quality in judged
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
        f"{preset.measurement.hardware['device']}: error on what was held out of the fit",
        ["model", "dtype", "of", "cells", "mean error %", "worst %"],
        [[r["model"], r["dtype"], r["of"], r["cells"], r["mape_pct"], r["worst_pct"]] for r in rows],
    )
    kept = f"saved as {output}" if output else "not saved: give -o FILE to keep it"
    print_verdict(
        f"The {rows[0]['of']} of {rows[0]['model']} in {rows[0]['dtype']} are predicted within {rows[0]['mape_pct']}% "
        f"on average; {kept}.",
        shell("coterie", "fleet", "TRACE", "--preset", output or "FILE"),
    )


def _by_tables(model: str, system: str, engine: str, source: str, name: str) -> Preset:
    from coterie.costs.aiconfigurator import read_tables
    from coterie.costs.presets import fit_preset
    from coterie.models import model_of

    return fit_preset(name, read_tables([model_of(model, model)], system, engine, None, source))


def _measured(model: str, engine: str, trace: Path | None, **given: Any) -> Preset:
    from coterie.engines.calibration.calibrate import calibrate
    from coterie.traces.activations import ActivationTrace
    from coterie.traces.readers import read_as

    check_one_of(("vllm",), engine=engine)
    routing = None if trace is None else read_as(ActivationTrace, trace)
    return calibrate(Path(model), trace=routing, **given)
