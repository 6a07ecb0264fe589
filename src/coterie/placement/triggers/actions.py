"""Replicate, swap: move a few experts at a time to the ranks whose own tokens activate them.

These actions follow the demand of each rank, so they lower the remote share of the activations. They do not balance
the load; planners do. If requests are spread over ranks at random, every rank has the same demand: then a swap saves
nothing, and only replicas help.

The settings are those of a published manager. This code corrects the following in the published code:

- The published manager copies an expert of *all* layers at once, though expert 5 of one layer is unrelated to expert 5
  of the next. This code acts on one layer at a time; `whole_experts` restores the published behaviour. Limits are
  stated in whole experts: with single layers, the limit of actions is multiplied by the number of layers, and the least
  saving is divided by it.
- The published swap counts only the gain of the target rank. This code also counts the losses of both ranks, since the
  partner may need the expert it gives away.
- The published saving is of a whole decay window (`1 ÷ (1 - decay)` = 100 steps) but is logged as the saving of a step.
  To save 10 us in one step would take 628 activations of one expert by one rank, when a rank's 16 tokens make 7,424
  activations in total. This code reports savings per step and compares them per window, as the published thresholds
  assume. The published code divides by the bandwidth of both directions; this code by that of one.
- The published manager evaluates every candidate against the placement before the cycle. This code evaluates again
  before each action, so that two actions never count on the same slot or the same saving.
- The published limit of 3 replicas counts all copies of an expert, including the first. So does this code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie._numba import njit
from coterie.costs.exchange import row_trips_s
from coterie.costs.movement import link_between, transfer_s
from coterie.errors import ConfigError, check, check_at_least, check_share
from coterie.placement.holdings import Demand, Held, remote_share
from coterie.types import Topology


@dataclass(frozen=True, slots=True)
class ActionSettings:
    """Thresholds and limits of actions. The defaults are the published manager's."""

    decay: float = 0.99
    """Decay of the demand per step; the demand covers about 1 ÷ (1 - decay) steps."""
    min_mismatch: float = 0.1
    """Share of a rank's demand that must be remote before the rank is considered for an action."""
    replicate_top: int = 5
    """Number of experts tried for a replica: those with the highest demand that the rank does not hold."""
    swap_top: int = 3
    """Number of experts tried for a swap: those with the highest demand that the rank does not hold, each against as
    many held experts with the lowest demand."""
    max_copies: int = 3
    """Most copies of an expert, the first one included."""
    extra_slots: int = 8
    """Slots of a rank per layer beyond its even share of the experts."""
    interval_s: float = 60.0
    """Seconds between cycles."""
    max_actions: int = 4
    """Most actions in a cycle, in whole experts (experts of all layers)."""
    min_saving_s: float = 10e-6
    """Least link time that an action must save in a decay window, in seconds per whole expert."""
    whole_experts: bool = False
    """Whether to act on an expert of all layers at once, as published; needs the same placement in all layers."""

    def __post_init__(self) -> None:
        check(0 < self.decay < 1, f"decay={self.decay} must be above 0 and below 1")
        check_share(min_mismatch=self.min_mismatch)
        check_at_least(1, max_copies=self.max_copies)
        check_at_least(
            0,
            replicate_top=self.replicate_top,
            swap_top=self.swap_top,
            extra_slots=self.extra_slots,
            interval_s=self.interval_s,
            max_actions=self.max_actions,
            min_saving_s=self.min_saving_s,
        )

    @property
    def window_steps(self) -> float:
        """Number of steps that the decayed demand covers."""
        return 1.0 / (1.0 - self.decay)


PUBLISHED = ActionSettings(whole_experts=True)
"""Settings of the published manager, which acts on whole experts."""

Kind = Literal["replicate", "swap", "skip"]


@dataclass(frozen=True, slots=True)
class ActionEvent:
    """An action taken or skipped, with the reason; for counters, logs and the dashboard."""

    kind: Kind
    reason: str
    """Explanation in words."""
    at_s: float = 0.0
    """Time on the caller's clock, in seconds."""
    layers: tuple[int, ...] = ()
    expert: int | None = None
    """Expert that the target rank receives; None if the event concerns a whole rank, layer or cycle."""
    target: int | None = None
    source: int | None = None
    given: int | None = None
    """Expert that a swap moves in the other direction."""
    moved_bytes: float = 0.0
    seconds: float = 0.0
    """Transfer time on the slowest link used, without other traffic; a swap uses both directions at the same time."""
    saving_s: float = 0.0
    """Predicted link time saved per step."""


class Cycle(NamedTuple):
    """Result of one round of decisions."""

    held: Held
    events: list[ActionEvent]

    @property
    def actions(self) -> list[ActionEvent]:
        return [event for event in self.events if event.kind != "skip"]


