"""``coterie place``: look at placements."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.markup import escape

from coterie.cli.output import (
    Column,
    JsonOption,
    bar,
    out,
    print_json,
    print_rank_bars,
    print_table,
    relative,
    set_width,
)
from coterie.errors import ConfigError

if TYPE_CHECKING:  # matplotlib takes a second to import: only when a figure is asked for
    from coterie.evaluation.placement.inspection import MapInspection


place_app = typer.Typer(help="Look at placements.", no_args_is_help=True, add_completion=False)


@place_app.callback()
def _group() -> None:
    """Look at placements."""  # keeps `inspect` a subcommand although it is the only one


@place_app.command("inspect")
def inspect_command(
    placement: Annotated[
        Path, typer.Argument(help="Placement file, in any known format; FILE.npz#NAME selects one of several.")
    ],
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
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="Number of ranks, if the file does not give it (sglang, tensorrt-llm)."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes; each holds the same number of ranks.")] = 1,
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the placement; detected from the file by default.")
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Figure to write (.png); a .pdf of the same name is written too. Existing files are replaced."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show a placement: replicas, duplicates, spread over nodes, and the load of every rank."""
    from coterie.evaluation.placement.inspection import inspect_map
    from coterie.evaluation.placement.loads import read_load
    from coterie.models import model_of
    from coterie.placement.maps.formats import read_map

    if out_file is not None and out_file.suffix != ".png":
        raise ConfigError(f"--out={out_file} must end in .png")
    spec = None if model is None else model_of("", model)
    found = read_map(placement, from_, model=spec, num_ranks=ranks)
    tokens = what = None
    if load is not None:
        named = None if found.model == "unknown" else found.model
        seen = read_load(load, None, model or named, window)
        if found.layer_ids not in (None, seen.layer_ids):
            raise ConfigError(f"{load} and {placement} are for different layers of {seen.spec.name}")
        tokens, what = seen.tokens, seen.what
    shown = inspect_map(found, nodes, tokens)
    if out_file is not None:
        from coterie.evaluation.placement.figures import draw_map

        busy = None if shown.rank_load is None else np.array(shown.rank_load)
        draw_map(out_file, found, busy, tokens)
    if json_output:
        print_json(asdict(shown) | {"load": what} | ({} if out_file is None else {"figure": str(out_file)}))
        return
    _print(shown, what)
    if out_file is not None:
        out.print(f"Figure: {escape(str(out_file))}", highlight=False, soft_wrap=True)


def _print(shown: MapInspection, load: str | None) -> None:
    set_width()
    where = f"{shown.ranks} ranks" + (f" on {shown.nodes} nodes" if shown.nodes > 1 else "")
    out.print(
        f"{escape(shown.model)}: {shown.layers} layers of {shown.experts} experts, {shown.slots} slots on {where}",
        highlight=False,
    )
    if load is not None:
        out.print(f"load: {escape(load)}", highlight=False)
    width = max(10, min(out.width - 36, 48))
    full = max(shown.replicas)
    rows = [[n, count, bar(count, full, width)] for n, count in enumerate(shown.replicas, 1) if count]
    print_table("Experts by slots, all layers", ["slots", "experts", ""], rows)
    if not shown.most:
        out.print("no expert has a replica", highlight=False)
    else:
        print_table(
            "Most slots",
            ["layer", "expert", "slots", "of the layer's load"],
            [
                [str(one.layer), str(one.expert), one.replicas, "-" if one.load is None else f"{100 * one.load:.1f}%"]
                for one in shown.most
            ],
        )
    if shown.rank_load is not None:
        _print_load(shown)
    lines = [f"duplicates on a rank: {shown.duplicates:,}" + (": memory that buys nothing" if shown.duplicates else "")]
    if shown.layers > 1:
        same = f"{shown.same_layers} of {shown.layers} layers are" if shown.same_layers > 1 else "no other layer is"
        lines.append(f"{same} placed like the first")
    if shown.spread is not None:
        lines.append(f"experts with replicas are on {100 * shown.spread:.0f}% of the nodes they could be on")
    for line in lines:
        out.print(escape(line), highlight=False, soft_wrap=True)


def _print_load(shown: MapInspection) -> None:
    busy = np.array(shown.rank_load)
    worst = busy[shown.layer_ids.index(shown.worst_layer)] if shown.worst_layer is not None else busy[0]
    print_rank_bars(
        "Load of every rank (1 = mean)",
        [Column("all layers", relative(busy.sum(axis=0)), 0), Column(f"layer {shown.worst_layer}", relative(worst), 1)],
        f"Balancedness (mean ÷ busiest rank, 1 is even), mean of layers: {shown.balancedness:.3f}; "
        f"layer {shown.worst_layer} is the least even.",
    )
