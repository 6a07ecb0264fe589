"""``coterie demo``: a one-minute tour."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.output import JsonOption, out, print_json, print_table, reporting


def demo_command(
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.", min=0)] = 0,
    requests: Annotated[int, typer.Option(help="Requests to draw.", min=64)] = 640,
    json: JsonOption = False,
) -> None:
    """Take a one-minute tour: draw a bursty workload and see when to group like requests, and when to mix them."""
    from coterie.evaluation.demo import RANKS, run_demo

    with reporting("starting") as report:
        result = run_demo(seed, requests, report)
    if json:
        print_json({**result._asdict(), "rows": [row._asdict() for row in result.rows]})
        return
    out.print(
        f"\nA Mixture-of-Experts model sends every token through a few experts; which ones depends on what the text is "
        f"about.\nHere {result.requests:,} requests from {result.domains} domains arrive in bursts "
        f"({result.tokens:,} tokens, synthetic routing in the shape of {result.model}).\nWhich of them should run "
        f"together? Times are predicted by the cost model calibrated on an {result.hardware}.\n",
        highlight=False,
    )
    print_table(
        "What runs together decides how long a step takes",
        ["step", "together", "distinct", "balance", "experts", "step", "change"],
        [
            [r.step, r.requests, r.distinct_experts, r.balancedness, r.experts_ms, r.step_ms,
             f"{r.against_arrival_pct:+.1f}%"]
            for r in result.rows
        ],
        note="distinct: experts touched per layer; balance: mean rank ÷ slowest; times in ms",
    )
    best = {row.step: row for row in sorted(result.rows, key=lambda row: -row.step_ms)}
    decode, prefill = (best[row.step] for row in (result.rows[0], result.rows[-1]))
    out.print(
        "\n[bold]Decode on one GPU[/] is limited by streaming experts' weights: fewer distinct experts, faster step. "
        f"Best here: [bold]{decode.requests}[/].\n[bold]Prefill over {RANKS} GPUs[/] waits for the slowest rank: even "
        f"load, faster step. Best here: [bold]{prefill.requests}[/].\n\nNext: [cyan]coterie generate[/] a trace, "
        "[cyan]coterie inspect[/] it or your own, [cyan]coterie models[/] lists shapes,\n[cyan]coterie calibrate[/] "
        "measures your GPU. Every verb has [cyan]--help[/].",
        highlight=False,
    )
