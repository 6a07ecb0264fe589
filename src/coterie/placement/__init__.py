"""Where experts live: planners, how replicas share tokens, moves."""

from coterie.placement.base import HOST, Load, Moves, Plan, Planner, planners
from coterie.placement.eplb import Eplb
from coterie.placement.objective import Objective, Problem, Score, settle

__all__ = ["HOST", "Eplb", "Load", "Moves", "Objective", "Plan", "Planner", "Problem", "Score", "planners", "settle"]
