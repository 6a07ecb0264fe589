"""Planners: one file each. The registry is ``coterie.placement.planners``."""
