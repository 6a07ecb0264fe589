"""Routing: which worker takes a request."""

from coterie.routing.base import Decision, Router, RouteRequest, routers
from coterie.routing.fleet import Fleet

__all__ = ["Decision", "Fleet", "RouteRequest", "Router", "routers"]
