"""``coterie load``: measure TTFT, TPOT and failures of any OpenAI-compatible server under load; compare servers."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.files import check_results, figure_results, read_bearer
from coterie.cli.output import (
    AdminKeyFileOption,
    JsonOption,
    print_json,
    print_lines,
    print_table,
    print_verdict,
    reporting,
    set_width,
    shell,
)
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.answers.load.measure import LoadSettings
    from coterie.answers.load.report import LoadReport, Row
    from coterie.types import Interval

DEFAULT_CONCURRENCY = 8
_STATISTICS = ("mean", "p50", "p90", "p99")
SHOWN = {
    "ttft_mean": "TTFT, mean",
    "ttft_p90": "TTFT, p90",
    "tpot_mean": "TPOT, mean",
    "tpot_p90": "TPOT, p90",
    "e2e_mean": "E2E, mean",
    "hit_rate": "hit rate, points",
}
"""Statistics in the table of changes → heading."""


def load_command(
    url: Annotated[str, typer.Argument(help="Server or gateway, such as http://127.0.0.1:8000.")],
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", help="Another server to compare with the first; may be repeated.", metavar="URL"),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            help="Router of a Coterie gateway at URL to compare, such as round_robin or joint:experts=0; repeat for "
            "several. The first is the base; the one in use is put back.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="Pool of the gateway whose router is swapped. Default: decode, or the only one."),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            help="prompts: of mixed domains. shared-prefix: conversations with common system prompts. trace: lengths "
            "and shared prefixes of --arrivals.",
        ),
    ] = "prompts",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts to use: .txt, .jsonl or .csv. Default: those that ship.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=10_000_000, help="Requests to measure, for each contender.")
    ] = 200,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before them that are not counted.")] = 8,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", min=1, max=10_000, help="Closed loop: clients that wait for their answers. Default: 8."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Open loop: Poisson arrivals, or --arrivals, at this many requests a second."),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option("--arrivals", help="Open loop: times of a request trace (Mooncake, Azure, ServeGen, …)."),
    ] = None,
    speed_up: Annotated[
        float | None, typer.Option("--speed-up", help="Replay the times of --arrivals this many times as fast.")
    ] = None,
    length_scale: Annotated[
        float, typer.Option("--length-scale", help="Factor on the lengths of a trace, for a shorter context.")
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option("--duration", help="Seconds after which no request is sent.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Largest number of tokens per answer.")] = 64,
    hit_rate: Annotated[
        float, typer.Option("--hit-rate", help="Share of the prompts that is a shared prefix (shared-prefix).")
    ] = 0.75,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Turns of a conversation (shared-prefix).")] = 4,
    systems: Annotated[int, typer.Option("--systems", min=1, help="System prompts (shared-prefix).")] = 8,
    model: Annotated[str | None, typer.Option("--model", help="Model name. Default: the first the server has.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Ask for chat completions, or for completions of a text.")
    ] = True,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Stream answers; otherwise only E2E is measured.")
    ] = True,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate exactly --max-tokens tokens, if the server can.")
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds within which an answer must be complete.")] = 300,
    ttft_target_ms: Annotated[
        float | None, typer.Option("--ttft-target-ms", help="Goodput counts answers with a TTFT of at most this.")
    ] = None,
    tpot_target_ms: Annotated[
        float | None, typer.Option("--tpot-target-ms", help="Goodput counts answers with a TPOT of at most this.")
    ] = None,
    blocks: Annotated[
        int, typer.Option("--blocks", min=1, max=1000, help="Blocks in which contenders take turns.")
    ] = 8,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the API key. Default: COTERIE_API_KEY, if set.")
    ] = None,
    admin_key_file: AdminKeyFileOption = None,
    warm_caches: Annotated[
        bool, typer.Option("--warm-caches", help="Let caches of earlier runs help: prompts get no marker of this run.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the workload and its arrivals.")] = 0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for a figure (load.png, .pdf) and load.json.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Send a workload to a server and print TTFT, TPOT and E2E with 95% intervals, failures by kind, and hit rate.

    Open loop with --rate or --arrivals (times count from the planned arrival), closed loop with --concurrency. With
    --compare or --router, each server or router serves the same requests in interleaved blocks, and differences are
    printed. Ctrl-C prints the results so far.
    """
    import asyncio

    from coterie.answers.load.client import Asking
    from coterie.answers.load.measure import BearerKeys, LoadMeasurement, LoadSettings, measure
    from coterie.answers.load.report import draw_load, report_of
    from coterie.answers.load.summary import Targets
    from coterie.answers.load.workload import SharedPrefixes
    from coterie.net.http_client import server_url
    from coterie.prompts import load_prompts, read_prompts
    from coterie.traces.readers import requests_of

    check_results(out_folder, "load", figure_results("load", "url"), (arrivals, prompts))
    if concurrency is None and rate is None and arrivals is None:
        concurrency = DEFAULT_CONCURRENCY
    settings = LoadSettings(
        urls=tuple(server_url(one) for one in (url, *(compare or ()))),
        workload=workload,
        requests=requests,
        warmup=warmup,
        max_tokens=max_tokens,
        rate=rate,
        concurrency=concurrency,
        trace=None if arrivals is None else requests_of(arrivals),
        speed_up=speed_up,
        length_scale=length_scale,
        prefixes=SharedPrefixes(hit_rate=hit_rate, turns=turns, systems=systems)
        if workload == "shared-prefix"
        else SharedPrefixes(),
        duration_s=duration,
        asking=Asking(model or "", chat, stream, temperature, ignore_eos, timeout),
        routers=tuple(router or ()),
        pool=pool,
        blocks=blocks,
        targets=Targets(*(None if ms is None else ms / 1e3 for ms in (ttft_target_ms, tpot_target_ms))),
        marker="" if warm_caches else secrets.token_hex(3),
        seed=seed,
    )
    keys = BearerKeys(read_bearer(key_file, "COTERIE_API_KEY"), read_bearer(admin_key_file, "COTERIE_ADMIN_KEY"))
    texts = load_prompts() if prompts is None else read_prompts(prompts)
    measured, ended_by = LoadMeasurement(), None
    try:
        with reporting("Starting") as report:
            asyncio.run(measure(settings, texts, measured, keys, report))
    except (KeyboardInterrupt, CoterieError) as error:
        if not measured.contenders:
            raise
        ended_by = error  # raised again after printing the results so far
    outcome = report_of(settings, measured, ended_by is not None)
    result: dict[str, Any] = {"url": settings.urls[0], **outcome.to_json(), "next": _next(settings, outcome)}
    if out_folder is not None and any(row.summary.requests for row in outcome.rows):
        from coterie.answers.figures import write_result  # matplotlib takes a second to import

        written = write_result(out_folder, "load", result, partial(draw_load, measured.contenders, warmup), 3.3)
        result["written"] = [str(path) for path in written]
    if json_output:
        print_json(result)
    else:
        _print(result, outcome, settings)
    if ended_by is not None:
        raise ended_by
    if not any(row.summary.answered for row in outcome.rows):
        raise typer.Exit(1)


