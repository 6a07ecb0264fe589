"""What the control loop costs the gateway: latency with one client and requests a second, with the loop on and off.

    python lab/benchmarks/gateway/loop_cost.py [--rounds 7] [--rate 25] [--subscribe /live]

Two canned workers, one gateway, one process that publishes expert events as a busy fleet would, all the time. In each
round the loop is switched on and off by a reload, which of them first in turn; a ratio is taken within the round, and
its interval is the 95% one by bootstrap over the rounds. ``--subscribe`` reads an endless answer of the gateway, as a
page does, for as long as the loop is on. A fit's own time is shown apart.

Latency and rate are noisy where clients, workers, gateway and loop share few cores, and so is the gateway's processor
time for a request: what runs beside it slows it. What the loop and the page add to the gateway itself is measured while
no request comes, right after the busy seconds: a page is then sent as much, and nothing else is done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from coterie.answers.runs import interval, with_ends
from coterie.gateway.config import AdviseSection, ControlSection, GatewayConfig, WorkerEntry
from coterie.gateway.embedded import tiny_fit_path
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http1.upstream import Upstream
from coterie.net.http_client import Client
from coterie.net.processes import ServerProcess, free_port
from gateway.compare import measure, median_of
from gateway.faulty.site import parse_metrics
from gateway.peers import HERE, START_S, start_workers

ON = ControlSection(score="experts", advise=AdviseSection(ranks=4))
OFF = ControlSection(enabled=False)


def config(port: int, urls: Sequence[str], endpoints: Sequence[str], control: ControlSection) -> GatewayConfig:
    workers = [
        WorkerEntry(id=f"worker-{number}", url=url, places=64, expert_events=endpoint)
        for number, (url, endpoint) in enumerate(zip(urls, endpoints, strict=True))
    ]
    spec = RouterSpec("latency_aware", fit=str(tiny_fit_path()))
    return GatewayConfig(listen=f"127.0.0.1:{port}", workers=workers, decode=spec, control=control)


class Cost(NamedTuple):
    """Results of one round."""

    p50_ms: float
    p99_ms: float
    requests_per_s: float
    cpu_ms: float
    """Processor time of the gateway's own process, a request."""
    idle_pct: float
    """Processor time of the gateway's own process while no request comes, as a share of the time."""


class Switched:
    """A gateway whose loop is switched on and off."""

    def __init__(
        self, path: Path, configs: dict[str, GatewayConfig], url: str, pid: int, subscribe: str | None
    ) -> None:
        self.path, self.configs, self.url, self.pid, self.subscribe = path, configs, url, pid, subscribe

    async def switch(self, client: Client, state: str) -> None:
        """Reload, and wait until the loop reads its streams, or has ended."""
        self.path.write_bytes(msgspec.yaml.encode(self.configs[state]))
        before = await self.metric(client, 'control_stream_total{kind="messages"}')
        status, text = await client.call("POST", "/reload")
        assert status == 200, text
        while state == "on" and await self.metric(client, 'control_stream_total{kind="messages"}') == before:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)

    async def metric(self, client: Client, name: str) -> float:
        """Return a metric of the gateway, summed over its labels if `name` has none."""
        found = parse_metrics((await client.call("GET", "/metrics"))[1])
        return sum(value for key, value in found.items() if f"coterie_gateway_{name}" in (key, key.partition("{")[0]))

    async def measure(self, client: Client, state: str, options: argparse.Namespace) -> Cost:
        async with self.page(state):
            before = await self.metric(client, "requests_total"), cpu_s(self.pid)
            seen = await measure(self.url, options)
            used, answered = cpu_s(self.pid) - before[1], await self.metric(client, "requests_total") - before[0]
            start_s, start_cpu_s = time.perf_counter(), cpu_s(self.pid)
            await asyncio.sleep(options.idle_seconds)
            idle = (cpu_s(self.pid) - start_cpu_s) / (time.perf_counter() - start_s)
            return Cost(*seen, 1e3 * used / answered, 100 * idle)

    @contextlib.asynccontextmanager
    async def page(self, state: str) -> AsyncIterator[None]:
        """Read what a page would, while the loop is on."""
        if self.subscribe is None or state == "off":
            yield
            return
        upstream = Upstream(self.url)
        answer = await upstream.send("GET", self.subscribe, [(b"accept", b"text/event-stream")])

        async def read() -> None:
            async for _ in answer:
                pass

        task = asyncio.create_task(read())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await upstream.close()


