"""The demo on a running gateway: compare routers on the gateway's workers, keep them busy."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from coterie.answers.demo.run import DemoResult, DemoRow, run_demo
from coterie.answers.load.client import Asking, LoadClient
from coterie.answers.load.measure import DECODE, use_router
from coterie.answers.load.workload import LoadRequest, Message
from coterie.answers.suites import Report
from coterie.control.switchback import Comparison, RouterChange
from coterie.gateway.embedded import OURS, EmbeddedFleet
from coterie.gateway.serve import RunningGateway
from coterie.net.http_client import Client, served_model
from coterie.prompts import load_prompts

IN_FLIGHT = 6
BUSY_TOKENS = 32
MIXES = (("code", "legal", "math"), ("chat", "medical", "writing"), ("code", "finance", "science"))
"""Domains of the requests, one set after another, so that traffic drifts away from the data of a router's fit."""
MIX_REQUESTS = 600
"""Number of requests until the domains change."""
REFUSED_S = 0.5
"""Seconds to wait after a request that failed although the gateway is reachable."""


def run_on(fleet: EmbeddedFleet, gateway: RunningGateway, folder: Path, report: Report) -> DemoResult:
    """Compare routers on the gateway's own workers, then switch the gateway to the fitted router.

    The dashboard shows how far the comparison is, and then its verdict. `gateway` may run in another thread.
    """

    def show(doing: str, done: int, total: int) -> None:
        report(doing, done, total)
        far = f": {done} of {total} requests" if done else ""
        gateway.parts.comparison = Comparison(time.time(), f"Routers are being compared. {doing}{far}.")

    show("Connecting to the workers", 0, 1)
    result = run_demo(out=folder, report=show, served=(fleet, gateway.url))

    async def use_fit() -> None:
        async with Client(gateway.url) as client:
            await use_router(client, DECODE, OURS, {"fit": str(Path(result.fit).resolve()), "model": None})

    asyncio.run(use_fit())
    gateway.parts.comparison = Comparison(time.time(), result.verdict, {"token_experts": change_of(result.rows)})
    return result


def change_of(rows: Sequence[DemoRow]) -> RouterChange:
    """Return the change of the experts of a token's step from the first router to the last one."""
    first, last = rows[0], rows[-1]
    low, high = last.interval_pct
    return RouterChange(last.experts, first.experts, -last.saving_pct, -high, -low)


async def keep_busy(url: str, requests: int | None = None, in_flight: int = IN_FLIGHT) -> int:
    """Send `requests` requests (None: no limit), or until the gateway is gone; return the number answered."""
    numbers = itertools.count() if requests is None else iter(range(requests))
    prompts = [[one for one in load_prompts() if one.domain in mix and one.lang == "en"] for mix in MIXES]
    done, gone = 0, False
    async with Client(url) as server:
        asking = Asking(await served_model(server))

    async def send(client: LoadClient) -> None:
        nonlocal done, gone
        for number in numbers:
            if gone:
                return
            mix = prompts[number // MIX_REQUESTS % len(prompts)]
            # Every round starts at another prompt, so that the order of prompts does not repeat.
            prompt = mix[(number * 7 + number // len(mix)) % len(mix)]
            request = LoadRequest(number, number, prompt.domain, (Message("user", prompt.prompt),), BUSY_TOKENS)
            outcome = await client.ask(request, asking, name=f"{prompt.id}.{number}")
            if outcome.failure is None:
                done += 1
            elif outcome.failure not in ("refused", "reset"):
                await asyncio.sleep(REFUSED_S)
            else:
                gone = True

    async with LoadClient(url) as client:
        await asyncio.gather(*(send(client) for _ in range(in_flight)))
    return done
