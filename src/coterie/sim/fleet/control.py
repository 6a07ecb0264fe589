"""What a fleet's controller is told, and what it may do: put another router in force while the fleet serves.

The simulator knows controllers by this protocol alone. It calls one whenever a router is about to be asked, at the
simulated time, with the requests that ended since the last call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.footprints.counting import footprint
from coterie.routing import Fleet, Router
from coterie.sim.fleet.requests import FleetRequests


class FinishedRequest(NamedTuple):
    """A request that ended, with the experts its tokens activated."""

    at_s: float
    request: int
    recorded: int
    worker: int
    """Decode worker."""
    prefill: NDArray[np.uint32]
    """[layer, expert] activations of the tokens recorded for its prompt."""
    decode: NDArray[np.uint32]
    """[layer, expert] activations of the tokens that it decoded."""


class RouterSwap(NamedTuple):
    """A router to ask from now on."""

    router: Router
    fleet: Fleet | None = None
    """An empty fleet with the priors of the new router; it takes over the running requests. None keeps the fleet."""


class FleetController(Protocol):
    """Anything that watches a fleet."""

    def tick(self, now_s: float, ended: Sequence[FinishedRequest]) -> RouterSwap | None: ...


class EndedRequests:
    """Makes what a controller is told of the rows of a run."""

    def __init__(self, requests: FleetRequests) -> None:
        self.requests = requests
        self._counts: dict[tuple[int, int], NDArray[np.uint32]] = {}

    def told(self, request: int, at_s: float, worker: int) -> FinishedRequest:
        recorded, kept = int(self.requests.recorded[request]), self.requests.recordings
        prompt = self._counted(int(kept.prompt_row[recorded]), int(kept.prompt_rows[recorded]))
        tokens, rows = int(self.requests.output_tokens[request]), int(kept.decode_rows[recorded])
        first = int(kept.decode_row[recorded])
        decode = (tokens // rows) * self._counted(first, rows) + self._counted(first, tokens % rows)
        return FinishedRequest(at_s, request, recorded, worker, prompt, decode.astype(np.uint32))

    def _counted(self, first: int, rows: int) -> NDArray[np.uint32]:
        """[layer, expert] of so many recorded tokens from the first on; computed once."""
        known = self._counts.get((first, rows))
        if known is None:
            recordings = self.requests.recordings
            ids = recordings.expert_ids[first : first + rows]
            known = self._counts[first, rows] = footprint(ids, recordings.num_experts).astype(np.uint32)
        return known
