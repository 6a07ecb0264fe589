"""A prefilled request as bytes: its KV, its tokens and their experts, in one safetensors file."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.worker.blocks import BlockTable
from coterie.engines.worker.metrics import Metrics
from coterie.errors import InputError

VERSION = "1"


class Prefilled(NamedTuple):
    """A prefilled prompt: what a decode worker needs to continue without computing it."""

    identity: str
    """Model and dtype; see :class:`PackedModel`."""
    token_ids: NDArray[np.int32]
    """[token] the prompt."""
    expert_ids: NDArray[np.unsignedinteger]
    """[token, layer, k]"""
    tensors: dict[str, Any]
    """key.LAYER and value.LAYER: [token, head, width]."""


def to_bytes(prefilled: Prefilled) -> bytes:
    import torch
    from safetensors.torch import save

    extra = {
        "token_ids": torch.from_numpy(np.ascontiguousarray(prefilled.token_ids)),
        # Signed: older torch knows no unsigned integer past 8 bits.
        "expert_ids": torch.from_numpy(np.ascontiguousarray(prefilled.expert_ids, np.int32)),
    }
    return bytes(save({**prefilled.tensors, **extra}, {"version": VERSION, "identity": prefilled.identity}))


def from_bytes(data: bytes) -> Prefilled:
    """Raises InputError in one line, whatever the bytes are."""
    import json

    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"is no prefilled request: {error}") from None
    if metadata.get("version") != VERSION or not {"token_ids", "expert_ids"} <= set(tensors):
        raise InputError(f"is a prefilled request of version {metadata.get('version')!r}, expected {VERSION!r}")
    token_ids, expert_ids = tensors.pop("token_ids").numpy(), tensors.pop("expert_ids").numpy()
    if token_ids.ndim != 1 or expert_ids.ndim != 3 or len(expert_ids) != len(token_ids):
        raise InputError(f"has token_ids {token_ids.shape} and expert_ids {expert_ids.shape}")
    return Prefilled(metadata.get("identity", ""), token_ids, expert_ids, tensors)


# KV of prefilled requests, kept until another worker fetches it, it expires or its blocks are needed.


class Staged(NamedTuple):
    """A prefilled request whose KV waits for another worker."""

    prompt: list[int]
    blocks: list[int]
    digest: bytes
    """Digest of prompt and salt, which a grant names."""
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

    def add(self, key: str, prompt: list[int], blocks: list[int], digest: bytes) -> None:
        self._staged[key] = Staged(prompt, blocks, digest, time.monotonic() + self._ttl_s)
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
