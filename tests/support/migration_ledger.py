"""What a migration really did to memory, from its events and commands alone: the check on the state machine.

The ledger knows buffers, not intentions: which rank has which, what lies in them, which slots and which running steps
point at them. It shares no code with the state machine, so what the machine believes and what its commands do are told
apart. docs/invariants.md explains the numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, NoReturn

from coterie.errors import CoterieError
from coterie.placement.base import HOST
from coterie.placement.migration.migrator import (
    AbortTransfer,
    BeginTransfer,
    Command,
    EndStep,
    Event,
    FreeOld,
    FreeStaging,
    RankDied,
    Row,
    RunStep,
    SwitchLayer,
    TransferDone,
    TransferFailed,
)
from coterie.placement.migration.rounds import Schedule, Transfer


class BrokenMigration(CoterieError):
    """A migration broke one of its rules: a defect, never bad input."""


def _broken(number: int, words: str) -> NoReturn:
    raise BrokenMigration(f"INV-{number} broken: {words}")


class _Buffer(NamedTuple):
    rank: int
    expert: int | None
    """None until its transfer is done."""


class Ledger:
    """Call :meth:`saw` with each event, then :meth:`told` with each command it led to."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._per_rank = schedule.current.slots_per_rank
        gone = {rank for rank, speed in enumerate(schedule.topology.rank_speeds.tolist()) if not speed}
        self.dead: set[int] = gone
        self.version = 0
        self.extra: Counter[int] = Counter()  # rank → experts besides its slots
        self._buffers: dict[int, _Buffer] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._staged: dict[int, int] = {}  # transfer → buffer
        self._old: dict[int, list[int]] = {}  # switch → buffers
        self._in_flight: dict[int, int | None] = {}  # transfer → buffer it reads, None on the host
        self._views: dict[int, frozenset[int]] = {}  # step → buffers
        for layer, row in enumerate(schedule.current.slot_experts.tolist()):
            for slot, expert in enumerate(row):
                if slot // self._per_rank not in gone:
                    self._slots[layer, slot] = len(self._buffers)
                    self._buffers[len(self._buffers)] = _Buffer(slot // self._per_rank, expert)
        self._next = len(self._buffers)

    def copy(self) -> Ledger:
        other = object.__new__(Ledger)
        for name, value in self.__dict__.items():
            other.__dict__[name] = value.copy() if isinstance(value, (dict, set)) else value
        return other

    def key(self) -> tuple[object, ...]:
        """Equal for ledgers that allow and forbid the same from here on, whatever their buffers are called."""
        names: dict[int, object] = {buffer: ("slot", place) for place, buffer in self._slots.items()}
        names |= {buffer: ("staged", id) for id, buffer in self._staged.items()}
        for switch, buffers in self._old.items():
            names |= {buffer: ("old", switch, index) for index, buffer in enumerate(buffers)}
        held = frozenset((names.get(buffer), content) for buffer, content in self._buffers.items())
        views = frozenset((step, frozenset(names.get(b) for b in view)) for step, view in self._views.items())
        return self.version, frozenset(self.dead), frozenset(self._in_flight), held, views

    # -------------------------------------------------------------------------------------------------------- events

    def saw(self, event: Event) -> None:
        if isinstance(event, TransferDone):
            if event.id in self._in_flight:
                del self._in_flight[event.id]
                buffer = self._staged[event.id]
                self._buffers[buffer] = self._buffers[buffer]._replace(expert=self.schedule.transfers[event.id].expert)
        elif isinstance(event, TransferFailed):
            self._in_flight.pop(event.id, None)
        elif isinstance(event, EndStep):
            self._views.pop(event.step, None)
        elif isinstance(event, RankDied):
            self._rank_died(event.rank)

    def _rank_died(self, rank: int) -> None:
        self.dead.add(rank)
        self.extra.pop(rank, None)
        for id in list(self._in_flight):
            transfer = self.schedule.transfers[id]
            if rank in (transfer.source, transfer.slot // self._per_rank):
                del self._in_flight[id]
        gone = {buffer for buffer, held in self._buffers.items() if held.rank == rank}
        for buffer in gone:
            del self._buffers[buffer]
        self._slots = {place: buffer for place, buffer in self._slots.items() if buffer not in gone}
        self._staged = {id: buffer for id, buffer in self._staged.items() if buffer not in gone}
        self._old = {s: [b for b in buffers if b not in gone] for s, buffers in self._old.items()}
        self._views = {step: view - gone for step, view in self._views.items()}

    # ------------------------------------------------------------------------------------------------------ commands

    def told(self, command: Command) -> None:
        if isinstance(command, BeginTransfer):
            self._begin(command)
        elif isinstance(command, SwitchLayer):
            self._switch(command)
        elif isinstance(command, RunStep):
            self._run(command)
        elif isinstance(command, FreeStaging):
            if command.id not in self._staged:
                _broken(28, f"transfer {command.id} has no staging to free")
            if command.id in self._in_flight:
                _broken(28, f"staging of transfer {command.id} freed while it is written")
            self._free(self._staged.pop(command.id))
        elif isinstance(command, FreeOld):
            if command.switch not in self._old:
                _broken(28, f"switch {command.switch} has no old weights to free")
            for buffer in self._old.pop(command.switch):
                self._free(buffer)
        elif isinstance(command, AbortTransfer) and command.id not in self._in_flight:
            _broken(28, f"transfer {command.id} aborted, though it is not in flight")

    def _begin(self, command: BeginTransfer) -> None:
        transfer = command.transfer
        rank, source = transfer.slot // self._per_rank, transfer.source
        if rank in self.dead:
            _broken(26, f"transfer {transfer.id} goes to rank {rank}, which is dead")
        read = self._source(transfer) if source != HOST else None
        if source != rank:
            for id in self._in_flight:
                other = self.schedule.transfers[id]
                if other.source == other.slot // self._per_rank:
                    continue
                if other.source == source != HOST:
                    _broken(27, f"rank {source} sends {id} and {transfer.id} at once")
                if other.slot // self._per_rank == rank:
                    _broken(27, f"rank {rank} receives {id} and {transfer.id} at once")
        self.extra[rank] += 1
        held, limit = self.extra[rank] * self.schedule.limits.expert_bytes, self.schedule.limits.staging_bytes
        if held > limit:
            _broken(23, f"rank {rank} holds {held:g} bytes besides its slots; staging has {limit:g}")
        self._buffers[self._next] = _Buffer(rank, None)
        self._staged[transfer.id] = self._next
        self._in_flight[transfer.id] = read
        self._next += 1

    def _source(self, transfer: Transfer) -> int:
        """The buffer it reads."""
        source, layer = transfer.source, transfer.layer
        if source in self.dead:
            _broken(26, f"transfer {transfer.id} comes from rank {source}, which is dead")
        for slot in range(source * self._per_rank, (source + 1) * self._per_rank):
            buffer = self._slots[layer, slot]
            if self._buffers[buffer].expert == transfer.expert:
                return buffer
        _broken(26, f"rank {source} does not have expert {transfer.expert} of layer {layer}")

    def _switch(self, command: SwitchLayer) -> None:
        if command.version != self.version + 1:
            _broken(25, f"version {self.version} is followed by {command.version}")
        self.version = command.version
        switch = self.schedule.switches[command.switch]
        layer, old = switch.layer, []
        before = self.live(layer)
        for transfer in switch.transfers:
            buffer = self._staged.pop(transfer.id, None)
            if buffer is None or self._buffers[buffer].expert != transfer.expert:
                _broken(22, f"layer {layer} switched without expert {transfer.expert} of slot {transfer.slot}")
            old.append(self._slots[layer, transfer.slot])
            self._slots[layer, transfer.slot] = buffer
        for slot, expert in enumerate(switch.after):
            if (layer, slot) in self._slots:
                held = self._buffers[self._slots[layer, slot]].expert
                if held != expert:
                    _broken(22, f"layer {layer} is half switched: slot {slot} holds {held}, not {expert}")
        self._old[command.switch] = old
        lost = before - self.live(layer)
        if lost:
            _broken(26, f"switching layer {layer} took the last living copy of {lost}")

    def _run(self, command: RunStep) -> None:
        if command.version != self.version:
            _broken(25, f"step {command.step} runs {command.version}, not {self.version}")
        rows: tuple[Row, ...] = command.rows
        for (layer, slot), buffer in self._slots.items():
            held = self._buffers[buffer].expert
            if held != rows[layer][slot]:
                _broken(22, f"slot {slot} of layer {layer} holds {held}; the map says {rows[layer][slot]}")
        self._views[command.step] = frozenset(self._slots.values())

    def _free(self, buffer: int) -> None:
        for step, view in self._views.items():
            if buffer in view:
                _broken(24, f"weights that step {step} uses were freed")
        if buffer in self._in_flight.values():
            _broken(28, "weights were freed while a transfer read them")
        self.extra[self._buffers.pop(buffer).rank] -= 1

    # ---------------------------------------------------------------------------------------------------------- rest

    def live(self, layer: int) -> set[int | None]:
        """Experts in slots of living ranks."""
        return {self._buffers[buffer].expert for (at, _), buffer in self._slots.items() if at == layer}

    def check_rest(self) -> None:
        """When a migration is over and no step runs: nothing is in flight, and every rank is back to its slots."""
        if self._in_flight:
            _broken(28, f"transfers {sorted(self._in_flight)} were forgotten")
        left = {rank: count for rank, count in self.extra.items() if count}
        if left:
            _broken(28, f"experts besides the slots, by rank: {left}")
