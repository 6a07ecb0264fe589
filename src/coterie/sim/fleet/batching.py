"""A batching strategy that chooses from the queues of a fleet's workers, by the waiting lists that live engines use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.batching.base import Loads, Strategy
from coterie.batching.waiting import Chooser, RequestView, WaitingList, WaitingReport
from coterie.errors import check_at_least, check_given
from coterie.sim.fleet import _state as state
from coterie.sim.fleet.requests import FleetRequests


@dataclass(frozen=True, slots=True)
class Batching:
    """Which waiting requests the workers that decode admit first."""

    strategy: Strategy
    window_size: int = 32
    """Number of a queue's oldest requests that the strategy may choose from."""
    batch_size: int = 8
    """Requests selected at once, or the number of free places if that is larger."""
    seed: int = 0
    """Seed for strategies that draw at random."""

    def __post_init__(self) -> None:
        check_at_least(1, window_size=self.window_size, batch_size=self.batch_size)


class _WorkerView(RequestView[int]):
    """A worker's requests: each is expected to activate in a step what a token of its footprint does."""

    def __init__(self, requests: FleetRequests) -> None:
        super().__init__(WaitingReport())
        recordings = requests.recordings
        self._footprints = check_given(recordings.footprint, "a batching strategy needs recordings with footprints")
        self._recorded, self._top_k = requests.recorded, recordings.expert_ids.shape[2]
        self.present: list[int] = []
        """Requests that run beside those that are chosen."""
        self.free = 0
        """Number of requests that may be admitted."""

    def share(self, request: int) -> Loads:
        counts = self._footprints[self._recorded[request]]
        tokens = counts.sum(axis=1, keepdims=True, dtype=np.float64) / self._top_k
        load: Loads = counts / np.maximum(tokens, 1e-12)
        return load

    def tokens(self, request: int) -> float:  # noqa: ARG002  (the contract's)
        return 1.0

    def running(self) -> Sequence[int]:
        return self.present

    def free_places(self) -> int:
        return self.free

    def name(self, request: int) -> str:
        return str(request)


class WorkerQueues:
    """The queues of all workers: linked lists in the compiled loop, waiting lists for the strategy."""

    def __init__(self, batching: Batching, requests: FleetRequests, world: state.World) -> None:
        self._world = world
        rng = np.random.default_rng(batching.seed)
        window_size, batch_size = batching.window_size, batching.batch_size
        self._views = [_WorkerView(requests) for _ in range(len(world.workers))]
        self._lists: dict[tuple[str, int], WaitingList[int]] = {}
        for worker, view in enumerate(self._views):
            chooser = Chooser(batching.strategy, view, rng, window_size=window_size, batch_size=batch_size, strict=True)
            for name in ("waiting", "handed"):
                self._lists[name, worker] = WaitingList(chooser)
        self._order: dict[tuple[str, int], list[int]] = {}
        """Last order of each queue."""

    def choose(self, name: str) -> None:
        """Put the requests that the strategy chooses at the head of the queue that has this name."""
        requests, worker = self._world.requests, int(self._world.loop["subject"])
        record, following = self._world.workers[worker], requests["next"]
        waiting, request = [], int(record[name]["head"])
        while request >= 0:
            waiting.append(request)
            request = following.item(request)
        queue, view = self._lists[name, worker], self._views[worker]
        for request in self._order.get((name, worker), [])[: len(queue) - sum(request in queue for request in waiting)]:
            queue.take(request)  # the compiled loop admits from the head
        for request in waiting:
            if request not in queue:
                queue.push(request)
        running = self._world.run[worker, : record["running"]]
        view.free = int(record["places"]) - len(running)
        if name == "handed":  # chosen for the end of the step that just started
            ends = requests["decoded"][running] + 1 == requests["output_tokens"][running]
            ends[len(ends) - record["staged"] :] = False
            view.free, running = int(ends.sum()), running[~ends]
        view.present = running.tolist()
        queue.refresh()
        order = self._order[name, worker] = queue.upcoming()
        following[order] = [*order[1:], -1]
        record[name] = order[0], order[-1]
