"""Contract checks for people who write policies: what every built-in passes, a plugin must pass too.

from coterie.testing import check_planner, check_router, check_strategy

def test_my_strategy():
    check_strategy(MyStrategy)

def test_my_router():
    check_router(MyRouter)

def test_my_planner():
    check_planner(MyPlanner)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from coterie.batching.base import Loads, Selection, Strategy, Window
from coterie.batching.picking import must_take
from coterie.errors import ConfigError, UnavailableError
from coterie.placement.base import HOST, Load, Plan, Planner
from coterie.placement.objective import Objective
from coterie.routing.base import Decision, Request, Router
from coterie.routing.fleet import Fleet
from coterie.types import Placement, Topology

FAR = 1_000_000
"""Skips of a request that any limit calls overdue."""


class _Case(NamedTuple):
    name: str
    window: Window
    running: Loads
    size: int


def check_strategy(make: Callable[[], Strategy], seed: int = 0) -> None:
    """Raise AssertionError where what `make()` returns breaks the contract of a batch selection strategy.

    It must return min(size, window) different indices into the window; the oldest request and the overdue ones, oldest
    first, must be among them; the same snapshot and state of the generator must give the same, and leave the snapshot
    as it was. Windows with load running, several layers, no load at all, fractions, one request or none are tried, and
    sizes from 0 to past the window. A strategy that passes may still choose badly.
    """
    strategy = make()
    _require(isinstance(strategy, Strategy), f"{strategy!r} has no max_skips and select(window, running, size, rng)")
    limit = strategy.max_skips
    _require(limit is None or limit >= 1, f"{strategy!r}: max_skips={limit!r} must be None or at least 1")
    for case in _cases(default_rng(seed), limit):
        _check_case(make, strategy, case, seed)


def _cases(rng: Generator, limit: int | None) -> Iterator[_Case]:
    overdue = FAR if limit is None else limit
    for waiting, layers, experts in ((1, 1, 4), (7, 2, 5), (32, 1, 60), (40, 3, 16)):
        loads = rng.integers(0, 50, (waiting, layers, experts)).astype(np.float64)
        fresh = np.zeros(waiting, np.int64)
        running = rng.integers(0, 200, (layers, experts)).astype(np.float64)
        nothing = np.zeros((layers, experts))
        sizes = sorted({0, 1, 2, waiting // 4, waiting // 2, waiting - 1, waiting, waiting + 3})
        shape = f"{waiting} waiting, {layers} layers, {experts} experts"
        for size in sizes:
            yield _Case(shape, Window(loads, fresh, waiting), nothing, size)
            yield _Case(f"{shape}, with a load running", Window(loads, fresh, waiting + 9), running, size)
            yield _Case(f"{shape}, all loads 0", Window(np.zeros_like(loads), fresh, waiting), nothing, size)
            yield _Case(f"{shape}, all alike", Window(np.ones_like(loads), fresh, waiting), running, size)
            yield _Case(f"{shape}, fractions", Window(rng.random(loads.shape), fresh, waiting), running / 200, size)
            late = np.where(rng.random(waiting) < 0.3, overdue, overdue - 1)
            yield _Case(f"{shape}, some overdue", Window(loads, late, waiting), running, size)
            last = np.where(np.arange(waiting) == waiting - 1, overdue + 1, 0)
            yield _Case(f"{shape}, the youngest overdue", Window(loads, last, waiting), nothing, size)
            yield _Case(f"{shape}, all overdue", Window(loads, fresh + overdue, waiting), nothing, size)
    empty = Window(np.zeros((0, 2, 4)), np.zeros(0, np.int64), 0)
    for size in (0, 1, 8):
        yield _Case("an empty window", empty, empty.no_load(), size)


def _check_case(make: Callable[[], Strategy], strategy: Strategy, case: _Case, seed: int) -> None:
    window, running = case.window, case.running
    before = window.loads.copy(), window.skipped.copy(), running.copy()
    where = f"{strategy!r}, {case.name}, size {case.size}"

    selected = _select(strategy, case, seed, where)
    for name, was, now in zip(("loads", "skipped", "running"), before, (*window[:2], running), strict=True):
        _require(np.array_equal(was, now), f"{where}: select changed {name}, which it may only read")
    order = _checked_order(selected, case, where)
    due = must_take(window, case.size, strategy.max_skips)
    if due:
        _require(0 in order, f"{where}: the oldest request is not in {order}")
        left_out = [request for request in due if request not in order]
        _require(not left_out, f"{where}: overdue {left_out} must be in, oldest first, but picked were {order}")

    again = [int(request) for request in _select(strategy, case, seed, where).order]
    _require(again == order, f"{where}: the same generator state gave {order}, then {again}")
    other = [int(request) for request in _select(make(), case, seed, where).order]
    _require(other == order, f"{where}: the same generator state gave {order}, then {other} by a new strategy")


def _select(strategy: Strategy, case: _Case, seed: int, where: str) -> Selection:
    try:
        return strategy.select(case.window, case.running, case.size, default_rng(seed))
    except Exception as error:
        raise AssertionError(f"{where}: select raised {type(error).__name__}: {error}") from error


def _checked_order(selected: Selection, case: _Case, where: str) -> list[int]:
    """The picks, if they are as many different requests of the window as there should be."""
    _require(isinstance(selected, Selection), f"{where}: select returned {type(selected).__name__}, not a Selection")
    array, waiting = selected.order, len(case.window.loads)
    whole = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"
    _require(whole, f"{where}: order must be a NumPy array [pick] of whole numbers; found {array!r}")
    order = [int(request) for request in array]
    outside = [request for request in order if not 0 <= request < waiting]
    _require(not outside, f"{where}: picked {outside}, which must be in 0 … {waiting - 1}")
    _require(len(set(order)) == len(order), f"{where}: picked twice in {order}")
    expected = min(case.size, waiting)
    _require(len(order) == expected, f"{where}: picked {len(order)}, expected min(size, window)={expected}")
    said = isinstance(selected.reason, str) and bool(selected.reason)
    _require(said, f"{where}: reason={selected.reason!r} must be words")
    return order


class _Snapshot(NamedTuple):
    """What a planner is shown."""

    name: str
    load: Load
    topology: Topology
    current: Placement
    shares: NDArray[np.float64] | None = None
    """[layer, slot] in force; None is equal ones, and the planner is not told."""
    streaming: bool = False
    """Whether the planner's objective is to price streaming and exchange too."""

    def plan(self, planner: Planner) -> Plan:
        in_force = () if self.shares is None else (self.shares,)
        return planner.plan(self.load, self.topology, self.current, *in_force)


