"""Arrival times and lengths of requests: the workload of a synthetic trace.

An arrival process draws the arrival times and domains of requests; a length model draws their prompt and output
tokens. Both are pure functions of their settings and a Generator. Arrivals are open-loop: a slow server does not slow
them down, which is wrong for a fixed pool of clients that wait for their answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import check, check_at_least, check_positive, check_share
from coterie.traces.requests import MOST_REQUESTS, RequestTrace


class Arrivals(NamedTuple):
    """Requests in order of arrival."""

    arrival_s: NDArray[np.float64]
    """[request] seconds since the start."""
    domain: NDArray[np.int64]
    """[request] index of the request's domain."""


class Lengths(NamedTuple):
    prompt_tokens: NDArray[np.int64]
    """[request] tokens."""
    output_tokens: NDArray[np.int64]
    """[request] tokens."""


class ArrivalProcess(Protocol):
    def draw(self, count: int, mix: NDArray[np.float64], rng: Generator) -> Arrivals:
        """Draw the first `count` arrivals; `mix` [domain] is each domain's share of the requests."""


class LengthModel(Protocol):
    def draw(self, domain: NDArray[np.int64], rng: Generator) -> Lengths:
        """Draw the lengths of requests; `domain` [request] is in order of arrival."""


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent requests at a constant mean rate."""

    rate: float = 10.0
    """Requests per second."""

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)

    def draw(self, count: int, mix: NDArray[np.float64], rng: Generator) -> Arrivals:
        return Arrivals(np.cumsum(rng.exponential(1.0 / self.rate, count)), rng.choice(len(mix), size=count, p=mix))


@dataclass(frozen=True, slots=True)
class BurstyArrivals:
    """Semantic bursts over a Poisson background: occasionally many requests of one domain in a short time."""

    rate: float = 10.0
    """Long-term mean of requests per second, bursts and background together."""
    burst_size: int = 32
    """Requests per burst."""
    burst_rate: float = 100.0
    """Requests per second within a burst."""
    share: float = 0.5
    """Share of the requests in bursts; the others are the background."""
    even_rate: bool = False
    """Whether bursts are of one domain but not faster: the order stays, the times are those of a Poisson process."""

    def __post_init__(self) -> None:
        check_positive(rate=self.rate, burst_size=self.burst_size, burst_rate=self.burst_rate)
        check_share(share=self.share)
        check(
            self.burst_rate > self.rate, f"bursty arrivals: burst_rate={self.burst_rate} must be above rate={self.rate}"
        )

    def draw(self, count: int, mix: NDArray[np.float64], rng: Generator) -> Arrivals:
        times, domains = [np.empty(0)], [np.empty(0, np.int64)]
        if self.share < 1:
            background = PoissonArrivals(self.rate * (1 - self.share)).draw(count, mix, rng)
            times, domains = [background.arrival_s], [background.domain]
        if self.share > 0:
            # Draw bursts until they hold `count` requests and the last burst starts after the last request to keep.
            burst_rate, drawn, last = self.rate * self.share / self.burst_size, 0, 0.0
            while drawn < count or last < np.partition(np.concatenate(times), count - 1)[count - 1]:
                some = max(1, count // self.burst_size // 4)
                starts = last + np.cumsum(rng.exponential(1.0 / burst_rate, some))
                gaps = rng.exponential(1.0 / self.burst_rate, (some, self.burst_size))
                gaps[:, 0] = 0.0
                times.append((starts[:, None] + np.cumsum(gaps, axis=1)).reshape(-1))
                domains.append(np.repeat(rng.choice(len(mix), size=some, p=mix), self.burst_size))
                drawn, last = drawn + some * self.burst_size, float(starts[-1])
        arrival_s, domain = np.concatenate(times), np.concatenate(domains)
        order = np.argsort(arrival_s, kind="stable")[:count]
        times_s = np.cumsum(rng.exponential(1.0 / self.rate, count)) if self.even_rate else arrival_s[order]
        return Arrivals(times_s, domain[order])


def at_rate(arrivals: ArrivalProcess, rate: float) -> ArrivalProcess:
    """Return the process at another mean rate; bursts keep their size and relative rate. Others become Poisson."""
    if isinstance(arrivals, BurstyArrivals):
        return replace(arrivals, rate=rate, burst_rate=arrivals.burst_rate * rate / arrivals.rate)
    return PoissonArrivals(rate)


@dataclass(frozen=True, slots=True)
class ReplayedArrivals:
    """Arrival times of a recorded trace, which is repeated if it is too short. Domains are drawn from the mix."""

    trace: RequestTrace
    time_scale: float = 1.0
    """Factor on recorded times: 0.5 replays twice as fast."""

    def __post_init__(self) -> None:
        check_positive(time_scale=self.time_scale)
        check(self.trace.arrival_s is not None and len(self.trace), "replayed arrivals: the trace has no arrival times")

    def draw(self, count: int, mix: NDArray[np.float64], rng: Generator) -> Arrivals:
        assert self.trace.arrival_s is not None
        order = np.argsort(self.trace.arrival_s, kind="stable")
        times = self.trace.arrival_s[order] - self.trace.arrival_s[order[0]]
        lap, row = np.divmod(np.arange(count), len(times))
        # A lap lasts one mean gap longer than the trace, so that its last request and the next lap's first differ.
        lap_s = times[-1] * (1 + 1 / max(1, len(times) - 1))
        arrival_s = (times[row] + lap * lap_s) * self.time_scale
        return Arrivals(arrival_s, rng.choice(len(mix), size=count, p=mix))


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Lognormal prompt and output lengths, independent of each other and of the domain."""

    prompt_mean: float = 512.0
    """Mean prompt length in tokens (of the lengths, not of their logarithms)."""
    prompt_sigma: float = 1.0
    """Standard deviation of the log length: at 0 all are equal, at 1 one in 20 is above 5 times the median."""
    output_mean: float = 256.0
    output_sigma: float = 0.8
    longest: int = 32_768
    """Largest length in tokens; longer draws are cut to it."""

    def __post_init__(self) -> None:
        check_positive(prompt_mean=self.prompt_mean, output_mean=self.output_mean, longest=self.longest)
        for name in ("prompt_sigma", "output_sigma"):
            check(0 <= getattr(self, name) < 10, f"lengths: {name}={getattr(self, name)} must be in 0 … 10")

    def draw(self, domain: NDArray[np.int64], rng: Generator) -> Lengths:
        def some(mean: float, sigma: float) -> NDArray[np.int64]:
            return np.clip(
                np.rint(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, len(domain))), 1, self.longest
            ).astype(np.int64)

        return Lengths(some(self.prompt_mean, self.prompt_sigma), some(self.output_mean, self.output_sigma))


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Lengths of recorded requests."""

    prompt_tokens: NDArray[np.int64]
    """[request] tokens."""
    output_tokens: NDArray[np.int64]
    """[request] tokens."""
    domain: NDArray[np.int64] | None = None
    """[request] index of each recorded request's domain: a new request gets the lengths of a random recorded request of
    its domain. None replays the lengths in order, repeatedly."""

    def __post_init__(self) -> None:
        count = len(self.prompt_tokens)
        check(
            count and len(self.output_tokens) == count and (self.domain is None or len(self.domain) == count),
            f"recorded lengths: {count} prompts must be at least 1, with as many outputs and domains",
        )

    def draw(self, domain: NDArray[np.int64], rng: Generator) -> Lengths:
        row = np.arange(len(domain)) % len(self.prompt_tokens)
        if self.domain is not None:
            for d in np.unique(domain):
                same = np.flatnonzero(self.domain == d)
                row[domain == d] = rng.choice(
                    same if len(same) else np.arange(len(self.prompt_tokens)), int((domain == d).sum())
                )
        return Lengths(self.prompt_tokens[row].astype(np.int64), self.output_tokens[row].astype(np.int64))


def draw_arrivals(
    arrivals: ArrivalProcess,
    lengths: LengthModel,
    mix: NDArray[np.float64],
    rng: Generator,
    requests: int | None = None,
    tokens: int | None = None,
) -> tuple[Arrivals, Lengths]:
    """Draw `requests` requests, or as many as have exactly `tokens` tokens; then the last request is cut short."""
    check((requests is None) != (tokens is None), "give either a number of requests or a number of tokens")
    check_at_least(1, requests=requests, tokens=tokens)
    check(requests is None or requests <= MOST_REQUESTS, f"requests={requests} must be at most {MOST_REQUESTS:,}")
    count = requests if requests is not None else 256
    while True:
        arrived = arrivals.draw(count, mix, rng)
        prompt, output = lengths.draw(arrived.domain, rng)
        if tokens is None:
            return arrived, Lengths(prompt, output)
        ends = np.cumsum(prompt + output)
        if ends[-1] >= tokens:
            break
        check(ends[-1] != 0, f"tokens={tokens} cannot be reached: all lengths drawn are 0")
        count = math.ceil(1.1 * count * tokens / ends[-1])  # estimated from the tokens of the requests drawn last
    last = int(np.searchsorted(ends, tokens))
    excess = int(ends[last]) - tokens  # cut from the output first, then from the prompt
    prompt, output = prompt[: last + 1].copy(), output[: last + 1].copy()
    prompt[last] -= max(0, excess - output[last])
    output[last] -= min(excess, output[last])
    return Arrivals(arrived.arrival_s[: last + 1], arrived.domain[: last + 1]), Lengths(prompt, output)
