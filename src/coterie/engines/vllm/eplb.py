"""Coterie's planners as vLLM's EPLB policy, with a map to begin from and a file that keeps the current one.

    COTERIE_EPLB='{"planner": "latency_optimal", "save_map": "map.json"}' vllm serve … --enable-eplb

vLLM asks its policy on every rank, with the same load and the same old map, and each rank then sends and receives
experts by the map it got. Two ranks with different maps would wait for each other for ever, or compute with weights of
another expert. So planning is deterministic, and before a map is returned the ranks compare theirs: a rank that cannot
read a file, or whose planner fails, costs a round and nothing else.

vLLM spreads a replicated expert's tokens evenly over its replicas, so only plans of equal shares can be carried out.
Its load has no source ranks. Wrong where `horizon` is not the steps between two rearrangements: moves are then made
that do not pay, or left out that would.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import coterie.placement.planning.latency_optimal  # noqa: F401  (the default planner registers itself)
from coterie.costs.presets import step_model
from coterie.engines.vllm.settings import EplbSettings
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.placement import DEEPSEEK_V3_PREFILL, Load, Objective, Plan, Planner, planners, read_map, write_map
from coterie.placement.maps.files import PlacementMap
from coterie.placement.planning.eplb import rebalance
from coterie.types import INFINIBAND_400G, NVLINK4, Placement, Topology

Slots = NDArray[np.int64]
"""[layer, slot] expert; -1 where vLLM has put none yet."""
EQUAL = "equal"

logger = logging.getLogger("vllm.coterie")  # under vLLM's logger, so that its handlers print it


def install(settings: EplbSettings) -> None:
    """Put a policy in place of vLLM's in this process.

    Under its name, since the option takes no other. Asked twice, the first stays.
    """
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    own = EPLB_POLICIES["default"]
    if not hasattr(own, "rounds"):
        EPLB_POLICIES["default"] = make_policy(own, Rounds(settings))
        logger.info("coterie: %s rearranges the experts in place of vLLM's own policy", settings.planner)


def make_policy(own: Any, rounds: Rounds) -> Any:
    """A policy that asks `rounds`, over vLLM's `own`."""
    import torch

    class CoterieEplbPolicy(own):
        @classmethod
        def rebalance_experts(
            cls,
            weight: Any,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Any = None,
        ) -> Any:
            def vllms() -> Slots:
                found = own.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
                )
                return np.asarray(found.cpu().numpy(), np.int64)

            old = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
            asked = Round(weight.cpu().numpy().astype(np.float64), num_replicas, num_nodes, num_ranks, old)
            return torch.from_numpy(rounds.run(asked, vllms, EplbGroup()))

    CoterieEplbPolicy.rounds = rounds
    return CoterieEplbPolicy


class Group(Protocol):
    """The ranks that rearrange experts together."""

    @property
    def rank(self) -> int: ...

    @property
    def writes(self) -> bool:
        """Whether this rank writes the map file."""

    def agree(self, digest: int) -> bool:
        """Whether all ranks have the same map; all ranks get the same answer."""


class EplbGroup:
    """vLLM's group, looked up in each round: elastic expert parallelism replaces it."""

    def __init__(self) -> None:
        from vllm.distributed import parallel_state

        # Not get_eplb_group(), which raises where there is none: a policy that is called by hand.
        self._group = parallel_state._EPLB
        stages = parallel_state._PP
        self._whole = stages is None or stages.world_size == 1

    @property
    def rank(self) -> int:
        return 0 if self._group is None else int(self._group.rank_in_group)

    @property
    def writes(self) -> bool:
        return self.rank == 0 and self._whole  # a pipeline's stage has some of the layers only

    def agree(self, digest: int) -> bool:
        if self._group is None:
            return True
        import torch

        # The same thread and group that vLLM's transfers use next, so the order of collectives is that of the ranks.
        ends = torch.tensor([digest, -digest])
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX, self._group.cpu_group)
        return int(ends[0]) == -int(ends[1])


class Round(NamedTuple):
    """Arguments of vLLM's call to its policy."""

    tokens: NDArray[np.float64]
    """[layer, expert] tokens in the window; all 0 while vLLM reserves memory."""
    num_slots: int
    num_nodes: int
    num_ranks: int
    old: Slots | None
    """Slots before the change; their number differs while ranks are added or removed."""

    def linear(self) -> Placement:
        """Map that vLLM starts with."""
        layers, experts = self.tokens.shape
        return Placement.linear(layers, experts, self.num_ranks, self.num_slots)


class Decision(NamedTuple):
    """A map and the reason for it."""

    slot_experts: Slots
    reason: str
    plan: Plan | None = None
    """Plan behind it; None if nothing was planned."""


@dataclass(slots=True)
class Counters:
    """Counters of this rank since the start."""

    rounds: int = 0
    """Rounds with load."""
    kept: int = 0
    """Rounds with load that moved nothing."""
    moves: int = 0
    failures: int = 0
    """Failures of planner or files; the rank then asked for vLLM's own map."""
    disagreements: int = 0
    """Rounds given up because ranks had different maps."""


