"""``coterie bench``: measure how fast Coterie is on this machine, and how exact its cost model is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coterie.cli.output import JsonOption, print_json, print_table, reporting
from coterie.errors import check


def bench_command(
    group: Annotated[
        str | None, typer.Argument(help="Group of benchmarks to run, or all. Without it, list the groups.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a group of benchmarks, or `all` of them."""
    from coterie.answers.suites import LAB_MISSING, benches, lab_missing, look_up

    check(group not in (None, "all") or benches.names() or not lab_missing(), LAB_MISSING)
    if group is None:
        groups = [
            {"group": name, "measures": (benches[name].__doc__ or "").partition("\n")[0]} for name in benches.names()
        ]
        if json:
            print_json({"groups": groups})
        else:
            print_table("Groups", ["group", "measures"], [list(row.values()) for row in groups])
        return
    names = benches.names() if group == "all" else [group]
    with reporting("bench") as report:
        rows = [{"group": name, **row} for name in names for row in look_up(benches, name)(report)]
    if json:
        print_json({"rows": rows})
        return
    for name in names:
        mine = [{key: value for key, value in row.items() if key != "group"} for row in rows if row["group"] == name]
        for kind in dict.fromkeys(tuple(row) for row in mine):
            _print_rows(name, [row for row in mine if tuple(row) == kind])


def _print_rows(name: str, rows: list[dict[str, Any]]) -> None:
    """Print rows with the same columns; values that are equal in all rows are printed once, below the table."""
    same = {key: value for key, value in rows[0].items() if len(rows) > 1 and all(row[key] == value for row in rows)}
    differ = [key for key in rows[0] if key not in same]
    note = "In all rows: " + "; ".join(f"{key} {value}" for key, value in same.items()) if same else None
    print_table(name, differ, [[row[key] for key in differ] for row in rows], note)
