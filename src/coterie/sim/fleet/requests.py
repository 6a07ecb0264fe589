"""Requests of a simulated fleet: arrivals, lengths and prefixes from one trace, experts from another.

A recording has tokens whose experts are replayed: some for the prompt, others for decode. A prompt or an output longer
than the recording repeats the recorded tokens from the start. A request is one use of a recording, and **no recording
should be in flight twice**: two uses of it on a worker activate the same experts, which makes a router that groups
similar requests look better than it is. So the uses are drawn far apart, and the simulator enforces the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from coterie.errors import ConfigError, check, check_at_least, check_given, check_positive
from coterie.footprints.counting import footprint
from coterie.routing import Fleet, Router
from coterie.traces import ActivationTrace, RequestTrace
from coterie.types import PREFILL, ModelSpec

DEFAULT_BLOCK_TOKENS = 16
"""Tokens in a KV block if the trace has no prefixes: the default of vLLM."""


@dataclass(frozen=True, slots=True, eq=False)
class Recordings:
    """Recorded requests; arrays are [recording] unless stated."""

    expert_ids: NDArray[np.integer]
    """[token, layer, k] expert ids of all recordings."""
    num_experts: int
    prompt_row: NDArray[np.int64]
    """Row in `expert_ids` of the first prompt token; there are `prompt_rows`."""
    prompt_rows: NDArray[np.int64]
    decode_row: NDArray[np.int64]
    """Row in `expert_ids` of the first decoded token; there are `decode_rows`."""
    decode_rows: NDArray[np.int64]
    footprint: NDArray[np.integer] | NDArray[np.floating] | None = None
    """[recording, layer, expert] footprint shown to routers: activations of the prompt, or a prediction."""
    domains: Sequence[str] | None = None
    prompt_tokens: NDArray[np.int64] | None = None
    """Length of the recorded request's prompt; None if unknown."""
    prefix_blocks: Sequence[NDArray[np.integer]] | None = None
    """[recording] numbers of the prompt's blocks; None if prompts share nothing."""
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.prompt_row)


@dataclass(frozen=True, slots=True, eq=False)
class FleetRequests:
    """Uses of recordings, in order of arrival; arrays are [request] unless stated."""

    recordings: Recordings
    recorded: NDArray[np.int64]
    """Recording that each request replays."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    arrival_s: NDArray[np.float64] | None = None
    """Arrival times; None for a closed loop, which keeps a fixed number of requests in flight."""
    block_offsets: NDArray[np.int64] | None = None
    """[request + 1] start of each request's prompt blocks in `blocks`."""
    blocks: NDArray[np.int64] | None = None
    """Numbers of the prompt blocks, from 0; prompts that begin with the same numbers share a prefix."""
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.recorded)


def split_recordings(
    trace: ActivationTrace, rows: NDArray[np.integer] | None = None, share: float = 0.5, least_tokens: int = 16
) -> Recordings:
    """Return recordings in which the first `share` of a request's tokens is its prompt, and the rest is decoded.

    For traces of decode only. Requests with fewer than `least_tokens` tokens are left out.
    """
    check(0.0 < share < 1.0, f"share={share} must be between 0 and 1")
    return _recordings(trace, rows, lambda phase: max(1, int(share * len(phase))), max(2, least_tokens))


def phase_recordings(trace: ActivationTrace, rows: NDArray[np.integer] | None = None) -> Recordings:
    """Return recordings with the prompt and decoded tokens of the trace. Requests without both are left out."""
    return _recordings(trace, rows, lambda phase: int((phase == PREFILL).sum()), 2)


