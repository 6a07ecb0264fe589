"""Where experts live: planners, how replicas share tokens, when to move, and moving without a stop."""

from coterie.placement.base import HOST, Load, Moves, Plan, Planner, planners
from coterie.placement.eplb import Eplb
from coterie.placement.latency_optimal import LatencyOptimal
from coterie.placement.latency_optimal_ilp import LatencyOptimalIlp
from coterie.placement.linear import Linear
from coterie.placement.maps import PlacementMap, map_formats, read_map, write_map
from coterie.placement.objective import Objective, Problem, Score, settle
from coterie.placement.popularity import Popularity
from coterie.placement.round_robin import RoundRobin

__all__ = [
    "HOST", "Eplb", "LatencyOptimal", "LatencyOptimalIlp", "Linear", "Load", "Moves", "Objective", "PlacementMap",
    "Plan", "Planner", "Popularity", "Problem", "RoundRobin", "Score", "map_formats", "planners", "read_map", "settle",
    "write_map",
]  # fmt: skip
