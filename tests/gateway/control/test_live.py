"""The loop's process behind a real gateway: a drifted fleet gets a new fit, no request notices, nothing is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from canned_workers import Canned
from control_cases import Publisher, saved_fit
from coterie.gateway.config import AdviseSection, ControlSection, GatewayConfig, WorkerEntry
from coterie.gateway.control.live import LiveControl, is_wanted, uses_fit
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.saved import SavedState
from gateway_runs import FAST, Run, gateway

PATIENCE_S = 300.0
"""No verdict depends on it: a process that is started compiles, on a machine that does other things."""
EAGER = ControlSection(
    window=8,
    min_requests=24,
    fit_requests=96,
    score_requests=32,
    score="experts",
    cooldown_s=0.0,
    tick_s=0.05,
    advise=AdviseSection(ranks=4, window_s=0.5, min_steps=8),
)
"""Acts as soon as it may."""


async def until(holds: Callable[[], object], work: Callable[[], object] | None = None) -> None:
    while not holds():
        if work is not None:
            work()
        await asyncio.sleep(0.02)


def config_of(workers: Sequence[Canned], publishers: Sequence[Publisher], fit: str, **more: object) -> GatewayConfig:
    entries = [
        WorkerEntry(id=worker.name, url=worker.url, expert_events=publisher.endpoint)
        for worker, publisher in zip(workers, publishers, strict=True)
    ]
    config = GatewayConfig(
        workers=entries, listen="127.0.0.1:0", health=FAST, decode=RouterSpec("latency_aware", fit=fit), control=EAGER
    )
    return msgspec.structs.replace(config, **more)


class Fleet:
    """Canned workers whose expert events are those of one sort of traffic."""

    def __init__(self, workers: Sequence[Canned], publishers: Sequence[Publisher]) -> None:
        self.workers, self.publishers, self.traffic = workers, publishers, "low"
        self.rng = np.random.default_rng(1)
        self.announced = False

    def work(self, run: Run) -> None:
        """Serve the requests that the gateway has announced a turn before, and announce the next ones."""
        control = control_now(run)
        for publisher in self.publishers:
            if self.announced:
                publisher.serve(self.traffic, 4, self.rng)
            for number in range(publisher.sent + 1, publisher.sent + 5):
                if control is not None:
                    control.sent(f"{publisher.name}.{number}", publisher.name)
        self.announced = True


@asynccontextmanager
async def fleet_of() -> AsyncIterator[Fleet]:
    workers = [Canned("a"), Canned("b")]
    publishers = [Publisher(worker.name) for worker in workers]
    try:
        for worker in workers:
            await worker.start()
        yield Fleet(workers, publishers)
    finally:
        for worker in workers:
            await worker.stop()
        for publisher in publishers:
            publisher.close()


def control_now(run: Run) -> LiveControl | None:
    return run.running.parts.control


def control_of(run: Run) -> LiveControl:
    control = control_now(run)
    assert control is not None
    return control


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fit_in_force(run: Run) -> str | None:
    return run.running.parts.pools["decode"].spec.fit


async def ask(run: Run, stop: asyncio.Event) -> list[int]:
    """Send requests one after the other until told to stop; their statuses."""
    found = []
    while not stop.is_set():
        found.append((await run.client.complete()).status)
        await asyncio.sleep(0)
    return found


async def drifting(tmp_path: Path) -> None:
    fit = saved_fit("low", tmp_path)
    async with fleet_of() as fleet:
        async with gateway(config_of(fleet.workers, fleet.publishers, fit)) as run:
            control, stop = control_of(run), asyncio.Event()

            def work() -> None:
                fleet.work(run)

            asking = asyncio.create_task(ask(run, stop))
            await until(lambda: control.view is not None and control.view.loads, work)
            assert fit_in_force(run) == fit, "this traffic is what the router was fitted to"

            fleet.traffic = "odd"
            await until(lambda: fit_in_force(run) != fit, work)
            await until(lambda: any(event["kind"] == "refit_taken" for event in control.events), work)
            await check_shown(run, control, fit)

            pid = pid_of(control)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pid_of(control) not in (None, pid), work)
            assert run.metrics["coterie_gateway_control_restarts_total"] == 1
            serving = fit_in_force(run)
            assert serving != fit, "the new fit outlives the process that made it"

            await check_other_routers(run, control, fit, str(serving))
            await check_reloads(run, control, fit, str(serving))
            stop.set()
            assert set(await asking) == {200}, "no request noticed"
            folder = control.folder
        assert "refit_taken" in run.logged()
        assert not folder.exists()


async def check_shown(run: Run, control: LiveControl, fit: str) -> None:
    """Where the swap is seen."""
    assert run.metrics["coterie_gateway_control_swaps_total"] >= 1
    assert run.metrics['coterie_gateway_control_refits_total{outcome="taken"}'] >= 1
    assert run.metrics["coterie_gateway_control_fit_seconds"] > 0
    told = (await run.client.ask("GET", "/decisions?last=500")).json
    taken = next(event for event in told["control"] if event["kind"] == "refit_taken")
    assert taken["values"]["saving_pct"] > 0
    view = control.view
    assert view is not None
    assert set(view.loads) == {"a", "b"}
    assert view.status["streams"]["messages"] > 0
    spec = run.running.parts.pools["decode"].spec
    assert control.as_configured(spec).fit == fit, "what is saved is the configured fit"
    advice = (await run.client.ask("GET", "/advice")).json
    assert advice["advice"] is None or {"reason", "gain_pct", "state", "before"} <= set(advice["advice"])


async def check_other_routers(run: Run, control: LiveControl, fit: str, serving: str) -> None:
    """A router that an administrator sets is never overwritten by the loop."""
    put = await run.client.ask("PUT", "/routers/decode", {"router": "round_robin"})
    assert put.status == 200
    assert run.running.parts.changes.routers["decode"].fit == fit, "the loop's own file is not saved"
    assert control_now(run) is control, "it goes on watching"
    back = await run.client.ask("PUT", "/routers/decode", {"router": "latency_aware"})
    assert back.status == 200
    assert fit_in_force(run) == serving


async def check_reloads(run: Run, control: LiveControl, fit: str, serving: str) -> None:
    """A reload that leaves the router alone keeps the loop's fit; one that switches the loop off takes it back."""
    parts = run.running.parts
    put = SavedState()  # what was set above is forgotten
    parts.reconfigure(msgspec.structs.replace(parts.config, log_requests=True), put)
    assert control_now(run) is control
    assert fit_in_force(run) == serving
    pid = pid_of(control)
    off = msgspec.structs.replace(parts.config, control=ControlSection(enabled=False))
    parts.reconfigure(off, put)
    assert control_now(run) is None
    assert fit_in_force(run) == fit
    await until(lambda: pid is None or not is_running(pid))
    advice = (await run.client.ask("GET", "/advice")).json
    assert advice == {"advice": None, "reason": "the control loop is off"}


