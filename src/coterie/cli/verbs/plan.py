"""``coterie plan``: plan an expert placement for a load, given the current placement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from coterie.cli.output import (
    JsonOption,
    RankColumn,
    WindowOption,
    print_json,
    print_lines,
    print_rank_bars,
    print_table,
    print_verdict,
    relative,
    reporting,
    set_width,
)
from coterie.errors import check, check_new_file
from coterie.units import counted, shown_s

if TYPE_CHECKING:  # NumPy and numba take a second to import: done only to make a plan
    from coterie.answers.plan.learning import ItemKind
    from coterie.answers.plan.plans import BatchRow, Planned
    from coterie.answers.plan.samples import Brought, Over
    from coterie.costs.movement import Movement
    from coterie.types import WeightDtype

PLANNERS = ("eplb", "flashlb", "latency_optimal", "latency_optimal_ilp", "linear", "popularity", "round_robin", "swaps")
"""Built-in planners that need only a load. Listed here for --help: importing the registry takes a second."""
LEARNERS = ("co_cluster", "moetuner", "sem_moe")
"""Built-in planners that learn from the requests of an activation trace as well."""
DTYPES = ("fp32", "bf16", "fp16", "fp8", "mxfp4")
"""Values of ``WeightDtype``, listed here for --help: importing it would import NumPy."""
MOVEMENTS = {"none": "none", "stops": "the engine stops", "staged": "beside its steps"}
SPLITS = ("equal", "weighted", "optimal")


def plan_command(
    load: Annotated[
        Path,
        typer.Argument(help="Load table or activation trace to plan for, in any known format, or sample:gpt-oss-20b."),
    ],
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
        str,
        typer.Option(
            "--planner",
            help=f"Planner to use: {', '.join(PLANNERS)}; of an activation trace also {', '.join(LEARNERS)}; or one "
            "that a package adds. NAME:key=value sets it.",
        ),
    ] = "latency_optimal",
    items: Annotated[
        str,
        typer.Option(
            "--items",
            help="What co_cluster and sem_moe place experts beside: requests, each on one rank (router semantic), or "
            "tokens, each id on a rank of every layer.",
        ),
    ] = "requests",
    split: Annotated[
        str | None,
        typer.Option("--split", help=f"How replicas share tokens: {', '.join(SPLITS)}. Default: the planner's."),
    ] = None,
    horizon: Annotated[
        float | None, typer.Option("--horizon", help="Steps that the new placement will serve. Default: 1,000.")
    ] = None,
    target_balance: Annotated[
        float | None,
        typer.Option(
            "--target-balance",
            help="Leave a layer unchanged if best possible ÷ slowest rank is at least this; 1 is even. Default: 1.",
        ),
    ] = None,
    movement: Annotated[
        str,
        typer.Option(
            "--movement",
            help="How the engine moves experts: stops (serving waits for every move) or staged (behind its steps, at "
            "the contention that the preset holds).",
        ),
    ] = "stops",
    max_moves: Annotated[
        int | None, typer.Option("--max-moves", help="Largest number of expert moves, over all layers.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds per layer for planner latency_optimal_ilp. Default: 10."),
    ] = None,
    window: WindowOption = None,
    preset: Annotated[
        str,
        typer.Option("--preset", help="Calibrated device: h200, rtx-pro-6000, or a file written by coterie calibrate."),
    ] = "h200",
    batch: Annotated[int, typer.Option("--batch", help="Tokens per step, summed over all ranks.")] = 8192,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help=f"Weight dtype of the experts: {', '.join(DTYPES)}. Default: as published."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", help="Memory of a device, in GB (10^9 bytes). Default: the preset's.")
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            "--speeds",
            help="Relative speed of each rank, such as 1,1,0.5,0: 1 is the preset's speed, 0 a rank that is down.",
        ),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(
            "--links",
            help="Text file with a row for each rank: GB/s from it to every rank, one direction; its own is not used. "
            "Default: one link inside a node, one between nodes.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Plan for single steps of so many requests, drawn from an activation trace."),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase",
            help="What a request brings to such a step: prefill (its prompt), decode (a token), mixed (one its prompt, "
            "the others a token), or all (its recorded tokens, as a prompt would). Default: prefill if it has prompts.",
        ),
    ] = None,
    bursts: Annotated[
        float, typer.Option("--bursts", help="Share of such steps whose requests are all of one domain.")
    ] = 0.0,
    over: Annotated[
        str | None,
        typer.Option(
            "--over",
            help="Plan for single windows of a load table, its domains (labels up to a /), or mixtures of them: "
            "windows, domains or mixtures.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps or mixtures to draw.")] = 64,
    save_scenarios: Annotated[
        Path | None,
        typer.Option(
            "--save-scenarios",
            help="File to write the steps of --requests or --over to, for vLLM's policy; it must not exist.",
        ),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the load; detected from the file by default.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Engine that runs the plan, and format to write: vllm, sglang, sglang-das, tensorrt-llm, ascend, or "
            "native for Coterie's own. Replicas then share tokens as that engine does. What SGLang does depends on "
            "sglang:version=0.5.23,a2a=deepep,runner=triton. Default: native, for any split.",
        ),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write the placement to; it must not exist.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write a file with which the engine of --to may compute other outputs.")
    ] = False,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--tables",
            help="Folder to write tables of an activation trace to, new or empty: tokens.safetensors, the experts of "
            "token ids (a gateway's predictor), and ranks.safetensors, the ranks of tokens under the placement.",
        ),
    ] = None,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency",
            help="Also simulate requests while the moves run: TTFT and TPOT without them, if the engine stops, and if "
            "weights move beside its steps. One node, ranks of one speed, no spare slots; seconds to half a minute.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Plan the placement of experts: savings per batch size, moves, memory, and whether the plan pays."""
    from coterie.answers.plan.learning import write_tables
    from coterie.answers.plan.moving import check_moving, latency_while_moving
    from coterie.answers.plan.plans import PlanOptions, make_plan
    from coterie.answers.plan.report import next_command, plan_verdict, summary
    from coterie.answers.plan.samples import Sampling
    from coterie.placement.maps.formats import check_map_target, map_formats, write_map
    from coterie.placement.maps.targets import Target
    from coterie.placement.scenarios import save_scenarios as write_scenarios

    format = to or "native"
    if out_file is None:
        map_formats[Target.parse(format).format]  # raise for an unknown name before the work
    else:
        check_map_target(out_file, format)
    check_new_file(save_scenarios)
    check(
        save_scenarios is None or requests is not None or over is not None,
        f"--save-scenarios={save_scenarios} needs steps: --requests or --over",
    )
    options = PlanOptions(
        load=load,
        load_format=from_,
        window=window,
        model=model,
        ranks=ranks,
        nodes=nodes,
        slots=slots,
        speeds=speeds,
        links=links,
        current=current,
        planner=planner,
        split=split,
        max_moves=max_moves,
        time_limit=time_limit,
        horizon=horizon,
        target_balance=target_balance,
        movement=cast("Movement", movement),
        preset=preset,
        dtype=cast("WeightDtype | None", dtype),
        memory_gb=memory,
        batch=batch,
        sampling=Sampling(requests, cast("Brought | None", phase), bursts, cast("Over | None", over), steps),
        items=cast("ItemKind", items),
        tables=tables,
        to=to,
    )
    if latency:
        check_moving(ranks, speeds)
    with reporting("Planning") as report:
        planned = make_plan(options, report)
        found = summary(planned)
        if latency:
            found["while_moving"] = [row._asdict() for row in latency_while_moving(planned, report)]
    if out_file is not None:
        written = write_map(out_file, planned.map, format, force=force)
        found |= {"written": str(out_file), "format": written.format, "left_out": list(written.left_out)}
        found |= {"note": Target.parse(format).engine.note}
    if tables is not None and planned.load.learned is not None:
        found |= {"tables": [str(file) for file in write_tables(tables, planned.load.learned, planned.map.placement)]}
    if save_scenarios is not None:
        write_scenarios(save_scenarios, planned.pricing.load(planned.options.batch))
        found |= {"scenarios": str(save_scenarios)}
    found |= {"verdict": plan_verdict(planned, found), "next": next_command(planned, found)}
    if json_output:
        print_json(found)
    else:
        _print(planned, found)