class Rounds:
    """Round after round: decide, agree, keep the map."""

    def __init__(self, settings: EplbSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self.last: Decision | None = None
        self._make_planner(self._objective(Load(np.ones((1, 1))), Topology(1)))  # wrong settings are said now
        self._initial = self._read_initial()
        self._warm = self._unlike = False
        self._most_layers = 0

    def run(self, asked: Round, vllms: Callable[[], Slots], group: Group) -> Slots:
        """The map that all ranks use next. `vllms` is the map of vLLM's own policy."""
        try:
            decision = self.decide(asked)
        except Exception:  # serving goes on, whatever a planner raises
            self._failed("coterie: rearranging failed; asking for vLLM's own map")
            decision = Decision(vllms(), "planning failed")
        if not group.agree(_digest(decision.slot_experts)):
            self.counters.disagreements += 1
            self._initial = None  # most likely cause: a file that not all ranks have
            logger.error("coterie: ranks came with different maps (here: %s); nothing moves", decision.reason)
            decision = Decision(self._unmoved(asked, vllms), "ranks disagreed")
        self.last = decision
        if asked.tokens.any():
            self._account(asked, decision, group)
        return decision.slot_experts

    def decide(self, asked: Round) -> Decision:
        """This rank's map for a round."""
        current = carry_over(asked)
        if not asked.tokens.any():
            self._warm_up(asked)
            return Decision(_int64(asked.linear() if current is None else current), "no load")
        if current is None:
            slots = rebalance(asked.tokens, asked.num_slots, asked.num_ranks)
            return Decision(slots.astype(np.int64), "no map to begin from")
        initial, self._initial = self._initial, None
        if initial is not None and self._may_begin(initial, current, asked):
            return Decision(_int64(initial), f"the map of {self.settings.initial_map}")
        plan = self._plan(Load(asked.tokens, self.settings.window), asked, current)
        return Decision(_int64(plan.placement), plan.skip_reason or "planned", plan)

    def _plan(self, load: Load, asked: Round, current: Placement) -> Plan:
        settings = self.settings
        topology = Topology(
            asked.num_ranks,
            asked.num_ranks // asked.num_nodes,
            NVLINK4._replace(name="intra", bytes_per_s=settings.intra_gb_s * 1e9),
            INFINIBAND_400G._replace(name="inter", bytes_per_s=settings.inter_gb_s * 1e9),
        )
        plan = self._make_planner(self._objective(load, topology)).plan(load, topology, current)
        _check_split(settings.planner, plan.split)
        return plan

    def _make_planner(self, objective: Objective) -> Planner:
        settings = self.settings
        try:
            planner = planners.make(settings.planner, {"objective": objective}, **settings.options)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"options={settings.options} of planner {settings.planner!r}: {error}") from None
        _check_split(settings.planner, getattr(planner, "split", EQUAL))
        return planner

    def _objective(self, load: Load, topology: Topology) -> Objective:
        settings = self.settings
        prices = {"horizon": settings.horizon, "target_balance": settings.target_balance}
        if settings.movement == "stops":
            prices["exposed"] = settings.exposed
        spec = None if settings.model is None else get_model(settings.model)
        if spec is not None:
            prices["expert_bytes"] = spec.expert_bytes()
        if settings.expert_bytes is not None:
            prices["expert_bytes"] = settings.expert_bytes
        if spec is None or settings.device is None:
            return replace(DEEPSEEK_V3_PREFILL, **prices)
        step = load.tokens.sum(axis=1).mean() / load.steps / spec.top_k
        model = step_model(spec, settings.device, topology=topology)
        return Objective.of(model, max(1, round(step)), settings.movement, **prices)

    def _read_initial(self) -> Placement | None:
        path, kept = self.settings.initial_map, self.settings.save_map
        if path is None or (path == kept and not Path(path).exists()):
            return None
        return read_map(path, model=self.settings.model).placement

    def _may_begin(self, initial: Placement, current: Placement, asked: Round) -> bool:
        """Only from the map vLLM starts with: a rank that joins later must not go back to the beginning alone."""
        first = asked.linear()
        wanted, found = ((p.num_layers, p.num_experts, p.num_ranks, p.num_slots) for p in (first, initial))
        if wanted != found:
            self._initial = initial  # a draft model is asked about too, and may come first
            if not self._unlike:
                logger.warning(
                    "coterie: %s has %s layers, experts, ranks and slots; vLLM asks for %s",
                    self.settings.initial_map,
                    found,
                    wanted,
                )
            self._unlike = True
            return False
        return bool((current.slot_experts == first.slot_experts).all())

    def _warm_up(self, asked: Round) -> None:
        """Compile the planner while vLLM starts, not in the first round that serves."""
        if self._warm:
            return
        self._warm = True
        tokens = np.arange(asked.tokens.size, dtype=np.float64).reshape(asked.tokens.shape) * 7919 % 101
        try:
            self._plan(Load(tokens), asked, asked.linear())
        except Exception:
            self._failed("coterie: the planner failed when it was tried")

    def _unmoved(self, asked: Round, vllms: Callable[[], Slots]) -> Slots:
        old = asked.old
        whole = old is not None and old.shape == (len(asked.tokens), asked.num_slots) and bool((old >= 0).all())
        return old.astype(np.int64) if whole and old is not None else vllms()

    def _account(self, asked: Round, decision: Decision, group: Group) -> None:
        counters = self.counters
        counters.rounds += 1
        moves = count_moves(asked.old, decision.slot_experts, asked.num_ranks)
        counters.moves += moves
        counters.kept += not moves
        if group.rank == 0:
            plan = decision.plan
            expected = ""
            if plan is not None:
                expected = (
                    f", balance {plan.balance_before:.3f} -> {plan.balance_after:.3f}, a step's experts "
                    f"{plan.before_s * 1e3:.2f} -> {plan.after_s * 1e3:.2f} ms, "
                    f"planned in {plan.planning_s * 1e3:.0f} ms"
                )
            since = ", ".join(f"{name} {value}" for name, value in asdict(counters).items())
            logger.info("coterie: %d moves (%s%s); since the start: %s", moves, decision.reason, expected, since)
        if self.settings.save_map is not None and group.writes and len(asked.tokens) >= self._most_layers:
            self._most_layers = len(asked.tokens)  # a draft model's few layers are not what a restart needs
            self._save(Path(self.settings.save_map), asked, decision)

    def _save(self, path: Path, asked: Round, decision: Decision) -> None:
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            slots = decision.slot_experts.astype(np.int32)
            placement = Placement(slots, asked.num_ranks, asked.tokens.shape[1])
            fresh.unlink(missing_ok=True)
            write_map(fresh, PlacementMap(placement, self.settings.model or "unknown"), "vllm")
            fresh.replace(path)
        except Exception:
            self._failed(f"coterie: the map could not be kept in {path}")

    def _failed(self, message: str) -> None:
        self.counters.failures += 1
        logger.exception("%s", message)