def _recordings(
    trace: ActivationTrace,
    rows: NDArray[np.integer] | None,
    prompt_rows: Callable[[NDArray[np.uint8]], int],
    least_tokens: int,
) -> Recordings:
    """Return recordings whose prompts have `prompt_rows` of the tokens' phases; a prefix may be without tokens."""
    experts, domains = trace.meta.num_experts, trace.requests.domains
    wanted = range(trace.num_requests) if rows is None else np.asarray(rows, np.int64).tolist()
    read = {number: trace.request(number) for number in wanted}
    cuts = {number: prompt_rows(tokens.phase) for number, tokens in read.items()}
    kept = [n for n, tokens in read.items() if len(tokens.phase) >= least_tokens and 1 <= cuts[n] < len(tokens.phase)]
    check(kept, f"none of {len(read)} requests has a prompt and decoded tokens, {least_tokens} in all")
    numbers, cut = np.array(kept, np.int64), np.array([cuts[number] for number in kept], np.int64)
    ids = [np.asarray(read[number].expert_ids) for number in kept]
    lengths = np.array([len(rows) for rows in ids], np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    shown = np.array([footprint(rows[:at], experts) for rows, at in zip(ids, cut, strict=True)])
    blocks = trace.requests.prefix_blocks
    return Recordings(
        np.concatenate(ids),
        experts,
        first,
        cut,
        first + cut,
        lengths - cut,
        shown,
        None if domains is None else [domains[int(number)] for number in numbers],
        np.asarray(trace.requests.prompt_tokens)[numbers],
        None if blocks is None else [np.asarray(blocks[int(number)]) for number in numbers],
        trace.requests.block_tokens or DEFAULT_BLOCK_TOKENS,
    )


def order_apart(recordings: int, requests: int, rng: Generator, apart: int | None = None) -> NDArray[np.int64]:
    """Draw [request] random recordings, all different among any `apart` consecutive requests.

    `apart` is half the number of recordings by default.
    """
    check_at_least(1, recordings=recordings)
    spacing = max(1, recordings // 2) if apart is None else apart
    check(1 <= spacing <= recordings, f"apart={spacing} must be in 1 … recordings={recordings}")
    order = np.empty(requests, np.int64)
    free = list(range(recordings))
    for at in range(requests):
        if at >= spacing:
            free.append(int(order[at - spacing]))
        picked = int(rng.integers(len(free)))
        order[at] = free[picked]
        free[picked] = free[-1]
        free.pop()
    return order


def draw_requests(
    recordings: Recordings,
    count: int,
    rng: Generator,
    arrivals: RequestTrace | None = None,
    rate: float | None = None,
    longest_prompt: int | None = None,
    apart: int | None = None,
) -> FleetRequests:
    """Draw requests with the lengths and prefixes of their recordings, or with times, lengths, prefixes of `arrivals`.

    Uses of one recording are at least `apart` requests apart, by default half the number of recordings. With more
    requests in flight than that, some must wait for others.

    From `arrivals` a contiguous part with a random start is taken, scaled to a mean `rate` of requests per second if
    given. A prompt cut at `longest_prompt` keeps the blocks that it fills completely.
    """
    check_at_least(1, count=count)
    recorded = order_apart(len(recordings), count, rng, apart)
    if arrivals is None:
        prompts = recordings.prompt_tokens if recordings.prompt_tokens is not None else recordings.prompt_rows
        prompt_tokens = np.clip(prompts[recorded], 1, longest_prompt)
        drawn = FleetRequests(recordings, recorded, prompt_tokens, recordings.decode_rows[recorded])
        own = recordings.prefix_blocks
        if own is None:
            return drawn
        return _with_blocks(drawn, [own[row] for row in recorded.tolist()], prompts[recorded], recordings.block_tokens)
    arrival_s = check_given(arrivals.arrival_s, "arrivals has no arrival times")
    rows = (int(rng.integers(max(1, len(arrivals) - count + 1))) + np.arange(count)) % len(arrivals)
    times = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(arrival_s, append=arrival_s[-1])[rows]))[:-1]])
    if rate is not None:
        check_positive(rate=rate)
        times = times / max(times[-1], 1e-9) * (count - 1) / rate
    prompt_tokens = np.clip(arrivals.prompt_tokens[rows], 1, longest_prompt)
    drawn = FleetRequests(recordings, recorded, prompt_tokens, np.maximum(1, arrivals.output_tokens[rows]), times)
    if arrivals.prefix_blocks is None or arrivals.block_tokens is None:
        return drawn
    blocks = [np.asarray(arrivals.prefix_blocks[row]) for row in rows.tolist()]
    return _with_blocks(drawn, blocks, arrivals.prompt_tokens[rows], arrivals.block_tokens)


def _with_blocks(
    drawn: FleetRequests, blocks: Sequence[NDArray[np.integer]], full: NDArray[np.integer], block_tokens: int
) -> FleetRequests:
    """Add the blocks [request] of prompts that had `full` [request] tokens before they were cut."""
    cut = drawn.prompt_tokens
    lengths = np.where(cut == full, cut, cut // block_tokens)  # no prompt has more blocks than tokens
    taken = [own[:length] for own, length in zip(blocks, lengths.tolist(), strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(own) for own in taken])]).astype(np.int64)
    numbers = np.unique(np.concatenate(taken), return_inverse=True)[1].astype(np.int64)
    return replace(drawn, block_offsets=offsets, blocks=numbers, block_tokens=block_tokens)


