"""Planners, one file per planner. The registry is ``coterie.placement.planners``."""
