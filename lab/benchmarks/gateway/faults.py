"""Faults under load: an embedded fleet behind a real gateway, streaming clients, and everything that can fail does.

    python lab/benchmarks/gateway/faults.py --minutes 5 [--rate 6] [--seed 0] [--json]

Decode workers are killed, stalled and flapped, a stream's worker is killed in its middle, the prefill worker lies in
its footprints, dies and stalls, clients leave, the gateway is drained, killed and reconfigured: two faults at a time,
drawn from a seeded deck. Every request is accounted for. Only a restart of the gateway itself may lose one before its
first byte, counted apart; one that breaks later must say so in the stream. At the end, with the fleet idle, nothing may
be left of any request: in the gateway, in its process, in the workers. Exit code 1 on any defect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from numpy.random import SeedSequence, default_rng

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from coterie.gateway.embedded import EmbeddedFleet, run_embedded
from gateway.faulty.client import Clients
from gateway.faulty.hands import Fault, Hands
from gateway.faulty.site import Site, until
from gateway.faulty.verdict import (
    DEFECTS,
    LOST,
    WHOLE,
    class_of,
    count_classes,
    different_answers,
    recoveries,
    rows_by_kind,
)

RATE = 6.0
WARM_REQUESTS = 24
QUIET_S = 6.0
"""Time after which connections that are kept unused are closed, and more."""
LEFT_S = 90.0
"""Time in which an idle fleet must be empty: KV that a killed gateway left behind is dropped after 60 s."""
GATEWAY_SHARE = 0.6
"""Share of the run in which the gateway itself may be restarted: its last process lives through the rest."""
SHOWN = 8


async def run(fleet: EmbeddedFleet, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    rngs = [default_rng(one) for one in SeedSequence(seed).spawn(3)]
    site = Site(fleet, rngs[0])
    async with site.running():
        await _warm(site)
        before = await _state(site)
        clients = Clients(site.gateway.url, rngs[1])
        began = time.monotonic()
        hands = Hands(site, clients, rngs[2], began + 0.85 * seconds, began + GATEWAY_SHARE * seconds)
        loading = asyncio.create_task(clients.load(rate, began + seconds))
        await hands.work()
        await loading
        await clients.finished()
        after, left = await _settle(site, before)
        metrics = await site.metrics()
        logged = site.logged()
    return _result(clients, hands, began, logged, {"before": before, "after": after}, left + _errors(metrics))


async def _warm(site: Site) -> None:
    """Every part has worked once: threads are started, connections were made."""
    clients = Clients(site.gateway.url, default_rng(0))
    for _ in range(WARM_REQUESTS):
        clients.send(clients.drawn())
    await clients.finished()
    await asyncio.sleep(QUIET_S)


async def _state(site: Site) -> dict[str, float]:
    """Count what is in use: by the gateway itself, by its process, and by the workers."""
    found = await site.metrics()
    state = {
        "requests in flight": found["coterie_gateway_in_flight"],
        "requests waiting": found["coterie_gateway_queue_length"],
        "requests at workers": sum(value for name, value in found.items() if "worker_running{" in name),
        "tasks": found["coterie_gateway_tasks"],
        "client connections": found["coterie_gateway_connections"],
    }
    for worker in site.fleet.workers:
        told = await site.worker_metrics(worker)
        for name, wanted in (
            ("staged KV", "coterie_worker_kv_staged{"),
            ("KV blocks in use", 'state="used"'),
            ("running in workers", "coterie_worker_running{"),
            ("waiting in workers", "coterie_worker_waiting{"),
        ):
            state[name] = state.get(name, 0.0) + _only(told, wanted)
    return {**state, **site.resources()}


def _only(metrics: dict[str, float], wanted: str) -> float:
    """The one value whose name holds `wanted`."""
    (value,) = (value for name, value in metrics.items() if wanted in name)
    return value


async def _settle(site: Site, before: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Wait until as little is in use as before; what is left over otherwise."""
    after = dict(before)

    def over() -> list[str]:
        return [name for name, value in after.items() if name != "resident_mib" and value > before[name]]

    async def empty() -> bool:
        after.update(await _state(site))
        return not over()

    await until(empty, LEFT_S, 1.0)
    return after, [f"left over: {name}: {before[name]:g} before, {after[name]:g} after" for name in over()]


