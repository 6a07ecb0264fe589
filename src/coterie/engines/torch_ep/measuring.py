"""Measure the expert-parallel layer between real processes: bytes of dispatch and combine, time of a shuffle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.dispatch.shuffle import shuffle_schedule
from coterie.engines.ranks import Member, run_ranks
from coterie.engines.torch_ep.exchange import COMBINE, DISPATCH, TorchExchange
from coterie.engines.torch_ep.group import Group, torch_reduce_scatter
from coterie.engines.torch_ep.layer import ExpertParallelLayers
from coterie.engines.torch_ep.shuffled import shuffle_rows, shuffled_reduce_scatter
from coterie.engines.torch_ep.weights import SlotWeights
from coterie.types import Placement

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None

INNER = 8
"""Inner width of the experts: bytes do not depend on it."""


class WireBytes(NamedTuple):
    """Bytes that crossed ranks, summed over the group, the layers and both directions."""

    hidden: int
    """Hidden states, there and back."""
    other: int
    """Slots, weights and counts that went with them."""


class WireMeasurement(NamedTuple):
    """Bytes by mode of dispatch."""

    deduplicated: WireBytes
    per_activation: WireBytes


class _Wire(NamedTuple):
    experts: NDArray[np.integer]
    placement: Placement
    hidden_size: int


def measure_wire(experts: NDArray[np.integer], placement: Placement, hidden_size: int) -> WireMeasurement:
    """Run `experts` [token, layer, k] through the layer in float32; token t lives on rank t modulo ranks."""
    asked = _Wire(experts, placement, hidden_size)
    ranks = run_ranks(_wire, asked, placement.num_ranks, doing="counting bytes")
    modes = [[getattr(rank, mode) for rank in ranks] for mode in WireMeasurement._fields]
    return WireMeasurement(
        *(WireBytes(sum(found.hidden for found in mode), sum(found.other for found in mode)) for mode in modes)
    )


def _wire(member: Member, asked: _Wire) -> WireMeasurement:
    group = Group(timeout_s=member.timeout_s)
    found = [_sent(group, member, asked, deduplicate) for deduplicate in (True, False)]
    group.close()
    return WireMeasurement(*found)


def _sent(group: Group, member: Member, asked: _Wire, deduplicate: bool) -> WireBytes:
    placement, hidden_size = asked.placement, asked.hidden_size
    group.bytes.reset()
    up = torch.zeros(2 * INNER, hidden_size)
    weights = SlotWeights(placement, group.rank, lambda _layer, _expert: (up, torch.zeros(hidden_size, INNER)))
    exchange = TorchExchange(group, placement.slots_per_rank, deduplicate)
    layers = ExpertParallelLayers(group, placement, weights, exchange)
    own = torch.from_numpy(asked.experts[group.rank :: group.size].astype(np.int64))
    hidden = torch.ones(len(own), hidden_size)
    for layer in range(placement.num_layers):
        member.say(f"layer {layer}", layer)
        chosen = own[:, layer]
        layers.forward(layer, hidden, chosen, torch.full(chosen.shape, 1 / chosen.shape[1]))
    sent = group.bytes.sent
    states = sent[DISPATCH] + sent[COMBINE]
    return WireBytes(states, sent.total() - states)


class ShuffleTimes(NamedTuple):
    """Medians over repeats of the slowest rank's milliseconds, and of ratios within a repeat."""

    gloo_ms: float
    """torch's own reduce-scatter, rows in order."""
    plain_ms: float
    """Ours, rows in order."""
    shuffled_ms: float
    """Ours, rows of the partial sums shuffled first."""
    early_ms: float
    """Ours, rows of the projection's input shuffled first, which is hidden ÷ ranks wide."""
    shuffled_to_gloo: float
    shuffled_to_plain: float
    early_to_plain: float


class _Shuffle(NamedTuple):
    tokens: int
    hidden_size: int
    repeats: int


def measure_shuffle(processes: int, tokens: int, hidden_size: int, repeats: int = 15) -> ShuffleTimes:
    """Time the reduce-scatter of [token, hidden] float32, with and without a random shuffle; `tokens` must divide."""
    found: ShuffleTimes = run_ranks(
        _shuffle, _Shuffle(tokens, hidden_size, repeats), processes, doing="timing the shuffle"
    )[0]
    return found


def _shuffle(member: Member, asked: _Shuffle) -> ShuffleTimes:
    group = Group(timeout_s=member.timeout_s)
    member.say("the shuffle")
    tokens, hidden_size, size = asked.tokens, asked.hidden_size, group.size
    schedule = shuffle_schedule(np.random.default_rng(0).permutation(np.arange(tokens) % size), size)
    partial, narrow = torch.ones(tokens, hidden_size), torch.ones(tokens, hidden_size // size)
    out = torch.empty(schedule.per_rank, hidden_size)

    def early() -> None:
        shuffle_rows(narrow, schedule)
        shuffled_reduce_scatter(group, partial, schedule, already_shuffled=True)

    runs: dict[str, Callable[[], Any]] = {
        "gloo": lambda: torch_reduce_scatter(out, partial),
        "plain": lambda: shuffled_reduce_scatter(group, partial, schedule, already_shuffled=True),
        "shuffled": lambda: shuffled_reduce_scatter(group, partial, schedule),
        "early": early,
    }
    times = torch.zeros(asked.repeats + 1, len(runs), dtype=torch.float64)  # [repeat, run] milliseconds
    for repeat in times:
        for at, call in enumerate(runs.values()):
            dist.barrier()
            start = time.perf_counter()
            call()
            repeat[at] = 1e3 * (time.perf_counter() - start)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    group.close()
    gloo, plain, shuffled, soon = times[1:].T.tolist()  # the first touches memory for the first time
    median = statistics.median
    return ShuffleTimes(
        gloo_ms=median(gloo),
        plain_ms=median(plain),
        shuffled_ms=median(shuffled),
        early_ms=median(soon),
        shuffled_to_gloo=_ratio(shuffled, gloo),
        shuffled_to_plain=_ratio(shuffled, plain),
        early_to_plain=_ratio(soon, plain),
    )


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
