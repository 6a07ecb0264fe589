"""Routing: which worker takes a request."""

from coterie.costs.lines import StepPrices
from coterie.routing.base import Decision, Router, RouteRequest, routers
from coterie.routing.domain import Domain
from coterie.routing.fitted import FittedRouting
from coterie.routing.fleet import Fleet
from coterie.routing.join_shortest_queue import JoinShortestQueue
from coterie.routing.joint import Joint
from coterie.routing.latency_aware import LatencyAware
from coterie.routing.locality_band import LocalityBand
from coterie.routing.power_of_two import PowerOfTwo
from coterie.routing.pressure import Pressure
from coterie.routing.random_worker import RandomWorker
from coterie.routing.round_robin import RoundRobin

__all__ = [
    "Decision",
    "Domain",
    "FittedRouting",
    "Fleet",
    "JoinShortestQueue",
    "Joint",
    "LatencyAware",
    "LocalityBand",
    "PowerOfTwo",
    "Pressure",
    "RandomWorker",
    "RoundRobin",
    "RouteRequest",
    "Router",
    "StepPrices",
    "routers",
]
