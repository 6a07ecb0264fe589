"""Latency and throughput of Envoy with pickers beside Envoy alone: interleaved rounds on one machine.

python tests/scale/envoy/throughput.py --rounds 5 --pickers 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT / "engines")]

from canned_workers import canned_workers  # noqa: E402
from coterie.net.http1.upstream import Upstream  # noqa: E402
from envoys import envoy  # noqa: E402

BODY = b'{"model": "canned", "prompt": "%b", "max_tokens": 16}' % (b"Once upon a time " * 30)
HEADERS = [(b"content-type", b"application/json")]
WORKERS = ("a", "b")


async def _serve_workers() -> None:
    """Canned workers in a process of their own: print their addresses, serve until the process is ended."""
    async with canned_workers(*WORKERS) as workers:
        print(*(worker.url.removeprefix("http://") for worker in workers), flush=True)
        await asyncio.Event().wait()


async def _measure(url: str, seconds: float, clients: int) -> list[float]:
    """Send requests for `seconds`; return the seconds that each took."""
    upstream, until, took = Upstream(url), time.perf_counter() + seconds, []

    async def client() -> None:
        while (started := time.perf_counter()) < until:
            answer = await upstream.send("POST", "/v1/completions", HEADERS, BODY)
            await answer.read()
            if answer.status != 200:
                raise SystemExit(f"HTTP {answer.status}")
            took.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(clients)))
    await upstream.close()
    return took


async def _served(url: str) -> None:
    """Wait until requests are answered: Envoy knows its pickers, and they know the workers."""
    upstream, status = Upstream(url), 0
    while status != 200:
        answer = await upstream.send("POST", "/v1/completions", HEADERS, BODY)
        await answer.read()
        status = answer.status
    await upstream.close()


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _config(folder: Path, port: int, endpoints: list[str]) -> Path:
    lines = [f"listen: 127.0.0.1:0\npicker: {{listen: '127.0.0.1:{port}'}}\nworkers:"]
    lines += [f"  - {{id: w{row}, url: 'http://{endpoint}', places: 64}}" for row, endpoint in enumerate(endpoints)]
    path = folder / f"picker-{port}.yaml"
    path.write_text("\n".join(lines))
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _main(rounds: int, pickers: int, seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = stack.enter_context(_process(__file__, "--serve-workers"))
        assert workers.stdout is not None
        endpoints = workers.stdout.readline().split()
        ports = [_free_port() for _ in range(pickers)]
        for port in ports:
            started = stack.enter_context(
                _process("-m", "coterie", "serve", "--config", str(_config(folder, port, endpoints)))
            )
            assert started.stdout is not None
            started.stdout.readline()
        async with envoy(folder, endpoints, ports) as proxy:
            urls = {"plain Envoy": proxy.plain_url, f"with {pickers} picker(s)": proxy.url}
            rates: dict[str, list[float]] = {name: [] for name in urls}
            delays: dict[str, list[float]] = {name: [] for name in urls}
            await _served(proxy.url)
            for number in range(rounds + 1):
                for name, url in urls.items():
                    alone = await _measure(url, seconds / 2, 1)
                    many = await _measure(url, seconds, 16)
                    if number:  # the first round warms up
                        rates[name].append(len(many) / seconds)
                        delays[name].append(1e3 * statistics.median(alone))
        plain, picked = urls
        for name in urls:
            delay, rate = statistics.median(delays[name]), statistics.median(rates[name])
            print(f"{name}: p50 {delay:.2f} ms alone, {rate:.0f} req/s at 16 clients")
        added = statistics.median(b - a for a, b in zip(delays[plain], delays[picked], strict=True))
        share = statistics.median(b / a for a, b in zip(rates[plain], rates[picked], strict=True))
        print(f"median of {rounds} rounds: +{added:.2f} ms p50, {share:.2f} of the requests per second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pickers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--serve-workers", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    asyncio.run(_serve_workers() if given.serve_workers else _main(given.rounds, given.pickers, given.seconds))
