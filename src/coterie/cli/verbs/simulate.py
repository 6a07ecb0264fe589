"""``coterie simulate``: one what-if run of batch selection on the user's own trace and config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from coterie.cli.output import JsonOption, out, print_json, print_table, print_verdict, reporting, set_width
from coterie.errors import check

if TYPE_CHECKING:  # numba takes a second to import: done only for a run
    from coterie.answers.batches.what_if import Simulated


def simulate_command(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Activation trace to replay, in any known format (or sample:gpt-oss-20b), or a request trace to take "
            "arrival times from. "
            "Default: synthetic requests, drawn as in CAPS."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="JSON file with model, experts and scheduler settings, in CAPS's layout."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="Strategy to compare with fcfs; may be repeated; 'all' is every one. Default: the config's.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--arrivals", help="poisson, bursty, or a trace to take arrival times from. Default: the trace's own times."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests per second. Default: as recorded, or 80% of what fcfs can serve."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Requests per run. Default: 3,000 (spread), 1,000 (prefill), 400 (decode)."),
    ] = None,
    execution: Annotated[
        str | None,
        typer.Option(
            "--execution",
            help="How a batch is timed: spread (CAPS's model), prefill or decode (a calibrated device). Default: "
            "decode or prefill if the trace's model is known, else spread.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Model shape to time: a known name, or a folder with config.json. Default: the trace's."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", help="Calibrated device: h200 (default), rtx-pro-6000, or a file written by coterie calibrate."
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Number of expert-parallel ranks. Default: 1.")] = None,
    places: Annotated[
        int | None, typer.Option("--places", help="Requests that can decode at the same time. Default: 32.")
    ] = None,
    base_ms: Annotated[
        float | None, typer.Option("--base-ms", help="Milliseconds of a batch with an even load (spread).")
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option(
            "--sensitivity",
            help="Relative growth of that time per unit of the load's coefficient of variation (spread).",
        ),
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            "--predictor",
            help="Predictor of the loads that strategies see, such as token_table; an unknown name lists all. Default: "
            "recorded, which is exact; with --with-model dry_run.",
        ),
    ] = None,
    with_model: Annotated[
        Path | None,
        typer.Option(
            "--with-model",
            help="Checkpoint folder to run on prompts, in the config's quantization. Its real routing is simulated; "
            "strategies see its router's dry run. Needs torch.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Prompts for --with-model: .txt, .jsonl or .csv. Default: shipped prompts."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Device for --with-model: cpu, cuda or cuda:N.")] = "cpu",
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the trace; detected from the file by default.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random generator.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Simulate batch selection on your own requests, and compare strategies with first come, first served."""
    from coterie.answers.batches.options import SimulateOptions

    check(from_ is None or trace is not None, f"--from={from_} is the format of TRACE, which is not given")
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
    # Import compiled code only now that names and ranges are checked: importing takes seconds.
    from coterie.answers.batches.what_if import simulate

    with reporting("Reading") as report:
        simulated = simulate(options, report)
    if json_output:
        print_json(simulated.to_json())
        return
    _print(simulated)
    print_verdict(*simulated.verdict)


def _print(simulated: Simulated) -> None:
    set_width()
    settings, rows = simulated.settings, simulated.rows
    uneven = imbalance_name(settings)
    heads = ["strategy", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "req/s"]
    print_table(
        f"{settings['requests']:,} requests, {_execution(settings)}",
        [*heads, *([uneven] if uneven else []), "experts", "skips", "wait ms"],
        [
            [
                row["strategy"],
                *(row[name] for name in ("p50_ms", "p90_ms", "p99_ms", "p999_ms")),
                f"{row['throughput']:.4g}",
                *([f"{row['imbalance']:.3f}"] if uneven else []),
                f"{row['distinct']:.1f}",
                row["worst_skips"],
                row["worst_wait_ms"],
            ]
            for row in rows
        ],
        note=_meaning(uneven),
    )
    if len(rows) > 1:
        out.print()
        gains = ("p50", "p90", "p99", "p999", "throughput", *(("imbalance",) if uneven else ()), "distinct")
        print_table(
            "Gain over fcfs, %",
            [
                "strategy",
                "p50",
                "p90",
                "p99",
                "p99.9",
                "throughput",
                *([f"less {uneven}"] if uneven else []),
                "experts",
            ],
            [[row["strategy"], *(_gain(row, name) for name in gains)] for row in rows[1:]],
            note="Above 0 is better: lower latency, more requests per second, more even load, fewer experts.",
        )
    out.print()
    for note in simulated.notes:
        out.print(f"- {escape(note)}", highlight=False)


def imbalance_name(settings: dict[str, Any]) -> str | None:
    """Return the heading of the imbalance column: CAPS's factor, or busiest ÷ mean rank; None on one rank."""
    if settings["execution"] == "spread":
        return "1 + s x CV"
    return "imbalance" if settings["ranks"] > 1 else None


def _meaning(uneven: str | None) -> str:
    last = "experts: mean per batch or step. skips, wait: largest of any request."
    if uneven is None:
        return last
    what = "busiest ÷ mean rank, 1 is even" if uneven == "imbalance" else "time of the batch ÷ that of an even load"
    return f"{uneven}: {what}. {last}"


def _gain(row: dict[str, Any], name: str) -> str:
    value = row["throughput_gain_pct" if name == "throughput" else f"{name}_reduction_pct"]
    return f"{round(value, 1) + 0.0:+.1f}"  # adding 0.0 turns -0.0 into 0.0


def _execution(settings: dict[str, Any]) -> str:
    if settings["execution"] == "spread":
        return f"spread: {settings['base_ms']:.3g} ms x (1 + {settings['sensitivity']:.3g} x CV)"
    ranks = f", {settings['ranks']} ranks" if settings["ranks"] > 1 else ""
    return f"{settings['execution']} of {settings['model']} on {settings['preset']}{ranks}"
