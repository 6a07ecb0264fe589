"""``coterie place``: look at placements, and apply them to checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
import typer
from rich.markup import escape

from coterie.cli.output import (
    JsonOption,
    RankColumn,
    bar,
    out,
    print_json,
    print_lines,
    print_rank_bars,
    print_table,
    print_verdict,
    relative,
    reporting,
    set_width,
    shell,
)
from coterie.errors import check

if TYPE_CHECKING:  # compiled code takes a second to import
    from coterie.answers.plan.inspection import MapInspection


place_app = typer.Typer(
    help="Look at placements, and apply them to checkpoints.", no_args_is_help=True, add_completion=False
)

PlacementArgument = Annotated[
    Path, typer.Argument(help="Placement file, in any known format; FILE.npz#NAME selects one of several.")
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", help="Number of ranks, if the file does not give it (sglang, tensorrt-llm).")
]
MapFormatOption = Annotated[
    str | None, typer.Option("--from", help="Format of the placement; detected from the file by default.")
]


@place_app.command("inspect")
def inspect_command(
    placement: PlacementArgument,
    load: Annotated[
        Path | None,
        typer.Option("--load", help="Load table or activation trace; shows the load it puts on every rank."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window", help="Windows of the load table: a label, a number from 0, or A:B. Default: all but merged_…."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model shape: a known name, or a folder with config.json. Default: the file's."),
    ] = None,
    ranks: RanksOption = None,
    from_: MapFormatOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show a placement: replicas, duplicates, and the load of every rank."""
    from coterie.answers.plan.inspection import inspect_map
    from coterie.answers.plan.loads import read_load
    from coterie.models import model_of
    from coterie.placement.maps.formats import read_map

    spec = None if model is None else model_of("", model)
    map = read_map(placement, from_, model=spec, num_ranks=ranks)
    tokens = what = None
    if load is not None:
        seen = read_load(load, None, model or (None if map.model == "unknown" else map.model), window)
        check(
            map.layer_ids in (None, seen.layer_ids),
            f"{load} and {placement} are for different layers of {seen.spec.name}",
        )
        tokens, what = seen.tokens, seen.what
    shown = inspect_map(map, tokens)
    if json_output:
        print_json(asdict(shown) | {"load": what})
    else:
        _print(shown, what)


@place_app.command("apply")
def apply_command(
    placement: PlacementArgument,
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the model: config.json and safetensors files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.")],
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest", help="Apply the nearest placement that keeps routing groups whole, if this one does not."
        ),
    ] = False,
    ties: Annotated[
        str,
        typer.Option(
            "--ties",
            help="Experts with equal router rows: refuse to move them, or keep their order, where the engine takes the "
            "lowest_index first.",
        ),
    ] = "refuse",
    ranks: RanksOption = None,
    from_: MapFormatOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write a checkpoint whose experts are in the order of a placement; the model computes the same results."""
    from coterie.engines.transformers.permute.checkpoint import Ties, permute_checkpoint
    from coterie.placement.maps.formats import read_map

    map = read_map(placement, from_, num_ranks=ranks)
    with reporting("Reading the checkpoint") as report:
        done = permute_checkpoint(map, checkpoint, output, nearest=nearest, ties=cast(Ties, ties), on_progress=report)
    applied = done.placement
    verdict = (
        f"{done.moved:,} of {applied.slot_experts.size:,} experts have another index in {output}: an engine that gives "
        f"each of {applied.num_ranks} ranks {applied.slots_per_rank} consecutive experts a layer holds the placement."
    )
    then = shell("vllm", "serve", output, "--enable-expert-parallel", "--data-parallel-size", applied.num_ranks)
    result = {
        "folder": str(done.folder),
        "layers": list(done.layer_ids),
        "experts": applied.num_experts,
        "ranks": applied.num_ranks,
        "moved": done.moved,
        "regrouped": done.regrouped,
        "tensors": done.tensors,
        "weight_bytes": done.weight_bytes,
        "left_out": list(done.left_out),
        "verdict": verdict,
        "next": then,
    }
    if json_output:
        print_json(result)
        return
    set_width()
    print_table(
        f"Permuted {checkpoint}",
        ["field", "value"],
        [
            ["layers", len(done.layer_ids)],
            ["experts of a layer", applied.num_experts],
            ["tensors renamed or reordered", done.tensors],
            ["bytes of weights", done.weight_bytes],
        ],
    )
    if done.regrouped:
        out.print(
            f"{done.regrouped:,} experts are on another rank than asked for, so that routing groups stay whole.",
            highlight=False,
        )
    print_lines(*(f"Left out: {name} (not permuted)" for name in done.left_out))
    print_verdict(verdict, then)


def _print(shown: MapInspection, load: str | None) -> None:
    set_width()
    out.print(
        f"{escape(shown.model)}: {shown.layers} layers of {shown.experts} experts, {shown.slots} slots on "
        f"{shown.ranks} ranks",
        highlight=False,
    )
    if load is not None:
        out.print(f"load: {escape(load)}", highlight=False)
    width = max(10, min(out.width - 36, 48))
    rows = [[n, count, bar(count, max(shown.replicas), width)] for n, count in enumerate(shown.replicas, 1) if count]
    print_table("Experts by slots, all layers", ["slots", "experts", ""], rows)
    if shown.rank_load is not None:
        _print_load(shown)
    print_lines(
        f"duplicates on a rank: {shown.duplicates:,}" + (": memory that buys nothing" if shown.duplicates else "")
    )
    if shown.layers > 1:
        same = f"{shown.same_layers} of {shown.layers} layers are" if shown.same_layers > 1 else "no other layer is"
        print_lines(f"{same} placed like the first")


def _print_load(shown: MapInspection) -> None:
    busy = np.array(shown.rank_load)
    worst = busy[shown.layer_ids.index(shown.worst_layer)] if shown.worst_layer is not None else busy[0]
    print_rank_bars(
        "Load of every rank (1 = mean)",
        [
            RankColumn("all layers", relative(busy.sum(axis=0)), 0),
            RankColumn(f"layer {shown.worst_layer}", relative(worst), 1),
        ],
        f"Balancedness (mean ÷ busiest rank, 1 is even), mean of layers: {shown.balancedness:.3f}; "
        f"layer {shown.worst_layer} is the least even.",
    )