def check_planner(make: Callable[[], Planner], seed: int = 0) -> None:
    """Raise AssertionError where what `make()` returns breaks the contract of a planner.

    A plan is for as many layers, slots and ranks as the current placement; it has every expert on a living rank, and no
    slot it changed holds what another slot of that rank holds. Shares of an expert add up to 1 over living ranks. Its
    moves are what differs between the two placements, each from a rank that has the expert, from the host only where
    none has. It says why (`skip_reason`) if and only if nothing moves. The same snapshot gives the same plan bit for
    bit, also from a new planner, and stays as it was. Where the planner has an `objective`, predicted times, movement
    and balance are what that objective says of the plan, from the shares in force; where living ranks are alike, the
    times are also what its settings come to in plain NumPy.

    Tried are one rank, slots with and without replicas, a placement with duplicates, loads of 0, one hot expert, an
    even load, two nodes, mixed speeds, known sources, a load that other shares would even out, such shares in force,
    and a rank that is gone; a planner that cannot leave a rank out may raise ConfigError there. A dataclass with an
    `objective` is also tried with streaming and the exchange of rows priced. One that passes may still plan badly.
    """
    planner = make()
    _require(isinstance(planner, Planner), f"{planner!r} has no plan(load, topology, current, shares=None)")
    for case in _snapshots(default_rng(seed)):
        if not case.streaming:
            _check_snapshot(make, planner, case)
        elif _streaming(planner) is not None:
            _check_snapshot(lambda: _streaming(make()), _streaming(planner), case)


