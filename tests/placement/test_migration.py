"""Migration under faults: random events, all interleavings of a small migration, and machines broken on purpose."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.base import Load
from coterie.placement.migration.migrator import (
    BeginTransfer,
    Cancel,
    EndStep,
    FreeOld,
    FreeStaging,
    MigrationOutcome,
    Migrator,
    RankDied,
    RunStep,
    StartStep,
    SwitchLayer,
    TransferDone,
    TransferFailed,
)
from coterie.placement.migration.rounds import MigrationLimits, schedule_moves
from coterie.placement.objective import settle
from coterie.types import Placement, Topology
from migration_ledger import BrokenMigration, Ledger
from v3_prices import v3_prices

EXPERT = 10.0


def placement(rows: Any, ranks: Any, experts: Any) -> Placement:
    return Placement(np.array(rows, np.int32), ranks, experts)


def random_schedule(rng: random.Random) -> Any:
    """2 to 4 ranks of 2 or 3 slots, 1 to 3 layers, staging for one to all experts of a rank."""
    ranks, per_rank, layers = rng.randint(2, 4), rng.randint(2, 3), rng.choice((1, 1, 2, 2, 3))
    slots = ranks * per_rank
    experts = rng.randint(max(2, slots // 2), slots)

    def rows() -> list[Any]:
        return [
            rng.sample([*range(experts), *(rng.randrange(experts) for _ in range(slots - experts))], slots)
            for _ in range(layers)
        ]

    old = placement(rows(), ranks, experts)
    new, _ = settle(old.slot_experts, np.array(rows(), np.int32), ranks)
    target = Placement(new, ranks, experts)
    limits = MigrationLimits(EXPERT, EXPERT * rng.randint(1, per_rank))
    return schedule_moves(old, target, Topology(ranks, rng.randint(1, ranks)), limits)


class Run:
    """A machine and its ledger, side by side."""

    def __init__(self, migrator: Any) -> None:
        self.migrator, self.ledger = migrator, Ledger(migrator.schedule)
        self.steps = 0
        self.in_flight: set[int] = set()
        self.take(migrator.start())

    def take(self, outcome: MigrationOutcome) -> None:
        self.state = outcome.state
        for command in outcome.commands:
            self.ledger.told(command)
            if isinstance(command, BeginTransfer):
                self.in_flight.add(command.transfer.id)

    def feed(self, event: Any) -> None:
        self.ledger.saw(event)
        if isinstance(event, (TransferDone, TransferFailed)):
            self.in_flight.discard(event.id)
        self.take(self.migrator.handle(self.state, event))
        if isinstance(event, RankDied):
            per_rank, transfers = self.migrator.schedule.current.slots_per_rank, self.migrator.schedule.transfers
            self.in_flight = {
                i for i in self.in_flight if event.rank not in (transfers[i].source, transfers[i].slot // per_rank)
            }

    def random_event(self, rng: random.Random, faults: Any) -> Any:
        """What can happen next; faults are as likely as `faults` says, so some runs end and some do not."""
        draw = rng.random()
        if draw < faults:
            kind = rng.randrange(3)
            if kind == 0 and self.in_flight:
                return TransferFailed(rng.choice(sorted(self.in_flight)))
            if kind == 1:
                return RankDied(rng.randrange(self.migrator.schedule.current.num_ranks))
            return Cancel()
        running = self.state.running
        if self.in_flight and draw < 0.6:
            return TransferDone(rng.choice(sorted(self.in_flight)))
        if running and (draw < 0.8 or len(running) == 3):
            return EndStep(rng.choice(running).step)
        self.steps += 1
        return StartStep(self.steps)

    def settle(self, rng: random.Random) -> None:
        """No more faults: whatever is in flight ends, every step ends."""
        while self.in_flight or self.state.running:
            if self.in_flight:
                self.feed(TransferDone(rng.choice(sorted(self.in_flight))))
            else:
                self.feed(EndStep(self.state.running[0].step))
        self.ledger.check_rest()

    def check_reach(self) -> None:
        """Live where the ledger has a copy on a living rank, else on the host, and never nowhere."""
        reload = set(self.migrator.to_reload(self.state))
        current = self.migrator.schedule.current
        for layer in range(current.num_layers):
            living = self.ledger.live(layer)
            for expert in range(current.num_experts):
                live = expert in living
                assert self.migrator.reach(self.state, layer, expert) == ("live" if live else "host")
                assert ((layer, expert) in reload) == (not live)
                assert live or self.ledger.dead, "without a death every expert stays on the devices"


def run_faults(make: Any, schedules: Any, seed: int = 0, events: int = 12) -> Counter[str]:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for number in range(schedules):
        if number % 20 == 0:
            schedule = random_schedule(rng)
        run = Run(make(schedule))
        faults = rng.choice((0.0, 0.05, 0.15))
        for _ in range(events):
            run.feed(run.random_event(rng, faults))
        run.settle(rng)
        run.check_reach()
        assert run.migrator.is_over(run.state)
        if not run.state.rolled_back and run.state.stopped is None:
            assert run.state.rows == tuple(map(tuple, schedule.placement.slot_experts.tolist())), "all of it was done"
            outcomes["done"] += 1
        else:
            outcomes["died" if run.ledger.dead else "cancelled" if run.state.stopped else "rolled back"] += 1
            outcomes["in part"] += 0 < run.state.version < len(schedule.switches)
    return outcomes


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_fault_schedules(count: int) -> None:
    outcomes = run_faults(Migrator, count)
    assert min(outcomes[kind] for kind in ("done", "died", "cancelled", "rolled back", "in part")) > count / 50, (
        outcomes
    )


# --------------------------------------------------------------------------------------------------- all interleavings


def small_schedule() -> Any:
    """3 ranks of 2 slots, 2 layers: a swap and a replica; a ring of three. One expert of staging a rank."""
    old = placement([[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0]], 3, 5)
    new = placement([[2, 1, 0, 3, 4, 3], [0, 4, 1, 3, 2, 0]], 3, 5)
    return schedule_moves(old, new, Topology(3), MigrationLimits(EXPERT, EXPERT))


def explore(migrator: Any, max_steps: int = 2, max_deaths: int = 2, limit: int = 200_000) -> tuple[Any, Any]:
    """Breadth first over all that can happen; every state of machine and ledger together is visited once."""
    first = Run(migrator)
    queue, seen = deque([first]), {_key(first)}
    ended: Counter[Any] = Counter()
    while queue:
        run = queue.popleft()
        events: list[Any] = [make(i) for i in sorted(run.in_flight) for make in (TransferDone, TransferFailed)]
        events += [EndStep(running.step) for running in run.state.running]
        if run.steps < max_steps + len(migrator.schedule.switches) and len(run.state.running) < max_steps:
            events.append(StartStep(run.steps + 1))
        if run.state.stopped is None:
            events.append(Cancel())
        if len(run.ledger.dead) < max_deaths:
            events += [RankDied(rank) for rank in range(3) if rank not in run.ledger.dead]
        for event in events:
            after = _branch(run)
            after.feed(event)
            after.steps += isinstance(event, StartStep)
            key = _key(after)
            if key in seen:
                continue
            seen.add(key)
            assert len(seen) < limit
            after.check_reach()
            if not after.in_flight and not after.state.running:
                if migrator.is_over(after.state):
                    after.ledger.check_rest()
                    ended["over"] += 1
                else:
                    assert after.state.moving is False or after.state.in_flight, "nothing waits for nothing"
            queue.append(after)
    return len(seen), ended


def _key(run: Any) -> tuple[Any, Any, Any, Any]:
    return run.state, run.ledger.key(), frozenset(run.in_flight), run.steps


def _branch(run: Any) -> Any:
    other = object.__new__(Run)
    other.migrator, other.ledger, other.steps = run.migrator, run.ledger.copy(), run.steps
    other.in_flight, other.state = set(run.in_flight), run.state
    return other


def test_every_interleaving_of_a_small_migration() -> None:
    schedule = small_schedule()
    assert [switch.layer for switch in schedule.switches] == [0, 1]
    assert len(schedule.transfers) == 6
    states, ended = explore(Migrator(schedule))
    assert states > 1000
    assert ended["over"] > 10


# ------------------------------------------------------------------------------------------------- broken on purpose


class SwitchesEarly(Migrator):
    def _round_over(self, state: Any) -> bool:
        return len(state.in_flight) <= 1


class FreesEarly(Migrator):
    def _unused(self, state: Any, version: Any) -> bool:  # noqa: ARG002
        return True


class IgnoresStaging(Migrator):
    def _has_room(self, state: Any) -> bool:  # noqa: ARG002
        return True


class FreesWhatIsWritten(Migrator):
    def _roll_back(self, state: Any, reason: Any, commands: Any) -> Any:
        commands += [FreeStaging(id) for id in sorted(state.in_flight)]
        return super()._roll_back(state, reason, commands)._replace(draining=frozenset())


class ForgetsStaging(Migrator):
    def _roll_back(self, state: Any, reason: Any, commands: Any) -> Any:
        return super()._roll_back(state._replace(arrived=frozenset()), reason, commands)


class GoesOnWhileDraining(Migrator):
    def _go_on(self, state: Any, commands: Any) -> MigrationOutcome:
        after = super()._go_on(state._replace(draining=frozenset()), commands)
        return MigrationOutcome(after.state._replace(draining=state.draining), after.commands)

    def _has_room(self, state: Any) -> bool:  # noqa: ARG002
        return True


class GoesOnAfterADeath(Migrator):
    def _rank_died(self, state: Any, rank: Any) -> Any:
        after = super()._rank_died(state, rank)
        return self._go_on(after.state._replace(stopped=None), after.commands)


class KeepsItsVersion(Migrator):
    def _switch(self, state: Any) -> MigrationOutcome:
        after = super()._switch(state)
        return MigrationOutcome(after.state._replace(version=state.version), after.commands)


class SwitchesRunningSteps(Migrator):
    """Old weights freed at once, as an update in place does."""

    def _switch(self, state: Any) -> MigrationOutcome:
        after = super()._switch(state)
        freed = {c.switch for c in after.commands if isinstance(c, FreeOld)}
        more = [FreeOld(switch) for switch, _ in after.state.retired if switch not in freed]
        return MigrationOutcome(after.state._replace(retired=()), [*after.commands, *more])


class ForgetsTheMap(Migrator):
    def _switch(self, state: Any) -> MigrationOutcome:
        after = super()._switch(state)
        return MigrationOutcome(after.state._replace(rows=state.rows), after.commands)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (SwitchesEarly, "INV-2[278]"),
        (FreesEarly, "INV-24"),
        (IgnoresStaging, "INV-23"),
        (FreesWhatIsWritten, "INV-28"),
        (ForgetsStaging, "INV-2[38]"),
        (GoesOnWhileDraining, "INV-2[37]"),
        (GoesOnAfterADeath, "INV-26"),
        (KeepsItsVersion, "INV-25"),
        (SwitchesRunningSteps, "INV-24"),
        (ForgetsTheMap, "INV-22"),
    ],
)
def test_a_broken_machine_is_caught(broken: Any, rule: str) -> None:
    with pytest.raises(BrokenMigration, match=rule):
        run_faults(broken, 400)


def test_a_schedule_that_takes_the_last_copy_is_caught() -> None:
    """The machine trusts its schedule; the ledger does not."""
    current, target = placement([[0, 1, 2, 3]], 2, 4), placement([[2, 1, 0, 3]], 2, 4)
    whole = schedule_moves(current, target, Topology(2), MigrationLimits(EXPERT))
    (swap,) = whole.switches
    (first, _) = swap.transfers
    kept = tuple(first.expert if slot == first.slot else expert for slot, expert in enumerate(swap.before))
    half = replace(whole, switches=(replace(swap, rounds=((first,),), after=kept),))
    with pytest.raises(BrokenMigration, match=r"INV-26 .*layer 0"):
        Run(Migrator(half)).feed(TransferDone(first.id))


# ------------------------------------------------------------------------------------------------------- what it says


def test_a_running_step_keeps_its_map_and_the_next_has_the_new_one() -> None:
    schedule = small_schedule()
    migrator = Migrator(schedule)
    state, begun = migrator.start()
    assert [type(c) for c in begun] == [BeginTransfer] * 2, "rank 1 has two to send: two rounds"
    state, (run,) = migrator.handle(state, StartStep(1))
    assert isinstance(run, RunStep)
    assert run.version == 0
    commands: list[Any] = []
    for transfer in schedule.switches[0].transfers:
        state, commands = migrator.handle(state, TransferDone(transfer.id))
    assert commands == [SwitchLayer(0, 0, 1)], "what step 1 uses is not freed, and staging is full"
    assert migrator.staged(state) == {0: 1, 1: 1, 2: 1}
    state, (second,) = migrator.handle(state, StartStep(2))
    assert isinstance(second, RunStep)
    assert (second.version, second.rows[0]) == (1, schedule.switches[0].after)
    assert second.rows[1] == run.rows[1]
    state, commands = migrator.handle(state, EndStep(1))
    assert commands[0] == FreeOld(0)
    assert [type(c) for c in commands[1:]] == [BeginTransfer] * 3


def test_a_failed_transfer_rolls_its_layer_back_and_the_next_goes_on() -> None:
    old, ring = [0, 1, 2, 3, 4, 0], [0, 4, 1, 3, 2, 0]
    schedule = schedule_moves(
        placement([old] * 2, 3, 5), placement([ring] * 2, 3, 5), Topology(3), MigrationLimits(EXPERT)
    )
    migrator = Migrator(schedule)
    state, begun = migrator.start()
    first, second, third = (c.transfer.id for c in begun if isinstance(c, BeginTransfer))
    state, _ = migrator.handle(state, TransferDone(first))
    state, commands = migrator.handle(state, TransferFailed(second, "link down"))
    assert commands[:2] == [FreeStaging(second), FreeStaging(first)]
    assert state.rolled_back == ((0, "link down"),)
    assert not state.moving, "the third is still being written"
    state, commands = migrator.handle(state, TransferDone(third))
    assert commands[0] == FreeStaging(third)
    assert state.moving
    assert state.at == 1
    assert state.rows[0] == schedule.switches[0].before
    assert migrator.handle(state, TransferDone(first)) == (state, []), "a late report changes nothing"


def test_after_a_death_a_plan_without_the_rank_brings_everything_back() -> None:
    schedule = small_schedule()
    run = Run(Migrator(schedule))
    run.feed(TransferDone(min(run.in_flight)))
    run.feed(RankDied(1))
    assert run.state.stopped == "rank 1 died"
    run.settle(random.Random(0))
    lost = run.migrator.to_reload(run.state)
    assert lost == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert run.migrator.reach(run.state, 0, 2) == "host"
    assert Migrator(schedule, host_copy=False).reach(run.state, 0, 2) == "lost"
    # Two ranks of two slots cannot hold five experts; with three slots each they can.
    old = placement([[0, 1, 4, 2, 3, 1, 4, 0, 2]], 3, 5)
    left = Topology(3, speeds=(1.0, 0.0, 1.0))
    problem = v3_prices().problem(Load(np.ones((1, 5))), left, old)
    target = problem.plan(np.array([[0, 1, 3, 2, 3, 1, 4, 0, 2]])).placement
    again = Run(Migrator(schedule_moves(old, target, left)))
    assert again.migrator.to_reload(again.state) == [(0, 3)]
    again.settle(random.Random(0))
    assert again.migrator.to_reload(again.state) == []
    again.check_reach()


def test_with_two_copies_on_two_ranks_any_single_death_leaves_every_expert_live() -> None:
    old = placement([[0, 1, 2, 3, 0, 1, 2, 3]] * 2, 4, 4)
    new = placement([[0, 2, 1, 3, 0, 2, 1, 3]] * 2, 4, 4)
    schedule = schedule_moves(old, new, Topology(4), MigrationLimits(EXPERT, EXPERT))
    assert len(schedule.switches) == 2
    for when in range(25):
        for rank in range(4):
            run, rng = Run(Migrator(schedule)), random.Random(when)
            for _ in range(when):
                run.feed(run.random_event(rng, 0.0))
            run.feed(RankDied(rank))
            assert run.migrator.to_reload(run.state) == []
            run.check_reach()


def test_bad_events() -> None:
    migrator = Migrator(small_schedule())
    state, _ = migrator.start()
    for event, words in (
        (EndStep(1), "step=1 must run before it ends"),
        (TransferDone(6), r"transfer 6 must be in 0 … 5"),
        (RankDied(3), r"rank=3 must be in 0 … 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            migrator.handle(state, event)
    state, _ = migrator.handle(state, StartStep(1))
    with pytest.raises(ConfigError, match="step=1"):
        migrator.handle(state, StartStep(1))
