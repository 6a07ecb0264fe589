"""Summary of a run: percentiles with 95% intervals, throughput, goodput, hit rate and failures.

Requests that are in flight together wait for the same steps, so their times are correlated: an interval from single
requests would be too narrow. The bootstrap therefore draws blocks of consecutive requests, twice as many as are in
flight. If a run has too few requests to bound a percentile from above, the upper end of the interval is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.answers.load.client import METRICS, RequestOutcome
from coterie.answers.load.run import LoadRun
from coterie.types import Interval

LEVELS = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
DRAWS = 1000
MOST_VALUES = 20_000_000
"""Most values drawn per metric: long runs get fewer draws, at least 200."""
LEAST_BLOCKS = 8
"""Fewest blocks in a run, which limits the block length: intervals from fewer blocks would mean nothing."""
SURE = 0.975
SLOWER = 0.85
"""Share of the planned rate below which the server may have fallen behind."""


class Targets(NamedTuple):
    """Latency targets in seconds. A request counts for goodput if its answer is complete and meets both targets."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, outcome: RequestOutcome) -> bool:
        times = zip((outcome.ttft_s, outcome.tpot_s), self, strict=True)
        return outcome.failure is None and all(s is None or most is None or s <= most for s, most in times)


class Percentiles(NamedTuple):
    """Mean and percentiles of one metric, in seconds."""

    requests: int
    mean: Interval
    p50: Interval
    p90: Interval
    p99: Interval


class Summary(NamedTuple):
    requests: int
    """Number of measured requests, answered or failed."""
    answered: int
    failures: dict[str, int]
    """Kind of failure → number of requests."""
    problems: dict[str, str]
    """Kind of failure → error message of one such request."""
    unfinished: int
    """Number of requests in flight when the run was interrupted."""
    wall_s: float
    metrics: dict[str, Percentiles]
    """Metric (ttft, tpot, gap, e2e) → percentiles; metrics without values are left out."""
    offered_per_s: float | None
    """Planned requests per second of an open loop; None in a closed loop."""
    behind: bool
    """Whether the server fell behind an open loop: it answered below the planned rate, and answers got slower."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    goodput_per_s: float
    """Requests per second that met the targets; without targets, that were answered."""
    within: Interval
    """Share of the requests that met the targets."""
    hit_rate: Interval | None
    """Share of prompt tokens that servers found in a prefix cache; None if no answer reports it."""
    in_flight: float
    """Mean number of requests in flight."""
    late_p99_s: float
    """99th percentile of the delay between planned and actual sending, which the client causes."""
    block: int
    """Requests per block of the bootstrap."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, with metrics in milliseconds."""
        plain = {name: value for name, value in self._asdict().items() if name not in ("metrics", "within", "hit_rate")}
        return {
            **plain,
            **{
                f"{name}_ms": {key: _ends(getattr(values, key), 1e3) for key in ("mean", *LEVELS)}
                | {"requests": values.requests}
                for name, values in self.metrics.items()
            },
            "within": _ends(self.within, 1.0),
            "hit_rate": None if self.hit_rate is None else _ends(self.hit_rate, 1.0),
        }


def summarise(
    runs: Sequence[LoadRun],
    rng: Generator,
    targets: Targets = Targets(),  # noqa: B008
    skip: int = 0,
) -> Summary:
    """Summarise runs of one server together; leave out the first `skip` requests of the workload as warm-up."""
    parts = [sorted((one for one in run.outcomes if one.request >= skip), key=lambda o: o.planned) for run in runs]
    outcomes = [one for part in parts for one in part]
    answered = [one for one in outcomes if one.failure is None]
    wall_s = sum(max(one.end for one in part) - part[0].planned for part in parts if part)
    in_flight = sum(one.end - one.sent for one in outcomes) / wall_s if wall_s else 0.0
    block = block_length(len(outcomes), in_flight)
    values = {name: values_of(answered, name) for name in METRICS}
    metrics = {name: percentiles(known, block, rng) for name, known in values.items() if len(known)}
    met = np.array([targets.met(one) for one in outcomes], np.float64)
    said = [one for one in answered if one.cached_tokens is not None and one.prompt_tokens]
    cached, prompt = np.array([(one.cached_tokens, one.prompt_tokens) for one in said], np.float64).reshape(-1, 2).T
    offered_per_s = _offered_per_s(parts) if runs and runs[0].open_loop else None
    requests_per_s = len(answered) / wall_s if wall_s else 0.0
    output_tokens = sum(one.output_tokens for one in outcomes)
    return Summary(
        requests=len(outcomes),
        answered=len(answered),
        failures=dict(Counter(one.failure for one in outcomes if one.failure is not None).most_common()),
        problems={one.failure: one.problem for one in outcomes if one.failure is not None},
        unfinished=sum(run.in_flight for run in runs),
        wall_s=wall_s,
        metrics=metrics,
        offered_per_s=offered_per_s,
        behind=offered_per_s is not None and requests_per_s < SLOWER * offered_per_s and _grows(answered),
        requests_per_s=requests_per_s,
        output_tokens_per_s=output_tokens / wall_s if wall_s else 0.0,
        prompt_tokens=sum(one.prompt_tokens or 0 for one in outcomes),
        output_tokens=output_tokens,
        goodput_per_s=float(met.sum()) / wall_s if wall_s else 0.0,
        within=share(met, np.ones_like(met), block, rng) if len(met) else Interval(0.0, None, None),
        hit_rate=share(cached, prompt, block, rng) if len(said) else None,
        in_flight=in_flight,
        late_p99_s=float(np.percentile([max(0.0, one.sent - one.planned) for one in outcomes], 99)) if outcomes else 0,
        block=block,
    )


