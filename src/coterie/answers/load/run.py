"""Send a workload to a server, or to several servers or routers in turn, and compare them on the same requests.

A workload is sent in an open loop (at planned times) or a closed loop (clients that wait for their answers). In an open
loop a request is timed from its planned arrival. If the server or the client falls behind, the delay counts in the
times of later requests, which avoids coordinated omission. Outcomes are stored as they arrive, so that an interrupted
run keeps them.

The speed of a machine changes over a day, so contenders alternate: every block of the workload is served under each
contender, in an order that changes from block to block. Differences are taken between statistics of the same requests.
Their intervals come from leaving out each block once (delete-a-group jackknife with Student's t): requests of one block
are correlated, while blocks are treated as independent. Each contender's prompts begin with its own marker, so that it
does not hit prefixes cached by another contender.

Distinct experts per decode step are read from the step logs of reference workers. A step with few requests uses few
experts whatever the requests, and routers differ in how evenly they spread requests. Experts are therefore also
compared at equal rows: at the step sizes that occur in both runs, weighted by the tokens of the first run.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from coterie.answers.load.client import METRICS, RequestOutcome
from coterie.answers.load.workload import LoadRequest
from coterie.answers.suites import Report
from coterie.errors import UnavailableError, check, check_at_least, check_positive
from coterie.footprints.positions import COLUMNS, DISTINCT, ROWS, LoggedSteps
from coterie.net.http_client import Client
from coterie.types import Interval


async def read_steps(client: Client, after: int | None = None) -> LoggedSteps:
    """Return the logged steps of a reference worker after its first `after` steps; None returns all that it keeps."""
    status, text = await client.call("GET", "/steps" if after is None else f"/steps?after={after}")
    check(
        status == 200,
        f"{client.url}/steps: HTTP {status}: not a reference worker, or not its key; {text[:200]}",
        UnavailableError,
    )
    found = json.loads(text)
    return LoggedSteps(found["total"], np.array(found["steps"], np.float64).reshape(-1, len(COLUMNS)))


class StepTotals(NamedTuple):
    """Sums over the steps of each size; totals of workers and blocks can be added."""

    steps: NDArray[np.float64]
    """[rows] number of decode steps with that number of rows (tokens)."""
    distinct: NDArray[np.float64]
    """[rows] sum of the distinct experts of these steps (mean over layers)."""

    @classmethod
    def of(cls, logs: Sequence[NDArray[np.float64]]) -> StepTotals:
        """Sum up step logs, [step, column] each."""
        log = np.concatenate([np.empty((0, len(COLUMNS))), *logs])
        rows = log[:, ROWS].astype(np.int64)
        steps = np.bincount(rows, minlength=1).astype(np.float64)
        return cls(steps, np.bincount(rows, log[:, DISTINCT], minlength=1).astype(np.float64))

    def plus(self, other: StepTotals) -> StepTotals:
        size = max(len(self.steps), len(other.steps))
        return StepTotals(*(_padded(a, size) + _padded(b, size) for a, b in zip(self, other, strict=True)))

    @property
    def rows_per_step(self) -> float:
        return float(self._rows @ self.steps / max(float(self.steps.sum()), 1.0))

    @property
    def experts_per_step(self) -> float:
        """Distinct experts of a layer in a decode step, mean over layers and steps."""
        return float(self.distinct.sum() / max(float(self.steps.sum()), 1.0))

    @property
    def experts_by_token(self) -> float:
        """Distinct experts of a layer in a token's decode step: mean over steps, weighted by their rows."""
        return float(self._rows @ self.distinct / max(float(self._rows @ self.steps), 1.0))

    @property
    def _rows(self) -> NDArray[np.float64]:
        return np.arange(len(self.steps), dtype=np.float64)


def experts_ratio(first: StepTotals, other: StepTotals) -> float | None:
    """Return the ratio of distinct experts of `other` to `first` at equal rows; None without a common step size."""
    size = max(len(first.steps), len(other.steps))
    steps, distinct = (np.array([_padded(one[at], size) for one in (first, other)]) for at in (0, 1))
    both = np.flatnonzero((steps[0] > 0) & (steps[1] > 0))
    if not len(both):
        return None
    means = distinct[:, both] / steps[:, both]  # [run, rows]
    weights = both * steps[0, both]
    return float(weights @ means[1] / (weights @ means[0]))


