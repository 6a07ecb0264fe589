"""``coterie fit``: fit a router to a trace and score it on held-out requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from coterie.cli.files import check_output, read_activations
from coterie.cli.output import (
    FromOption,
    JsonOption,
    NumExpertsOption,
    TraceModelOption,
    out,
    print_json,
    print_lines,
    print_table,
    print_verdict,
    reporting,
    shell,
)
from coterie.errors import check_one_of
from coterie.units import parse_speeds

if TYPE_CHECKING:
    from coterie.footprints.signatures import Weighting


def fit_command(
    trace: Annotated[Path, typer.Argument(help="Activation trace to learn from, in any known format.")],
    workers: Annotated[int, typer.Option("--workers", min=1, help="Decode workers to route to.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write the fitted router to (.safetensors); an older router is replaced."
        ),
    ],
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=65536, help="Requests per decode step of one worker.")
    ] = 16,
    requests: Annotated[
        int | None, typer.Option("--requests", min=4, help="Requests to read, drawn at random. Default: 1,400.")
    ] = None,
    weighting: Annotated[
        str | None,
        typer.Option(
            "--weighting",
            help="Weights of experts in a request's signature: count_idf, count or binary. Default: the one that "
            "scores best on held-out requests.",
        ),
    ] = None,
    speeds: Annotated[
        str | None, typer.Option("--speeds", help="Relative speed of each worker, such as 1,1,0.5. Default: all equal.")
    ] = None,
    from_: FromOption = None,
    model: TraceModelOption = None,
    num_experts: NumExpertsOption = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed for the split, the pairs and the starting points.")
    ] = 0,
    json_output: JsonOption = False,
) -> None:
    """Fit a router to a trace: request signatures, clusters and a forecast of decode experts."""
    import numpy as np

    from coterie.answers.fit import CHOICES, REQUESTS, fit_and_score
    from coterie.routing import RouterFit
    from coterie.routing.fleet import checked_speeds

    if weighting is not None:
        check_one_of(CHOICES, weighting=weighting)
    check_output(output, "--output", "a fitted router", RouterFit.load, [trace])
    rates = None if speeds is None else checked_speeds([*parse_speeds(speeds, workers)], workers)
    opened = read_activations(trace, from_, model, num_experts)
    with reporting("Counting requests") as report:
        scored = fit_and_score(
            opened,
            workers,
            np.random.default_rng(seed),
            batch=batch,
            requests=requests or REQUESTS,
            weighting=cast("Weighting | None", weighting),
            speeds=rates,
            report=report,
        )
    fitted = scored.fitted
    fitted.save(output)
    result = {
        "trace": str(trace),
        "model": fitted.model,
        "layers": fitted.num_layers,
        "experts": fitted.num_experts,
        "top_k": fitted.learned.top_k,
        "workers": workers,
        "batch": batch,
        "calibration_requests": scored.calibration_requests,
        "test_requests": scored.test_requests,
        "halves": scored.halved,
        "weighting": scored.weighting,
        "weighting_why": scored.chosen,
        "seed": seed,
        "layers_kept": fitted.learned.signature.layers.tolist(),
        "rho": [score._asdict() for score in scored.rho],
        "distinct": scored.distinct,
        "file": str(output),
        "bytes": output.stat().st_size,
    }
    then = shell("coterie", "fleet", trace, "--decoders", workers, "--fitted", output)
    result |= {"verdict": _verdict(result), "next": then}
    if json_output:
        print_json(result)
    else:
        _print(result)


def _verdict(result: dict[str, Any]) -> str:
    """Say in words whether routing by this fit pays, how certain that is, and which weighting it uses."""
    why = f"Weighting {result['weighting']}: {result['weighting_why']}."
    saved = {row["clusters"]: row["saving_pct"] for row in result["distinct"]}
    if not saved:
        few = f"{result['test_requests']} held-out requests are too few to test {result['workers']} workers"
        return f"The router is fitted, not tested: {few}. {why}"
    best = max(("cosine clusters", "union clusters"), key=lambda name: saved[name])
    gain = saved[best] - saved["round robin"]
    more = f"{gain:.1f} points more than dealing them out in turn"
    pays = more if gain >= 1 else "next to nothing more than dealing them out in turn: do not expect it to pay"
    return (
        f"On {result['test_requests']} held-out requests its {best} touch {saved[best]:.1f}% fewer experts a step than "
        f"one mixed pool, {pays}; no interval: one split. {why}"
    )


def _print(result: dict[str, Any]) -> None:
    print_lines(
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, "
        f"{result['calibration_requests']:,} requests to fit, {result['test_requests']:,} to test"
    )
    if result["halves"]:
        out.print("The trace has one phase: first and second halves of requests stand for prefill and decode.")
    if not result["rho"]:
        out.print("No scores of signatures: requests are too few.")
    else:
        ends = [[end(row["per_split"], default=None) for end in (min, max)] for row in result["rho"]]
        print_table(
            "rho on held-out requests, mean of splits in halves",
            ["signature", "layer mask", "layers", "rho", "lowest", "highest"],
            [
                [*(row[name] for name in ("weighting", "mask", "layers", "rho")), *both]
                for row, both in zip(result["rho"], ends, strict=True)
            ],
        )
    if not result["distinct"]:
        out.print(f"No test: {result['test_requests']} requests are too few to test {result['workers']} workers.")
    else:
        print_table(
            f"Expected distinct experts of a step of {result['batch']}, all layers, test requests",
            ["clusters", "experts", "saving %"],
            [[row["clusters"], row["experts_per_step"], row["saving_pct"]] for row in result["distinct"]],
        )
    print_lines(
        f"Layers kept, of {result['layers']}: {', '.join(map(str, result['layers_kept']))}",
        f"Router: {result['file']} ({result['bytes']:,} bytes)",
    )
    print_verdict(result["verdict"], result["next"])