def _next(settings: LoadSettings, report: LoadReport) -> str:
    """Return the next command to run."""
    url, rows = settings.urls[0], report.rows
    if not rows or not rows[0].summary.answered:
        return shell("curl", f"{url}/v1/models")
    same = ["--workload", settings.workload] if settings.workload == "shared-prefix" else []
    summary = rows[0].summary
    if len(rows) > 1:
        option, others = ("--router", settings.routers) if settings.routers else ("--compare", settings.urls[1:])
        again = ["coterie", "load", url, *(word for other in others for word in (option, other))]
        if not any(row.told_apart for row in rows):
            return shell(*again, *same, "--requests", 4 * settings.requests)
        return shell(*again, "--workload", "prompts" if same else "shared-prefix")
    # Propose 0.8 of the served rate after a closed loop, overload or failures; after a good open loop, 1.5 times.
    factor = 0.8 if settings.concurrency is not None or summary.behind or summary.failures else 1.5
    return shell("coterie", "load", url, *same, "--rate", f"{max(factor * summary.requests_per_s, 0.01):.2g}")


def _print(result: dict[str, Any], report: LoadReport, settings: LoadSettings) -> None:
    from coterie.answers.load.report import WORDS

    set_width()
    if report.rows:
        most = "" if settings.workload == "trace" else f"; {settings.max_tokens} tokens an answer at most"
        print_lines(f"{report.model}: {report.workload}; {report.paced}{most}")
    if len(report.rows) > 1:
        _print_contenders(report)
    elif report.rows and report.rows[0].summary.metrics:
        row = report.rows[0]
        print_table(
            f"{row.name}, ms with 95% intervals",
            ["", *(WORDS[name] for name in row.summary.metrics)],
            [
                [key, *(_interval(getattr(times, key), 1e3) for times in row.summary.metrics.values())]
                for key in _STATISTICS
            ],
        )
    for row in report.rows:
        _print_counts(row, report.reachable_hit_rate, f"{row.name}: " if len(report.rows) > 1 else "")
    print_lines(
        *(f"Note: {note}" for note in report.notes), *(f"Written: {path}" for path in result.get("written", ()))
    )
    print_verdict(report.verdict, result["next"])


