"""Coterie's planners as vLLM's EPLB policy, with an initial map and a file that stores the current one.

    COTERIE_EPLB='{"planner": "latency_optimal", "save_map": "map.json"}' vllm serve … --enable-eplb

vLLM calls its policy on every rank, with the same load and the same old map, and each rank then sends and receives
experts by the map it got. Two ranks with different maps would deadlock or compute with another expert's weights.
Planning is therefore deterministic, and the ranks compare their maps before one is returned: a rank that cannot read a
file, or whose planner fails, costs only this round.

    policy.py   the policy class that vLLM calls, and vLLM's group of ranks
    rounds.py   one round: decide, agree, account; series in the Prometheus registry of the process
    paying.py   objective, topology and planner of the settings; single steps to plan for, from a file; the Rebalancer
                that keeps the map until a change pays
    files.py    map files: the initial map, maps made elsewhere, the saved map
    base.py     types of a round, a decision and the group; adapting a map when ranks are added or removed

vLLM spreads a replicated expert's tokens evenly over its replicas, so that only plans with equal shares can be applied.
vLLM's load does not have source ranks.
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
