"""``coterie fleet``: simulate the gains of routers on a fleet of decoders, on the requests of a trace."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from coterie.cli.files import check_results, figure_results, read_activations
from coterie.cli.output import (
    FromOption,
    JsonOption,
    NumExpertsOption,
    out,
    print_json,
    print_lines,
    print_table,
    print_verdict,
    reporting,
    set_width,
    shell,
)
from coterie.errors import check, refuse

if TYPE_CHECKING:  # numba takes a second to import
    from coterie.answers.fleet.simulation import FleetReport, FleetRow
    from coterie.traces.requests import RequestTrace


def fleet_command(
    trace: Annotated[Path, typer.Argument(help="Activation trace, in any known format, or sample:gpt-oss-20b.")],
    decoders: Annotated[int, typer.Option("--decoders", min=1, max=1024, help="Decode workers.")] = 8,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, max=4096, help="Requests on each decoder, on average.")
    ] = 16,
    prefill: Annotated[
        int,
        typer.Option(
            "--prefill", min=0, max=1024, help="Prefill workers. 0: requests come to decoders with their prompts done."
        ),
    ] = 0,
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            help="Router to compare, such as round_robin or joint:experts=0; repeat for several. Default: every "
            "registered one.",
        ),
    ] = None,
    base: Annotated[
        str, typer.Option("--base", help="Router that the others are compared with.")
    ] = "join_shortest_queue",
    fitted: Annotated[
        Path | None,
        typer.Option("--fitted", help="Router file of coterie fit; it serves the requests it was not fitted on."),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            "--arrivals",
            help="closed: keep --in-flight requests on each decoder. trace: at the trace's own times. Or a file of "
            "requests, whose times and lengths are used.",
        ),
    ] = "closed",
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests a second: Poisson arrivals, or --arrivals at this mean rate."),
    ] = None,
    places: Annotated[
        int | None,
        typer.Option("--places", min=1, max=16384, help="Requests a decoder may run at once. Default: 4 x the mean."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model shape: a known name, or a folder with config.json. Default: the trace's."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="Weight dtype; repeat to compare several. Default: as the model is deployed."),
    ] = None,
    preset: Annotated[
        str,
        typer.Option("--preset", help="Calibrated device: h200, rtx-pro-6000, or a file written by coterie calibrate."),
    ] = "h200",
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=1024, help="GPUs of one decoder (expert parallel).")] = 1,
    gateways: Annotated[
        int, typer.Option("--gateways", min=1, max=64, help="Gateways before the fleet; each routes its own requests.")
    ] = 1,
    exchange: Annotated[
        float,
        typer.Option(
            "--exchange", min=0.0, max=86_400.0, help="Seconds between two exchanges of the gateways; 0: at once."
        ),
    ] = 0.0,
    told: Annotated[
        str,
        typer.Option(
            "--told",
            help="What gateways exchange: profiles (with counts), counts, reports (what workers say), or nothing.",
        ),
    ] = "profiles",
    splits: Annotated[
        int, typer.Option("--splits", min=1, max=1000, help="Ways to halve the trace; 1 gives no intervals.")
    ] = 6,
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=1_000_000, help="Requests served per router and split.")
    ] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first split.")] = 0,
    from_: FromOption = None,
    num_experts: NumExpertsOption = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for a figure (fleet.png, .pdf) and fleet.json.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Serve a trace on a simulated fleet under every router: experts per step, TPOT, TTFT, and whether routing pays."""
    from coterie.answers.fleet.simulation import FleetSettings, draw_fleets, simulate_fleet
    from coterie.answers.plan.memory import device_bytes
    from coterie.costs.presets import load_preset, step_model
    from coterie.models import model_of
    from coterie.routing import RouterFit, routers
    from coterie.sim.fleet.front_ends import FrontEnds, Told
    from coterie.types import Topology, WeightDtype, check_dtype

    alone = gateways == 1 and (exchange, told) != (0.0, "profiles")
    refuse({"--exchange and --told need --gateways of at least 2": alone})
    for name in (base, *(router or ())):
        routers.check(name)
    spec = None if model is None else model_of("", model)
    for name in dtype or ():
        check_dtype(name)
    device = load_preset(preset)
    check_results(out_folder, "fleet", figure_results("fleet", "trace"), (trace, fitted))
    opened = read_activations(trace, from_, None if spec is None else spec.name, num_experts)
    spec = model_of(opened.meta.model) if spec is None else spec
    dtypes = cast(list[WeightDtype], list(dict.fromkeys(dtype or [spec.weight_dtype])))
    models = [step_model(spec, device, name, Topology(ranks)) for name in dtypes]
    settings = FleetSettings(
        decoders=decoders,
        in_flight=in_flight,
        prefill=prefill,
        routers=None if router is None else tuple(router),
        base=base,
        arrivals=_arrivals(arrivals, opened.requests),
        rate=rate,
        places=places,
        splits=splits,
        requests=requests,
        seed=seed,
        front_ends=FrontEnds(gateways, exchange, cast(Told, told)),
        device_bytes=device_bytes(device),
        fitted=None if fitted is None else RouterFit.load(fitted, workers=decoders),
    )
    with reporting("Counting requests") as report:
        reports = [simulate_fleet(opened, step, settings, report) for step in models]
    result: dict[str, Any] = {
        "trace": str(trace),
        "device": preset,
        "ranks": ranks,
        "base": base,
        "arrivals": _said(arrivals, rate),
        "gateways": asdict(settings.front_ends),
        "fleets": [fleet.to_json() for fleet in reports],
        "verdict": " ".join(fleet.verdict for fleet in reports),
        "next": _next(trace, reports, fitted),
    }
    if out_folder is not None:
        from coterie.answers.figures import write_result  # matplotlib takes a second to import

        height = 1.1 + sum(0.32 * len(fleet.rows) + 0.5 for fleet in reports)
        written = write_result(out_folder, "fleet", result, partial(draw_fleets, reports), height)
        result["written"] = [str(path) for path in written]
    if json_output:
        print_json(result)
    else:
        _print(result, reports)