def test_a_drifted_fleet_gets_a_new_fit(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(drifting(tmp_path), PATIENCE_S))


def pid_of(control: LiveControl) -> int | None:
    """Process id of the loop's process; None while there is none."""
    return None if control.child is None else control.child.process.pid


PARENT = """
import asyncio, sys
from pathlib import Path
from coterie.gateway.control.live import Child
from coterie.net.access import FleetAccess
from coterie.net.processes import leave_to_cleaner

async def main() -> None:
    leave_to_cleaner(Path(sys.argv[1]))
    child = await Child.start(Path(sys.argv[1]), FleetAccess())
    print(child.process.pid, flush=True)
    await child.receive()

asyncio.run(main())
"""


def test_the_process_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    handle = os.pidfd_open(pid) if is_running(pid) else None
    if handle is not None:
        ended = select.select([handle], [], [], PATIENCE_S)[0]
        os.close(handle)
        assert ended, "the process outlives its gateway"
    until = time.monotonic() + PATIENCE_S
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not folder.exists(), "what the gateway could not remove, the cleaner does"


@pytest.mark.parametrize(
    ("section", "router", "events", "wanted"),
    [
        (ControlSection(), "latency_aware", True, True),
        (ControlSection(), "latency_aware", False, False),
        (ControlSection(), "round_robin", True, False),
        (ControlSection(enabled=False), "latency_aware", True, False),
        (ControlSection(enabled=True), "round_robin", False, True),
    ],
)
def test_when_the_loop_runs(section: ControlSection, router: str, events: bool, wanted: bool) -> None:
    endpoint = "tcp://127.0.0.1:5602" if events else None
    worker = WorkerEntry(id="a", url="http://127.0.0.1:1", expert_events=endpoint)
    assert is_wanted(section, RouterSpec(router, fit="fit.safetensors"), [worker]) == wanted


def test_a_router_without_a_file_uses_no_fit() -> None:
    assert not uses_fit(RouterSpec("latency_aware"))
    assert not uses_fit(RouterSpec("no such router", fit="fit.safetensors"))
    assert uses_fit(RouterSpec("latency_aware", fit="fit.safetensors"))
