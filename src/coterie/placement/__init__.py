"""Where experts live: planners, how replicas share tokens, when to move, and moving without a stop."""

from coterie.placement.base import HOST, Load, Moves, Plan, Planner, planners
from coterie.placement.demand import DemandTracker, WindowTracker, mismatch
from coterie.placement.drift import DriftEstimator
from coterie.placement.eplb import Eplb
from coterie.placement.latency_optimal import LatencyOptimal
from coterie.placement.latency_optimal_ilp import LatencyOptimalIlp
from coterie.placement.linear import Linear
from coterie.placement.maps import PlacementMap, map_formats, read_map, write_map
from coterie.placement.memory import MemoryBudget
from coterie.placement.migration import Migrator
from coterie.placement.objective import Objective, Problem, Score, settle
from coterie.placement.popularity import Popularity
from coterie.placement.rebalancing import Rebalancer, RebalancingSettings
from coterie.placement.round_robin import RoundRobin
from coterie.placement.rounds import schedule_moves

__all__ = [
    "HOST", "DemandTracker", "DriftEstimator", "Eplb", "LatencyOptimal", "LatencyOptimalIlp", "Linear", "Load",
    "MemoryBudget", "Migrator", "Moves", "Objective", "PlacementMap", "Plan", "Planner", "Popularity", "Problem",
    "Rebalancer", "RebalancingSettings", "RoundRobin", "Score", "WindowTracker", "map_formats", "mismatch", "planners",
    "read_map", "schedule_moves", "settle", "write_map",
]  # fmt: skip
