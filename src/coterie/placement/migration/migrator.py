"""Migration as a transaction: a state machine that decides what to send, when a layer switches and what to free.

The state machine has no threads, clock or weights. It takes an event and returns a new state and commands; the same
events always give the same commands. An engine executes the commands and reports the results as events.

             room in staging, nothing draining              last round arrived
    waiting ──────────────────────────────────▶ moving ──────────────────────────▶ waiting for the next switch
       ▲                                          │ │                               or done, after the last
       │   transfer failed: the layer is rolled   │ │
       └──────── back, the next one goes on ──────┘ └── cancelled, or a rank died: rolled back ──▶ stopped

A switch increments the version of the map. A running step keeps the map it started with; the next step uses the new
map. Weights that only the old map needs are freed when the last step that uses it has ended. Rolling back frees
staging: at once if a transfer has ended, else when the engine reports its end, because the transfer may still write to
staging. Earlier switches stay in effect: every intermediate map is valid.

The death of a rank stops the migration, because the rest of the plan relies on the rank. A rank that returns is empty
and needs a new plan. Experts that only the dead rank held must be loaded from the host: :meth:`Migrator.to_reload`
returns them, and a plan for the topology without the rank fetches them. The engine must fence a rank before it reports
its death: afterwards the rank must neither write nor be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from coterie.errors import check
from coterie.placement.migration.rounds import Schedule, Transfer

Row = tuple[int, ...]
"""[slot] expert in each slot of one layer."""


# ------------------------------------------------------------------------------------------------------- events in


class StartStep(NamedTuple):
    """A step is about to start; the migrator returns RunStep."""

    step: int
    """Number of the step; any number not used by a running step."""


class EndStep(NamedTuple):
    step: int


class TransferDone(NamedTuple):
    id: int


class TransferFailed(NamedTuple):
    """A transfer ended without delivering its weights, by failure or abort; nothing writes to its staging any more."""

    id: int
    reason: str = "the transfer failed"


class Cancel(NamedTuple):
    reason: str = "cancelled"


class RankDied(NamedTuple):
    rank: int


Event = StartStep | EndStep | TransferDone | TransferFailed | Cancel | RankDied


# ----------------------------------------------------------------------------------------------------- commands out


class RunStep(NamedTuple):
    """Run a step with this map until its end."""

    step: int
    version: int
    rows: tuple[Row, ...]


class BeginTransfer(NamedTuple):
    """Allocate staging for one expert on the slot's rank and transfer the expert into it."""

    transfer: Transfer


class AbortTransfer(NamedTuple):
    """Abort a transfer that is no longer needed. Report TransferDone or TransferFailed when it has ended."""

    id: int


class SwitchLayer(NamedTuple):
    """Use the staged weights of this switch in their slots from the next step on; running steps keep the old ones."""

    switch: int
    """Position of the switch in the schedule."""
    layer: int
    version: int


class FreeStaging(NamedTuple):
    """Free the staging of a transfer that failed, was aborted or is no longer needed."""

    id: int


class FreeOld(NamedTuple):
    """Free the weights that a switch replaced; no step uses them any more, and as much staging becomes free."""

    switch: int


Command = RunStep | BeginTransfer | AbortTransfer | SwitchLayer | FreeStaging | FreeOld


# ------------------------------------------------------------------------------------------------------------ state


class Running(NamedTuple):
    step: int
    version: int


class RolledBack(NamedTuple):
    """A layer that was rolled back to the map of its last complete switch."""

    layer: int
    reason: str


class MigrationState(NamedTuple):
    """Complete state of a migration: equal states give equal commands."""

    rows: tuple[Row, ...]
    """[layer] rows of the map that the next step uses."""
    version: int = 0
    at: int = 0
    """Index of the switch in progress, or of the next one."""
    moving: bool = False
    round: int = 0
    in_flight: frozenset[int] = frozenset()
    """Transfers of this round that have not ended."""
    arrived: frozenset[int] = frozenset()
    """Transfers of this switch whose weights are in staging."""
    draining: frozenset[int] = frozenset()
    """Aborted transfers that have not ended."""
    retired: tuple[tuple[int, int], ...] = ()
    """(switch, version) of completed switches whose replaced weights a running step may still use."""
    running: tuple[Running, ...] = ()
    dead: frozenset[int] = frozenset()
    rolled_back: tuple[RolledBack, ...] = ()
    stopped: str | None = None
    """Reason why the migration was stopped; None if it was not."""


class MigrationOutcome(NamedTuple):
    state: MigrationState
    commands: list[Command]


