"""Series of the EPLB policy in the Prometheus registry of the process that decides.

vLLM's policy runs in its worker processes. Their registries reach the server's `/metrics` where prometheus_client works
over files, that is with PROMETHEUS_MULTIPROC_DIR in the environment: vLLM sets it itself for several API servers.
Values over all processes are added up there, so the first rank alone counts what all ranks decide alike.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter

from coterie.engines.vllm.eplb.base import MapDecision

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


class EplbSeries:
    """The series, made once a process."""

    def __init__(self) -> None:
        self.rounds = Counter("coterie_eplb_rounds", "Rounds with load that vLLM asked for")
        self.kept = Counter("coterie_eplb_kept", "Rounds that kept the map, by reason", ["reason"])
        self.plans = Counter("coterie_eplb_plans", "Plans made, carried out or not")
        self.moves = Counter("coterie_eplb_moves", "Experts loaded into a rank that did not hold them")
        self.gain = Counter("coterie_eplb_predicted_gain_seconds", "Predicted saving of the plans carried out")
        self.movement = Counter("coterie_eplb_predicted_movement_seconds", "Predicted time of their moves")
        self.planning = Counter("coterie_eplb_planning_seconds", "Time of planning, of the slowest rank")
        self.asking = Counter("coterie_eplb_asking_seconds", "Time of all rounds in the policy of the first rank")
        self.maps = Counter("coterie_eplb_maps_loaded", "Maps taken over from a file")
        self.disagreements = Counter("coterie_eplb_disagreements", "Rounds given up because ranks differed")
        self.failures = Counter("coterie_eplb_failures", "Failures of planner or files, counted by each rank")
        for kind in KINDS:  # a counter that never moved reads 0, not nothing
            self.kept.labels(kind)

    def count(self, decision: MapDecision, moves: int, slowest_s: float, asking_s: float) -> None:
        """A round, by the rank that counts for all."""
        self.rounds.inc()
        self.asking.inc(asking_s)
        if decision.planning_s:
            self.plans.inc()
        self.planning.inc(slowest_s)
        if not moves:
            self.kept.labels(decision.kind if decision.kind in KINDS else "nothing_found").inc()
            return
        self.moves.inc(moves)
        self.gain.inc(max(0.0, decision.gain_s))
        if decision.plan is not None:
            self.movement.inc(decision.plan.movement_s)


@cache
def series() -> EplbSeries:
    return EplbSeries()
