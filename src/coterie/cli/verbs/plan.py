"""``coterie plan``: plan an expert placement for a load, given the current placement."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from coterie.cli.output import (
    Column,
    JsonOption,
    out,
    print_json,
    print_rank_bars,
    print_table,
    relative,
    reporting,
    set_width,
)

if TYPE_CHECKING:  # numba takes a second to import: only when a plan is asked for
    from coterie.evaluation.placement.plans import Planned


def plan_command(
    load: Annotated[Path, typer.Argument(help="Load table or activation trace to plan for, in any known format.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model shape: a known name, or a folder with config.json. Default: the load's."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="Number of expert-parallel ranks.")] = 8,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes; each holds the same number of ranks.")] = 1,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots", help="Slots (places for an expert's weights) per layer, over all ranks. Default: one per expert."
        ),
    ] = None,
    current: Annotated[
        Path | None,
        typer.Option("--current", help="Current placement, in any known format. Default: experts in order."),
    ] = None,
    planner: Annotated[
        str, typer.Option("--planner", help="Planner to use; an unknown name lists all planners.")
    ] = "latency_optimal",
    split: Annotated[
        str | None,
        typer.Option("--split", help="How replicas share tokens: equal, weighted or optimal. Default: the planner's."),
    ] = None,
    horizon: Annotated[
        float | None, typer.Option("--horizon", help="Steps that the new placement will serve. Default: 1,000.")
    ] = None,
    target_balance: Annotated[
        float | None,
        typer.Option(
            "--target-balance",
            help="Leave a layer unchanged if its balance (best possible ÷ slowest rank) is at least this. Default: 1.",
        ),
    ] = None,
    max_moves: Annotated[
        int | None, typer.Option("--max-moves", help="Largest number of expert moves, over all layers.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds per layer for planner latency_optimal_ilp. Default: 10."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            help="Windows of the load table: a label, a number from 0, or A:B. Default: the sum of all windows but "
            "those named merged_…, which are sums of others.",
        ),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option(
            "--sources",
            help="The same tokens by the rank they start on: an .npy array [rank, layer, expert], or a folder of "
            "TensorRT-LLM's statistics. Default: every rank sends the same load.",
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option("--preset", help="Calibrated device: h200, rtx-pro-6000, or a file written by coterie calibrate."),
    ] = "h200",
    batch: Annotated[int, typer.Option("--batch", help="Tokens per step, summed over all ranks.")] = 8192,
    speeds: Annotated[
        str | None,
        typer.Option(
            "--speeds",
            help="Relative speed of each rank, such as 1,1,0.5,0: 1 is the preset's speed, 0 a rank that is down.",
        ),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the load; detected from the file by default.")
    ] = None,
    to: Annotated[
        str, typer.Option("--to", help="Format to write: sglang, vllm, tensorrt-llm, ascend or native.")
    ] = "native",
    out_file: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write the placement to; it must not exist.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Plan where experts live: load of every rank before and after, moves, gain, and steps until the moves pay off."""
    from coterie.evaluation.placement.plans import PlanOptions, make_plan, summary
    from coterie.placement.maps.formats import check_map_target, map_formats, write_map

    if out_file is None:
        map_formats[to]  # fail on a wrong name before the work
    else:
        check_map_target(out_file, to)
    options = PlanOptions(
        load=load,
        load_format=from_,
        window=window,
        sources=sources,
        model=model,
        ranks=ranks,
        nodes=nodes,
        slots=slots,
        speeds=speeds,
        current=current,
        planner=planner,
        split=split,
        max_moves=max_moves,
        time_limit=time_limit,
        horizon=horizon,
        target_balance=target_balance,
        preset=preset,
        batch=batch,
    )
    with _reporting(json_output) as report:
        planned = make_plan(options, report)
    found = summary(planned)
    if out_file is not None:
        written = write_map(out_file, planned.map, to)
        found |= {"written": str(out_file), "format": to, "left_out": list(written.left_out)}
    if json_output:
        print_json(found)
        return
    _print(planned, found)


