"""A prefilled request as bytes: its KV, its tokens and their experts, in one safetensors file."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.engines.worker.blocks import BlockTable
from coterie.engines.worker.metrics import WorkerMetrics
from coterie.engines.worker.model import PackedModel
from coterie.errors import ConfigError, InputError

VERSION = "1"
HEADER_BYTES = 1 << 18
"""Bound of a safetensors header; a model of 100 layers has 20 KB."""


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


def most_bytes(model: PackedModel, tokens: int) -> int:
    """Upper bound of a prefilled prompt's size on the wire."""
    capture = model.capture
    each = model.store.token_bytes + 4 + 4 * len(capture.layer_ids) * capture.top_k
    return tokens * each + HEADER_BYTES


def check_prefilled(prefilled: Prefilled, prompt: Sequence[int], model: PackedModel) -> None:
    """Raise ConfigError unless KV from another worker is this prompt's and fits this model."""
    token_ids, expert_ids, capture = prefilled.token_ids, prefilled.expert_ids, model.capture
    if prefilled.identity != model.identity:
        raise ConfigError(f"KV is of model {prefilled.identity}; this worker runs {model.identity}")
    if token_ids.dtype.kind not in "iu" or expert_ids.dtype.kind not in "iu":
        raise ConfigError(f"token and expert ids are {token_ids.dtype} and {expert_ids.dtype}, not integers")
    if token_ids.tolist() != list(prompt):
        raise ConfigError(f"KV is of another prompt, of {len(token_ids)} tokens")
    if expert_ids.shape != (len(prompt), len(capture.layer_ids), capture.top_k):
        raise ConfigError(f"expert ids {expert_ids.shape} are not of this model")
    if expert_ids.min() < 0 or expert_ids.max() >= capture.num_experts:
        raise ConfigError(f"expert ids must be in 0 … {capture.num_experts - 1}")
    model.store.check(prefilled.tensors, len(prompt))


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

    def __init__(self, blocks: BlockTable, metrics: WorkerMetrics, ttl_s: float) -> None:
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
