"""Hold the dashboard open in Chromium on a live embedded fleet with traffic, and watch the memory of both.

    python lab/benchmarks/gateway/page_soak.py --minutes 60

The gateway is a process of its own. Sampled: its resident memory and that of its children, the page's JavaScript heap
after a forced collection, and the page's DOM nodes. The verdict holds the last quarter against the second one: the
first is warming up, of lists and rings that fill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))

from browser import Chromium, Page, chromium, find_chromium, tab
from coterie.answers.demo.serving import keep_busy
from coterie.gateway.embedded import run_embedded
from coterie.net.http_client import Client
from coterie.net.processes import ServerProcess, free_port

MB = 1e6


class Sample(NamedTuple):
    minute: float
    gateway_mb: float
    children_mb: float
    heap_mb: float
    nodes: int
    decisions: int


class Bound(NamedTuple):
    """How much a median of the last quarter may be above that of the second."""

    share: float
    absolute: float


BOUNDS = {
    "gateway_mb": Bound(0.03, 4.0),
    "children_mb": Bound(0.05, 8.0),
    "heap_mb": Bound(0.05, 0.5),
    "nodes": Bound(0.15, 20),  # advice comes and goes
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=24, help="at least 8")
    parser.add_argument("--in-flight", type=int, default=4, help="requests at a time")
    asked = parser.parse_args(arguments)
    if asked.samples < 8 or asked.minutes <= 0:
        parser.error(f"--samples {asked.samples} must be at least 8, and --minutes {asked.minutes} above 0")
    if find_chromium() is None:
        print("no Chromium found", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser, run_embedded() as fleet:
        port = free_port()
        file = Path(folder) / "gateway.yaml"
        file.write_bytes(msgspec.json.encode(fleet.config(f"127.0.0.1:{port}")))
        url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "coterie", "serve", "--config", str(file)]
        with ServerProcess(argv, url, Path(folder) / "gateway.log", fleet.access.environment).start() as gateway:
            found = asyncio.run(soak(browser, url, gateway.pid, asked.minutes, asked.samples, asked.in_flight))
    print(table(found))
    problems = grown(found)
    print("\n".join(problems) or f"flat over {asked.minutes:g} minutes: {found[-1].decisions} decisions were shown")
    return 1 if problems else 0


async def soak(browser: Chromium, url: str, pid: int, minutes: float, samples: int, in_flight: int) -> list[Sample]:
    async with Client(url) as client:
        traffic = asyncio.create_task(keep_busy(url, in_flight=in_flight))
        try:
            async with tab(browser) as page:
                await page.open(url + "/")
                await page.until("document.getElementById('state').dataset.state === 'live'")
                return await _sample(page, client, pid, minutes, samples)
        finally:
            traffic.cancel()
            await asyncio.gather(traffic, return_exceptions=True)


async def _sample(page: Page, client: Client, pid: int, minutes: float, samples: int) -> list[Sample]:
    found: list[Sample] = []
    started = time.monotonic()
    for number in range(1, samples + 1):
        await asyncio.sleep(max(0.0, started + 60 * minutes * number / samples - time.monotonic()))
        heap, nodes = await page.memory()
        _, text = await client.call("GET", "/decisions?last=0")
        children = sum(map(resident, children_of(pid)))
        recorded = int(msgspec.json.decode(text)["recorded"])
        minute = (time.monotonic() - started) / 60
        found.append(Sample(minute, resident(pid) / MB, children / MB, heap / MB, nodes, recorded))
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        if page.problems:
            raise SystemExit(f"the page raised errors: {page.problems[:5]}")
    return found


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def children_of(pid: int) -> list[int]:
    """Processes started by any thread of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return found


def grown(samples: Sequence[Sample]) -> list[str]:
    """Name the values that grew by more than their bound, from the second quarter to the last."""
    quarter = len(samples) // 4
    problems = []
    for name, bound in BOUNDS.items():
        values = [float(getattr(one, name)) for one in samples]
        before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        if after - before > max(bound.share * before, bound.absolute):
            problems.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return problems


def table(samples: Sequence[Sample]) -> str:
    lines = ["| minute | gateway, MB | its children, MB | page's heap, MB | DOM nodes | decisions |", "|" + "---:|" * 6]
    for one in samples:
        lines.append(
            f"| {one.minute:.1f} | {one.gateway_mb:.1f} | {one.children_mb:.1f} | {one.heap_mb:.2f} | {one.nodes:,} | "
            f"{one.decisions:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
