"""Invariants of the books that a running fleet keeps: counts, rows and tables that must agree."""

from __future__ import annotations

import numpy as np

from coterie.engines.worker.blocks import BlockTable
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.waiting import WaitingLine
from coterie.kvindex._tables import _VEIL
from coterie.kvindex.directory import KVDirectory
from coterie.routing.fleet import Fleet


def check_fleet(fleet: Fleet) -> None:
    """Raise AssertionError if a worker's sums differ from those over the requests in the fleet."""
    names = ("running", "context_tokens", "prefill_tokens", "_profiled", "_logs")
    sums = {name: np.zeros_like(getattr(fleet, name)) for name in names}
    for worker, context, uncomputed, logs in fleet._residents.values():
        for total, part in zip(sums.values(), (1, context, uncomputed, logs is not None, logs), strict=True):
            total[worker] += 0 if part is None else part
    own = fleet.own()
    for name, total in sums.items():
        right = np.array_equal(getattr(own, name.removeprefix("_")), total)
        assert right, f"fleet.{name} differs from its requests' sum"
    least = np.minimum(fleet.in_flight, fleet.peak)
    known = fleet.running + fleet.heard.running
    assert (least >= known).all(), "fleet.in_flight and fleet.peak must be at least the requests that are known"
    assert np.isfinite(fleet._prior).all(), "a prior of the fleet is not finite"


def check_keeper(keeper: FleetKeeper) -> None:
    """Raise AssertionError if ids, rows, requests and the fleet disagree."""
    fleet = keeper.fleet
    check_fleet(fleet)
    rows = {worker_id: worker.row for worker_id, worker in keeper.members.items()}
    listed = {worker_id: row for row, worker_id in enumerate(keeper._ids) if worker_id is not None}
    alive = np.zeros(len(fleet), np.bool_)
    for worker in keeper.members.values():
        alive[worker.row] = worker.open
    counts = np.bincount([choice.row for choice in keeper.requests.values()], minlength=len(fleet))
    for right, what in (
        (rows == listed, "rows of workers"),
        (len(keeper._ids) == len(keeper._last) == len(fleet), "number of rows"),
        (set(keeper._left) <= {row for row, there in enumerate(keeper._ids) if there is None}, "rows that are free"),
        (np.array_equal(alive, fleet.alive), "workers that may be chosen"),
        (keeper.open_workers == int(alive.sum()), "number of workers that may be chosen"),
        (np.array_equal(counts, fleet.running), "requests that run"),
    ):
        assert right, f"the keeper and its fleet disagree on the {what}"


def check_line(line: WaitingLine) -> None:
    """Raise AssertionError if a waiter is miscounted, or waits although its place is free."""
    queued = [waiter for waiter in line._line if waiter.queued]
    assert len(queued) == line.waiting
    assert line.in_use >= 0
    assert not queued or line.in_use >= line.places or queued[0].future.done(), (
        "the first request waits though its place is free"
    )


def check_blocks(blocks: BlockTable) -> None:
    """Raise AssertionError unless every block is in exactly one state and is found under its own hash only."""
    empty, cached = set(blocks._empty), set(blocks._cached)
    used = {block for block, users in enumerate(blocks._users) if users > 0}
    whole = len(empty) + len(cached) + len(used)
    assert whole == blocks.num_blocks, f"{len(empty)} empty + {len(cached)} cached + {len(used)} used"
    assert empty | cached | used == set(range(blocks.num_blocks))
    assert min(blocks._users) >= 0, f"a block has {min(blocks._users)} users"
    hashed = {block: digest for block, digest in enumerate(blocks._digest) if digest is not None}
    by_digest = {digest: block for block, digest in hashed.items()}
    assert by_digest == blocks._by_digest, "a hash leads to a block that does not have it"
    assert len(hashed) == len(by_digest), "two blocks have one hash"
    assert cached <= set(hashed), "a cached block has no hash"
    assert not empty & set(hashed), "an empty block has a hash"


def check_directory(directory: KVDirectory) -> None:
    """Raise AssertionError if the tables contradict each other."""
    table = directory._contents
    rows = table.entries[table.entries[:, 0] != 0]
    assert len(rows) == table.used[0], f"{len(rows)} contents, {table.used[0]} counted"
    assert rows[:, 2:].any(axis=1).all(), "a content without a worker"
    by_worker = 0
    for state in directory._workers:
        held = state.held.entries[state.held.entries[:, 0] != 0]
        assert len(held) == state.held.used[0] >= state.blocks, f"{len(held)} rows, {state.held.used[0]} counted"
        contents = set(map(tuple, held[held[:, 2] != 0, 2:].tolist()))
        marked = set(map(tuple, (held[:, :2] ^ _VEIL).tolist()))
        by_worker += len(contents - marked)
    many = rows[rows[:, 2] >= 1 << 63, 2] ^ np.uint64(1 << 63)
    few = rows[rows[:, 2] < 1 << 63, 2]
    bits = int(np.bitwise_count(directory._sets[many]).sum())
    bits += sum(int((few >> np.uint64(shift) & np.uint64(0x7FFF) != 0).sum()) for shift in (0, 15, 30, 45))
    assert by_worker == bits, f"workers hold {by_worker} contents, the table of contents says {bits}"
    assert len(set(many.tolist())) == len(many), "two contents share a set"
    freed, row = set(), int(table.used[2])
    while row:
        freed.add(row)
        row = int(directory._sets[row, 0])
    assert freed | set(many.tolist()) == set(range(1, int(table.used[1]) + 1)), "a set is lost"
