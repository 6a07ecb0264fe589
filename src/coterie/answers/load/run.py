"""Send a workload: open loop (at planned times) or closed loop (clients that wait for their answers).

In an open loop a request is timed from its planned arrival. If the server or the client falls behind, the delay counts
in the times of later requests, which avoids coordinated omission. Outcomes are stored as they arrive, so that an
interrupted run keeps them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.answers.load.client import RequestOutcome
from coterie.answers.load.workload import LoadRequest
from coterie.errors import ConfigError, check_at_least, check_positive

Progress = Callable[[str, int, int], None]
Send = Callable[[LoadRequest, float | None], Awaitable[RequestOutcome]]
"""Callback that sends a request; its second argument is the planned time, None for now."""

MOST_OPEN = 1000
"""Most requests in flight of an open loop, below the usual limit of open files; further requests are sent late."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of sending: at `arrival_s` (open loop), or by `concurrency` clients that wait for answers (closed loop)."""

    concurrency: int | None = None
    arrival_s: NDArray[np.float64] | None = None
    """[request] seconds since the start."""
    duration_s: float | None = None
    """Seconds from the start after which no request is sent; None for no limit."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.arrival_s is None):
            raise ConfigError("give either a concurrency (closed loop) or arrival times (open loop)")
        check_at_least(1, concurrency=self.concurrency)
        check_positive(duration_s=self.duration_s)


@dataclass(slots=True)
class LoadRun:
    """Outcomes of the requests sent so far."""

    started: float = 0.0
    """Time of the start, on the event loop's clock."""
    open_loop: bool = False
    outcomes: list[RequestOutcome] = field(default_factory=list)
    """Outcomes in order of completion."""
    in_flight: int = 0
    """Number of requests sent and not answered; above 0 at the end only if the run was interrupted."""

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def drive(
        self,
        requests: Sequence[LoadRequest],
        pace: Pace,
        send: Send,
        done: Callable[[RequestOutcome], None] | None = None,
    ) -> None:
        """Send all requests and wait for their answers; `done` is called with each outcome."""
        self.started, self.open_loop = self._now(), pace.arrival_s is not None

        async def one(request: LoadRequest, planned: float | None) -> None:
            self.in_flight += 1
            outcome = await send(request, planned)
            self.in_flight -= 1
            self.outcomes.append(outcome)
            if done is not None:
                done(outcome)

        if pace.arrival_s is not None:
            await self._open(requests, pace.arrival_s, pace.duration_s, one)
        else:
            assert pace.concurrency is not None
            await self._closed(requests, pace.concurrency, pace.duration_s, one)

    async def _open(
        self,
        requests: Sequence[LoadRequest],
        arrival_s: NDArray[np.float64],
        duration_s: float | None,
        one: Callable[[LoadRequest, float | None], Awaitable[None]],
    ) -> None:
        gate = asyncio.Semaphore(MOST_OPEN)

        async def gated(request: LoadRequest, planned: float) -> None:
            async with gate:
                await one(request, planned)

        async with asyncio.TaskGroup() as tasks:
            for request, at in zip(requests, arrival_s, strict=True):
                if duration_s is not None and at > duration_s:
                    break
                planned = self.started + float(at)
                if (left := planned - self._now()) > 0:
                    await asyncio.sleep(left)
                tasks.create_task(gated(request, planned))

    async def _closed(
        self,
        requests: Sequence[LoadRequest],
        concurrency: int,
        duration_s: float | None,
        one: Callable[[LoadRequest, float | None], Awaitable[None]],
    ) -> None:
        """Run clients that each take the next conversation and send its requests one after another."""
        conversations: dict[int, list[LoadRequest]] = {}
        for request in requests:
            conversations.setdefault(request.conversation, []).append(request)
        waiting = iter(list(conversations.values()))

        async def client() -> None:
            for conversation in waiting:  # one iterator for all clients, so that each conversation is taken once
                for request in conversation:
                    if duration_s is not None and self._now() - self.started > duration_s:
                        return
                    await one(request, None)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(conversations))):
                tasks.create_task(client())