def _padded(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    return np.pad(values, (0, size - len(values)))


Send = Callable[[LoadRequest, float | None], Awaitable[RequestOutcome]]
"""Callback that sends a request; its second argument is the planned time, None for now."""

MOST_OPEN = 1000
"""Most requests in flight of an open loop, below the usual limit of open files; further requests are sent late."""
CHANGES = ("mean", "p50", "p90")
"""Statistics to compare. p99 is left out: in a block it depends on one or two requests."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of sending: at `arrival_s` (open loop), or by `concurrency` clients that wait for answers (closed loop)."""

    concurrency: int | None = None
    arrival_s: NDArray[np.float64] | None = None
    """[request] seconds since the start."""
    duration_s: float | None = None
    """Seconds from the start after which no request is sent; None for no limit."""

    def __post_init__(self) -> None:
        check(
            (self.concurrency is None) != (self.arrival_s is None),
            "give either a concurrency (closed loop) or arrival times (open loop)",
        )
        check_at_least(1, concurrency=self.concurrency)
        check_positive(duration_s=self.duration_s)


@dataclass(slots=True)
class LoadRun:
    """Outcomes of the requests sent so far."""

    open_loop: bool = False
    outcomes: list[RequestOutcome] = field(default_factory=list)
    """Outcomes in order of completion."""
    in_flight: int = 0
    """Number of requests sent and not answered; above 0 at the end only if the run was interrupted."""

    async def drive(
        self,
        requests: Sequence[LoadRequest],
        pace: Pace,
        send: Send,
        done: Callable[[RequestOutcome], None] = lambda _: None,
    ) -> None:
        """Send all requests and wait for their answers; `done` is called with each outcome."""
        now = asyncio.get_running_loop().time
        started, end_s = now(), math.inf if pace.duration_s is None else pace.duration_s
        self.open_loop = pace.arrival_s is not None
        gate = asyncio.Semaphore(pace.concurrency or MOST_OPEN)

        async def one(request: LoadRequest, planned: float | None) -> None:
            async with gate:
                self.in_flight += 1
                outcome = await send(request, planned)
                self.in_flight -= 1
                self.outcomes.append(outcome)
                done(outcome)

        async with asyncio.TaskGroup() as tasks:
            if pace.arrival_s is None:
                conversations: dict[int, list[LoadRequest]] = {}
                for request in requests:
                    conversations.setdefault(request.conversation, []).append(request)
                waiting = iter(conversations.values())

                async def client() -> None:
                    for conversation in waiting:  # one iterator for all clients: each conversation is taken once
                        for request in conversation:
                            if now() - started > end_s:
                                return
                            await one(request, None)

                for _ in range(min(pace.concurrency or 0, len(conversations))):
                    tasks.create_task(client())
            else:
                for request, at in zip(requests, pace.arrival_s, strict=True):
                    if at > end_s:
                        break
                    planned = started + float(at)
                    if (left := planned - now()) > 0:
                        await asyncio.sleep(left)
                    tasks.create_task(one(request, planned))


@dataclass(slots=True)
class Contender:
    name: str
    send: Send
    prepare: Callable[[], Awaitable[None]] | None = None
    """Called before each block of this contender, to swap the router; None if there is nothing to swap."""
    runs: list[LoadRun] = field(default_factory=list)
    """[block] its run."""
    steps: list[StepTotals] = field(default_factory=list)
    """[block] totals of the workers' decode steps; empty if step logs are not read."""


class Change(NamedTuple):
    """Change of a statistic relative to the first contender, in percent; negative is faster or fewer.

    The change of the hit rate is in percentage points: from 50% to 60% is +10.
    """

    statistic: str
    """Name of the statistic, such as ttft_p50, experts or hit_rate."""
    pct: Interval

    @property
    def sure(self) -> bool:
        """Whether the interval excludes 0."""
        return self.pct.low is not None and self.pct.high is not None and (self.pct.low > 0 or self.pct.high < 0)


def blocks_of(count: int, blocks: int) -> list[tuple[int, int]]:
    """Split `count` requests into blocks of nearly equal size; return (first, end) per block."""
    check_at_least(1, blocks=blocks)
    check(blocks <= count, f"blocks={blocks} must be at most the number of requests, {count}")
    edges = np.linspace(0, count, blocks + 1).round().astype(int)
    return [(int(a), int(b)) for a, b in pairwise(edges)]


async def compare(
    contenders: Sequence[Contender],
    requests: Sequence[LoadRequest],
    pace: Pace,
    blocks: int,
    rng: np.random.Generator,
    report: Report = lambda *_: None,
    workers: Sequence[Client] = (),
) -> None:
    """Serve every block under every contender; each run is stored in its contender when it starts.

    `workers` are reference workers whose step logs are read before and after each block.
    """
    total, done = len(requests) * len(contenders), 0
    order = rng.permutation(len(contenders)).tolist()
    for number, (start, end) in enumerate(blocks_of(len(requests), blocks)):
        # An order is followed by its reverse, then rotated: each contender is first, and early, about equally often.
        first = number // 2 % len(order)
        turn = order[first:] + order[:first]
        for index in turn if number % 2 == 0 else turn[::-1]:
            contender = contenders[index]
            if contender.prepare is not None:
                await contender.prepare()

            def noted(_: RequestOutcome, name: str = contender.name) -> None:
                nonlocal done
                done += 1
                report(f"Serving under {name}" if len(contenders) > 1 else "Serving", done, total)

            before = [(await read_steps(worker)).total for worker in workers]
            run = LoadRun()
            contender.runs.append(run)
            part = _part(pace, start, end, len(contenders) * blocks)
            await run.drive(requests[start:end], part, contender.send, noted)
            if workers:
                logs = [(await read_steps(one, after)).rows for one, after in zip(workers, before, strict=True)]
                contender.steps.append(StepTotals.of(logs))


def _part(pace: Pace, start: int, end: int, parts: int) -> Pace:
    times = None if pace.arrival_s is None else pace.arrival_s[start:end] - pace.arrival_s[start]
    return Pace(pace.concurrency, times, None if pace.duration_s is None else pace.duration_s / parts)


# ------------------------------------------------------------------------------------------------------------ changes


def changes(first: Contender, other: Contender, skip: int = 0) -> list[Change]:
    """Return the changes of TTFT, TPOT, E2E, hit rate and experts per step; leave out statistics without values.

    Only requests that both contenders answered count: a contender that fails slow requests must not look fast.
    """
    pairs = [_pairs(a.outcomes, b.outcomes, skip) for a, b in zip(first.runs, other.runs, strict=False)]
    steps = list(zip(first.steps, other.steps, strict=False))
    found: dict[str, Interval | None] = {}
    for metric, attribute in METRICS.items():
        if metric != "gap":
            values = [_values(one, attribute) for one in pairs]
            found |= {f"{metric}_{name}": jackknife(values, partial(_log_ratio, name)) for name in CHANGES}
    found |= {"hit_rate": jackknife(pairs, _hit_points), "experts": jackknife(steps, _experts) if steps else None}
    return [
        Change(name, change if name == "hit_rate" else _percent(change))
        for name, change in found.items()
        if change is not None
    ]


def _percent(log_ratio: Interval) -> Interval:
    """Convert a log ratio to percent. Intervals are computed on logarithms: those of ratios could go below -100%."""
    low, high = (None if end is None else 100 * math.expm1(end) for end in (log_ratio.low, log_ratio.high))
    return Interval(100 * math.expm1(log_ratio.mean), low, high)


def _pairs(
    first: Sequence[RequestOutcome], other: Sequence[RequestOutcome], skip: int
) -> list[tuple[RequestOutcome, RequestOutcome]]:
    known = {one.request: one for one in first if one.failure is None and one.request >= skip}
    return [(known[one.request], one) for one in other if one.failure is None and one.request in known]


def _values(pairs: Sequence[tuple[RequestOutcome, RequestOutcome]], attribute: str) -> NDArray[np.float64]:
    """Return the values [request, contender] of the requests for which both contenders have a value."""
    found = [(getattr(a, attribute), getattr(b, attribute)) for a, b in pairs]
    return np.array([(a, b) for a, b in found if a is not None and b is not None], np.float64).reshape(-1, 2)


def _log_ratio(statistic: str, blocks: Sequence[NDArray[np.float64]]) -> float | None:
    values = np.concatenate([np.empty((0, 2)), *blocks])
    if not len(values):
        return None
    first, other = values.mean(axis=0) if statistic == "mean" else np.percentile(values, float(statistic[1:]), axis=0)
    return math.log(other / first) if first > 0 and other > 0 else None


def _hit_points(blocks: Sequence[Sequence[tuple[RequestOutcome, RequestOutcome]]]) -> float | None:
    """Return the difference of the hit rates in percentage points; None if an answer does not report cached tokens."""
    pairs = [pair for block in blocks for pair in block]
    if not pairs or any(one.cached_tokens is None or not one.prompt_tokens for pair in pairs for one in pair):
        return None
    first, other = (
        sum(pair[at].cached_tokens or 0 for pair in pairs) / sum(pair[at].prompt_tokens or 0 for pair in pairs)
        for at in (0, 1)
    )
    return 100 * (other - first)


def _experts(blocks: Sequence[tuple[StepTotals, StepTotals]]) -> float | None:
    ratio = experts_ratio(*(reduce(StepTotals.plus, totals) for totals in zip(*blocks, strict=True)))
    return None if ratio is None else math.log(ratio)


def jackknife(blocks: Sequence[Any], statistic: Callable[[Sequence[Any]], float | None]) -> Interval | None:
    """Compute a statistic of all blocks and its 95% interval from leaving out each block once; needs 3 blocks."""
    whole = statistic(blocks)
    if whole is None:
        return None
    parts = [statistic([*blocks[:out], *blocks[out + 1 :]]) for out in range(len(blocks))] if len(blocks) > 2 else []
    known = [part for part in parts if part is not None]
    if len(known) < 3 or len(known) < len(blocks):
        return Interval(whole, None, None)
    count = len(known)
    error = math.sqrt((count - 1) / count * float(np.sum((np.array(known) - np.mean(known)) ** 2)))
    half = float(stdtrit(count - 1, 0.975)) * error
    return Interval(whole, whole - half, whole + half)
