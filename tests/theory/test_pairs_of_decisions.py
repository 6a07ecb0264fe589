"""Pairs of decisions that Coterie takes at once: each best by itself predicts a worse time than both together.

The table in docs/joint-decisions.md names the pairs. The time is the predicted one: that of a step, and for placements
``horizon x step + movement``. Where there are few choices, all of them are tried.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.batching import LatencyAware as Strategy
from coterie.batching import Window
from coterie.costs.lines import StepCost
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, PlacedStepModel
from coterie.models import get_model
from coterie.placement import LatencyOptimal, Load, Objective, Problem
from coterie.placement.planning.free_split import improve_split
from coterie.placement.splits.shares import optimal_shares
from coterie.routing import Fleet, Request, routers
from coterie.routing.latency_aware import LatencyAware as Router
from coterie.sim.group import LockstepGroup
from coterie.types import Placement, Topology
from routing_cases import COST, draw, fitted
from v3_prices import v3_prices

Floats = NDArray[np.float64]


# Routing and batching.

PLACES, TOKENS = 4, 40


def ending(profiles: list[Floats], left: NDArray[np.int64], queue: list[int]) -> float:
    """Sum of the times at which a worker's requests end, first come, first served, at most `PLACES` in a step."""
    clock, total, waiting = 0.0, 0.0, [(profiles[number], int(left[number])) for number in queue]
    running: list[tuple[Floats, int]] = []
    while waiting or running:
        while waiting and len(running) < PLACES:
            running.append(waiting.pop(0))
        distinct = (1 - np.prod([1 - profile for profile, _ in running], axis=0)).sum()
        clock += COST.fixed_us + COST.expert_us * distinct + COST.request_us * len(running)
        total += clock * sum(tokens == 1 for _, tokens in running)
        running = [(profile, tokens - 1) for profile, tokens in running if tokens > 1]
    return total


def test_routing_and_batching() -> None:
    """One more request for six full workers: which choice delays everyone least, it included?

    A router that does not know the batch prices a step of all that wait, and misses the wait and the experts.
    """
    late = {PLACES: 0.0, 1 << 20: 0.0}
    for seed in range(60):
        rng, drawn = np.random.default_rng(seed), draw(61, seed)
        profiles = [np.asarray(fitted().profile(footprint), np.float64) for footprint in drawn.prefill]
        workers = np.append(np.repeat(np.arange(6), PLACES), rng.integers(0, 6, 60 - 6 * PLACES))
        left = rng.integers(1, TOKENS, 61)
        fleets = {places: fitted().fleet(places) for places in late}
        for number, worker in enumerate(workers):
            for fleet in fleets.values():
                fleet.admit(str(number), int(worker), 0, fitted().profile(drawn.prefill[number]))
        queues = [[*np.flatnonzero(workers == worker).tolist()] for worker in range(6)]
        delays = np.array([ending(profiles, left, [*queue, 60]) - ending(profiles, left, queue) for queue in queues])
        for places, fleet in fleets.items():
            chosen = Router(fitted(), COST).route(Request("new", 0, drawn.prefill[60]), fleet).worker
            late[places] += delays[chosen] - delays.min()
    assert late[PLACES] < 0.5 * late[1 << 20]


# Batching and placement.


