"""Notes and tables of the joint suite: which steps help, which do not and why, and if the published order holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.answers.runs import interval_of, with_ends
from coterie.answers.suites import Column, Row, SuiteTable
from coterie_lab.suites.eldr.fleets import TRACES
from coterie_lab.suites.joint import published
from coterie_lab.suites.joint.cells import CHAIN, LOADS, REPLICATION, ROUTING, SCHEDULING, STANDARD
from coterie_lab.suites.shared import distinct_values, gain, number, plain

KEY = "step_tbt_mean_saving"
"""Saving of a step's mean TBT against the step before it."""
SETTING = (
    "A worker is a rank: it keeps the KV cache of its own requests and holds an eighth of every layer's experts; a "
    "token whose expert is elsewhere crosses and comes back, and all ranks wait for the slowest in every layer. "
    "Requests share no prefixes here, so the router's KV term is the same for all ranks. Decode only: no prefill gets "
    "in between, and p99 lies near the mean unless someone is held back."
)


def notes_of(rows: Sequence[Row]) -> list[str]:
    notes = [SETTING, *_published_notes()]
    for trace in distinct_values(rows, "trace"):
        notes += _trace_notes([row for row in rows if row["trace"] == trace])
    return notes


def _published_notes() -> list[str]:
    first, last = (published.TABLE[name] for name in (CHAIN[0], CHAIN[-1]))
    exchange_ms = published.LAYER_US * published.LAYERS / 1e3
    return [
        f"The published table does not follow from the article's own numbers: {published.LAYERS} layers of "
        f"{published.LAYER_US} us are {exchange_ms:.2f} ms, {100 * exchange_ms / first.tbt_mean_ms:.1f}% of its "
        f"{first.tbt_mean_ms} ms step and not {first.all_to_all_pct:g}%.",
        f"Its throughputs are all {published.BATCH} ÷ mean TBT ({published.BATCH} ÷ {last.tbt_mean_ms} ms = "
        f"{1e3 * published.BATCH / last.tbt_mean_ms:.0f} a second), as any loop with {published.BATCH} always in "
        "flight has them, ours too: throughput says nothing here that TBT does not.",
    ]


def told(row: Row, key: str) -> str:
    return with_ends(interval_of(row, key), unit="%")


def verdict(row: Row, key: str) -> str:
    """Say whether a saving differs significantly from 0."""
    mean, low, high = interval_of(row, key)
    if mean == 0.0 and low == high:  # every seed, or the only one, is the same to the last digit
        return "does nothing"
    if low is None or high is None:
        return f"{'helps' if mean > 0 else 'hurts'} (one seed: no interval)"
    return "helps" if low > 0 else "hurts" if high < 0 else "not told apart from nothing"


def _trace_notes(rows: Sequence[Row]) -> list[str]:
    main = [row for row in rows if row["part"] == "main"]
    chain = {row["configuration"]: row for row in main if row["published"] is not None}
    standard, name = chain[STANDARD], f"{rows[0]['trace']}, {rows[0]['routing']} routing"
    steps = [
        f"{step} {verdict(chain[step], KEY)} ({told(chain[step], KEY)} of the mean TBT before it)" for step in CHAIN[1:]
    ]
    same = all((chain[step][f"{KEY}_low"] or 0.0) > 0 for step in CHAIN[1:])
    order = "the published order: every step is below the one before" if same else _ours(chain)
    ours = [chain[step]["all_to_all_pct"] for step in (STANDARD, SCHEDULING)]
    theirs = [published.TABLE[step].all_to_all_pct for step in (STANDARD, SCHEDULING)]
    notes = [
        f"{name}, {standard['in_flight']} in flight on {standard['ranks']} ranks, {standard['seeds']} seeds: "
        + "; ".join(steps)
        + ".",
        f"{name}: {order}. The all-to-all is {ours[0]:.1f}% of a standard step and {ours[1]:.1f}% with all steps "
        f"(published {theirs[0]:g} and {theirs[1]:g}): the first is the most that crossing less could ever save.",
        _routing_note(name, main, rows),
        _replication_note(name, chain, rows),
    ]
    notes += [_budget_note(name, chain, row) for row in rows if row["part"] == "budget"]
    notes += _size_notes(name, [row for row in rows if row["part"] == "step size"])
    slow = {row["configuration"]: row for row in rows if row["part"] == "slow link"}
    if slow:
        words = ", ".join(f"{step} {told(slow[step], KEY)}" for step in CHAIN[1:])
        notes.append(
            f"{name}, ranks joined by InfiniBand: the all-to-all is {slow[STANDARD]['all_to_all_pct']:.1f}% of a step; "
            f"{words}, each against the one before."
        )
    return notes


def _ours(chain: dict[str, Row]) -> str:
    order = sorted(CHAIN, key=lambda step: float(chain[step]["tbt_mean_ms"]))
    return "not the published order; from the shortest mean TBT to the longest: " + " ≤ ".join(
        f"{step} {chain[step]['tbt_mean_ms']:.2f} ms" for step in order
    )


def _routing_note(name: str, main: Sequence[Row], rows: Sequence[Row]) -> str:
    by = {row["router"]: row for row in main if row["configuration"] in (STANDARD, ROUTING)}
    joint, shortest, ours = by["joint"], by["join_shortest_queue"], by["latency_aware"]
    varied = {(row["router"], row["experts_placed_by"]): row for row in rows if row["part"] == "locality"}
    alone, clustered = varied["joint, no load", "order"], varied["locality_band", "clusters"]
    return (
        f"{name}: round robin leaves {_remote(by['round_robin'])}, joint {_remote(joint)} and the shortest queue "
        f"{_remote(shortest)}; the busiest rank has {by['round_robin']['uneven']:.2f}, {joint['uneven']:.2f} and "
        f"{shortest['uneven']:.2f} times the mean of requests. Against the shortest queue, which knows no experts, "
        f"joint saves {told(joint, 'shortest_tbt_mean_saving')}. Without its load term it reaches {_remote(alone)}. "
        "Experts placed by clusters of like requests, and requests sent to the rank of their cluster (locality_band), "
        f"reach {_remote(clustered)}. latency_aware: {_remote(ours)}; it prices experts that a worker streams for its "
        "own requests, but here ranks stream for each other, so its price is not of this fleet."
    )


