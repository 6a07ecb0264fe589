"""Measure the expert-parallel layer between real processes: bytes of dispatch and combine, shuffles, live migration."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.dispatch.shuffle import shuffle_schedule
from coterie.engines.ranks import RankMember, run_ranks
from coterie.engines.torch_ep.group import Group
from coterie.engines.torch_ep.layer import (
    COMBINE,
    DISPATCH,
    ExpertParallelLayers,
    SlotWeights,
    TorchExchange,
    shuffle_rows,
    shuffled_reduce_scatter,
)
from coterie.engines.torch_ep.migration import LiveMigration, Mover
from coterie.errors import ConfigError
from coterie.placement.migration.rounds import MigrationLimits, schedule_moves
from coterie.types import Placement, Topology

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None

INNER = 8
"""Inner width of the experts: bytes do not depend on it."""
TCP_BYTES_SENT = 200
"""Offset of tcpi_bytes_sent in Linux's struct tcp_info, since 4.19."""


class WireBytes(NamedTuple):
    """Bytes that crossed ranks, summed over the group, the layers and both directions."""

    hidden: int
    """Hidden states, there and back."""
    other: int
    """Slots, weights and counts that went with them."""
    tcp: int | None
    """Bytes that the system counted on its TCP connections meanwhile, without headers; None if it does not count."""


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
    return WireMeasurement(*(_summed(mode) for mode in modes))


def _summed(ranks: list[WireBytes]) -> WireBytes:
    tcp = [rank.tcp for rank in ranks if rank.tcp is not None]
    hidden, other = (sum(getattr(rank, name) for rank in ranks) for name in ("hidden", "other"))
    return WireBytes(hidden, other, sum(tcp) if len(tcp) == len(ranks) else None)


def _wire(member: RankMember, asked: _Wire) -> WireMeasurement:
    group = Group(timeout_s=member.timeout_s)
    modes = [_sent(group, member, asked, deduplicate) for deduplicate in (True, False)]
    group.close()
    return WireMeasurement(*modes)


def _sent(group: Group, member: RankMember, asked: _Wire, deduplicate: bool) -> WireBytes:
    placement, hidden_size = asked.placement, asked.hidden_size
    group.sent_bytes.clear()
    up = torch.zeros(2 * INNER, hidden_size)
    weights = SlotWeights(placement, group.rank, lambda _layer, _expert: (up, torch.zeros(hidden_size, INNER)))
    exchange = TorchExchange(group, placement.slots_per_rank, deduplicate)
    layers = ExpertParallelLayers(group, placement, weights, exchange)
    own = torch.from_numpy(asked.experts[group.rank :: group.size].astype(np.int64))
    hidden = torch.ones(len(own), hidden_size)
    dist.barrier()
    before = tcp_bytes_sent()
    for layer in range(placement.num_layers):
        member.say(f"layer {layer}", layer)
        chosen = own[:, layer]
        layers.forward(layer, hidden, chosen, torch.full(chosen.shape, 1 / chosen.shape[1]))
    sent = group.sent_bytes
    states = sent[DISPATCH] + sent[COMBINE]
    dist.barrier()  # what others have received has been sent
    after = tcp_bytes_sent()
    tcp = None if before is None or after is None else after - before
    return WireBytes(states, sent.total() - states, tcp)


def tcp_bytes_sent() -> int | None:
    """Return the bytes that this process's TCP connections have sent so far, or None if the system does not count."""
    folder, option = Path("/proc/self/fd"), getattr(socket, "TCP_INFO", None)
    if option is None or not folder.exists():
        return None
    total = 0
    for name in [path.name for path in folder.iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, option, 256)
                if len(info) < TCP_BYTES_SENT + 8:
                    return None
                total += int.from_bytes(info[TCP_BYTES_SENT : TCP_BYTES_SENT + 8], sys.byteorder)
    return total


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
    """Time the reduce-scatter of [token, hidden] float32, with and without a random shuffle."""
    if tokens % processes:
        raise ConfigError(f"tokens={tokens} must be a multiple of processes={processes}")
    asked = _Shuffle(tokens, hidden_size, repeats)
    times: list[ShuffleTimes] = run_ranks(_shuffle, asked, processes, doing="timing the shuffle")
    return times[0]


