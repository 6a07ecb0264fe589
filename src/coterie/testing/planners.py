"""Contract check of planners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.placement import HOST, Load, Objective, Plan, Planner
from coterie.testing._require import no_error, require, unchanged
from coterie.types import Placement, Topology


class _Snapshot(NamedTuple):
    """Inputs of a planner in one test case."""

    name: str
    load: Load
    topology: Topology
    current: Placement
    shares: NDArray[np.float64] | None = None
    """[layer, slot] shares in force; None for equal shares, which are then not passed to the planner."""
    streaming: bool = False
    """Whether the planner's objective also prices streaming and the exchange of rows."""

    def plan(self, planner: Planner) -> Plan:
        in_force = () if self.shares is None else (self.shares,)
        return planner.plan(self.load, self.topology, self.current, *in_force)


def check_planner(make: Callable[[], Planner], seed: int = 0) -> None:
    """Raise AssertionError if the planner that `make()` returns breaks the contract of a planner.

    A plan has as many layers, slots and ranks as the current placement. Every expert is on a living rank, and no
    changed slot holds an expert that another slot of its rank holds. Shares of an expert add up to 1 over living ranks.
    The moves are the differences between the two placements, each from a rank that has the expert, or from the host
    only if no living rank has it. `skip_reason` is given if and only if nothing moves. The same snapshot gives the same
    plan bit for bit, also from a new planner, and is not changed. If the planner has an `objective`, predicted times,
    movement and balance equal the objective's values for the plan, from the shares in force.

    The cases are one rank, slots with and without replicas, a placement with duplicates, loads of 0, one hot expert, an
    even load, two nodes, mixed speeds, known sources, a load that other shares would even out, such shares in force,
    and a rank that is gone, for which a planner may raise ConfigError. A dataclass with an `objective` is also checked
    with streaming and the exchange of rows priced. A planner that passes may still plan badly.
    """
    planner = make()
    require(isinstance(planner, Planner), f"{planner!r} has no plan(load, topology, current, shares=None)")
    for case in _snapshots(default_rng(seed)):
        if not case.streaming:
            _check_snapshot(make, planner, case)
        elif _streaming(planner) is not None:
            _check_snapshot(lambda: _streaming(make()), _streaming(planner), case)


def _streaming(planner: Any) -> Any:
    """Return the planner with streaming and the exchange of rows priced; None if it has no objective to replace."""
    objective = getattr(planner, "objective", None)
    if is_dataclass(planner) and isinstance(objective, Objective):
        return replace(planner, objective=replace(objective, touch_s=2e-5, row_bytes=4096.0))  # type: ignore[type-var]
    return None


def _snapshots(rng: Generator) -> list[_Snapshot]:
    layers, experts = 2, 6  # small, so that an exact planner takes seconds only
    tokens = np.round(rng.lognormal(3.0, 1.2, (layers, experts)))
    full, spare = Placement.linear(layers, experts, 3), Placement.linear(layers, experts, 4, 8)
    twice = np.array([np.sort(np.concatenate([rng.permutation(6), rng.integers(0, 6, 2)])) for _ in range(layers)])
    messy = Placement(twice.astype(np.int32), 4, experts)
    everywhere = Placement.linear(layers, experts, 2, 2 * experts)
    plain, two_nodes = Topology(4), Topology(4, ranks_per_node=2)
    fractions = rng.random(tokens.shape)
    from_ranks = rng.multinomial(tokens.astype(np.int64), np.full(4, 0.25)).astype(np.float64)  # [layer, expert, rank]
    known = Load(tokens, sources=np.moveaxis(from_ranks, 2, 0))
    one_hot = np.where(np.arange(experts) == 4, 1e6, np.ones_like(tokens))
    linked = Placement(np.tile(np.array([0, 1, 0, 2, 3, 4, 5, 3], np.int32), (layers, 1)), 4, experts)
    uneven = Load(np.tile([60.0, 50.0, 5.0, 40.0, 5.0, 30.0], (layers, 1)))
    shares = np.tile([0.2, 1.0, 0.8, 1.0, 0.7, 1.0, 1.0, 0.3], (layers, 1))
    by_shares = [
        ("other shares would be evener", uneven, None),
        ("shares in force", uneven, shares),
        ("shares in force, another load", Load(tokens), shares),
    ]
    return [
        _Snapshot("one rank", Load(tokens), Topology(1), Placement.linear(layers, experts, 1)),
        _Snapshot("as many slots as experts", Load(tokens, steps=10.0), Topology(3), full),
        _Snapshot("replicas", Load(tokens, steps=0.5), plain, spare),
        _Snapshot("replicas of all, one on every rank", Load(tokens), Topology(2), everywhere),
        _Snapshot("duplicates in the current placement", Load(tokens), plain, messy),
        _Snapshot("no load", Load(np.zeros_like(tokens)), plain, spare),
        _Snapshot("no load in one layer", Load(tokens * np.array([[1.0], [0.0]])), plain, spare),
        _Snapshot("an even load", Load(np.full_like(tokens, 100.0)), Topology(3), full),
        _Snapshot("one hot expert", Load(one_hot), plain, spare),
        _Snapshot("fractions", Load(fractions), plain, spare),
        _Snapshot("two nodes", Load(tokens), two_nodes, spare),
        _Snapshot("mixed speeds", Load(tokens), Topology(4, speeds=(1.0, 0.5, 2.0, 1.0)), spare),
        _Snapshot("known sources", known, two_nodes, spare),
        *(_Snapshot(name, load, plain, linked, shares) for name, load, shares in by_shares),
        *(
            _Snapshot(f"{name}, streaming priced", load, plain, linked, shares, True)
            for name, load, shares in by_shares
        ),
        _Snapshot("replicas, streaming priced", Load(tokens, steps=0.5), plain, spare, streaming=True),
        _Snapshot("duplicates, streaming priced", Load(tokens), plain, messy, streaming=True),
        _Snapshot("a rank that is gone", Load(tokens), Topology(4, speeds=(1.0, 1.0, 0.0, 1.0)), spare),
    ]


