"""``coterie demo``: record, fit and route on this machine, in less than a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from coterie.cli.output import (
    JsonOption,
    out,
    print_json,
    print_lines,
    print_table,
    print_verdict,
    reporting,
    set_width,
)

if TYPE_CHECKING:
    from coterie.answers.demo.run import DemoResult


def demo_command(
    seed: Annotated[
        int, typer.Option(help="Seed for the split into fitting and test requests, and for their order.", min=0)
    ] = 0,
    requests: Annotated[
        int, typer.Option(help="Number of shipped prompts to use, taken from the domains in turn.", min=24)
    ] = 132,
    folder: Annotated[Path, typer.Option("--out", help="Folder to write the figure and the recorded trace to.")] = Path(
        "out"
    ),
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            help="Router to compare with join_shortest_queue and round_robin, such as joint:experts=0; may be "
            "repeated. Default: latency_aware.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve a small model with three decode workers and measure the savings of routing by experts.

    Records a workload of three domains, fits a router on it, serves other requests under round robin,
    join-shortest-queue and latency-aware routing (or any registered router, by name), and then exits.
    """
    from coterie.answers.demo.run import run_demo
    from coterie.gateway.embedded import OURS
    from coterie.routing import routers

    names = tuple(router or (OURS,))
    for name in names:
        routers.check(name)
    with reporting("Starting", lines=True) as report:
        result = run_demo(seed, requests, folder, report, names)
    print_result(result, json)
    if not result.same_tokens:
        raise typer.Exit(1)


def print_result(result: DemoResult, json: bool) -> None:
    if json:
        print_json({**result._asdict(), "rows": [row._asdict() for row in result.rows], "cpu": result.cpu._asdict()})
        return
    set_width()
    out.print(
        f"\nOne prefill and {len(result.rows[0].requests)} decode workers served {result.model}, a trained "
        f"Mixture-of-Experts model, on this machine.\nA router was fitted on {result.calibrated} requests of "
        f"{result.domains} domains; {result.served} others were then served {len(result.rows)} times.\n",
        highlight=False,
    )
    print_table(
        f"The same {result.served} requests under {len(result.rows)} routers, compared at equal batch sizes",
        [
            "router",
            "experts of\na layer in a\ntoken's step",
            "fewer than\nthe shortest queue\n(95% interval)",
            f"predicted\nms a step,\n{result.hardware}",
        ],
        [
            [
                row.router,
                f"{row.experts:.1f}",
                f"{row.saving_pct:.1f}% ({row.interval_pct[0]:.1f} to {row.interval_pct[1]:.1f})" if number else "-",
                f"{row.h200_ms:.2f}",
            ]
            for number, row in enumerate(result.rows)
        ],
    )
    same = "the same text" if result.same_tokens else "[bold red]not[/] the same text"
    out.print(
        f"\nExperts were counted in the workers. The H200's times are those of {result.shape}, which has as many "
        f"experts per layer.\nEvery request was answered with {same} under all routers ({result.output_tokens:,} "
        f"tokens).\nFigure: {escape(result.figure)}   Trace: {escape(result.trace)}   {result.wall_s:.0f} s in all",
        highlight=False,
        soft_wrap=True,
    )
    print_verdict(result.verdict, result.next)
    print_lines(
        "Or record your own server: coterie record --engine vllm --url http://HOST:PORT --prompts bundled -o trace"
    )