class _Candidate(NamedTuple):
    saving: float
    """Link seconds saved in a decay window."""
    unit: int
    target: int
    expert: int
    given: int
    """Expert that a swap sends from the target to the source; -1 if the action is a replica."""
    source: int


@dataclass(frozen=True, slots=True)
class ActionManager:
    """Chooses actions without executing them. Its choice is a pure function of demand and held experts."""

    topology: Topology
    row_bytes: float = 14336.0
    """Bytes of a token's hidden state, sent to a remote expert and back."""
    expert_bytes: float = 44e6
    """Bytes of the weights of one expert of one layer."""
    settings: ActionSettings = ActionSettings()

    # --------------------------------------------------------------------------------------------------------- cycle

    def cycle(self, demand: Demand, held: Held, at_s: float = 0.0) -> Cycle:
        """Choose replicas and swaps that save enough, in order of saving, up to the limit of actions."""
        work = _Work(self, demand, held)
        events: list[ActionEvent] = []
        candidates: list[_Candidate] = []
        for rank in range(self.topology.num_ranks):
            score = remote_share(demand[rank], held[rank])
            if score < self.settings.min_mismatch:
                words = f"rank {rank} lacks {score:.3f} of its demand, less than {self.settings.min_mismatch}"
                events.append(ActionEvent("skip", words, at_s, target=rank))
                continue
            for unit in range(len(work.units)):
                candidates += work.candidates(unit, rank)
        candidates.sort(key=lambda c: (-c.saving, c[1:]))
        limit, done = self.settings.max_actions * len(work.units), 0
        for number, candidate in enumerate(candidates):
            if done == limit:
                words = f"{limit} actions are the limit of a cycle; {len(candidates) - number} candidates left"
                events.append(ActionEvent("skip", words, at_s))
                break
            event = work.act(candidate, at_s)
            events.append(event)
            done += event.kind != "skip"
        if not candidates and len(events) < self.topology.num_ranks:
            events.append(ActionEvent("skip", "no rank asks for an expert that it lacks", at_s))
        return Cycle(work.result(), events)

    def check(self, demand: Demand, held: Held) -> None:
        """Raise ConfigError if demand and held experts do not fit each other or the topology."""
        check(
            demand.ndim == 3 and demand.shape == held.shape,
            f"demand has shape {demand.shape}, held {held.shape}; both must be [rank, layer, expert]",
        )
        check(
            len(demand) == self.topology.num_ranks,
            f"demand has {len(demand)} ranks; topology.num_ranks={self.topology.num_ranks}",
        )
        check(
            (self.topology.rank_speeds > 0).all(),
            "actions cannot leave a rank out; plan with latency_optimal where one is gone",
        )
        check(np.isfinite(demand).all() and (demand >= 0).all(), "demand must be finite and not negative")
        nowhere = np.argwhere(~held.any(axis=0))
        if nowhere.size:
            raise ConfigError(f"no rank holds expert {nowhere[0][1]} of layer {nowhere[0][0]}")
        check(
            not self.settings.whole_experts or not (held != held[:, :1]).any(),
            "whole_experts needs ranks that hold the same experts in every layer",
        )


@njit()
def _link_s(
    demand: Demand, row_s: NDArray[np.float64], held: Held, unit: int, expert: int, add: int, drop: int
) -> float:
    """Return the link seconds of an expert's activations, each sent to the nearest rank that holds the expert."""
    total = 0.0
    for rank in range(demand.shape[1]):
        nearest = np.inf
        for holder in range(demand.shape[1]):
            has = (held[unit, holder, expert] or holder == add) and holder != drop
            if has and row_s[rank, holder] < nearest:
                nearest = row_s[rank, holder]
        total += demand[unit, rank, expert] * nearest
    return total