def _print_counts(row: Row, reachable: float, name: str) -> None:
    from coterie.answers.load.report import failures_of

    summary = row.summary
    parts = [
        f"{summary.answered} of {summary.requests} answered in {summary.wall_s:.1f} s",
        f"{summary.requests_per_s:.3g} requests and {summary.output_tokens_per_s:.3g} tokens a second",
        f"goodput {summary.goodput_per_s:.3g} a second",
        f"{summary.in_flight:.3g} in flight",
    ]
    if summary.unfinished:
        parts.append(f"{summary.unfinished} unfinished")
    if summary.hit_rate is not None:
        reach = f" (an endless cache: {100 * reachable:.0f}%)" if reachable else ""
        parts.append(f"hit rate {_interval(summary.hit_rate, 100)}%{reach}")
    if summary.failures:
        parts.append(f"failed: {failures_of(summary)}")
    print_lines(name + "; ".join(parts) + ".")


def _print_contenders(report: LoadReport) -> None:
    """Print each contender's times, then the changes relative to the first contender."""
    from coterie.answers.load.report import WORDS
    from coterie.answers.runs import with_ends

    levels = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("e2e", "p50")]
    levels = [one for one in levels if any(one[0] in row.summary.metrics for row in report.rows)]
    print_table(
        "Each on its own, ms",
        ["", *(f"{WORDS[name]} {level}" for name, level in levels), "hit %", "failed"],
        [
            [
                row.name,
                *(
                    _number(1e3 * getattr(row.summary.metrics[name], level).mean)
                    if name in row.summary.metrics
                    else "-"
                    for name, level in levels
                ),
                "-" if row.summary.hit_rate is None else f"{100 * row.summary.hit_rate.mean:.1f}",
                sum(row.summary.failures.values()),
            ]
            for row in report.rows
        ],
    )
    changes = [{change.statistic: change.pct for change in row.changes} for row in report.rows[1:]]
    rows = [
        [heading, *(with_ends(known[name]) if name in known else "-" for known in changes)]
        for name, heading in SHOWN.items()
        if any(name in known for known in changes)
    ]
    if rows:
        print_table(
            f"Change against {report.rows[0].name}, percent (below 0: less)",
            ["", *(row.name for row in report.rows[1:])],
            rows,
            note="On the same requests; 95% intervals from leaving out each block once.",
        )


def _interval(value: Interval, factor: float) -> str:
    mean, low, high = ("…" if end is None else _number(factor * end) for end in value)
    return mean if value.low is None else f"{mean} [{low}, {high}]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
