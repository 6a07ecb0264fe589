"""Domain: workers belong to labels, as an operator who knows every request's subject would have it.

An oracle to compare with: nobody labels real traffic, and where labels are coarse they are worse than what the experts
themselves say. Requests of an unknown label may go anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coterie.errors import ConfigError
from coterie.registry import needs
from coterie.routing.base import Decision, Request, routers
from coterie.routing.fleet import Fleet
from coterie.routing.picking import best


@routers.register("domain")
@dataclass(frozen=True, slots=True)
class Domain:
    labels: Mapping[str, tuple[int, ...]] = needs("label → workers that take its requests; make it with share_out()")

    def route(self, request: Request, fleet: Fleet) -> Decision:
        load = (fleet.running + 1) / fleet.speeds
        own = self.labels.get(request.domain or "")
        if own is None:
            worker, scores = best(load, fleet)
            return Decision(worker, scores, f"domain {request.domain!r} has no workers of its own: the shortest queue")
        if max(own) >= len(fleet):
            raise ConfigError(f"domain {request.domain!r} has worker {max(own)}; the fleet has {len(fleet)}")
        elsewhere = np.ones(len(fleet), np.bool_)
        elsewhere[list(own)] = False
        # Its own first; if none of them is open, the others.
        worker, scores = best(load + elsewhere * (1.0 + load.max()), fleet)
        return Decision(worker, scores, f"the shortest queue of the {len(own)} workers of {request.domain!r}")


def share_out(requests: Mapping[str, int], workers: int) -> dict[str, tuple[int, ...]]:
    """Workers for each label, in proportion to its requests; labels share a worker where there are more of them."""
    if workers < 1 or not requests or min(requests.values()) < 0:
        raise ConfigError(f"workers={workers} and {len(requests)} labels must be at least 1, requests not negative")
    labels = sorted(requests, key=lambda label: (-requests[label], label))
    if len(labels) > workers:
        load = np.zeros(workers)
        chosen: dict[str, tuple[int, ...]] = {}
        for label in labels:  # longest first onto the emptiest
            worker = int(np.argmin(load))
            load[worker] += requests[label]
            chosen[label] = (worker,)
        return chosen
    count = dict.fromkeys(labels, 1)
    for _ in range(workers - len(labels)):
        neediest = max(labels, key=lambda label: requests[label] / count[label])
        count[neediest] += 1
    ends = np.cumsum([count[label] for label in labels])
    return {label: tuple(range(end - count[label], end)) for label, end in zip(labels, ends.tolist(), strict=True)}