def carry_over(asked: Round) -> Placement | None:
    """The old map on the ranks there are now, every expert somewhere; None where it says nothing about them.

    vLLM adds ranks at the end, with empty slots, and takes them away from the end. Empty slots get replicas of the
    busiest experts. Experts that were only on ranks that leave go into empty slots, else in place of the replicas that
    are missed least.
    """
    (layers, experts), old = asked.tokens.shape, asked.old
    per_rank = asked.num_slots // asked.num_ranks
    if old is None or len(old) != layers or old.shape[1] % per_rank or not (old >= 0).any():
        return None
    slots = np.full((layers, asked.num_slots), -1, np.int32)
    kept = min(asked.num_slots, old.shape[1])
    slots[:, :kept] = old[:, :kept]
    for row, tokens in zip(slots, asked.tokens, strict=True):
        _complete(row, tokens, per_rank)
    return Placement(slots, asked.num_ranks, experts)


def _complete(row: NDArray[np.int32], tokens: NDArray[np.float64], per_rank: int) -> None:
    """Give every expert a slot of `row`, and every slot an expert."""
    experts = len(tokens)
    count = np.bincount(row[row >= 0], minlength=experts)
    empty = sorted(np.flatnonzero(row < 0).tolist(), key=lambda slot: (slot % per_rank, slot))  # a slot a rank in turn
    missing = np.flatnonzero(count == 0)
    for expert in missing[np.argsort(-tokens[missing], kind="stable")]:
        if empty:
            slot = empty.pop(0)
        else:
            spare = np.flatnonzero(count[row] > 1)
            left = row[spare]
            slot = int(spare[np.argmin(tokens[left] / (count[left] - 1))])
            count[row[slot]] -= 1
        row[slot] = expert
        count[expert] = 1
    for slot in empty:
        rank = slot // per_rank
        held = row[rank * per_rank : (rank + 1) * per_rank]
        each = tokens / count
        each[held[held >= 0]] = -1.0
        row[slot] = np.argmax(each)
        count[row[slot]] += 1


def count_moves(old: Slots | None, new: Slots, num_ranks: int) -> int:
    """Experts on ranks that did not have them; all of them where the old map is None."""
    per_rank = new.shape[1] // num_ranks
    if old is None or old.shape[1] % per_rank:
        return int(new.size)
    moves = 0
    for start in range(0, new.shape[1], per_rank):
        mine, before = new[:, start : start + per_rank], old[:, start : start + per_rank]
        moves += int((~(mine[:, :, None] == before[:, None, :]).any(axis=2)).sum())
    return moves


def _check_split(planner: str, split: str) -> None:
    if split != EQUAL:
        raise ConfigError(f"split={split!r} of planner {planner!r} must be {EQUAL!r}: vLLM spreads tokens evenly")


def _int64(placement: Placement) -> Slots:
    return placement.slot_experts.astype(np.int64)


def _digest(slots: Slots) -> int:
    """63 bits of a map's hash."""
    content = np.ascontiguousarray(slots).tobytes() + repr(slots.shape).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
