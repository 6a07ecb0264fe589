"""``coterie advise``: say which decisions to turn on for a user's own traffic, and write the files that do it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.files import read_bearer, read_experts
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
            help="Your traffic: a recording (an activation trace, in any known format; a load table, for placement "
            "alone), or the URL of a gateway, for the newest requests that its control loop keeps; "
            "sample:gpt-oss-20b is a recording that is shipped.",
        ),
    ],
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet",
            help="Config file of your gateway, to advise on the deployment that it describes: decoders, their places, "
            "ranks, model and dtype. Default for a URL: the gateway's own.",
        ),
    ] = None,
    decoders: Annotated[
        int | None,
        typer.Option(
            "--decoders",
            min=1,
            max=1024,
            help="Decode workers: advise on this fleet alone. Default: 8, or what half of the recording keeps busy.",
        ),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", min=1, max=4096, help="Requests on each decoder. Default: 16.")
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
        typer.Option(
            "--ranks",
            min=1,
            max=1024,
            help="GPUs that share the experts: advise on one such group alone, or with --decoders or --fleet on "
            "decoders that are groups. Default: 8 for a group, 1 for a decoder.",
        ),
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
    """Say what pays on your traffic: routing, batching, placement, planning again, graph sizes; and what does not.

    Without --fleet, --decoders or --ranks it advises on two deployments: decoders of one GPU, and one group of 8 ranks.
    """
    from coterie.answers.advise.advising import AdviseSettings, advise
    from coterie.answers.advise.files import write_advice
    from coterie.answers.advise.live import GatewayTraffic, read_gateway
    from coterie.answers.advise.tables import TableWindows
    from coterie.answers.fleet.bench import Source
    from coterie.answers.page import check_report_folder
    from coterie.costs.presets import load_preset
    from coterie.gateway.config import read_config
    from coterie.models import model_of
    from coterie.routing.calibration import calibration
    from coterie.traces import LoadTable
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
            "--batch is of a group: name its --ranks": batch is not None and ranks is None and decoders is not None,
            "--prompts and --kv-tokens are of a fleet: name its --decoders": ranks is not None
            and (prompts is not None or kv_tokens is not None)
            and decoders is None
            and fleet is None
            and not is_url,
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
        "prompts": prompts,
        "kv_tokens": kv_tokens,
        "ranks": ranks,
        "batch": batch,
        "dtype": dtype,
        "preset": preset,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    counts = {"splits": splits, "requests": requests, "seed": seed}
    settings = AdviseSettings(**{**known, **_deployment(decoders, ranks, config is not None), **given, **counts})
    load_preset(settings.preset)
    spec = None if named is None else model_of("", named)
    opened = live or read_experts(Path(trace), from_, None if spec is None else spec.name, num_experts)
    with reporting("Counting requests") as report:
        if isinstance(opened, LoadTable):
            spec = spec or model_of(opened.model)
            source: Source | TableWindows = TableWindows.of(Path(trace), opened, spec)
        else:
            source = opened.source() if isinstance(opened, GatewayTraffic) else Source(opened, calibration(opened))
            spec = spec or model_of(source.trace.meta.model)
        apart = config is None and decoders is None and ranks is None
        advice = [
            advise(source, spec, one, report, newest=live is not None)
            for one in (settings.apart(source, spec) if apart else [settings])
        ]
    result: dict[str, Any] = {
        "trace": trace,
        "device": settings.preset,
        "model": advice[0].model,
        "dtype": advice[0].dtype,
        "recorded": advice[0].recorded,
        "deployments": [advised.to_json() for advised in advice],
        "verdict": " ".join(advised.verdict for advised in advice),
        "next": _next(trace, advice, out_folder, live, {"fleet": fleet, "model": model, "from": from_, **given}),
    }
    if out_folder is not None:
        result["written"] = [str(path) for path in write_advice(advice, source, result, out_folder, config)]
    if json_output:
        print_json(result)
    else:
        _print(advice, result)


def _deployment(decoders: int | None, ranks: int | None, of_config: bool) -> dict[str, int]:
    """Return the settings of the deployment that the options name; empty if they name none."""
    if ranks is None:
        return {} if of_config or decoders is None else {"ranks": 1}
    return {"gpus": ranks} if of_config or decoders is not None else {"decoders": 0}


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


def _next(
    trace: str, advice: list[Advised], out_folder: Path | None, live: GatewayTraffic | None, given: dict[str, Any]
) -> str:
    """Return the next command to run; `given` are the options that say what was asked."""
    from coterie.answers.advise.decisions import ON, TOO_LITTLE, TRY
    from coterie.answers.advise.files import config_name
    from coterie.answers.advise.live import record_command

    answers = {said for advised in advice for said in advised.answers.values()}
    if out_folder is None and {ON, TRY} & answers:
        options = [word for name, value in given.items() for word in _option(name, value)]
        return shell("coterie", "advise", trace, *options, "--out", "advice")
    configs = list(filter(None, map(config_name, advice)))
    if out_folder is not None and configs:
        return shell("coterie", "serve", "--config", out_folder / configs[0], "--check")
    if live is not None or TOO_LITTLE in answers:
        return record_command("http://HOST:8000" if live is None else live.worker)
    return shell("coterie", "inspect", trace)


def _option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [] if value is None else [f"--{flag}", str(value)]


def _print(advice: list[Advised], result: dict[str, Any]) -> None:
    set_width()
    print_lines(*(advised.verdict for advised in advice), "")
    for advised in advice:
        recorded = f"{advised.recorded:,} recorded {'windows' if advised.of_table else 'requests'}"
        print_table(
            f"{advised.model} in {advised.dtype} on {result['device']}, {recorded}: {advised.where}",
            ["decision", "advice", "gain %", "of"],
            [_cells(decision) for decision in advised.decisions],
            note="Gains with 95% intervals, each against what runs without the decision.",
        )
    for decision in (decision for advised in advice for decision in advised.decisions):
        print_lines("", f"{decision.title}: {decision.advice}.", decision.sentence)
    notes = dict.fromkeys(note for advised in advice for note in advised.notes)
    print_lines("", *notes, *(f"Written: {path}" for path in result.get("written", ())))
    print_verdict("\n".join(advised.verdict for advised in advice), result["next"])


def _cells(decision: Any) -> list[Any]:
    from coterie.answers.runs import with_ends

    gain = with_ends(decision.gain) if decision.chosen else "-"
    return [decision.name, decision.advice, gain, decision.metric or "-"]