class _Work:
    """Arrays of one cycle, indexed by unit. A unit is one layer, or all layers with `whole_experts`."""

    def __init__(self, manager: ActionManager, demand: Demand, held: Held) -> None:
        manager.check(demand, held)
        self.manager, self.settings = manager, manager.settings
        ranks, self.num_layers, experts = demand.shape
        whole = self.settings.whole_experts
        self.units = [tuple(range(self.num_layers))] if whole else [(layer,) for layer in range(self.num_layers)]
        self.demand = np.stack([demand[:, list(unit)].sum(axis=1) for unit in self.units])  # [unit, rank, expert]
        self.held = np.stack([held[:, unit[0]] for unit in self.units])  # [unit, rank, expert]
        self.row_s = row_trips_s(manager.topology, manager.row_bytes)  # [rank, holder] to send an activation and back
        self.slots = -(-experts // ranks) + self.settings.extra_slots
        self.least_s = self.settings.min_saving_s / (self.num_layers if not whole else 1)

    def result(self) -> Held:
        whole = np.repeat(self.held, self.num_layers // len(self.units), axis=0)  # [layer, rank, expert]
        return np.ascontiguousarray(whole.swapaxes(0, 1))

    def cost(self, unit: int, expert: int, add: int = -1, drop: int = -1) -> float:
        """Return the link seconds of an expert's activations if rank `add` also held it and rank `drop` did not."""
        return float(_link_s(self.demand, self.row_s, self.held, unit, expert, add, drop))

    def move_s(self, source: int, target: int, layers: int) -> float:
        """Return the seconds to move an expert of this many layers."""
        return layers * transfer_s(link_between(self.manager.topology, source, target), self.manager.expert_bytes)

    def nearest(self, holders: NDArray[np.bool_], rank: int) -> int:
        """Return the rank among `holders` [rank] that is the nearest to a rank."""
        return min(np.flatnonzero(holders).tolist(), key=lambda holder: (self.row_s[rank, holder], holder))

    # ---------------------------------------------------------------------------------------------------- candidates

    def candidates(self, unit: int, rank: int) -> Iterator[_Candidate]:
        """Yield the possible replicas and swaps of a rank in a unit, before savings and limits are checked."""
        demand, held = self.demand[unit, rank], self.held[unit, rank]
        lacking = np.flatnonzero(~held & (demand > 0))
        lacking = lacking[np.argsort(-demand[lacking], kind="stable")].tolist()
        for expert in lacking[: self.settings.replicate_top]:
            yield self._replica(unit, rank, expert)
        asked = demand[demand > 0]
        spare = np.flatnonzero(held & (demand < np.median(asked))) if asked.size else np.array([], np.int64)
        spare = spare[np.argsort(demand[spare], kind="stable")][: self.settings.swap_top]
        for expert in lacking[: self.settings.swap_top]:
            for given in spare.tolist():
                yield from sorted(self._swaps(unit, rank, expert, given))[-1:]

    def _replica(self, unit: int, target: int, expert: int) -> _Candidate:
        saving = self.cost(unit, expert) - self.cost(unit, expert, target)
        return _Candidate(saving, unit, target, expert, -1, self.nearest(self.held[unit, :, expert], target))

    def _swaps(self, unit: int, target: int, expert: int, given: int) -> Iterator[_Candidate]:
        """Yield the swap with every partner rank that holds `expert` and does not hold `given`."""
        before = self.cost(unit, expert) + self.cost(unit, given)
        for partner in np.flatnonzero(self.held[unit, :, expert] & ~self.held[unit, :, given]).tolist():
            after = self.cost(unit, expert, target, partner) + self.cost(unit, given, partner, target)
            yield _Candidate(before - after, unit, target, expert, given, partner)

    # ------------------------------------------------------------------------------------------------------- actions

    def act(self, candidate: _Candidate, at_s: float) -> ActionEvent:
        """Evaluate a candidate against the present state; apply it, or return a skip event with the reason."""
        unit, target, expert, given, source = candidate[1:]
        swap = given >= 0
        held = self.held[unit]
        stale = held[target, expert] or not held[source, expert]
        if stale or (swap and (held[source, given] or not held[target, given])):
            return self._event("skip", "an earlier action of this cycle changed what is where", at_s, candidate)
        if not swap:
            if held[:, expert].sum() >= self.settings.max_copies:
                return self._event("skip", f"it has {self.settings.max_copies} copies, the limit", at_s, candidate)
            if held[target].sum() >= self.slots:
                return self._event("skip", f"rank {target} has all its {self.slots} slots in use", at_s, candidate)
            now = self._replica(unit, target, expert)
        else:
            now = next(c for c in self._swaps(unit, target, expert, given) if c.source == source)
        if not now.saving >= self.least_s or now.saving <= 0:
            words = f"saves {now.saving * 1e6:.3g} us a window, less than {self.least_s * 1e6:.3g}"
            return self._event("skip", words, at_s, now)
        held[target, expert] = True
        if swap:
            held[source, expert] = held[target, given] = False
            held[source, given] = True
            return self._event("swap", f"for expert {given}, which rank {target} hardly asks for", at_s, now)
        return self._event("replicate", f"rank {target} asks for it and lacks it", at_s, now)

    def _event(self, kind: Kind, reason: str, at_s: float, c: _Candidate) -> ActionEvent:
        layers = self.units[c.unit]
        moved = 0 if kind == "skip" else 2 if kind == "swap" else 1
        return ActionEvent(
            kind,
            reason,
            at_s,
            layers,
            c.expert,
            c.target,
            c.source,
            c.given if c.given >= 0 else None,
            moved * len(layers) * self.manager.expert_bytes,
            self.move_s(c.source, c.target, len(layers)) if moved else 0.0,
            c.saving / self.settings.window_steps,
        )
