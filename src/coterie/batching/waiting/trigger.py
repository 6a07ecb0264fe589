"""CAPS's rule for when requests of a shallow queue start: when enough wait to choose from, or one has waited enough."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class BatchTrigger(Generic[T]):
    """Holds waiting requests back for an engine that looks at its queue in every step."""

    min_batch: int
    """Number of waiting requests at which they may start; 1 never holds any."""
    interval_s: float
    """Longest time that the oldest request is held."""
    _since: dict[T, float] = field(default_factory=dict, init=False)
    """Waiting request → time at which it was first seen."""

    def holds(self, waiting: Sequence[T], now_s: float) -> bool:
        """Return whether none of the waiting requests may start yet; call it in every step."""
        if self.min_batch == 1:
            return False
        self._since = {request: self._since.get(request, now_s) for request in waiting}
        oldest_s = min(self._since.values(), default=now_s)
        return 0 < len(waiting) < self.min_batch and now_s - oldest_s < self.interval_s