def _errors(metrics: dict[str, float]) -> list[str]:
    """Exceptions that the gateway did not expect."""
    return [
        f"unexpected error: {name} {value:g}"
        for name, value in metrics.items()
        if "gateway_errors_total" in name and value
    ]


def _result(
    clients: Clients,
    hands: Hands,
    began: float,
    logged: dict[str, dict[str, Any]],
    state: dict[str, dict[str, float]],
    left: list[str],
) -> dict[str, Any]:
    faults: list[Fault] = hands.faults
    counts = count_classes(clients.asked, faults)
    served_by = {name: event["worker"] for name, event in logged.items() if "worker" in event}
    found = recoveries(clients.asked, faults, served_by)
    different = different_answers(clients.asked)
    defects = [f"{counts[name]} requests {name.removeprefix('DEFECT: ')}" for name in DEFECTS if counts[name]]
    defects += hands.defects + left
    defects += [f"answers differ: {one}" for one in different[:SHOWN]]
    return {
        "requests": len(clients.asked),
        "retried": sum("failures" in event for event in logged.values()),
        "most_retries": max((event["retries"] for event in logged.values()), default=0),
        "by_class": counts,
        "recovery": rows_by_kind(found),
        "faults": [
            {
                "kind": one.fault.kind,
                "target": one.fault.target,
                "at_s": round(one.fault.began_s - began, 2),
                "lasted_s": round(one.repair_s, 2),
                "served_again_s": one.any_s,
                "worker_back_s": one.worker_s,
                "note": one.fault.note,
            }
            for one in found
        ],
        "state": state,
        "failed": [
            {
                "name": one.name,
                "at_s": round(one.began_s - began, 2),
                "seconds": round(one.ended_s - one.began_s, 2),
                "class": found_class,
                "problem": one.problem,
                "tries": logged.get(one.name, {}).get("failures", []),
            }
            for one in clients.asked
            if (found_class := class_of(one, faults)) != WHOLE
        ],
        "defects": defects,
    }


def print_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table in Markdown."""
    print(f"\n{title}\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(map(str, row))} |")


def report(result: dict[str, Any]) -> None:
    print_rows("Requests", ("what became of it", "requests"), result["by_class"].items())
    columns = ("fault", "times", "lasted, s", "served again, s", "worker back, s")
    note = "Median, longest. Served again: fault to the first whole answer. Worker back: repair to its own first."
    rows = [[_shown(value) for value in row.values()] for row in result["recovery"]]
    print_rows("Faults", columns, rows)
    print(note)
    before, after = result["state"]["before"], result["state"]["after"]
    held = [(name, value, after[name]) for name, value in before.items()]
    print_rows("In use while idle", ("what", "before", "after"), held)
    for defect in result["defects"]:
        print(f"defect: {defect}")
    if result["by_class"][LOST]:
        for one in [one for one in result["failed"] if one["class"] in DEFECTS][:SHOWN]:
            print(f"  {one}")


def _shown(value: Any) -> Any:
    return ", ".join(f"{one:.1f}" for one in value) if isinstance(value, list) else value


def verdict(result: dict[str, Any]) -> str:
    counts = result["by_class"]
    done = f"{result['requests']:,} requests under {len(result['faults'])} faults: {counts[WHOLE]:,} whole"
    if result["defects"]:
        return f"{done}; {len(result['defects'])} defects."
    return f"{done}; none lost but by a restart of the gateway, every broken stream said so, nothing left over."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Faults under load.")
    parser.add_argument("--minutes", type=float, default=5.0, help="time under load (default 5)")
    parser.add_argument("--rate", type=float, default=RATE, help=f"requests a second (default {RATE:g})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if not (options.minutes > 0 and options.rate > 0 and options.seed >= 0):
        parser.error("--minutes and --rate must be above 0, --seed at least 0")
    with run_embedded() as fleet:
        result = asyncio.run(run(fleet, 60 * options.minutes, options.rate, options.seed))
    if options.json:
        print(json.dumps({**result, "verdict": verdict(result)}))
    else:
        report(result)
        print(verdict(result))
    return 1 if result["defects"] else 0


if __name__ == "__main__":
    sys.exit(main())