def _print(planned: Planned, found: dict[str, Any]) -> None:
    set_width()
    where = f"{counted(found['ranks'], 'rank')}" + (f" on {found['nodes']} nodes" if found["nodes"] > 1 else "")
    shape = f"{found['layers']} MoE layers of {found['experts']} experts"
    print_lines(
        f"{found['model']}: {shape}, {found['slots']} slots on {where}",
        f"planned for {counted(found['batch'], 'token')} a step over all ranks, device {found['preset']}, "
        f"experts in {found['dtype']}",
        *filter(None, [planned.pricing.model.caveat]),
        f"load: {found['load']}",
        f"planner: {found['planner']}, split {found['split']}",
        *_memory(planned),
    )
    _print_batches(planned, found)
    _print_bars(planned)
    _print_prediction(planned, found)
    _print_moves(found)
    if found.get("while_moving"):
        _print_while_moving(found)
    print_verdict(found["verdict"], found["next"])


def _memory(planned: Planned) -> list[str]:
    from coterie.answers.plan.memory import device_size, gigabytes

    memory = planned.memory
    replicas = f", replicas {gigabytes(memory.replicas_bytes)}" if memory.replicas_bytes else ""
    needs = (
        f"memory of a rank: experts {gigabytes(memory.experts_bytes)}{replicas}, "
        f"staging at least {gigabytes(memory.staging_bytes)}"
    )
    shared, whole = gigabytes(memory.rest_bytes / memory.ranks), gigabytes(memory.rest_bytes)
    rest = f"KV cache, workspace and other weights (16-bit: {shared} shared by ranks, {whole} on each)"
    if memory.device_bytes is None or memory.left_bytes is None:
        return [f"{needs}; not checked: the preset does not say what a device has (--memory)", f"  not counted: {rest}"]
    short = "" if memory.fits else ", which is too little"
    left = gigabytes(max(0.0, memory.left_bytes))
    return [
        f"{needs}; a device has {device_size(memory.device_bytes)}",
        f"  left: {left} for {rest}{short}",
        f"  beside a full copy: KV cache of {memory.kv_tokens or 0:,.0f} tokens a rank; "
        f"a spare slot takes that of {memory.replica_kv_tokens:,.0f}",
    ]