def mean_of(values: Sequence[float]) -> str:
    """Mean and 95% interval: processor time is counted in hundredths of a second, too coarse for a median."""
    return with_ends(interval(values), 2, sign="")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(gateway: Switched, options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[Cost]] = {"on": [], "off": []}
    async with Client(gateway.url) as client:
        for number in range(options.rounds):
            for state in ("on", "off") if number % 2 == 0 else ("off", "on"):
                await gateway.switch(client, state)
                rounds[state].append(await gateway.measure(client, state, options))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
        fits = {
            name: await gateway.metric(client, f'control_refits_total{{outcome="{name}"}}')
            for name in ("taken", "kept")
        }
        fit_s = await gateway.metric(client, "control_fit_seconds")
    return {"rounds": rounds, "fits": fits, "fit_s": fit_s}


def report(told: dict[str, Any], clients: int) -> str:
    rounds: dict[str, list[Cost]] = told["rounds"]
    pairs = list(zip(rounds["on"], rounds["off"], strict=True))
    lines = ["| | loop on | loop off | on ÷ off |", "|---|---|---|---|"]
    for name, field in (
        ("p50, 1 client (ms)", "p50_ms"),
        ("p99, 1 client (ms)", "p99_ms"),
        (f"req/s, {clients} clients", "requests_per_s"),
        ("gateway's processor time a request (ms)", "cpu_ms"),
    ):
        on, off = ([getattr(one, field) for one in rounds[state]] for state in ("on", "off"))
        ratio = median_of([getattr(a, field) / getattr(b, field) for a, b in pairs])
        lines.append(f"| {name} | {median_of(on)} | {median_of(off)} | {ratio} |")
    on, off = ([one.idle_pct for one in rounds[state]] for state in ("on", "off"))
    more = mean_of([a - b for a, b in zip(on, off, strict=True)])
    name = "gateway's processor time, no requests (% of a core)"
    lines.append(f"| {name} | {mean_of(on)} | {mean_of(off)} | {more} more |")
    taken, kept = (f"{told['fits'][name]:.0f}" for name in ("taken", "kept"))
    lines.append(f"| fits taken, kept; the last took | {taken}, {kept}; {told['fit_s']:.2f} s | | |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=400, help="of the single client, a round")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the several clients, a round")
    parser.add_argument("--idle-seconds", type=float, default=2.0, help="without requests, a round")
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second of each worker, as events")
    parser.add_argument(
        "--subscribe", metavar="PATH", help="endless answer to read while the loop is on, such as /live"
    )
    parser.add_argument("--stream", action="store_true", help="ask for server-sent events")
    options = parser.parse_args(argv)
    with ExitStack() as started:
        logs = Path(started.enter_context(tempfile.TemporaryDirectory()))
        workers, urls = start_workers(2, logs)
        started.enter_context(workers)
        port, endpoints = free_port(), [f"tcp://127.0.0.1:{free_port()}" for _ in urls]
        publisher = subprocess.Popen([sys.executable, str(HERE / "publishing.py"), str(options.rate), *endpoints])
        started.callback(publisher.wait)
        started.callback(publisher.kill)
        configs = {state: config(port, urls, endpoints, section) for state, section in (("on", ON), ("off", OFF))}
        path = logs / "gateway.yaml"
        path.write_bytes(msgspec.yaml.encode(configs["off"]))
        url = f"http://127.0.0.1:{port}"
        argv_of = [sys.executable, "-m", "coterie", "serve", "--config", str(path)]
        server = started.enter_context(ServerProcess(argv_of, url, logs / "gateway.log").start(START_S))
        told = uvloop.run(run(Switched(path, configs, url, server.pid, options.subscribe), options))
    print(report(told, options.clients))


if __name__ == "__main__":
    main()
