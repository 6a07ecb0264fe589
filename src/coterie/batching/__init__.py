"""Batch selection: which waiting requests join the running batch."""

from coterie.batching.base import Loads, Selection, SpreadCost, Strategy, Window, passed_over, strategies
from coterie.batching.baselines import Fcfs, RandomSample
from coterie.batching.by_weight import KarmarkarKarp, Lpt
from coterie.batching.greedy import (
    BestFit,
    Differencing,
    GreedyDotProduct,
    GreedyVariance,
    LptBalanced,
    NormMinimizing,
    PowerOfD,
    PowerOfDDot,
)
from coterie.batching.latency_aware import LatencyAware
from coterie.registry import import_modules

import_modules(__name__)  # importing a module registers its strategies: a new one needs no line here

__all__ = [
    "BestFit",
    "Differencing",
    "Fcfs",
    "GreedyDotProduct",
    "GreedyVariance",
    "KarmarkarKarp",
    "LatencyAware",
    "Loads",
    "Lpt",
    "LptBalanced",
    "NormMinimizing",
    "PowerOfD",
    "PowerOfDDot",
    "RandomSample",
    "Selection",
    "SpreadCost",
    "Strategy",
    "Window",
    "passed_over",
    "strategies",
]