def _print_batches(planned: Planned, found: dict[str, Any]) -> None:
    """Print the plan at several batch sizes, with a plan made for each of them, or a plan without spare slots."""
    spare = found["no_spare"] is not None
    other = "gain without spare slots" if spare else "gain of a plan for this batch"
    replanned = not spare and any(row.replanned_gain_pct is not None for row in planned.batches[1:])
    rows = [
        [
            f"{row.tokens:,}{' (--batch)' if row.tokens == found['batch'] else ''}",
            _phase(row.tokens / found["ranks"]),
            f"{1e3 * row.now_s:.3g}",
            f"{1e3 * row.after_s:.3g}",
            f"{row.gain_pct:.1f}%",
            *([_beside(row, spare)] if spare or replanned else []),
        ]
        for row in planned.batches
    ]
    print_table(
        "MoE layers of a step, by batch",
        ["tokens a step", "typical of", "now, ms", "this plan, ms", "gain", *([other] if spare or replanned else [])],
        rows,
        "Tokens over all ranks; a decode step has one for each running request. 'now' is what runs today.",
    )


def _phase(per_rank: float) -> str:
    return "decode" if per_rank <= 64 else "decode or prefill" if per_rank <= 256 else "prefill"


def _beside(row: BatchRow, spare: bool) -> str:
    gain = row.no_spare_gain_pct if spare else row.replanned_gain_pct
    if gain is None:
        return "-"
    return "keeps what runs now" if not spare and row.kept and gain <= 0 else f"{gain:.1f}%"


def _print_prediction(planned: Planned, found: dict[str, Any]) -> None:
    before, after = planned.both(planned.pricing.busy_s)
    worst = [f"{planned.problem.layer_balance(busy).min():.3f}" for busy in (before, after)]
    held, other = found["held_out"], found["no_spare"]
    columns = ["", "now", "this plan"]
    rows = [
        ["MoE layers of a step, ms", f"{1e3 * found['before_s']:.3g}", f"{1e3 * found['after_s']:.3g}"],
        ["gain, on the load planned for", "", f"{found['gain_pct']:.1f}%"],
        ["gain, on load held out", "", "-" if held is None else f"{held['gain_pct']:.1f}%"],
        ["balancedness, mean of layers", *(f"{found[f'balancedness_{when}']:.3f}" for when in ("before", "after"))],
        [
            "balancedness, on load held out",
            *("-" if held is None else f"{held[f'balancedness_{when}']:.3f}" for when in ("before", "after")),
        ],
        ["balancedness, worst layer", *worst],
        ["duplicates", str(found["duplicates_before"]), str(found["duplicates_after"])],
    ]
    if other is not None:
        columns.append("no spare slots")
        beside = f"{1e3 * other['after_s']:.3g}", f"{other['gain_pct']:.1f}%"
        unseen = "-" if held is None else f"{held['no_spare_gain_pct']:.1f}%"
        for row, cell in zip(rows, (*beside, unseen, f"{other['balancedness_after']:.3f}", "", "", "0"), strict=True):
            row.append(cell)
    how = f"Held out: {held['what']}" if held is not None else f"Nothing is held out: {found['not_held_out']}"
    print_table(f"Prediction at {counted(found['batch'], 'token')} a step", columns, rows)
    print_lines(f"Balancedness: mean ÷ slowest rank, 1 is even. {how}.", *_steps(found))
    if found["domains"]:
        print_table(
            "Balancedness on domains held out",
            ["", "mix of today", "worst domain", ""],
            [
                [row["placement"], f"{row['mix']:.3f}", f"{row['worst']:.3f}", row["worst_domain"]]
                for row in found["domains"]
            ],
            "A domain that is not in the load gains little.",
        )


