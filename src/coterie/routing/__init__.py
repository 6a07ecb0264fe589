"""Routing: which worker takes a request."""

from coterie.registry import import_modules
from coterie.routing.base import Decision, Request, Router, routers
from coterie.routing.baselines import Domain, JoinShortestQueue, PowerOfTwo, RandomWorker, RoundRobin, share_out
from coterie.routing.calibration import Calibration, calibration
from coterie.routing.fitted import RouterFit
from coterie.routing.fleet import Fleet
from coterie.routing.joint import Joint
from coterie.routing.latency_aware import LatencyAware
from coterie.routing.locality_band import LocalityBand
from coterie.routing.pressure import Pressure
from coterie.routing.semantic import Semantic

import_modules(__name__)  # importing a module registers its routers: a new one needs no line here

__all__ = [
    "Calibration",
    "Decision",
    "Domain",
    "Fleet",
    "JoinShortestQueue",
    "Joint",
    "LatencyAware",
    "LocalityBand",
    "PowerOfTwo",
    "Pressure",
    "RandomWorker",
    "Request",
    "RoundRobin",
    "Router",
    "RouterFit",
    "Semantic",
    "calibration",
    "routers",
    "share_out",
]
