"""``coterie demo``: the whole loop on this machine, in about two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from coterie.cli.output import JsonOption, out, print_json, print_table, reporting


def demo_command(
    seed: Annotated[
        int, typer.Option(help="Seed for the split into fitting and test requests, and for their order.", min=0)
    ] = 0,
    requests: Annotated[
        int, typer.Option(help="Number of shipped prompts to use, taken from the domains in turn.", min=24)
    ] = 240,
    folder: Annotated[Path, typer.Option("--out", help="Folder to write the figure to.")] = Path("out"),
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            help="Router to compare with round robin and join_shortest_queue; may be repeated. Default: latency_aware.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve a small model with four decode workers and measure what routing by experts changes.

    Records a mixed-domain workload, fits a router on it, serves other requests under round robin, join-shortest-queue
    and latency-aware routing (or any registered router, by name), and ends by itself.
    """
    from coterie.evaluation.demo.run import OURS, run_demo

    with reporting("Starting") as report:
        result = run_demo(seed, requests, folder, report, tuple(router or (OURS,)))
    if json:
        print_json({**result._asdict(), "rows": [row._asdict() for row in result.rows]})
        return
    out.print(
        f"\nOne prefill and {len(result.rows[0].requests)} decode workers served {result.model}, a trained "
        f"Mixture-of-Experts model, on this machine.\nA router was fitted on {result.calibrated} requests of "
        f"{result.domains} domains; {result.served} others were then served {len(result.rows)} times.\n",
        highlight=False,
    )
    print_table(
        f"The same requests under {len(result.rows)} routers",
        ["router", "experts", "fewer", "token", "rows", "H200", "CPU"],
        [
            [
                r.router,
                r.distinct_experts,
                f"{r.saving_pct:.1f}%",
                f"{r.by_token_pct:.1f}%",
                f"{r.equal_rows_pct:.1f}%",
                r.h200_ms,
                r.cpu_ms,
            ]
            for r in result.rows
        ],
        note="experts: distinct experts per layer and decode step, counted in the workers; fewer: saving against round "
        "robin, mean over steps; token: the same, weighted by tokens; rows: the same, at equal batch size. H200: "
        f"predicted milliseconds of a token's step in the shape of {result.shape} (32 experts per layer, 4 per "
        "token, as in this model); CPU: measured on this machine",
    )
    best = result.rows[-1]
    faster_pct = 100 * (1 - best.h200_ms / result.rows[0].h200_ms)
    same = "the same tokens" if result.same_tokens else "[bold red]not[/] the same tokens"
    out.print(
        f"\nEvery request was answered with {same} under all routers ({result.output_tokens:,} tokens).\n"
        "Decode streams the weights of every distinct expert. The step a token is in touches "
        f"{best.by_token_pct:.1f}% fewer under {best.router}\n({best.equal_rows_pct:.1f}% at equal rows) and takes "
        f"{faster_pct:.1f}% less time on an {result.hardware}, by the calibrated cost model.\n\n"
        f"Figure: {escape(result.figure)} ({result.wall_s:.0f} s in all)\nNext: [cyan]coterie "
        "record[/] your own server, [cyan]coterie fit[/] a router, [cyan]coterie inspect[/] a trace.\nEvery verb has "
        "[cyan]--help[/].",
        highlight=False,
    )
    if not result.same_tokens:
        raise typer.Exit(1)
