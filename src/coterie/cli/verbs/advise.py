"""``coterie advise``: say which decisions to turn on for a user's own traffic, and write the files that do it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.files import read_activations, read_bearer
from coterie.cli.output import (
    AdminKeyFileOption,
    FromOption,
    JsonOption,
    NumExpertsOption,
    print_json,
    print_lines,
    print_table,
    print_verdict,
    reporting,
    set_width,
    shell,
)
from coterie.errors import refuse

if TYPE_CHECKING:  # numba takes a second to import
    from coterie.answers.advise.advising import Advised
    from coterie.answers.advise.live import GatewayTraffic
    from coterie.gateway.config import GatewayConfig, WorkerEntry


def advise_command(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|URL",
            help="Your traffic: a recording (an activation trace, in any known format), or the URL of a gateway, for "
            "the newest requests that its control loop keeps; sample:gpt-oss-20b is a recording that is shipped.",
        ),
    ],
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet",
            help="Config file of your gateway: its decoders, their places, ranks, model and dtype are taken from it. "
            "Default for a URL: the gateway's own.",
        ),
    ] = None,
    decoders: Annotated[
        int | None,
        typer.Option(
            "--decoders", min=1, max=1024, help="Decode workers. Default: 8, or what half of the recording keeps busy."
        ),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", min=1, max=4096, help="Requests on each decoder. Default: 16.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, max=1024, help="GPUs of one decoder. Default: 1.")
    ] = None,
    prompts: Annotated[
        bool | None,
        typer.Option(
            "--prompts/--no-prompts", help="Decoders compute prompts too. Default: if the recording has prefixes."
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", min=1, help="Tokens in a decoder's KV cache. Default: by the device's memory."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, max=1024, help="GPUs that share the experts, for placement. Default: 8."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Tokens of a step of that group. Default: 8192, as in prefill.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model shape: a known name, or a folder with config.json. Default: the trace's."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Weight dtype. Default: as the model is deployed.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="Calibrated device: h200, rtx-pro-6000, or a file written by coterie calibrate."),
    ] = None,
    splits: Annotated[int, typer.Option("--splits", min=2, max=1000, help="Ways to halve the recording.")] = 6,
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=1_000_000, help="Requests served per run and split.")
    ] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the first split.")] = 0,
    from_: FromOption = None,
    num_experts: NumExpertsOption = None,
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for the page, the router, the placement and the config; new, empty or of earlier advice.",
        ),
    ] = None,
    admin_key_file: AdminKeyFileOption = None,
    json_output: JsonOption = False,
) -> None:
    """Say what pays on your traffic: routing, batching, placement, planning again, graph sizes; and what does not."""
    from coterie.answers.advise.advising import AdviseSettings, advise
    from coterie.answers.advise.files import write_advice
    from coterie.answers.advise.live import GatewayTraffic, read_gateway
    from coterie.answers.fleet.bench import Source
    from coterie.answers.page import check_report_folder
    from coterie.costs.presets import load_preset
    from coterie.gateway.config import read_config
    from coterie.models import model_of
    from coterie.routing.calibration import calibration
    from coterie.traces.readers import trace_path
    from coterie.types import check_dtype

    is_url = "://" in trace
    refuse(
        {
            f"{trace} is no file; the URL of a gateway begins with http:// or https://, as in http://{trace}": (
                not is_url and ":" in trace and not trace_path(trace.partition("#")[0]).exists()
            ),
            "--from and --num-experts are for a recording; a gateway tells its own": is_url and (from_ or num_experts),
            "--admin-key-file is for the URL of a gateway": admin_key_file is not None and not is_url,
        }
    )
    config = None if fleet is None else read_config(fleet)
    if dtype is not None:
        check_dtype(dtype)
    if out_folder is not None:
        check_report_folder(out_folder)
    live = None
    if is_url:
        with reporting("Reading requests"):
            live = asyncio.run(read_gateway(trace, read_bearer(admin_key_file, "COTERIE_ADMIN_KEY")))
        config = config or live.config
    known: dict[str, Any] = {}
    if config is not None:
        workers = live.workers if live is not None and fleet is None else config.workers
        refuse({f"{fleet or trace} lists no worker that decodes": all(entry.role == "prefill" for entry in workers)})
        known = _of_config(config, workers)
    named = known.pop("model", None)
    named = model or named
    asked = {
        "decoders": decoders,
        "in_flight": in_flight,
        "gpus": gpus,
        "prompts": prompts,
        "kv_tokens": kv_tokens,
        "ranks": ranks,
        "batch": batch,
        "dtype": dtype,
        "preset": preset,
        "splits": splits,
        "requests": requests,
        "seed": seed,
    }
    settings = AdviseSettings(**{**known, **{name: value for name, value in asked.items() if value is not None}})
    load_preset(settings.preset)
    spec = None if named is None else model_of("", named)
    opened = live or read_activations(Path(trace), from_, None if spec is None else spec.name, num_experts)
    with reporting("Counting requests") as report:
        source = opened.source() if isinstance(opened, GatewayTraffic) else Source(opened, calibration(opened))
        spec = spec or model_of(source.trace.meta.model)
        advised = advise(source, spec, settings, report, newest=live is not None)
    result: dict[str, Any] = {"trace": trace, "device": settings.preset, **advised.to_json()}
    result["next"] = _next(trace, advised, out_folder, live)
    if out_folder is not None:
        result["written"] = [str(path) for path in write_advice(advised, source, result, out_folder, config)]
    if json_output:
        print_json(result)
    else:
        _print(advised, result)


def _of_config(config: GatewayConfig, workers: list[WorkerEntry]) -> dict[str, Any]:
    """Return what a gateway's config and workers say of the fleet, by the name of the setting."""
    pool = [worker for worker in workers if worker.role != "prefill"]
    places, group = min(worker.places for worker in pool), config.control.advise
    prefill = len(workers) - len(pool)
    said = {
        "decoders": len(pool),
        "places": places,
        "in_flight": max(1, places // 2),
        "prefill": prefill,
        "prompts": not prefill,
        "gpus": config.decode.ranks,
        "ranks": config.decode.ranks if group is None else group.ranks,
        "batch": None if group is None else group.step_tokens,
        "horizon": None if group is None else group.horizon,
        "preset": config.decode.device,
        "dtype": config.decode.dtype,
        "engine": config.decode.engine,
        "model": config.decode.model or (None if group is None else group.model),
    }
    return {name: value for name, value in said.items() if value is not None}


def _next(trace: str, advised: Advised, out_folder: Path | None, live: GatewayTraffic | None) -> str:
    """Return the next command to run."""
    from coterie.answers.advise.decisions import ON, TOO_LITTLE, TRY
    from coterie.answers.advise.files import GATEWAY
    from coterie.answers.advise.live import record_command

    answers = advised.answers
    if out_folder is None and {ON, TRY} & set(answers.values()):
        return shell("coterie", "advise", trace, "--out", "advice")
    if out_folder is not None and {ON, TRY} & {answers.get("routing"), answers.get("live_loop")}:
        return shell("coterie", "serve", "--config", out_folder / GATEWAY, "--check")
    if live is not None or TOO_LITTLE in answers.values():
        return record_command("http://HOST:8000" if live is None else live.worker)
    return shell("coterie", "inspect", trace)


def _print(advised: Advised, result: dict[str, Any]) -> None:
    set_width()
    print_lines(advised.verdict, "")
    print_table(
        f"{advised.model} in {advised.dtype} on {result['device']}, {advised.recorded:,} recorded requests",
        ["decision", "advice", "gain %", "of"],
        [_cells(decision) for decision in advised.decisions],
        note="Gains with 95% intervals, each against what runs without the decision.",
    )
    for decision in advised.decisions:
        print_lines("", f"{decision.title}: {decision.advice}.", decision.sentence)
    print_lines("", *advised.notes, *(f"Written: {path}" for path in result.get("written", ())))
    print_verdict(advised.verdict, result["next"])


def _cells(decision: Any) -> list[Any]:
    from coterie.answers.runs import with_ends

    gain = with_ends(decision.gain) if decision.chosen else "-"
    return [decision.name, decision.advice, gain, decision.metric or "-"]
