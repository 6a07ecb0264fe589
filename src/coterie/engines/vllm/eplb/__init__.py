"""Coterie's planners as vLLM's EPLB policy, with a map to begin from and a file that keeps the current one.

    COTERIE_EPLB='{"planner": "latency_optimal", "save_map": "map.json"}' vllm serve … --enable-eplb

vLLM asks its policy on every rank, with the same load and the same old map, and each rank then sends and receives
experts by the map it got. Two ranks with different maps would wait for each other for ever, or compute with weights of
another expert. So planning is deterministic, and before a map is returned the ranks compare theirs: a rank that cannot
read a file, or whose planner fails, costs a round and nothing else.

    policy.py   what vLLM calls, and vLLM's group of ranks
    rounds.py   round after round: decide, agree, account; series in the Prometheus registry of the process
    paying.py   objective, topology and planner of the settings; single steps to plan for, from a file; the Rebalancer
                that answers "keep, because …" until a change pays
    files.py    maps on disk: the one to begin from, one made elsewhere, the one to keep
    base.py     a round, a decision, the group; carrying a map over when ranks come and go

vLLM spreads a replicated expert's tokens evenly over its replicas, so only plans of equal shares can be carried out.
Its load has no source ranks.
"""

from coterie.engines.vllm.eplb.base import Agreement, EplbRound, MapDecision, RearrangingGroup, carry_over, count_moves
from coterie.engines.vllm.eplb.policy import install, make_policy
from coterie.engines.vllm.eplb.rounds import Rounds

__all__ = [
    "Agreement",
    "EplbRound",
    "MapDecision",
    "RearrangingGroup",
    "Rounds",
    "carry_over",
    "count_moves",
    "install",
    "make_policy",
]