def values_of(outcomes: Sequence[RequestOutcome], metric: str) -> NDArray[np.float64]:
    """Return the values of a metric, in seconds, of the outcomes that have one."""
    return np.array([v for one in outcomes if (v := getattr(one, METRICS[metric])) is not None], np.float64)


def _offered_per_s(parts: Sequence[Sequence[RequestOutcome]]) -> float | None:
    span = sum(part[-1].planned - part[0].planned for part in parts if part)
    return (sum(map(len, parts)) - len(parts)) / span if span > 0 else None


def _grows(answered: Sequence[RequestOutcome]) -> bool:
    """Return whether the median time of the last quarter of answers is above 1.5 times that of the first quarter."""
    times = [one.end - one.planned for one in answered]
    quarter = len(times) // 4
    return quarter > 1 and float(np.median(times[-quarter:])) > 1.5 * float(np.median(times[:quarter]))


def block_length(count: int, in_flight: float) -> int:
    """Return the bootstrap block length: 2 x requests in flight, at least count^(1/3), at most count / 8."""
    return max(1, min(int(max(2 * in_flight, count ** (1 / 3)) + 0.5), count // LEAST_BLOCKS))


def draws_of(count: int, block: int, rng: Generator) -> NDArray[np.int64]:
    """Draw indices [draw, request] of a circular block bootstrap: blocks of consecutive requests with random starts."""
    draws = max(200, min(DRAWS, MOST_VALUES // max(count, 1)))
    starts = rng.integers(0, count, (draws, -(-count // block), 1))
    return ((starts + np.arange(block)) % count).reshape(draws, -1)[:, :count]


def percentiles(values: NDArray[np.float64], block: int, rng: Generator) -> Percentiles:
    """Compute mean and percentiles of values in order of time, with intervals."""
    count, levels = len(values), list(LEVELS.values())
    found = [float(values.mean()), *np.percentile(values, levels).tolist()]
    if count < 2 * LEAST_BLOCKS:
        return Percentiles(count, *(Interval(value, None, None) for value in found))
    drawn = draws_of(count, min(block, count // LEAST_BLOCKS), rng)
    means, sampled = np.empty(len(drawn)), np.empty((len(levels), len(drawn)))
    for start in range(0, len(drawn), 64):  # in slices of 64: all draws of a long run would take gigabytes
        some = values[drawn[start : start + 64]]
        means[start : start + 64] = some.mean(axis=1)
        sampled[:, start : start + 64] = np.percentile(some, levels, axis=1)
    ends = np.percentile(np.vstack([means, sampled]), [100 * (1 - SURE), 100 * SURE], axis=1)  # [end, statistic]
    intervals = [Interval(value, float(low), float(high)) for value, low, high in zip(found, *ends, strict=True)]
    # The largest of n values is above the q-th quantile with probability 1 - q^n.
    bounded = [True, *(1 - (level / 100) ** count >= SURE for level in levels)]
    return Percentiles(
        count, *(one if ok else one._replace(high=None) for one, ok in zip(intervals, bounded, strict=True))
    )


def share(part: NDArray[np.float64], whole: NDArray[np.float64], block: int, rng: Generator) -> Interval:
    """Compute the ratio of two sums over requests in order of time, with its interval."""
    value = float(part.sum() / whole.sum())
    if len(part) < 2 * LEAST_BLOCKS:
        return Interval(value, None, None)
    drawn = draws_of(len(part), min(block, len(part) // LEAST_BLOCKS), rng)
    ratios = [part[rows].sum() / whole[rows].sum() for rows in drawn]
    low, high = np.percentile(ratios, [100 * (1 - SURE), 100 * SURE])
    return Interval(value, float(low), float(high))


def _ends(found: Interval, factor: float) -> Mapping[str, float | None]:
    low, high = (None if end is None else factor * end for end in (found.low, found.high))
    return {"value": factor * found.mean, "low": low, "high": high}