def test_batching_and_placement() -> None:
    """Requests that load one rank of the map in force load all ranks of experts in order: then any batch looks even."""
    spec, ranks, size = get_model("gpt-oss-20b"), 4, 4
    model = step_model(spec, "h200", "bf16", Topology(ranks))
    row = np.concatenate([[*range(rank, 32, 4), (rank + 1) % 4, (rank + 2) % 4] for rank in range(ranks)])
    true = Placement(np.tile(row, (spec.num_moe_layers, 1)).astype(np.int32), ranks, spec.num_experts)
    kinds = [0, 0, 0, 0, 1, 1, 2, 3]
    loads = np.zeros((len(kinds), spec.num_moe_layers, spec.num_experts))
    for request, kind in enumerate(kinds):
        loads[request, :, kind + 4 :: 4] = 2048 * spec.top_k / 7  # the first expert of a kind has replicas elsewhere
    batch = Batch(prefill_tokens=size * 2048 // ranks)
    placed = PlacedStepModel(model, true)

    def step_s(order: NDArray[np.integer] | tuple[int, ...]) -> float:
        return placed.step(np.rint(loads[list(order)].sum(axis=0)).astype(np.int64), batch).total_s

    window, nothing = Window(loads, np.zeros(len(kinds), np.int64), 100_000), np.zeros(loads.shape[1:])
    chosen = {}
    for name, placement in (("apart", Placement.linear(spec.num_moe_layers, 32, ranks)), ("together", true)):
        strategy = Strategy(cost=StepCost.of(model, batch, placement), trust=1.0)
        chosen[name] = step_s(strategy.select(window, nothing, size, np.random.default_rng(0)).order)
    best = min(step_s((0, *others)) for others in combinations(range(1, len(kinds)), size - 1))
    assert chosen["together"] == pytest.approx(best, rel=1e-9), "the best of all batches with the oldest request"
    assert chosen["apart"] > 1.2 * chosen["together"]


# Routing and placement.


def test_routing_and_placement() -> None:
    """Two kinds of requests, two ranks, and a map that has half of either kind's experts on each rank: it is even.

    The planner that sees only the load keeps it. The planner that knows which rank the router sends a kind to makes a
    map on which the router finds every request's experts on one rank.
    """
    spec, requests = get_model("gpt-oss-20b"), 64
    layers, experts = spec.num_moe_layers, spec.num_experts
    topology = Topology(2)
    model = step_model(spec, "h200", "bf16", topology)
    kind = np.arange(requests) % 2
    ids = np.tile((4 * kind[:, None] + np.arange(4))[:, None, :], (1, layers, 1))
    footprints = np.zeros((requests, layers, experts), np.int64)
    np.put_along_axis(footprints, ids, 1, axis=2)
    even = np.concatenate([np.arange(0, experts, 2), np.arange(1, experts, 2)])  # half of each kind's experts on a rank
    mixed = Placement(np.tile(even, (layers, 1)).astype(np.int32), 2, experts)

    def step_s(placement: Placement, homes: NDArray[np.int64]) -> float:
        return LockstepGroup(model, placement).step(ids, homes, np.full(requests, 512)).total_s

    def sent(name: str, placement: Placement) -> NDArray[np.int64]:
        router, fleet = routers.make(name, {"placement": placement, "seed": 0}), Fleet([requests, requests])
        homes = []
        for number, footprint in enumerate(footprints):
            homes.append(router.route(Request(str(number), 0, footprint), fleet).worker)
            fleet.admit(str(number), homes[-1])
        return np.array(homes)

    load = footprints.sum(axis=0).astype(float)
    by_kind = np.stack([footprints[kind == one].sum(axis=0) for one in (0, 1)]).astype(float)
    objective = Objective.of(model, tokens=requests, horizon=1e6)
    planner = LatencyOptimal(objective)
    alone = planner.plan(Load(load), topology, mixed).placement
    assert np.array_equal(alone.slot_experts, mixed.slot_experts), "even already: nothing to plan for the load alone"
    knowing = planner.plan(Load(load, sources=by_kind), topology, mixed).placement
    together = step_s(knowing, sent("semantic", knowing))
    queue = "join_shortest_queue"
    shuffled = np.random.default_rng(0).permutation(requests)
    apart = min(step_s(mixed, sent(name, mixed)) for name in (queue, "semantic"))
    assert together < 0.99 * apart, "the best router on the best map for the load alone"
    assert together < 0.99 * step_s(knowing, sent(queue, knowing)[shuffled]), (
        "the best map, a router that does not see it"
    )


# Placement and migration, placement and dispatch, migration and dispatch.


def tokens_of(seed: int, experts: int) -> Floats:
    return np.random.default_rng(seed).pareto(1.2, (1, experts)) * 1000 + 10


def problem_of(seed: int, horizon: float, ranks: int = 3, experts: int = 5) -> Problem:
    """One layer of two slots a rank, with experts in two of them."""
    rng = np.random.default_rng(seed)
    slots = 2 * ranks
    row = np.concatenate([np.arange(experts), rng.choice(experts, slots - experts, replace=False)])
    while any(len(set(row[2 * rank : 2 * rank + 2])) < 2 for rank in range(ranks)):
        row = rng.permutation(row)
    objective = v3_prices(horizon=horizon, target_balance=1.0)
    return objective.problem(
        Load(tokens_of(seed, experts)), Topology(ranks), Placement(row[None].astype(np.int32), ranks, experts)
    )


def all_maps(problem: Problem) -> list[NDArray[np.int32]]:
    """Every [1, slot] map of two different experts on each of three ranks that holds all experts."""
    pairs = list(combinations(range(problem.current.num_experts), 2))
    maps = ([*a, *b, *c] for a in pairs for b in pairs for c in pairs)
    return [np.array([row], np.int32) for row in maps if len(set(row)) == problem.current.num_experts]


def total_s(problem: Problem, slots: NDArray[np.integer], shares: Floats | None = None) -> float:
    return float(problem.score(slots, shares).total_s.sum())


SEEDS = range(20)


def test_placement_and_migration() -> None:
    """The fastest map, reached by its cheapest moves, against the map whose moves pay."""
    apart, together = 0.0, 0.0
    for seed in SEEDS:
        problem = problem_of(seed, horizon=0.3)
        maps = all_maps(problem)
        times = np.array([problem.score(slots).processing_s.sum() for slots in maps])
        totals = np.array([total_s(problem, slots) for slots in maps])
        apart += totals[times <= times.min() * (1 + 1e-9)].min()
        plan = LatencyOptimal(problem.objective).plan(Load(tokens_of(seed, 5)), problem.topology, problem.current)
        together += total_s(problem, plan.placement.slot_experts)
        assert total_s(problem, plan.placement.slot_experts) <= totals.min() * (1 + 1e-9), "the best of all maps"
    assert together < 0.9 * apart


def test_placement_and_dispatch() -> None:
    """The best map for equal shares, then the best shares on it, against map and shares chosen together."""
    apart, together, best = 0.0, 0.0, 0.0
    for seed in SEEDS:
        problem = problem_of(seed, horizon=1e6, experts=4)
        maps = all_maps(problem)
        split = [total_s(problem, slots, optimal_shares(problem, slots)) for slots in maps]
        equal = np.array([total_s(problem, slots) for slots in maps])
        apart += min(np.array(split)[equal <= equal.min() * (1 + 1e-9)])
        best += min(split)
        plan = improve_split(problem)
        together += total_s(problem, plan.slot_experts, plan.shares)
    assert best < 0.98 * apart
    assert together < 0.995 * apart, "the search finds a part of it"


def test_migration_and_dispatch() -> None:
    """Moves chosen for equal shares, then new shares, load experts that new shares make needless."""
    apart, together, moves = 0.0, 0.0, np.zeros(2, np.int64)
    for seed in SEEDS:
        problem = problem_of(seed, horizon=1.0, experts=4)
        plan = LatencyOptimal(problem.objective).plan(Load(tokens_of(seed, 4)), problem.topology, problem.current)
        moved = plan.placement.slot_experts
        apart += min(total_s(problem, moved, shares) for shares in (None, optimal_shares(problem, moved)))
        at_once = improve_split(problem)
        together += total_s(problem, at_once.slot_experts, at_once.shares)
        moves += len(problem.moves(moved).layer), len(problem.moves(at_once.slot_experts).layer)
    assert together < 0.985 * apart
    assert moves[1] < 0.7 * moves[0]