def _check_snapshot(make: Callable[[], Planner], planner: Planner, case: _Snapshot) -> None:
    where = f"{planner!r}, {case.name}"
    inputs = {"load.tokens": case.load.tokens, "load.sources": case.load.sources, "shares": case.shares}
    try:
        with (
            unchanged(f"{where}: plan", current=case.current.slot_experts, **inputs),
            no_error(f"{where}: plan", but=ConfigError),
        ):
            plan = case.plan(planner)
    except ConfigError:
        require(not case.topology.rank_speeds.all(), f"{where}: plan refused a sound snapshot")
        return
    require(isinstance(plan, Plan), f"{where}: plan returned {type(plan).__name__}, not a Plan")
    _check_placement(plan, case, where)
    _check_moves(plan, case, where)
    _check_numbers(planner, plan, case, where)
    _same_plan(plan, case.plan(planner), f"{where}: a second call")
    _same_plan(plan, case.plan(make()), f"{where}: a new planner")


def _check_placement(plan: Plan, case: _Snapshot, where: str) -> None:
    now, was = plan.placement, case.current
    sizes, expected = ((p.num_layers, p.num_slots, p.num_ranks, p.num_experts) for p in (now, was))
    require(sizes == expected, f"{where}: layers, slots, ranks, experts are {sizes}, of the current {expected}")
    alive = np.repeat(case.topology.rank_speeds > 0, was.slots_per_rank)  # [slot]
    for layer, row in enumerate(now.slot_experts):
        lost = np.setdiff1d(np.arange(now.num_experts), row[alive])
        require(not lost.size, f"{where}: layer {layer} has expert {lost[:1]} on no living rank")
        for slot in np.flatnonzero(alive & (row != was.slot_experts[layer])):
            start = slot // was.slots_per_rank * was.slots_per_rank
            twice = int((row[start : start + was.slots_per_rank] == row[slot]).sum()) > 1
            require(not twice, f"{where}: layer {layer} has expert {row[slot]} twice on one rank, new in slot {slot}")
    require(now.duplicates <= was.duplicates, f"{where}: the plan has {now.duplicates} duplicates")
    shares = plan.shares
    require(shares.shape == now.slot_experts.shape, f"{where}: shares must be [layer, slot]; found {shares.shape}")
    require((shares >= 0).all(), f"{where}: shares must not be negative")
    total = np.zeros((now.num_layers, now.num_experts))
    np.add.at(total, (np.arange(now.num_layers)[:, None], now.slot_experts), shares * alive)
    require(np.allclose(total, 1.0), f"{where}: shares of an expert must add up to 1 over living ranks")


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
    require(listed == needed, f"{where}: moves by layer and slot must be {needed}; found {listed}")
    for layer, expert, source in zip(moves.layer.tolist(), moves.expert.tolist(), moves.source.tolist(), strict=True):
        living = [rank for rank in range(len(alive)) if alive[rank] and (layer, expert, rank) in holders]
        require(
            source in living or (source == HOST and not living),
            f"{where}: layer {layer}, expert {expert} comes from {source}; living ranks {living} have it",
        )
    require(len(moves.seconds) == len(moves), f"{where}: moves must each have their seconds")
    explained = bool((plan.skip_reason or "").strip())
    require(explained != bool(len(moves)), f"{where}: {len(moves)} moves, and yet skip_reason={plan.skip_reason!r}")


def _check_numbers(planner: Planner, plan: Plan, case: _Snapshot, where: str) -> None:
    names = ("before_s", "after_s", "movement_s", "balance_before", "balance_after")
    for name in (*names, "planning_s"):
        value = getattr(plan, name)
        require(0 <= value < np.inf, f"{where}: {name}={value} must be a finite number of at least 0")
    objective = getattr(planner, "objective", None)
    if isinstance(objective, Objective):
        problem = objective.problem(case.load, case.topology, case.current, case.shares)
        again = problem.plan(plan.placement.slot_experts, plan.shares, split=plan.split)
        for name in names:
            said, right = getattr(plan, name), getattr(again, name)
            require(
                np.isclose(said, right, rtol=1e-9, atol=1e-15), f"{where}: {name}={said}, the objective says {right}"
            )


def _same_plan(plan: Plan, other: Plan, where: str) -> None:
    pairs = [
        (plan.placement.slot_experts, other.placement.slot_experts),
        (plan.shares, other.shares),
        *((getattr(plan.moves, name), getattr(other.moves, name)) for name in ("layer", "slot", "expert", "source")),
    ]
    require(all(np.array_equal(a, b) for a, b in pairs), f"{where} gave another plan for the same snapshot")
    for name in ("before_s", "after_s", "movement_s", "skip_reason", "split", "layer_reasons"):
        said = getattr(plan, name), getattr(other, name)
        require(said[0] == said[1], f"{where}: {name} was {said[0]!r}, then {said[1]!r}")
