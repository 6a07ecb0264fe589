"""Domain: each label has its own workers, as an operator who knows every request's subject would assign them.

A reference to compare with: real traffic has no labels, and coarse labels are worse than footprints. Requests of an
unknown label may go anywhere.
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
        # Own workers first; if none of them is open, the others.
        worker, scores = best(load + elsewhere * (1.0 + load.max()), fleet)
        return Decision(worker, scores, f"the shortest queue of the {len(own)} workers of {request.domain!r}")


def share_out(requests: Mapping[str, int], workers: int) -> dict[str, tuple[int, ...]]:
    """Assign workers to labels in proportion to requests; labels share workers where they outnumber them."""
    if workers < 1 or not requests or min(requests.values()) < 0:
        raise ConfigError(f"workers={workers} and {len(requests)} labels must be at least 1, requests not negative")
    labels = sorted(requests, key=lambda label: (-requests[label], label))
    if len(labels) > workers:
        load = np.zeros(workers)
        chosen: dict[str, tuple[int, ...]] = {}
        for label in labels:  # most requests first, to the least loaded worker
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