def _reporting(quiet: bool) -> AbstractContextManager[Callable[[str, int, int], None]]:
    return nullcontext(lambda *_: None) if quiet else reporting("Planning")


def _print(planned: Planned, found: dict[str, Any]) -> None:
    set_width()
    where = f"{found['ranks']} ranks" + (f" on {found['nodes']} nodes" if found["nodes"] > 1 else "")
    out.print(
        f"{escape(found['model'])}: {found['layers']} MoE layers of {found['experts']} experts, "
        f"{found['slots']} slots on {where}",
        highlight=False,
    )
    out.print(f"load: {escape(found['load'])}", highlight=False)
    out.print(f"planner: {found['planner']}, split {found['split']}", highlight=False)
    _print_bars(planned)
    before, after = planned.busy_s()
    print_table(
        "Prediction",
        ["", "before", "after"],
        [
            ["MoE layers of a step, ms", 1e3 * found["before_s"], 1e3 * found["after_s"]],
            ["balance, mean of layers", f"{found['balance_before']:.3f}", f"{found['balance_after']:.3f}"],
            ["balance, worst layer", *(f"{planned.problem.layer_balance(busy).min():.3f}" for busy in (before, after))],
            ["duplicates", found["duplicates_before"], found["duplicates_after"]],
        ],
    )
    _print_verdict(planned, found)


def _print_bars(planned: Planned) -> None:
    before, after = planned.busy_s()
    worst = int(np.argmin(planned.problem.layer_balance(before)))
    name = planned.load.layer_ids[worst]
    print_rank_bars(
        "Time of every rank (1 = mean)",
        [
            Column("all layers, before", relative(before.sum(axis=0)), 0),
            Column("after", relative(after.sum(axis=0)), 0),
            Column(f"layer {name}, before", relative(before[worst]), 1),
            Column("after", relative(after[worst]), 1),
        ],
        f"Summed over layers ranks look more even than they are in each; layer {name} is the least even one before.",
    )


def _print_verdict(planned: Planned, found: dict[str, Any]) -> None:
    lines = []
    if found["keep"]:
        lines.append(f"keep the current placement: {found['skip_reason']}")
        if found["after_s"] < found["before_s"]:
            lines.append(f"split {found['split']} alone makes a step {found['gain_pct']:.1f}% shorter")
    else:
        links = ", ".join(
            f"{part['moves']:,} {name} ({_seconds(part['link_s'])} of link time)"
            for name, part in found["moves_by_link"].items()
        )
        lines.append(f"{_count(found['moves'], 'move')}, {found['move_bytes'] / 1e9:,.1f} GB: {links}")
        lines.append(f"gain: {found['gain_pct']:.1f}% of the MoE layers' time")
        held, steps = f"movement holds up serving for {_seconds(found['movement_s'])}", found["break_even_steps"]
        if steps is None:
            lines.append(f"{held}, and never pays for itself")
        else:
            whole = math.ceil(steps)
            even = f"paid for after {_count(whole, 'step')}, {_seconds(whole * found['after_s'])} of MoE layers"
            lines.append(f"{held}: {even} (horizon {_count(found['horizon'], 'step')})")
    proof = found["proof"]
    if proof is not None:
        lines.append(
            f"{_seconds(proof['objective_s'])} over the horizon, movement paid; no plan is below "
            f"{_seconds(proof['bound_s'])}: a gap of {proof['gap']:.2%}, {proof['worst_gap']:.2%} in the "
            f"worst layer; {proof['layers_closed']} of {found['layers']} layers closed"
        )
    lines.append(f"planning took {_seconds(found['planning_s'])}")
    if not planned.measured:
        lines.append(f"{found['model']} was not measured on this device: using the rates of the nearest measured shape")
    if "written" in found:
        what = " (the current placement)" if found["keep"] else ""
        left = [name for name in found["left_out"] if name == "shares"]
        note = f"; {found['format']} cannot store shares: the engine splits tokens its own way" if left else ""
        lines.append(f"Written: {found['written']}, {found['format']}{what}{note}")
    for line in lines:
        out.print(escape(line), highlight=False, soft_wrap=True)


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}" + ("" if number == 1 else "s")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"