def _streaming(planner: Any) -> Any:
    """The planner with streaming and the exchange of rows priced; None where its prices cannot be told to it."""
    objective = getattr(planner, "objective", None)
    if not is_dataclass(planner) or not isinstance(objective, Objective):
        return None
    return replace(planner, objective=replace(objective, touch_s=2e-5, row_bytes=4096.0))  # type: ignore[type-var]


def _snapshots(rng: Generator) -> Iterator[_Snapshot]:
    layers, experts = 2, 6  # small, so that an exact planner passes in seconds too
    tokens = np.round(rng.lognormal(3.0, 1.2, (layers, experts)))
    full, spare = Placement.linear(layers, experts, 3), Placement.linear(layers, experts, 4, 8)
    twice = np.array([np.sort(np.concatenate([rng.permutation(6), rng.integers(0, 6, 2)])) for _ in range(layers)])
    messy = Placement(twice.astype(np.int32), 4, experts)
    plain = Topology(4)
    yield _Snapshot("one rank", Load(tokens), Topology(1), Placement.linear(layers, experts, 1))
    yield _Snapshot("as many slots as experts", Load(tokens, steps=10.0), Topology(3), full)
    yield _Snapshot("replicas", Load(tokens, steps=0.5), plain, spare)
    everywhere = Placement.linear(layers, experts, 2, 2 * experts)
    yield _Snapshot("replicas of all, one on every rank", Load(tokens), Topology(2), everywhere)
    yield _Snapshot("duplicates in the current placement", Load(tokens), plain, messy)
    yield _Snapshot("no load", Load(np.zeros_like(tokens)), plain, spare)
    yield _Snapshot("no load in one layer", Load(tokens * np.array([[1.0], [0.0]])), plain, spare)
    yield _Snapshot("an even load", Load(np.full_like(tokens, 100.0)), Topology(3), full)
    yield _Snapshot("one hot expert", Load(np.where(np.arange(experts) == 4, 1e6, np.ones_like(tokens))), plain, spare)
    yield _Snapshot("fractions", Load(rng.random(tokens.shape)), plain, spare)
    yield _Snapshot("two nodes", Load(tokens), Topology(4, ranks_per_node=2), spare)
    yield _Snapshot("mixed speeds", Load(tokens), Topology(4, speeds=(1.0, 0.5, 2.0, 1.0)), spare)
    from_ranks = rng.multinomial(tokens.astype(np.int64), np.full(4, 0.25)).astype(np.float64)  # [layer, expert, rank]
    sources = np.moveaxis(from_ranks, 2, 0)
    yield _Snapshot("known sources", Load(tokens, sources=sources), Topology(4, ranks_per_node=2), spare)
    linked = Placement(np.tile(np.array([0, 1, 0, 2, 3, 4, 5, 3], np.int32), (layers, 1)), 4, experts)
    uneven = Load(np.tile([60.0, 50.0, 5.0, 40.0, 5.0, 30.0], (layers, 1)))
    shares = np.tile([0.2, 1.0, 0.8, 1.0, 0.7, 1.0, 1.0, 0.3], (layers, 1))
    for priced, words in ((False, ""), (True, ", streaming priced")):
        yield _Snapshot(f"other shares would be evener{words}", uneven, plain, linked, streaming=priced)
        yield _Snapshot(f"shares in force{words}", uneven, plain, linked, shares, priced)
        yield _Snapshot(f"shares in force, another load{words}", Load(tokens), plain, linked, shares, priced)
    yield _Snapshot("replicas, streaming priced", Load(tokens, steps=0.5), plain, spare, streaming=True)
    yield _Snapshot("duplicates, streaming priced", Load(tokens), plain, messy, streaming=True)
    yield _Snapshot("a rank that is gone", Load(tokens), Topology(4, speeds=(1.0, 1.0, 0.0, 1.0)), spare)


