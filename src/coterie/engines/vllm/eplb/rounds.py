"""Rounds of the EPLB policy: decide, agree with the other ranks, count and log."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from coterie.engines.vllm.eplb.base import (
    Agreement,
    EplbRound,
    MapDecision,
    RearrangingGroup,
    Slots,
    as_slots,
    carry_over,
    count_moves,
    digest_of,
)
from coterie.engines.vllm.eplb.files import MapFiles
from coterie.engines.vllm.eplb.paying import EplbPrices, Payoff, StepsFile, checked
from coterie.engines.vllm.settings import EplbSettings
from coterie.placement import Load, rebalance
from coterie.types import Placement

KINDS = (
    "not_due",
    "planning_costs_more",
    "nothing_found",
    "does_not_pay",
    "first_window",
    "bad_load",
    "failed",
    "disagreed",
    "never",
)
"""Reasons to keep a map, for the label of `coterie_eplb_kept_total`."""


SERIES = {
    "rounds": "Rounds with load that vLLM asked for",
    "plans": "Plans made, carried out or not",
    "moves": "Experts loaded into a rank that did not hold them",
    "predicted_gain_seconds": "Predicted saving of the plans carried out",
    "predicted_movement_seconds": "Predicted time of their moves",
    "planning_seconds": "Time of planning, of the slowest rank",
    "asking_seconds": "Time of all rounds in the policy of the first rank",
    "maps_loaded": "Maps taken over from a file",
    "disagreements": "Rounds given up because ranks differed",
    "failures": "Failures of planner or files, counted by each rank",
}


@cache
def series() -> dict[str, Counter]:
    """Return the counters in the Prometheus registry of the deciding process, created once.

    vLLM's policy runs in its worker processes. Their registries reach the server's `/metrics` only if prometheus_client
    works over files, with PROMETHEUS_MULTIPROC_DIR in the environment; vLLM sets it for several API servers. Values of
    all processes are summed there, so that only the first rank counts what all ranks decide equally.
    """

    kept = Counter("coterie_eplb_kept", "Rounds that kept the map, by reason", ["reason"])
    for kind in KINDS:  # so that an unused counter reads 0 instead of being absent
        kept.labels(kind)
    return {"kept": kept, **{name: Counter(f"coterie_eplb_{name}", text) for name, text in SERIES.items()}}


def count_round(decision: MapDecision, moves: int, slowest_s: float, asking_s: float) -> None:
    """Count a round in the series; called on the first rank only."""
    amounts = {"rounds": 1, "plans": decision.planning_s > 0, "planning_seconds": slowest_s, "asking_seconds": asking_s}
    if moves:
        movement_s = 0.0 if decision.plan is None else decision.plan.movement_s
        amounts |= {
            "moves": moves,
            "predicted_gain_seconds": max(0.0, decision.gain_s),
            "predicted_movement_seconds": movement_s,
        }
    else:
        series()["kept"].labels(decision.kind if decision.kind in KINDS else "nothing_found").inc()
    for name, amount in amounts.items():
        series()[name].inc(amount)


logger = logging.getLogger("vllm.coterie")  # a child of vLLM's logger, so that its handlers print the messages


COUNTED = ("rounds", "kept", "plans", "moves", "maps", "failures", "disagreements")
"""Counters of a rank: rounds with load; those that moved nothing; plans; moves; maps applied from `load_map`; failures
of planner or files, after which the rank keeps the map, or with when=always uses vLLM's own; rounds abandoned because
ranks had different maps."""


class Rounds:
    """Runs the rounds of the EPLB policy on one rank."""

    def __init__(self, settings: EplbSettings) -> None:
        self.settings = settings
        self.counters = collections.Counter(dict.fromkeys(COUNTED, 0))
        """Counters of this rank since the start."""
        self.last: MapDecision | None = None
        self._prices = EplbPrices(settings)
        self._prices.check()
        self._files = MapFiles(settings, self._failed)
        self._steps = StepsFile(settings.scenarios, self._failed)
        self._payoff = Payoff(self._prices, self._steps) if settings.when == "pays" else None
        self._warm = self._waiting = False
        self._logged_kind = ""

    def run(self, asked: EplbRound, vllms: Callable[[], Slots], group: RearrangingGroup) -> Slots:
        """Return the map that all ranks use next. `vllms` computes the map of vLLM's own policy."""
        began = time.perf_counter()
        loaded = bool(asked.tokens.any())  # NaN counts as load
        decision = self._from_file(asked, group) if loaded and self.settings.load_map is not None else None
        state: tuple[int, ...] = ()  # for a file's map the ranks' states need not be equal
        if decision is None:
            if self.settings.scenarios is not None:
                self._steps.agreed(group.agree(self._steps.offered()).same)
            decision = self._decided(asked, vllms)
            state = () if self._payoff is None else self._payoff.fingerprint()
        asking_s = time.perf_counter() - began
        agreement = group.agree(digest_of(decision.slot_experts, state), decision.planning_s)
        if not agreement.same:
            decision = self._disagreed(decision, asked, vllms, group)
        elif self._payoff is not None:
            self._payoff.learn(agreement.slowest_s)
        self.last = decision
        if loaded:
            self._account(asked, decision, agreement, asking_s, group)
        return decision.slot_experts

    def decide(self, asked: EplbRound) -> MapDecision:
        """Return this rank's decision for a round."""
        if self.settings.when != "always" and asked.whole and not _usable(asked.tokens).all():
            return MapDecision(_old(asked), f"the load is {_nonsense(asked.tokens)}", "bad_load")
        current = carry_over(asked)
        if not asked.tokens.any():
            took_s = self._warm_up(asked)
            return MapDecision(
                as_slots(asked.linear() if current is None else current), "no load", "no_load", planning_s=took_s
            )
        if current is None:
            return MapDecision(
                rebalance(asked.tokens, asked.num_slots, asked.num_ranks).astype(np.int64), "no map to begin from"
            )
        initial = self._files.begin(asked, current)
        if initial is not None:
            return MapDecision(as_slots(initial), f"the map of {self.settings.initial_map}")
        if asked.whole and self._payoff is not None:
            return self._payoff.decide(asked, current)
        if self._payoff is not None:
            self._payoff.ranks_changed()
        elif asked.whole and self.settings.when == "never":
            return MapDecision(_old(asked), "only a map of a file changes it", "never")
        return self._planned(asked, current)

    def _planned(self, asked: EplbRound, current: Placement) -> MapDecision:
        """Plan for the interval and use the plan as it is, without a Rebalancer."""
        plan = self._prices.plan(self._steps.around(Load(asked.tokens, self.settings.window)), asked, current)
        checked(self.settings.planner, plan)
        gain_s, took_s = plan.saving_s * self.settings.horizon, max(plan.planning_s, 1e-9)
        kind = "moved" if plan.skip_reason is None else "does_not_pay"
        return MapDecision(as_slots(plan.placement), plan.skip_reason or "planned", kind, plan, gain_s, took_s)

    def _decided(self, asked: EplbRound, vllms: Callable[[], Slots]) -> MapDecision:
        try:
            return self.decide(asked)
        except Exception:  # serving must go on, whatever a planner raises
            if self._payoff is not None:
                self._payoff.forget()
            if self.settings.when != "always" and asked.whole:
                self._failed("coterie: deciding failed; the map is kept")
                return MapDecision(_old(asked), "deciding failed", "failed")
            self._failed("coterie: rearranging failed; asking for vLLM's own map")
            return MapDecision(vllms(), "planning failed", "failed")

    def _from_file(self, asked: EplbRound, group: RearrangingGroup) -> MapDecision | None:
        """Return the map of `load_map` if all ranks have read the same new one, else None."""
        placement = self._files.offered(asked)
        slots = None if placement is None else as_slots(placement)
        if not group.agree(0 if slots is None else digest_of(slots)).same:
            if not self._waiting:
                logger.warning("coterie: %s is not the same on all ranks yet; it waits", self.settings.load_map)
            self._waiting = True
            return None
        self._waiting = False
        if slots is None:
            return None
        self._files.taken()
        self.counters["maps"] += 1
        if group.rank == 0:
            series()["maps_loaded"].inc()
        return MapDecision(slots, f"the map of {self.settings.load_map}")

    def _disagreed(
        self, decision: MapDecision, asked: EplbRound, vllms: Callable[[], Slots], group: RearrangingGroup
    ) -> MapDecision:
        self.counters["disagreements"] += 1
        if group.rank == 0:
            series()["disagreements"].inc()
        self._files.forget_initial()  # most likely cause: a file that not all ranks have
        if self._payoff is not None:
            self._payoff.forget()
        logger.error("coterie: ranks came with different maps (here: %s); nothing moves", decision.reason)
        return MapDecision(_old(asked) if asked.whole else vllms(), "ranks disagreed", "disagreed")

    def _warm_up(self, asked: EplbRound) -> float:
        """Compile the planner while vLLM starts, not in the first round under load; return the seconds of a plan."""
        if self._warm:
            return 0.0
        self._warm = True
        tokens = np.arange(asked.tokens.size, dtype=np.float64).reshape(asked.tokens.shape) * 7919 % 101
        try:
            for _ in range(1 if self._payoff is None else 2):  # the first plan compiles, the second is timed
                load = self._steps.around(Load(tokens))
                plan = checked(self.settings.planner, self._prices.plan(load, asked, asked.linear()))
            return plan.planning_s
        except Exception:
            self._failed("coterie: the planner failed when it was tried")
            return 0.0

    def _account(
        self, asked: EplbRound, decision: MapDecision, agreement: Agreement, asking_s: float, group: RearrangingGroup
    ) -> None:
        counters = self.counters
        counters["rounds"] += 1
        moves = count_moves(asked.old, decision.slot_experts, asked.num_ranks)
        counters["moves"] += moves
        counters["kept"] += not moves
        counters["plans"] += decision.planning_s > 0
        if group.rank == 0:
            count_round(decision, moves, agreement.slowest_s, asking_s)
            self._tell(moves, decision)
        if group.writes:
            self._files.save(asked, decision.slot_experts)

    def _tell(self, moves: int, decision: MapDecision) -> None:
        """Log a round; of consecutive rounds that keep the map for the same reason, only the first."""
        since = "since the start: " + ", ".join(f"{name} {value}" for name, value in self.counters.items())
        if moves or self.settings.when == "always":
            self._logged_kind = ""
            logger.info("coterie: %d moves (%s%s); %s", moves, decision.reason, _expected(decision), since)
        elif decision.kind != self._logged_kind:
            self._logged_kind = decision.kind
            logger.info("coterie: keep, because %s; %s", decision.reason, since)

    def _failed(self, message: str) -> None:
        self.counters["failures"] += 1
        series()["failures"].inc()
        logger.exception("%s", message)


def _old(asked: EplbRound) -> Slots:
    assert asked.old is not None
    return asked.old.astype(np.int64)


def _usable(tokens: np.ndarray) -> NDArray[np.bool_]:
    return (tokens >= 0) & (tokens < np.inf)  # NaN fails both comparisons


def _nonsense(tokens: np.ndarray) -> str:
    layer, expert = (int(index) for index in np.argwhere(~_usable(tokens))[0])
    return f"{tokens[layer, expert]} for expert {expert} of layer {layer}; tokens must be finite and not negative"


def _expected(decision: MapDecision) -> str:
    plan = decision.plan
    if plan is None:
        return ""
    unseen, held_out = plan.unseen, ""
    if unseen is not None:
        held_out = (
            f", on {unseen.scenarios} steps held out {unseen.before:.3f} -> {unseen.after:.3f} "
            f"(a plan for the mean step {unseen.mean:.3f})"
        )
    return (
        f", balance {plan.balance_before:.3f} -> {plan.balance_after:.3f}{held_out}, a step's experts "
        f"{plan.before_s * 1e3:.2f} -> {plan.after_s * 1e3:.2f} ms, planned in {plan.planning_s * 1e3:.0f} ms"
    )
