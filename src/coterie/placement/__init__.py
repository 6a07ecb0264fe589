"""Expert placement: planners, token shares of replicas, rebalancing triggers, and migration while serving."""

from coterie.placement.base import HOST, Load, Moves, Plan, Planner, planners
from coterie.placement.co_clustering.base import CoClusters, Items
from coterie.placement.co_clustering.planners import CoCluster, SemMoe
from coterie.placement.holdings import DemandTracker
from coterie.placement.maps.formats import PlacementMap, map_formats, read_map, replace_map, write_map
from coterie.placement.migration.migrator import Migrator
from coterie.placement.migration.rounds import Schedule, Transfer, schedule_moves
from coterie.placement.objective import DEEPSEEK_V3_PREFILL, Objective, Problem, Score, settle
from coterie.placement.planning.baselines import Linear, Popularity, RoundRobin
from coterie.placement.planning.eplb import Eplb, rebalance
from coterie.placement.planning.flashlb import FlashLb
from coterie.placement.planning.latency_optimal import LatencyOptimal
from coterie.placement.planning.latency_optimal_ilp import LatencyOptimalIlp
from coterie.placement.planning.moetuner import MoeTuner
from coterie.placement.planning.swaps import Swaps
from coterie.placement.triggers.drift import DriftEstimator
from coterie.placement.triggers.rebalancing import Rebalancer, RebalancingSettings
from coterie.registry import import_modules

import_modules("coterie.placement.planning")  # registers every planner of that package; none is listed here

__all__ = [
    "DEEPSEEK_V3_PREFILL",
    "HOST",
    "CoCluster",
    "CoClusters",
    "DemandTracker",
    "DriftEstimator",
    "Eplb",
    "FlashLb",
    "Items",
    "LatencyOptimal",
    "LatencyOptimalIlp",
    "Linear",
    "Load",
    "Migrator",
    "MoeTuner",
    "Moves",
    "Objective",
    "PlacementMap",
    "Plan",
    "Planner",
    "Popularity",
    "Problem",
    "Rebalancer",
    "RebalancingSettings",
    "RoundRobin",
    "Schedule",
    "Score",
    "SemMoe",
    "Swaps",
    "Transfer",
    "map_formats",
    "planners",
    "read_map",
    "rebalance",
    "replace_map",
    "schedule_moves",
    "settle",
    "write_map",
]
