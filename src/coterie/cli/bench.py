"""``coterie bench``: how fast Coterie is on this machine, and how exact its cost model is."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.output import JsonOption, print_json, print_table, reporting


def bench_command(
    group: Annotated[str, typer.Argument(help="A group of benchmarks, or all.")], json: JsonOption = False
) -> None:
    """Run a group of benchmarks: `batching`, `costs`, `placement`, `routing`, `sim`, `traces`, or `all`."""
    from coterie.evaluation.bench import benches

    names = benches.names() if group == "all" else [group]
    rows = []
    with reporting("bench") as report:
        for name in names:
            rows += [{"group": name, **row} for row in benches[name](report)]
    if json:
        print_json({"rows": rows})
        return
    for name in names:
        mine = [{key: value for key, value in row.items() if key != "group"} for row in rows if row["group"] == name]
        for kind in dict.fromkeys(tuple(row) for row in mine):
            some = [row for row in mine if tuple(row) == kind]
            print_table(name, kind, [list(row.values()) for row in some])