def _check_snapshot(make: Callable[[], Planner], planner: Planner, case: _Snapshot) -> None:
    where = f"{planner!r}, {case.name}"
    before = [array.copy() for array in _inputs(case)]
    try:
        plan = case.plan(planner)
    except ConfigError:
        if not case.topology.rank_speeds.all():
            return
        raise AssertionError(f"{where}: plan refused a sound snapshot") from None
    except Exception as error:
        raise AssertionError(f"{where}: plan raised {type(error).__name__}: {error}") from error
    for was, now in zip(before, _inputs(case), strict=True):
        _require(np.array_equal(was, now), f"{where}: plan changed its inputs, which it may only read")
    _require(isinstance(plan, Plan), f"{where}: plan returned {type(plan).__name__}, not a Plan")
    _check_placement(plan, case, where)
    _check_moves(plan, case, where)
    _check_numbers(planner, plan, case, where)
    _same_plan(plan, case.plan(planner), f"{where}: a second call")
    _same_plan(plan, case.plan(make()), f"{where}: a new planner")


def _inputs(case: _Snapshot) -> list[NDArray[np.generic]]:
    arrays: list[NDArray[np.generic]] = [case.load.tokens, case.current.slot_experts]
    return arrays + [array for array in (case.load.sources, case.shares) if array is not None]


def _check_placement(plan: Plan, case: _Snapshot, where: str) -> None:
    now, was = plan.placement, case.current
    sizes, expected = ((p.num_layers, p.num_slots, p.num_ranks, p.num_experts) for p in (now, was))
    _require(sizes == expected, f"{where}: layers, slots, ranks, experts are {sizes}, of the current {expected}")
    alive = np.repeat(case.topology.rank_speeds > 0, was.slots_per_rank)  # [slot]
    for layer, row in enumerate(now.slot_experts):
        lost = np.setdiff1d(np.arange(now.num_experts), row[alive])
        _require(not lost.size, f"{where}: layer {layer} has expert {lost[:1]} on no living rank")
        for slot in np.flatnonzero(alive & (row != was.slot_experts[layer])):
            start = slot // was.slots_per_rank * was.slots_per_rank
            twice = int((row[start : start + was.slots_per_rank] == row[slot]).sum()) > 1
            _require(not twice, f"{where}: layer {layer} has expert {row[slot]} twice on one rank, new in slot {slot}")
    _require(now.duplicates <= was.duplicates, f"{where}: the plan has {now.duplicates} duplicates")
    shares = plan.shares
    _require(shares.shape == now.slot_experts.shape, f"{where}: shares must be [layer, slot]; found {shares.shape}")
    _require(bool((shares >= 0).all()), f"{where}: shares must not be negative")
    total = np.zeros((now.num_layers, now.num_experts))
    np.add.at(total, (np.arange(now.num_layers)[:, None], now.slot_experts), shares * alive)
    _require(np.allclose(total, 1.0), f"{where}: shares of an expert must add up to 1 over living ranks")