def _remote(row: Row) -> str:
    return f"{row['remote_pct']:.1f}% remote at {row['tbt_mean_ms']:.2f} ms"


def _replication_note(name: str, chain: dict[str, Row], rows: Sequence[Row]) -> str:
    before, after = chain[ROUTING], chain[REPLICATION]
    streamed = [row["tbt_mean_ms"] * row["experts_pct"] / 100 for row in (before, after)]
    crossed = [row["tbt_mean_ms"] * row["all_to_all_pct"] / 100 for row in (before, after)]
    fewer = [row for row in rows if row["part"] == "replicas" and row["experts_placed_by"] == "demand"]
    words = ", ".join(f"{row['extra_slots']} {told(row, 'tbt_mean_saving')}" for row in fewer)
    return (
        f"{name}: {after['extra_slots']} more slots a rank bring remote activations from {before['remote_pct']:.1f} to "
        f"{after['remote_pct']:.1f}% and the all-to-all from {crossed[0]:.2f} to {crossed[1]:.2f} ms a step; experts "
        f"go from {streamed[0]:.2f} to {streamed[1]:.2f} ms, as a replica that is used is one more expert to stream."
        + (f" Fewer slots, against standard: {words}." if words else "")
    )


def _size_notes(name: str, rows: Sequence[Row]) -> list[str]:
    notes, most = [], max((row["extra_slots"] for row in rows), default=0)
    for planner, slots, what in (
        ("demand", most, "replicas for who asks"),
        ("eplb", most, "replicas to even out load"),
        ("eplb", 0, "experts moved to even out load, without replicas"),
    ):
        mine = [row for row in rows if (row["experts_placed_by"], row["extra_slots"]) == (planner, slots)]
        if mine:
            words = ", ".join(f"{row['in_flight']} tokens {told(row, 'tbt_mean_saving')}" for row in mine)
            notes.append(f"{name}, single steps: {what} save {words}.")
    return notes


def _budget_note(name: str, chain: dict[str, Row], tight: Row) -> str:
    wide = chain[SCHEDULING]
    return (
        f"{name}: under the published budget of {wide['budget']} {wide['decoding_pct']:.0f}% of those in flight decode "
        f"in a step (p99 {wide['tbt_p99_ms']:.2f} ms); under {tight['budget']}, which binds, "
        f"{tight['decoding_pct']:.0f}%, mean TBT {tight['tbt_mean_ms']:.2f} ms and p99 {tight['tbt_p99_ms']:.2f}. A "
        "step of fewer requests streams nearly the same experts, and who is left out waits for a whole one."
    )


def _beside(key: str, digits: int) -> Callable[[Row], str]:
    """Show our value, with the published one in brackets."""

    def value(row: Row) -> str:
        ours = f"{row[key]:.{digits}f}"
        return ours if row["published"] is None else f"{ours} ({row['published'][key]:g})"

    return value


def _step(row: Row) -> str:
    ours = gain(KEY)(row)
    return f"{ours} ({row['published']['step_tbt_mean_saving_pct']:.1f})" if ours and row["published"] else ours


def _varied(row: Row) -> str:
    """Say what differs from the chain."""
    if row["part"] == "budget":
        return f"budget {row['budget']}"
    if row["part"] == "replicas":
        return f"{row['extra_slots']} more slots, by {row['experts_placed_by']}"
    if row["part"] == "slow link":
        return "on InfiniBand"
    if row["part"] == "step size":
        return f"step of {row['in_flight']}, {row['extra_slots']} more, by {row['experts_placed_by']}"
    return f"{row['router']}, experts by {row['experts_placed_by']}"


def _shows(trace: str, main: bool) -> Callable[[Row], bool]:
    return lambda row: bool(row["trace"] == trace and "tbt_mean_ms" in row and (row["part"] == "main") == main)


_CHAIN = (
    Column("with", plain("configuration")),
    Column("router", plain("router")),
    Column("TBT ms", _beside("tbt_mean_ms", 2)),
    Column("p99", _beside("tbt_p99_ms", 2)),
    Column("all-to-all %", _beside("all_to_all_pct", 1)),
    Column("remote %", number("remote_pct", 1)),
    Column("saved %", _step),
)
_VARIED = (
    Column("with", plain("configuration")),
    Column("varied", _varied),
    Column("TBT ms", number("tbt_mean_ms")),
    Column("p99", number("tbt_p99_ms")),
    Column("all-to-all %", number("all_to_all_pct", 1)),
    Column("remote %", number("remote_pct", 1)),
    Column("decoding %", number("decoding_pct", 0)),
    Column("saved %", gain("tbt_mean_saving")),
)


def _tables(trace: str) -> tuple[SuiteTable, SuiteTable]:
    name = f"{trace}, {'recorded' if trace in TRACES else 'synthetic'} routing"
    chain = f"{name}: each step added to the one before, and what it saves of that one's mean TBT (published)"
    varied = f"{name}: one part varied, and what is saved of standard's mean TBT"
    return SuiteTable(chain, _CHAIN, _shows(trace, True)), SuiteTable(varied, _VARIED, _shows(trace, False))


TABLES = tuple(table for trace in sorted(LOADS, key=lambda trace: trace not in TRACES) for table in _tables(trace))