def _arrivals(asked: str, own: RequestTrace) -> RequestTrace | None:
    from coterie.traces.readers import requests_of, trace_path

    if asked == "closed":
        return None
    if asked == "trace":
        check(
            own.arrival_s is not None, "--arrivals trace: the trace has no arrival times; leave it out, or give --rate"
        )
        return own
    check(trace_path(asked).exists(), f"--arrivals={asked} must be closed, trace, or a file of requests that exists")
    return requests_of(asked)


def _said(arrivals: str, rate: float | None) -> str:
    if arrivals == "closed":
        return "closed loop" if rate is None else f"Poisson, {rate:g} requests a second"
    times = "the trace's own times" if arrivals == "trace" else f"times of {Path(arrivals).name}"
    return times if rate is None else f"{times} at {rate:g} requests a second"


def _next(trace: Path, reports: list[FleetReport], fitted: Path | None) -> str:
    """Return the next command to run."""
    if reports[0].pays and fitted is None:
        return shell("coterie", "fit", trace, "--workers", reports[0].decoders, "--output", "router.safetensors")
    return shell("coterie", "plan", trace)


def _print(result: dict[str, Any], reports: list[FleetReport]) -> None:
    set_width()
    for one in reports:
        told = result["gateways"]
        many = f", {told['count']} gateways ({told['told']} each {told['every_s']:g} s)" if told["count"] > 1 else ""
        gpus = "" if result["ranks"] == 1 else f" of {result['ranks']} GPUs"
        prefill = f", {one.prefill} prefill workers" if one.prefill else ""
        print_table(
            f"{one.model} in {one.dtype} on {result['device']}: {one.decoders} decoders{gpus}{prefill}{many}, "
            f"{one.in_flight:.3g} requests on each, {result['arrivals']}",
            ["router", "experts/step", "TPOT ms", "p99 ms", "TTFT ms", "mean TPOT saved %", "p99 saved %"],
            [_cells(row, number == 0) for number, row in enumerate(one.rows)],
            note=f"Times are medians but for p99. Saved: against {result['base']}, "
            + (f"mean of {one.splits} splits and 95% interval." if one.splits > 1 else "on one split: no interval."),
        )
        out.print(
            f"{one.recorded:,} recorded requests were served, {one.measured:,} or more measured per split; "
            f"{one.places} places on a decoder.",
            highlight=False,
        )
        print_lines(*one.notes, *(f"Left out: {name} ({reason})" for name, reason in one.skipped.items()), "")
    print_lines(*(f"Written: {path}" for path in result.get("written", ())))
    print_verdict("\n".join(one.verdict for one in reports), result["next"])


def _cells(row: FleetRow, is_base: bool) -> list[Any]:
    from coterie.answers.runs import with_ends

    return [
        row.router,
        f"{row.experts_per_step:.2f}",
        f"{row.tpot_p50_ms:.2f}",
        f"{row.tpot_p99_ms:.2f}",
        f"{row.ttft_p50_ms:.1f}",
        *("-" if is_base else with_ends(saved) for saved in (row.saved_pct, row.saved_p99_pct)),
    ]