def _shuffle(member: RankMember, asked: _Shuffle) -> ShuffleTimes:
    group = Group(timeout_s=member.timeout_s)
    member.say("the shuffle")
    tokens, hidden_size, size = asked.tokens, asked.hidden_size, group.size
    schedule = shuffle_schedule(np.random.default_rng(0).permutation(np.arange(tokens) % size), size)
    partial, narrow = torch.ones(tokens, hidden_size), torch.ones(tokens, hidden_size // size)
    out = torch.empty(schedule.per_rank, hidden_size)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name in this torch

    def early() -> None:
        shuffle_rows(narrow, schedule)
        shuffled_reduce_scatter(group, partial, schedule, already_shuffled=True)

    runs: dict[str, Callable[[], Any]] = {
        "gloo": lambda: scatter(out, partial),
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
    medians = [statistics.median(series) for series in (gloo, plain, shuffled, soon)]
    ratios = [_ratio(shuffled, gloo), _ratio(shuffled, plain), _ratio(soon, plain)]
    return ShuffleTimes(*medians, *ratios)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


class MigrationCost(NamedTuple):
    """Cost of migrations under traffic, of all ranks or of the slowest one."""

    switches: int
    steps: int
    """Steps that ran meanwhile."""
    changed_steps: int
    """Steps whose output differed in any bit from that before the migrations."""
    sent_bytes: int
    planned_bytes: int
    """Bytes that the schedules said would be sent."""
    stall_ms: float
    """Mean time per step that the migration took between steps."""
    step_ms: float
    """Median step while experts move, stall left out."""
    quiet_ms: float
    """Median step before."""


class _Migrations(NamedTuple):
    num_experts: int
    hidden_size: int
    switches: int


def measure_migration(
    processes: int, num_experts: int = 32, hidden_size: int = 128, switches: int = 40
) -> MigrationCost:
    """Move experts between random placements with one replica a rank, one layer, staging for two, until `switches`."""
    asked = _Migrations(num_experts, hidden_size, switches)
    ranks: list[MigrationCost] = run_ranks(_migrate, asked, processes, doing="migrating")
    slowest = max(ranks, key=lambda rank: rank.stall_ms)
    return slowest._replace(
        changed_steps=sum(rank.changed_steps for rank in ranks), sent_bytes=sum(rank.sent_bytes for rank in ranks)
    )


def _migrate(member: RankMember, asked: _Migrations) -> MigrationCost:
    group = Group(timeout_s=member.timeout_s)
    rng, size = np.random.default_rng(0), asked.hidden_size
    placement = _random_placement(asked.num_experts, group.size, rng)
    weights = SlotWeights(
        placement, group.rank, lambda _layer, expert: _whole_expert(expert, size), staging=2, activation="relu"
    )
    layers = ExpertParallelLayers(group, placement, weights, TorchExchange(group, placement.slots_per_rank))
    mover = Mover(group, weights)
    limits = MigrationLimits(weights.expert_bytes, 2 * weights.expert_bytes)
    own = np.random.default_rng(group.rank)
    hidden = torch.from_numpy(own.integers(-2, 3, (32, size))).to(torch.float32)
    experts = torch.from_numpy(own.random((32, asked.num_experts)).argsort(axis=1)[:, :4].copy())
    shares = torch.full(experts.shape, 0.25)
    expected = layers.forward(0, hidden, experts, shares)
    quiet = [_clock_ms(lambda: layers.forward(0, hidden, experts, shares))[1] for _ in range(20)]
    switches = changed = sent = 0
    stall_s = planned = 0.0
    during: list[float] = []
    while switches < asked.switches:
        target = _random_placement(asked.num_experts, group.size, rng)
        schedule = schedule_moves(placement, target, Topology(group.size), limits)
        migration = LiveMigration(layers, schedule, mover)
        while not migration.over:
            with migration.step():
                out, took = _clock_ms(lambda: layers.forward(0, hidden, experts, shares))
            during.append(took)
            changed += not torch.equal(out, expected)
        placement, report = migration.placement, migration.report()
        switches += report.switches
        sent, stall_s, planned = sent + report.sent_bytes, stall_s + report.stall_s, planned + schedule.moved_bytes
    mover.close()
    group.close()
    return MigrationCost(
        switches=switches,
        steps=len(during),
        changed_steps=changed,
        sent_bytes=sent,
        planned_bytes=round(planned),
        stall_ms=1e3 * stall_s / len(during),
        step_ms=statistics.median(during),
        quiet_ms=statistics.median(quiet),
    )


def _random_placement(num_experts: int, ranks: int, rng: np.random.Generator) -> Placement:
    slots = np.concatenate([np.arange(num_experts), rng.integers(0, num_experts, ranks)])
    return Placement(rng.permutation(slots)[None].astype(np.int32), ranks, num_experts)


def _whole_expert(expert: int, size: int) -> tuple[Any, Any]:
    """Draw whole numbers: with a ReLU every sum is exact, whatever its order."""
    rng = np.random.default_rng(expert)
    up, down = (torch.from_numpy(rng.integers(-1, 2, shape)).float() for shape in ((2 * size, size), (size, size)))
    return up, down


def _clock_ms(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    out = call()
    return out, 1e3 * (time.perf_counter() - start)