def check_fleet_requests(requests: FleetRequests, spec: ModelSpec, in_flight: int | None) -> None:
    """Raise ConfigError for invalid requests: the compiled loop does not check and would read past an array's end."""
    count, recordings = len(requests), requests.recordings
    check(count, "there are no requests; a run needs at least one")
    for name in ("prompt_tokens", "output_tokens"):
        values = getattr(requests, name)
        check(len(values) == count, f"{name} has {len(values)} requests; recorded has {count}")
        check(values.min() >= 1, f"{name}={values.min()} must be at least 1 for every request")
    check(
        0 <= requests.recorded.min() <= requests.recorded.max() < len(recordings),
        f"recorded holds numbers outside 0 … {len(recordings) - 1}",
    )
    ids = recordings.expert_ids
    check(
        ids.ndim == 3 and ids.shape[1] == spec.num_moe_layers and recordings.num_experts == spec.num_experts,
        f"recordings have shape {ids.shape} of {recordings.num_experts} experts; {spec.name} has "
        f"{spec.num_moe_layers} MoE layers of {spec.num_experts}",
    )
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    check(
        low >= 0 and high < spec.num_experts,
        f"expert_ids holds {low if low < 0 else high}; ids must be in 0 … {spec.num_experts - 1}",
    )
    for row, rows in ((recordings.prompt_row, recordings.prompt_rows), (recordings.decode_row, recordings.decode_rows)):
        check(
            row.min() >= 0 and rows.min() >= 1 and int((row + rows).max()) <= len(ids),
            f"recordings need at least one token each for prompt and decode within {len(ids)}",
        )
    check_at_least(1, in_flight=in_flight, block_tokens=requests.block_tokens)
    check(
        (requests.arrival_s is None) != (in_flight is None),
        "give either requests with arrival_s (open) or in_flight (closed)",
    )
    times = np.zeros(count) if requests.arrival_s is None else requests.arrival_s
    check(
        len(times) == count and np.isfinite(times).all() and times[0] >= 0,
        f"arrival_s must hold {count} finite times of at least 0",
    )
    check(not (np.diff(times) < 0).any(), "arrival_s must not fall")
    check(
        (requests.blocks is None) == (requests.block_offsets is None), "blocks and block_offsets must be given together"
    )
    if requests.blocks is not None and requests.block_offsets is not None:
        _check_blocks(requests, requests.block_offsets, requests.blocks)


def _check_blocks(requests: FleetRequests, offsets: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
    check(
        len(offsets) == len(requests) + 1 and offsets[0] == 0 and offsets[-1] == len(blocks),
        f"block_offsets must run from 0 to {len(blocks)} over {len(requests)} requests",
    )
    held = np.diff(offsets)
    most = -(-requests.prompt_tokens // requests.block_tokens)
    for row in np.flatnonzero((held < 0) | (held > most)):
        raise ConfigError(
            f"request {row} has {held[row]} blocks; its prompt of {requests.prompt_tokens[row]} tokens has at most "
            f"{most[row]} of {requests.block_tokens}"
        )
    check(blocks.min(initial=0) >= 0, f"blocks holds {blocks.min(initial=0)}; blocks are numbered from 0")
    owner = np.repeat(np.arange(len(requests)), held)
    check(
        len(np.unique(np.stack([owner, blocks]), axis=1).T) == len(blocks),
        "a prompt holds one block twice; blocks are numbered by all that lies before them",
    )


# Inputs of a fleet's controller. The simulator knows controllers only by this protocol: before each routing decision it
# calls the controller with the simulated time and the requests that ended since the last call.


class FinishedRequest(NamedTuple):
    """A request that ended, with the experts its tokens activated."""

    at_s: float
    request: int
    recorded: int
    worker: int
    """Decode worker."""
    prefill: NDArray[np.uint32]
    """[layer, expert] activations of the tokens recorded for the prompt."""
    decode: NDArray[np.uint32]
    """[layer, expert] activations of the decoded tokens."""


class RouterSwap(NamedTuple):
    """A router to use from now on."""

    router: Router
    fleet: Fleet | None = None
    """An empty fleet with the new router's priors, into which running requests are copied; None keeps the old fleet."""


class FleetController(Protocol):
    """A controller that observes a fleet and may swap its router."""

    def tick(self, now_s: float, ended: Sequence[FinishedRequest]) -> RouterSwap | None: ...


class EndedRequests:
    """Creates the FinishedRequest values that a controller receives."""

    def __init__(self, requests: FleetRequests) -> None:
        self.requests = requests
        self._counted = cache(self._count)

    def finished(self, request: int, at_s: float, worker: int) -> FinishedRequest:
        recorded, kept = int(self.requests.recorded[request]), self.requests.recordings
        prompt = self._counted(int(kept.prompt_row[recorded]), int(kept.prompt_rows[recorded]))
        tokens, rows = int(self.requests.output_tokens[request]), int(kept.decode_rows[recorded])
        first = int(kept.decode_row[recorded])
        decode = (tokens // rows) * self._counted(first, rows) + self._counted(first, tokens % rows)
        return FinishedRequest(at_s, request, recorded, worker, prompt, decode.astype(np.uint32))

    def _count(self, first: int, rows: int) -> NDArray[np.uint32]:
        """Return [layer, expert] activations of `rows` recorded tokens from row `first` on."""
        recordings = self.requests.recordings
        return footprint(recordings.expert_ids[first : first + rows], recordings.num_experts).astype(np.uint32)