def _steps(found: dict[str, Any]) -> list[str]:
    """Compare the plan for single steps with a plan for the mean step, on held-out steps; empty without steps."""
    held, unseen = found["held_out"], found["unseen"]
    if found["steps"] is None:
        return []
    lines = [f"Planned for {found['steps']['what']}; times and balancedness are means over steps."]
    if held is not None:
        lines.append(
            f"On steps it was not planned on, balancedness is {held['balancedness_after']:.3f}; a plan for the mean "
            f"step has {held['balancedness_mean']:.3f} there, what runs now {held['balancedness_before']:.3f}."
        )
    elif unseen is not None:
        lines.append(
            f"On {unseen['scenarios']} steps that were left out, balancedness is {unseen['after']:.3f} "
            f"({unseen['fitted']:.3f} on the others); a plan for the mean step has {unseen['mean']:.3f} there, "
            f"what runs now {unseen['before']:.3f}."
        )
    return lines


def _print_bars(planned: Planned) -> None:
    before, after = planned.both(planned.pricing.busy_s)
    worst = int(planned.problem.layer_balance(before).argmin())
    name = planned.load.layer_ids[worst]
    print_rank_bars(
        "Time of every rank (1 = mean)",
        [
            RankColumn("all layers, now", relative(before.sum(axis=0)), 0),
            RankColumn("this plan", relative(after.sum(axis=0)), 0),
            RankColumn(f"layer {name}, now", relative(before[worst]), 1),
            RankColumn("this plan", relative(after[worst]), 1),
        ],
        f"Summed over layers ranks look more even than they are in each; layer {name} is the least even one now.",
    )


def _print_moves(found: dict[str, Any]) -> None:
    lines = []
    if found["keep"]:
        lines.append(f"keep the current placement: {found['skip_reason']}")
        if found["after_s"] < found["before_s"]:
            lines.append(f"split {found['split']} alone makes a step {found['gain_pct']:.1f}% shorter")
    else:
        links = ", ".join(
            f"{part['moves']:,} {name} ({shown_s(part['link_s'])} of link time)"
            for name, part in found["moves_by_link"].items()
        )
        lines.append(f"{counted(found['moves'], 'move')}, {found['move_bytes'] / 1e9:,.1f} GB: {links}")
        held, steps = f"movement holds up serving for {shown_s(found['movement_s'])}", found["break_even_steps"]
        if steps is None:
            lines.append(f"{held}, and never pays for itself")
        else:
            whole = math.ceil(steps)
            even = f"paid for after {counted(whole, 'step')}, {shown_s(whole * found['after_s'])} of MoE layers"
            lines.append(f"{held}: {even} (horizon {counted(found['horizon'], 'step')})")
        lines += _trade(found["trade"])
    proof = found["proof"]
    if proof is not None:
        lines.append(
            f"{shown_s(proof['objective_s'])} over the horizon, movement paid; no plan is below "
            f"{shown_s(proof['bound_s'])}: a gap of {proof['gap']:.2%}, {proof['worst_gap']:.2%} in the "
            f"worst layer; {proof['layers_closed']} of {found['layers']} layers closed"
        )
    lines.append(f"planning took {shown_s(found['planning_s'])}")
    if "written" in found:
        what = " (the current placement)" if found["keep"] else ""
        lines.append(f"Written: {found['written']}, {found['format']}{what}")
        lines += filter(None, [found["note"]])
    lines += [f"Table written: {file}" for file in found.get("tables", ())]
    if "scenarios" in found:
        lines.append(f"Steps written: {found['scenarios']}")
    print_lines(*lines)


def _print_while_moving(found: dict[str, Any]) -> None:
    rows = [
        [
            MOVEMENTS[row["movement"]],
            *(f"{row[name]:.3g}" for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")),
            f"{row['longest_gap_ms']:.3g}",
            "never" if row["recovered_s"] is None else shown_s(row["recovered_s"]),
        ]
        for row in found["while_moving"]
    ]
    moving, count = found["while_moving"][-1]["moving_s"], found["while_moving"][0]["requests"]
    print_table(
        f"Simulated latency while weights move for {shown_s(moving)}, in ms",
        ["moves", "TTFT p50", "p99", "TPOT p50", "p99", "longest gap", "caught up after"],
        rows,
        f"{count:,} requests served from the first move until it has caught up: as many tokens as without moves.",
    )


def _trade(trade: dict[str, Any]) -> list[str]:
    """Return the break-even of an engine that stops for every move, and of one that stages moves, in words."""
    stops, staged = trade["stops_steps"], trade["staged_steps"]
    if stops is None or staged is None:
        return []
    return [
        f"an engine that stops for moves loses all of their time, {shown_s(trade['link_s'])}, and needs "
        f"{counted(math.ceil(stops), 'step')} to win it back;",
        f"one that stages them behind its steps loses {trade['staged_exposed']:.1%} of it, and needs "
        f"{math.ceil(staged):,}",
    ]