Reach = Literal["live", "host", "lost"]


@dataclass(frozen=True)
class Migrator:
    """State machine that executes a schedule."""

    schedule: Schedule
    host_copy: bool = True
    """Whether the host has a copy of every expert. If not, an expert is lost with the last rank that holds it."""

    @cached_property
    def _needs(self) -> list[Counter[int]]:
        """[switch] number of experts that each rank must stage."""
        return [Counter(self._rank(t.slot) for t in switch.transfers) for switch in self.schedule.switches]

    def start(self) -> MigrationOutcome:
        schedule = self.schedule
        rows = tuple(tuple(row) for row in schedule.current.slot_experts.tolist())
        gone = frozenset(rank for rank, speed in enumerate(schedule.topology.rank_speeds.tolist()) if not speed)
        return self._go_on(MigrationState(rows, dead=gone), [])

    def handle(self, state: MigrationState, event: Event) -> MigrationOutcome:
        """Return the new state and commands after an event. Repeated or late reports of a transfer change nothing."""
        match event:
            case StartStep(step):
                return self._start_step(state, step)
            case EndStep(step):
                return self._end_step(state, step)
            case TransferDone(id):
                return self._transfer_ended(state, id, None)
            case TransferFailed(id, reason):
                return self._transfer_ended(state, id, reason)
            case Cancel(reason):
                return self._stop(state, reason, [])
            case RankDied(rank):
                return self._rank_died(state, rank)

    # ------------------------------------------------------------------------------------------------------- queries

    def is_over(self, state: MigrationState) -> bool:
        """Return whether the migration has ended and holds no staging."""
        ended = state.stopped is not None or state.at == len(self.schedule.switches)
        return ended and not (state.moving or state.draining or state.retired)

    def reach(self, state: MigrationState, layer: int, expert: int) -> Reach:
        """Return where a step finds an expert: in a slot of a living rank, on the host, or nowhere (lost)."""
        return "live" if expert in self._live(state, layer) else "host" if self.host_copy else "lost"

    def to_reload(self, state: MigrationState) -> list[tuple[int, int]]:
        """Return (layer, expert) of all experts that no living rank holds."""
        experts = set(range(self.schedule.current.num_experts))
        return [(layer, e) for layer in range(len(state.rows)) for e in sorted(experts - self._live(state, layer))]

    def _live(self, state: MigrationState, layer: int) -> set[int]:
        """Return the experts of a layer that living ranks hold."""
        return {expert for slot, expert in enumerate(state.rows[layer]) if self._rank(slot) not in state.dead}

    def staged(self, state: MigrationState) -> Counter[int]:
        """Return the number of experts that each rank holds in memory beyond its slots."""
        held: Counter[int] = Counter()
        if state.moving:
            held.update(self._needs[state.at])
        for switch, _ in state.retired:
            held.update(self._needs[switch])
        held.update(self._rank(self.schedule.transfers[id].slot) for id in state.draining)
        return held

    # --------------------------------------------------------------------------------------------------------- steps

    def _start_step(self, state: MigrationState, step: int) -> MigrationOutcome:
        check(not any(running.step == step for running in state.running), f"step={step} must not start while it runs")
        running = (*state.running, Running(step, state.version))
        return MigrationOutcome(state._replace(running=running), [RunStep(step, state.version, state.rows)])

    def _end_step(self, state: MigrationState, step: int) -> MigrationOutcome:
        left = tuple(running for running in state.running if running.step != step)
        check(len(left) != len(state.running), f"step={step} must run before it ends")
        return self._release(state._replace(running=left), [])

    def _release(self, state: MigrationState, commands: list[Command]) -> MigrationOutcome:
        """Free replaced weights that no step uses, then begin the next switch if staging has room."""
        free = [(switch, version) for switch, version in state.retired if self._unused(state, version)]
        commands += [FreeOld(switch) for switch, _ in free]
        return self._go_on(state._replace(retired=tuple(old for old in state.retired if old not in free)), commands)

    def _unused(self, state: MigrationState, version: int) -> bool:
        """Return whether no running step uses a map older than this version."""
        return all(running.version >= version for running in state.running)

    # ----------------------------------------------------------------------------------------------------- transfers

    def _go_on(self, state: MigrationState, commands: list[Command]) -> MigrationOutcome:
        """Begin the next switch if one is left and staging has room for it."""
        over = state.stopped is not None or state.at == len(self.schedule.switches)
        # A rank sends and receives one expert at a time, and may still be busy with an aborted transfer.
        if state.moving or over or state.draining or not self._has_room(state):
            return MigrationOutcome(state, commands)
        return self._begin(state._replace(moving=True, arrived=frozenset()), 0, commands)

    def _has_room(self, state: MigrationState) -> bool:
        staged, limit = self.staged(state), self.schedule.staging_experts
        return all(staged[rank] + count <= limit for rank, count in self._needs[state.at].items())

    def _begin(self, state: MigrationState, number: int, commands: list[Command]) -> MigrationOutcome:
        transfers = self.schedule.switches[state.at].rounds[number]
        commands += [BeginTransfer(transfer) for transfer in transfers]
        return MigrationOutcome(state._replace(round=number, in_flight=frozenset(t.id for t in transfers)), commands)

    def _transfer_ended(self, state: MigrationState, id: int, failure: str | None) -> MigrationOutcome:
        """Continue after a transfer, or roll the layer back if it failed; late reports of aborted ones free staging."""
        check(
            0 <= id < len(self.schedule.transfers), f"transfer {id} must be in 0 … {len(self.schedule.transfers) - 1}"
        )
        if id in state.draining:
            return self._go_on(state._replace(draining=state.draining - {id}), [FreeStaging(id)])
        if id not in state.in_flight:
            return MigrationOutcome(state, [])
        state = state._replace(in_flight=state.in_flight - {id})
        if failure is not None:
            commands: list[Command] = [FreeStaging(id)]
            return self._go_on(self._roll_back(state, failure, commands), commands)
        state = state._replace(arrived=state.arrived | {id})
        if not self._round_over(state):
            return MigrationOutcome(state, [])
        if state.round + 1 < len(self.schedule.switches[state.at].rounds):
            return self._begin(state, state.round + 1, [])
        return self._switch(state)

    def _round_over(self, state: MigrationState) -> bool:
        return not state.in_flight

    def _switch(self, state: MigrationState) -> MigrationOutcome:
        """Complete a switch whose transfers have all arrived; the next step uses the new map."""
        at, version = state.at, state.version + 1
        switch = self.schedule.switches[at]
        rows = (*state.rows[: switch.layer], switch.after, *state.rows[switch.layer + 1 :])
        retired = (*state.retired, (at, version))
        state = state._replace(
            rows=rows, version=version, at=at + 1, moving=False, arrived=frozenset(), retired=retired
        )
        return self._release(state, [SwitchLayer(at, switch.layer, version)])

    # --------------------------------------------------------------------------------------------------- rolling back

    def _roll_back(self, state: MigrationState, reason: str, commands: list[Command]) -> MigrationState:
        """Keep the layer's present map, free or abort its transfers, and skip the remaining switches of the layer."""
        commands += [FreeStaging(id) for id in sorted(state.arrived)]
        commands += [AbortTransfer(id) for id in sorted(state.in_flight)]
        layer, at = self.schedule.switches[state.at].layer, state.at
        while at < len(self.schedule.switches) and self.schedule.switches[at].layer == layer:
            at += 1
        return state._replace(
            at=at,
            moving=False,
            in_flight=frozenset(),
            arrived=frozenset(),
            draining=state.draining | state.in_flight,
            rolled_back=(*state.rolled_back, RolledBack(layer, reason)),
        )

    def _stop(self, state: MigrationState, reason: str, commands: list[Command]) -> MigrationOutcome:
        if state.moving:
            state = self._roll_back(state, reason, commands)
        return MigrationOutcome(state._replace(stopped=state.stopped or reason), commands)

    def _rank_died(self, state: MigrationState, rank: int) -> MigrationOutcome:
        """Stop after the death of a rank: its transfers count as ended, and its own staging needs no freeing."""
        if rank in state.dead:
            return MigrationOutcome(state, [])
        check(
            0 <= rank < self.schedule.current.num_ranks,
            f"rank={rank} must be in 0 … {self.schedule.current.num_ranks - 1}",
        )
        at = self.schedule.transfers
        ended = {id for id in state.in_flight | state.draining if rank in (at[id].source, self._rank(at[id].slot))}
        state = state._replace(
            dead=state.dead | {rank},
            in_flight=state.in_flight - ended,
            draining=state.draining - ended,
            arrived=frozenset(self._on_living(state.arrived, rank)),
        )
        return self._stop(state, f"rank {rank} died", [FreeStaging(id) for id in self._on_living(ended, rank)])

    def _on_living(self, ids: Iterable[int], died: int) -> list[int]:
        return sorted(id for id in ids if self._rank(self.schedule.transfers[id].slot) != died)

    def _rank(self, slot: int) -> int:
        return slot // self.schedule.current.slots_per_rank
