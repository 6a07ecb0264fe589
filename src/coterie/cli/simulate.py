"""``coterie simulate``: one what-if run of batch selection on the user's own trace and config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from coterie.cli.output import JsonOption, out, print_json, print_table, reporting, set_width
from coterie.errors import ConfigError

if TYPE_CHECKING:  # numba takes a second to import: only when a run is asked for
    from coterie.evaluation.simulate.what_if import Simulated


def _show_help(ctx: typer.Context, asked: bool) -> None:
    """Help with the predictors there are, a user's own among them: they are imported when help is asked for."""
    if not asked:
        return
    from coterie.predictors import predictors

    option: Any = next(param for param in ctx.command.params if param.name == "predictor")
    names = escape(", ".join(predictors.names()))
    option.help += f": {names}, with a model dry_run. Else recorded, which is exact, or the model's dry_run."
    typer.echo(ctx.get_help())
    raise typer.Exit


def simulate_command(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Activation trace to replay, in any known format, or a request trace for its times. Without it "
            "requests are drawn, as CAPS's are."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Model, experts and scheduler as JSON, in CAPS's layout.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", help="To compare with fcfs; repeat it for more, 'all' is all. Else the config's."),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option("--arrivals", help="poisson, bursty, or a trace to take the times from; else the trace's own."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second; else as recorded, or 80% of what fcfs can serve.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests of a run; else 3,000 (spread), 1,000 or 400 (decode).")
    ] = None,
    execution: Annotated[
        str | None,
        typer.Option(
            "--execution",
            help="What times a batch: spread (CAPS's model), prefill or decode (a calibrated device). Else decode or "
            "prefill where the trace is of a known model.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Shape to time: a known name, or a folder with config.json; else the trace's."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="Calibrated device: h200, rtx-pro-6000, or a file of coterie calibrate."),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Expert-parallel ranks; else 1.")] = None,
    places: Annotated[int | None, typer.Option("--places", help="Requests that decode at once; else 32.")] = None,
    base_ms: Annotated[
        float | None, typer.Option("--base-ms", help="Time of a batch with an even load (spread).")
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option("--sensitivity", help="Growth of that time by the load's coefficient of variation (spread)."),
    ] = None,
    predictor: Annotated[str | None, typer.Option("--predictor", help="Where strategies have the load from")] = None,
    with_model: Annotated[
        Path | None,
        typer.Option(
            "--with-model",
            help="Folder of a checkpoint to run on prompts, in the config's quantization: its routing is what runs, "
            "its router's dry run what strategies see. Needs torch.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts for the model: .txt, .jsonl or .csv; else shipped ones.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda or cuda:N.")] = "cpu",
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the trace, where the file itself does not show it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for simulate.json and requests.csv; they are replaced if there."),
    ] = None,
    json_output: JsonOption = False,
    _help: Annotated[
        bool, typer.Option("--help", callback=_show_help, is_eager=True, help="Show this message and exit.")
    ] = False,
) -> None:
    """Simulate batch selection on your own requests: every strategy beside first come, first served."""
    from coterie.evaluation.simulate.options import SimulateOptions
    from coterie.evaluation.simulate.what_if import simulate, write

    if from_ is not None and trace is None:
        raise ConfigError(f"--from={from_} is the format of TRACE, which is not given")
    if out_folder is not None and out_folder.exists() and not out_folder.is_dir():
        raise ConfigError(f"{out_folder} is a file; --out takes a folder")
    options = SimulateOptions(
        trace=trace,
        trace_format=from_,
        config=config,
        strategies=tuple(strategy or ()),
        arrivals=arrivals,
        rate=rate,
        requests=requests,
        seed=seed,
        execution=execution,
        model=model,
        preset=preset,
        ranks=ranks,
        places=places,
        base_ms=base_ms,
        sensitivity=sensitivity,
        predictor=predictor,
        with_model=with_model,
        prompts=prompts,
        device=device,
    )
    with reporting("Reading") as report:
        found = simulate(options, report)
    if out_folder is not None:
        write(out_folder, found)
    if json_output:
        print_json(found.to_json())
        return
    _print(found)
    if out_folder is not None:
        where = escape(str(out_folder))
        out.print(f"Written: {where}: simulate.json, requests.csv", highlight=False, soft_wrap=True)


def _print(found: Simulated) -> None:
    set_width()
    settings = found.settings
    print_table(
        f"{settings['requests']:,} requests, {_execution(settings)}",
        ["strategy", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "req/s", "imbalance", "experts", "skips", "wait ms"],
        [
            [
                row["strategy"],
                *(row[name] for name in ("p50_ms", "p90_ms", "p99_ms", "p999_ms")),
                f"{row['throughput']:.4g}",
                f"{row['imbalance']:.3f}",
                f"{row['distinct']:.1f}",
                row["worst_skips"],
                row["worst_wait_ms"],
            ]
            for row in found.rows
        ],
        note="imbalance, experts: mean of a batch or step. skips, wait: of the request that fared worst.",
    )
    if len(found.rows) > 1:
        out.print()
        gains = ("p50", "p90", "p99", "p999", "throughput", "imbalance", "distinct")
        print_table(
            "Gain over fcfs, %",
            ["strategy", "p50", "p90", "p99", "p99.9", "throughput", "imbalance", "experts"],
            [[row["strategy"], *(_gain(row, name) for name in gains)] for row in found.rows[1:]],
            note="Above 0 is better: shorter, more requests a second, more even, fewer experts.",
        )
    out.print()
    for note in found.notes:
        out.print(f"- {escape(note)}", highlight=False)


def _gain(row: dict[str, Any], name: str) -> str:
    value = row["throughput_gain_pct" if name == "throughput" else f"{name}_reduction_pct"]
    return f"{round(value, 1) + 0.0:+.1f}"  # no -0.0


def _execution(settings: dict[str, Any]) -> str:
    if settings["execution"] == "spread":
        return f"spread: {settings['base_ms']:.3g} ms x (1 + {settings['sensitivity']:.3g} x CV)"
    ranks = f", {settings['ranks']} ranks" if settings["ranks"] > 1 else ""
    return f"{settings['execution']} of {settings['model']} on {settings['preset']}{ranks}"
