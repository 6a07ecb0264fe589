"""A switchback on a live fleet: a router that is worse on purpose, the one that ships, and what the turns cost.

The last decode worker of an embedded fleet is slow: its process is paused for a third of the time, and the router
`last_worker` (this file is its plugin) sends it every request. Then all are alike, under the router that ships. The
cost is the ratio of medians with turns to those without, in runs of a minute in which the shortest queue has a sixth.

    python lab/benchmarks/switchback_live.py [--minutes 10] [--rounds 6]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coterie.control import SwitchbackSettings
from coterie.gateway.config import ControlSection
from coterie.gateway.embedded import OURS, EmbeddedFleet, decode_router, run_embedded
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.http_client import Client
from coterie.net.processes import ServerProcess, free_port
from coterie.routing import Decision, Fleet, Request, routers

TURNS = SwitchbackSettings(block_s=10.0, settle_s=3.0)
COST_S, PAUSE_S = 60.0, 0.02


@routers.register("last_worker")
class LastWorker:
    def route(self, _: Request, fleet: Fleet) -> Decision:
        scores = -np.arange(len(fleet), dtype=np.float64)
        return Decision(int(np.flatnonzero(fleet.alive)[-1]), scores, "the last one")


@contextmanager
def slowed(process: int) -> Iterator[None]:
    """Pause a process for a third of the time while the block runs."""
    over = threading.Event()

    def pause() -> None:
        while not over.wait(2 * PAUSE_S):
            os.kill(process, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def served(fleet: EmbeddedFleet, spec: RouterSpec, turns: SwitchbackSettings) -> Iterator[str]:
    """Run a gateway on the fleet, with this file as a plugin; yield its URL."""
    port = free_port()
    config = fleet.config(f"127.0.0.1:{port}", decode=spec, switchback=turns, control=ControlSection(enabled=False))
    path = fleet.folder / "gateway.yaml"
    path.write_bytes(msgspec.yaml.encode(config))
    argv = [sys.executable, "-m", "coterie", "serve", "--config", str(path), "--plugin", str(Path(__file__).resolve())]
    url = f"http://127.0.0.1:{port}"
    with ServerProcess(argv, url, fleet.folder / "gateway.log", fleet.access.environment):
        yield url


def loading(url: str, seconds: float, seed: int) -> subprocess.Popen[bytes]:
    argv = f"load {url} --concurrency 12 --requests 1000000 --duration {seconds:g} --max-tokens 48 --ignore-eos".split()
    argv += ["--seed", str(seed), "--json"]
    return subprocess.Popen([sys.executable, "-m", "coterie", *argv], stdout=subprocess.PIPE)


async def told(url: str) -> dict[str, Any] | None:
    async with Client(url) as client:
        found: dict[str, Any] | None = json.loads((await client.call("GET", "/switchback"))[1])["switchback"]
        return found


def turned(fleet: EmbeddedFleet, spec: RouterSpec, minutes: float) -> None:
    with served(fleet, spec, TURNS) as url, loading(url, 60 * minutes, 0) as load:
        turns = None
        while load.poll() is None and (turns is None or turns["state"] != "left"):
            time.sleep(1)
            turns = asyncio.run(told(url))
        load.kill()
        assert turns is not None
        print(f"{spec.router}: {turns['state']} after {turns['pairs']} pairs of blocks: {turns['verdict']}")
        for name, one in turns["changes"].items():
            bounds = "" if one["low"] is None else f" [{one['low']:+.1f}, {one['high']:+.1f}]"
            print(f"  {name}: {one['router']:.4g} against {one['shortest_queue']:.4g}, {one['percent']:+.1f}%{bounds}")


def cost(fleet: EmbeddedFleet, rounds: int) -> None:
    seen: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(rounds):
        for enabled in (number % 2 == 0, number % 2 == 1):
            settings = msgspec.structs.replace(TURNS, pairs=1, enabled=enabled)
            with served(fleet, decode_router(OURS), settings) as url, loading(url, COST_S, number) as load:
                row = json.loads(load.communicate()[0])["rows"][0]
            seen[enabled].append((row["tpot_ms"]["p50"]["value"], row["ttft_ms"]["p50"]["value"]))
    ratios = np.array(seen[True]) / np.array(seen[False])
    for name, column in zip(("TPOT", "TTFT"), ratios.T, strict=True):
        draws = np.median(np.random.default_rng(0).choice(column, (4000, rounds)), axis=1)
        low, high = np.quantile(draws, (0.025, 0.975))
        print(f"cost on the median {name}: {np.median(column):.3f} [{low:.3f}, {high:.3f}] over {rounds} rounds")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--minutes", type=float, default=10.0)
    asked.add_argument("--rounds", type=int, default=6)
    given = asked.parse_args()
    with run_embedded() as fleet:
        with slowed(fleet.workers[-1].process.pid):
            turned(fleet, RouterSpec("last_worker"), given.minutes)
        turned(fleet, decode_router(OURS), given.minutes)
        cost(fleet, given.rounds)


if __name__ == "__main__":
    main()
