"""The demo on a running gateway: request one completion, compare routers on the gateway's workers, keep them busy.

The progress of the comparison is reported to the gateway's dashboard, `PUT /comparison`, from a separate thread. The
comparison never waits for the gateway. Only the newest state is sent, at most four times a second. If the gateway is
unavailable, its dashboard lacks the progress; the comparison goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from coterie.answers.demo.run import BASELINES, DemoResult, DemoRow, run_demo
from coterie.answers.load.client import Asking, LoadClient
from coterie.answers.load.measure import DECODE, use_router
from coterie.answers.load.workload import LoadRequest, Message
from coterie.answers.suites import Report
from coterie.errors import UnavailableError
from coterie.gateway.embedded import OURS, EmbeddedFleet
from coterie.net.http_client import Client, completion_body, completion_path, served_model
from coterie.prompts import load_prompts

MAX_TOKENS = 24
"""Largest number of tokens of the first completion."""
PERIOD_S = 0.25
"""Seconds between two reports to the dashboard."""
IN_FLIGHT = 6
BUSY_TOKENS = 32
MIXES = (("code", "legal", "math"), ("chat", "medical", "writing"), ("code", "finance", "science"))
"""Domains of the requests, one set after another, so that traffic drifts away from the data of a router's fit."""
MIX_REQUESTS = 600
"""Number of requests until the domains change."""
REFUSED_S = 0.5
"""Seconds to wait after a request that failed although the gateway is reachable."""


class FirstCompletion(NamedTuple):
    """Answer to one request that was sent through the gateway."""

    model: str
    prompt: str
    text: str
    seconds: float


def first_completion(url: str) -> FirstCompletion:
    """Request one chat completion from the gateway. Raise UnavailableError if the gateway does not answer."""

    async def ask() -> FirstCompletion:
        async with Client(url) as client:
            model, prompt = await served_model(client), load_prompts()[0]
            started = time.perf_counter()
            answer = await client.post(
                completion_path(chat=True), completion_body(prompt, model, MAX_TOKENS, chat=True)
            )
            seconds = time.perf_counter() - started
        if answer.body is None:
            raise UnavailableError(f"{url} did not answer a completion: {answer.problem}")
        return FirstCompletion(model, prompt.prompt, answer.body["choices"][0]["message"]["content"], seconds)

    return asyncio.run(ask())


def run_on(fleet: EmbeddedFleet, url: str, folder: Path, report: Report) -> DemoResult:
    """Compare routers on the gateway's own workers, then switch the gateway to the fitted router.

    The gateway's dashboard shows the progress.
    """
    with telling(url, (*BASELINES, OURS), "an H200") as comparison:

        def progress(what: str, done: int, total: int) -> None:
            comparison.progress(what, done, total)
            report(what, done, total)

        result = run_demo(out=folder, report=progress, served=(fleet, url), rows_so_far=comparison.rows)
        comparison.done(result.verdict)

    async def use_fit() -> None:
        async with Client(url) as client:
            await use_router(client, DECODE, OURS, {"fit": str(Path(result.fit).resolve()), "model": None})

    asyncio.run(use_fit())
    return result


class Telling:
    """Progress of a running comparison, for the gateway's dashboard."""

    def __init__(self, url: str, routers: Sequence[str], hardware: str) -> None:
        self._url = url
        self._state: dict[str, Any] = {"state": "running", "routers": list(routers), "hardware": hardware}
        self._news, self._over = threading.Event(), threading.Event()

    def progress(self, what: str, done: int, total: int) -> None:
        self._change(stage=what[:500], done=done, total=total)

    def rows(self, rows: Sequence[DemoRow]) -> None:
        self._change(
            rows=[
                {
                    "router": row.router,
                    "experts": row.experts,
                    "saving_pct": row.saving_pct,
                    "low_pct": row.interval_pct[0],
                    "high_pct": row.interval_pct[1],
                    "step_ms": row.h200_ms,
                    "requests": row.requests,
                }
                for row in rows
            ]
        )

    def done(self, verdict: str) -> None:
        self._change(state="done", stage="", done=0, total=0, verdict=verdict[:500])

    def failed(self, problem: str) -> None:
        self._change(state="failed", stage="", done=0, total=0, verdict=f"The comparison failed: {problem}"[:500])

    def _change(self, **values: Any) -> None:
        self._state = {**self._state, **values}
        self._news.set()

    def run(self) -> None:
        """Send each new state until :meth:`end` is called; runs in the reporting thread."""
        while not self._over.is_set() or self._news.is_set():
            self._news.wait()
            self._news.clear()
            with suppress(UnavailableError):
                asyncio.run(self._send(self._state))
            self._over.wait(PERIOD_S)

    async def _send(self, state: dict[str, Any]) -> None:
        async with Client(self._url) as client:
            await client.call("PUT", "/comparison", state)

    def end(self) -> None:
        self._over.set()
        self._news.set()


@contextmanager
def telling(url: str, routers: Sequence[str], hardware: str) -> Iterator[Telling]:
    """Report progress while the block runs. The block calls `done` at its end; an exception reports a failure."""
    comparison = Telling(url, routers, hardware)
    thread = threading.Thread(target=comparison.run, name="coterie-telling", daemon=True)
    thread.start()
    try:
        yield comparison
    except BaseException as error:
        comparison.failed(str(error))
        raise
    finally:
        comparison.end()
        thread.join()


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
