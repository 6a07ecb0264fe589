"""A plugin: a router that fails on every request whose footprint it is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.routing import Decision, Fleet, Request, routers


@routers.register("raising")
@dataclass(frozen=True, slots=True)
class Raising:
    def route(self, request: Request, fleet: Fleet) -> Decision:
        if request.footprint is not None:
            raise RuntimeError("on purpose")
        return Decision(int(np.flatnonzero(fleet.alive)[0]), np.zeros(len(fleet)), "the first")
