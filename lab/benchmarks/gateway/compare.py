"""What gateways add to canned workers: latency with one client, requests a second with several, in one run.

    python lab/benchmarks/gateway [--peers vllm-router,sglang-router,bare-aiohttp,minimal] [--gateway NAME=URL]

All run at the same time and are measured in turn, round after round, so that a noisy neighbour meets them alike: the
ratios hold, the absolute times are this machine's. A value is the median over the rounds with its 95% interval by
bootstrap; a ratio to the first peer is taken within each round. ``--gateway`` adds a row: a URL where a gateway runs in
front of its own workers, or a command in which ``{port}`` and ``{workers}`` are filled in.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from gateway.load import closed_loop
from gateway.peers import PEERS, Target, start_command, start_peer, start_workers

DIRECT = "direct"
RESAMPLES = 2000


class Median(NamedTuple):
    """A median and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 0 if self.value >= 100 else 3 if self.value < 10 else 1
        return f"{self.value:,.{digits}f} [{self.low:,.{digits}f}, {self.high:,.{digits}f}]"


def median_of(samples: Sequence[float]) -> Median:
    values = np.asarray(samples)
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Median(float(np.median(values)), float(low), float(high))


class Round(NamedTuple):
    """Results of one target in one round."""

    p50_ms: float
    p99_ms: float
    requests_per_s: float


async def measure(url: str, options: argparse.Namespace) -> Round:
    await closed_loop(url, 1, requests=20, stream=options.stream)  # connections of the gateway to its workers
    alone = await closed_loop(url, 1, requests=options.requests, stream=options.stream)
    p50, p99 = np.percentile(alone.latencies_s, (50, 99)) * 1e3
    await closed_loop(url, options.clients, requests=20, stream=options.stream)
    many = await closed_loop(url, options.clients, seconds=options.seconds, stream=options.stream)
    return Round(float(p50), float(p99), len(many.latencies_s) / many.seconds)


async def measure_all(targets: Sequence[Target], options: argparse.Namespace) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {target.name: [] for target in targets}
    for number in range(options.rounds):
        for at in range(len(targets)):  # each round begins with another, so that none is always first
            target = targets[(at + number) % len(targets)]
            found[target.name].append(await measure(target.url, options))
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    return found


def summarise(found: dict[str, list[Round]], reference: str | None) -> list[dict[str, Any]]:
    """Return a row per target: added latency, requests a second, and both as ratios to the reference."""
    direct = [one.p50_ms for one in found[DIRECT]]
    rows: list[dict[str, Any]] = []
    for name, rounds in found.items():
        added = [one.p50_ms - base for one, base in zip(rounds, direct, strict=True)]
        rates = [one.requests_per_s for one in rounds]
        row: dict[str, Any] = {
            "name": name,
            "p50_ms": median_of([one.p50_ms for one in rounds]),
            "p99_ms": median_of([one.p99_ms for one in rounds]),
            "added_p50_ms": None if name == DIRECT else median_of(added),
            "requests_per_s": median_of(rates),
        }
        if reference is not None and name != DIRECT:
            others = found[reference]
            slower = [own / (one.p50_ms - base) for own, one, base in zip(added, others, direct, strict=True)]
            row["added_ratio"] = median_of(slower)
            row["rate_ratio"] = median_of([own / one.requests_per_s for own, one in zip(rates, others, strict=True)])
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], clients: int, reference: str | None) -> str:
    beside = f" ÷ {reference}" if reference else ""
    lines = [
        f"| target | p50, 1 client (ms) | added p50 (ms) | added{beside} | req/s, {clients} clients | req/s{beside} |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        keys = ("p50_ms", "added_p50_ms", "added_ratio", "requests_per_s", "rate_ratio")
        cells = [row.get(key) for key in keys]
        lines.append(f"| {row['name']} | " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def read_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gateway", description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, or '' for none: %(default)s")
    parser.add_argument("--gateway", action="append", default=[], metavar="[NAME=]URL_OR_COMMAND")
    parser.add_argument("--reference", help="the row that ratios refer to; the first peer unless given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=400, help="of the single client, a round")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the several clients, a round")
    parser.add_argument("--stream", action="store_true", help="ask for server-sent events")
    parser.add_argument("--output", type=Path, help="also write all rounds, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options(argv)
    peers = [name for name in options.peers.split(",") if name]
    with ExitStack() as started:
        logs = Path(started.enter_context(tempfile.TemporaryDirectory()))
        workers, urls = start_workers(options.workers, logs)
        started.enter_context(workers)
        targets = [Target(DIRECT, urls[0])]
        starts = [(start_peer, name) for name in peers] + [(start_command, given) for given in options.gateway]
        for start, given in starts:
            targets.append(start(given, urls, logs))
            process = targets[-1].process
            if process is not None:
                started.enter_context(process)
        found = uvloop.run(measure_all(targets, options))
    names = [target.name for target in targets]
    reference = options.reference or (names[1] if len(names) > 1 else None)
    rows = summarise(found, reference)
    print(table(rows, options.clients, reference))
    if options.output is not None:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "system": platform.platform()}
        settings = {key: value for key, value in vars(options).items() if key != "output"}
        told = {"rows": rows, "rounds": found, "settings": settings, "hardware": machine}
        options.output.write_text(json.dumps(told, indent=1) + "\n")