def _check_moves(plan: Plan, case: _Snapshot, where: str) -> None:
    was, now, moves = case.current, plan.placement, plan.moves
    per_rank, alive = was.slots_per_rank, case.topology.rank_speeds > 0
    holders = {
        (layer, int(expert), slot // per_rank)
        for layer, row in enumerate(was.slot_experts)
        for slot, expert in enumerate(row)
    }
    needed = [
        (layer, slot, int(expert))
        for layer, row in enumerate(now.slot_experts)
        for slot, expert in enumerate(row)
        if alive[slot // per_rank] and (layer, int(expert), slot // per_rank) not in holders
    ]
    listed = list(zip(moves.layer.tolist(), moves.slot.tolist(), moves.expert.tolist(), strict=True))
    _require(listed == needed, f"{where}: moves by layer and slot must be {needed}; found {listed}")
    for layer, expert, source in zip(moves.layer.tolist(), moves.expert.tolist(), moves.source.tolist(), strict=True):
        living = [rank for rank in range(len(alive)) if alive[rank] and (layer, expert, rank) in holders]
        sound = source in living or (source == HOST and not living)
        _require(sound, f"{where}: layer {layer}, expert {expert} comes from {source}; living ranks {living} have it")
    _require(len(moves.seconds) == len(moves), f"{where}: moves must each have their seconds")
    reason = plan.skip_reason
    explained = reason is not None and bool(reason.strip())
    _require(explained != bool(len(moves)), f"{where}: {len(moves)} moves, and yet skip_reason={reason!r}")


def _check_numbers(planner: Planner, plan: Plan, case: _Snapshot, where: str) -> None:
    names = ("before_s", "after_s", "movement_s", "balance_before", "balance_after")
    for name in (*names, "planning_s"):
        value = getattr(plan, name)
        _require(0 <= value < np.inf, f"{where}: {name}={value} must be a finite number of at least 0")
    objective = getattr(planner, "objective", None)
    if isinstance(objective, Objective):
        problem = objective.problem(case.load, case.topology, case.current, case.shares)
        again = problem.plan(plan.placement.slot_experts, plan.shares, split=plan.split)
        for name in names:
            said, found = getattr(plan, name), getattr(again, name)
            same = bool(np.isclose(said, found, rtol=1e-9, atol=1e-15))
            _require(same, f"{where}: {name}={said}, the objective says {found}")
        for name, placement, shares in (
            ("before_s", case.current, case.shares),
            ("after_s", plan.placement, plan.shares),
        ):
            said, plain = getattr(plan, name), _plain_s(objective, case, placement, shares)
            same = plain is None or bool(np.isclose(said, plain, rtol=1e-6, atol=1e-15))
            _require(same, f"{where}: {name}={said}; by the definition of the objective it is {plain}")


def _plain_s(
    objective: Objective, case: _Snapshot, placement: Placement, shares: NDArray[np.float64] | None
) -> float | None:
    """Seconds of a step's MoE layers by the definition alone; None where living ranks are not alike.

    It recomputes the objective on purpose and shares no code with it: a check of plans, not a second price.
    """
    topology, load = case.topology, case.load
    alive = topology.rank_speeds > 0
    nodes, living, experts = topology.rank_nodes[alive], int(alive.sum()), placement.num_experts
    near = np.array([(nodes == node).sum() - 1 for node in nodes])
    sent = near / topology.intra.bytes_per_s + (living - 1 - near) / topology.inter.bytes_per_s
    token_s = 2.0 * objective.row_bytes * sent / living  # [living rank] to bring it there and back, from anywhere
    if load.sources is not None or len({*topology.rank_speeds[alive]}) > 1 or np.ptp(token_s) > 1e-9 * token_s.max():
        return None
    most = min(living, living * placement.slots_per_rank - experts + 1)  # replicas of an expert
    parts = np.append(0.0, 1.0 / np.arange(most, 0, -1))
    seconds = 0.0
    for layer, row in enumerate(placement.slot_experts):
        holders = np.repeat(alive, placement.slots_per_rank)
        replicas = np.bincount(row[holders], minlength=experts)
        busy = np.zeros(placement.num_ranks)
        for slot in np.flatnonzero(holders):
            tokens = parts * load.tokens[layer, row[slot]] / load.steps
            alone = objective.touch_s * (1.0 - np.exp(-tokens)) + objective.row_s * tokens
            part = 1.0 / replicas[row[slot]] if shares is None else shares[layer, slot]
            busy[slot // placement.slots_per_rank] += np.interp(
                part, parts, alone / topology.rank_speeds[alive][0] + tokens * token_s[0]
            )
        seconds += busy.max()
    return float(seconds)


def _same_plan(plan: Plan, other: Plan, where: str) -> None:
    pairs = [
        (plan.placement.slot_experts, other.placement.slot_experts),
        (plan.shares, other.shares),
        *((getattr(plan.moves, name), getattr(other.moves, name)) for name in ("layer", "slot", "expert", "source")),
    ]
    _require(all(np.array_equal(a, b) for a, b in pairs), f"{where} gave another plan for the same snapshot")
    for name in ("before_s", "after_s", "movement_s", "skip_reason", "split", "layer_reasons"):
        said = getattr(plan, name), getattr(other, name)
        _require(said[0] == said[1], f"{where}: {name} was {said[0]!r}, then {said[1]!r}")


def check_router(
    make: Callable[[], Router], layers: int = 3, experts: int = 8, workers: int = 6, seed: int = 0
) -> None:
    """Raise AssertionError where what `make()` returns breaks the contract of a router.

    It must name a living worker, with a place free if any has one; the score of that worker must be finite, and those
    of workers that may not be chosen infinite; the same snapshot must give the same decision and stay as it was; a
    fleet without a living worker must be refused with UnavailableError. Empty and full fleets, dead workers, requests
    of which nothing is known, and cached prefixes are tried, on a fleet of `workers` that tracks `layers` x
    `experts`: those the router was fitted for. A router that passes may still choose badly.
    """
    router = make()
    _require(isinstance(router, Router), f"{router!r} has no route(request, fleet)")
    rng = default_rng(seed)
    for name, fleet in _fleets(rng, workers, layers * experts):
        for request in _route_requests(rng, layers, experts, workers):
            _check_route(make, router, f"{type(router).__name__}, {name}", request, fleet)
    nobody = Fleet([4] * workers, np.full((workers, layers * experts), 0.25, np.float32))
    nobody.alive[:] = False
    try:
        router.route(Request("r"), nobody)
    except UnavailableError:
        return
    _require(False, f"{router!r} found a worker in a fleet of which none is alive")


def _fleets(rng: Generator, workers: int, size: int) -> Iterator[tuple[str, Fleet]]:
    for name, requests, dead in (
        ("an empty fleet", 0, 0),
        ("a busy fleet", 3 * workers, 0),
        ("a full fleet", 4 * workers, 0),
        ("a fleet with a dead worker", 2 * workers, 1),
        ("one living worker", workers, workers - 1),
    ):
        prior = rng.uniform(0, 0.5, (workers, size)).astype(np.float32)
        fleet = Fleet([4] * workers, prior, rng.uniform(0.5, 2.0, workers))
        for number in range(requests):
            profile = rng.uniform(0, 0.5, size).astype(np.float32)
            fleet.admit(f"resident-{number}", number % workers, int(rng.integers(2000)), profile)
        fleet.alive[:dead] = False
        fleet.kv_used[:] = rng.random(workers)
        fleet.prefill_tokens[:] = rng.integers(0, 9000, workers)
        yield name, fleet


def _route_requests(rng: Generator, layers: int, experts: int, workers: int) -> Iterator[Request]:
    yield Request("nothing known")
    for number in range(6):
        counts = rng.integers(0, 20, (layers, experts))
        cached = rng.integers(0, 500, workers) if number % 2 else None
        yield Request(f"r{number}", 500, counts, "code" if number % 3 else None, cached)
    yield Request("no token", 1, np.zeros((layers, experts), np.int64))


def _check_route(make: Callable[[], Router], router: Router, where: str, request: Request, fleet: Fleet) -> None:
    arrays = {name: value.copy() for name, value in vars(fleet).items() if isinstance(value, np.ndarray)}
    decision = router.route(request, fleet)
    _require(isinstance(decision, Decision), f"{where}: {decision!r} is no Decision")
    allowed = fleet.open
    _require(0 <= decision.worker < len(fleet), f"{where}: worker {decision.worker} of {len(fleet)}")
    _require(bool(allowed[decision.worker]), f"{where}: worker {decision.worker} must not be chosen: dead, or full")
    scores = decision.scores
    _require(scores.shape == (len(fleet),), f"{where}: scores has shape {scores.shape}; expected ({len(fleet)},)")
    _require(bool(np.isfinite(scores[decision.worker])), f"{where}: the chosen worker's score is infinite")
    _require(bool((scores[~allowed] == np.inf).all()), f"{where}: a worker that must not be chosen has a finite score")
    _require(bool(decision.reason), f"{where} gives no reason")
    for name, value in arrays.items():
        _require(np.array_equal(value, getattr(fleet, name)), f"{where} changed fleet.{name}")
    again = make().route(request, fleet)
    same = again.worker == decision.worker and np.array_equal(again.scores, scores) and again.reason == decision.reason
    _require(same, f"{where} gave another decision for the same snapshot")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
