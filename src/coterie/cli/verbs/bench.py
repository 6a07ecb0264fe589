"""``coterie bench``: how fast Coterie is on this machine, and how exact its cost model is."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.output import JsonOption, print_json, print_table, reporting


def bench_command(
    group: Annotated[
        str | None, typer.Argument(help="Group of benchmarks to run, or all. Without it, list the groups.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a group of benchmarks, or `all` of them."""
    from coterie.evaluation.bench import benches

    if group is None:
        if json:
            print_json({"groups": _groups()})
        else:
            _print_groups()
        return
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


def _groups() -> list[dict[str, str]]:
    """Name of every group, and the first line of its docstring."""
    from coterie.evaluation.bench import benches

    return [{"group": name, "measures": (benches[name].__doc__ or "").partition("\n")[0]} for name in benches.names()]


def _print_groups() -> None:
    print_table("Groups", ["group", "measures"], [list(row.values()) for row in _groups()])
