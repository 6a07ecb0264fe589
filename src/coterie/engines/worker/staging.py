"""KV of prefilled requests, kept until another worker fetches it, it expires or its blocks are needed."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from coterie.engines.worker.blocks import BlockTable
from coterie.engines.worker.metrics import Metrics


class Staged(NamedTuple):
    """A prefilled request whose KV waits for another worker."""

    prompt: list[int]
    blocks: list[int]
    until: float
    """Time of expiry, by the monotonic clock."""


class StagedKV:
    """Staged requests by key, oldest first. Every release returns the blocks to the table and counts its reason."""

    def __init__(self, blocks: BlockTable, metrics: Metrics, ttl_s: float) -> None:
        self._blocks, self._metrics, self._ttl_s = blocks, metrics, ttl_s
        self._staged: OrderedDict[str, Staged] = OrderedDict()

    def __len__(self) -> int:
        return len(self._staged)

    def get(self, key: str) -> Staged | None:
        return self._staged.get(key)

    @property
    def due(self) -> float | None:
        """Time at which the next one expires."""
        return min((staged.until for staged in self._staged.values()), default=None)

    def add(self, key: str, prompt: list[int], blocks: list[int]) -> None:
        self._staged[key] = Staged(prompt, blocks, time.monotonic() + self._ttl_s)
        self._metrics.add("kv_staged_total")

    def release(self, key: str, why: str) -> bool:
        """Whether there was any KV under this key."""
        staged = self._staged.pop(key, None)
        if staged is None:
            return False
        self._blocks.release(staged.blocks)
        self._metrics.add("kv_released_total", why)
        return True

    def release_expired(self) -> None:
        now = time.monotonic()
        for key in [key for key, staged in self._staged.items() if staged.until <= now]:
            self.release(key, "expired")

    def evict_oldest(self) -> bool:
        oldest = next(iter(self._staged), None)
        return oldest is not None and self.release(oldest, "evicted")

    def release_all(self, why: str) -> None:
        for key in list(self._staged):
            self.release(key, why)
