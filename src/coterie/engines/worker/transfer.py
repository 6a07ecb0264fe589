"""Transfer of KV between workers: serialisation of prefilled requests, staging, and the grant to fetch them.

A prefilled request is one safetensors file: its KV, its tokens and their experts.

A prefill worker puts a grant into the ``kv_transfer_params`` of its answer: an expiry time and an HMAC, keyed with the
fleet's secret, over the request's key, the digest of its prompt and cache salt, and the expiry time. The decode worker
checks the grant before it connects, so that a client cannot invent an address or use another prompt's KV. The prefill
worker checks it before it sends the KV, and sends the KV once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from coterie.engines.worker.blocks import BlockTable, salt_digest
from coterie.engines.worker.metrics import WorkerMetrics
from coterie.engines.worker.model import PackedModel
from coterie.errors import CoterieError, InputError, check

GRANT_FIELD = "coterie_grant"
"""Field of ``kv_transfer_params`` that holds the grant."""
GRANT_HEADER = "X-Coterie-Grant"
_FORM = re.compile(r"1\.([0-9]{1,12})\.([0-9a-f]{64})")


class GrantError(CoterieError):
    """KV was requested without a valid grant."""


def prompt_digest(prompt: Sequence[int], salt: str | None) -> bytes:
    """Return the digest of a prompt and its cache salt."""
    return hashlib.sha256(salt_digest(salt) + np.asarray(prompt, "<i4").tobytes()).digest()


class Grants:
    """Signs and checks grants; without a secret, grants are neither issued nor required."""

    def __init__(self, secret: str | None) -> None:
        self._key = None if secret is None else hmac.digest(secret.encode(), b"coterie grants 1", "sha256")

    def sign(self, request: str, digest: bytes, until: float) -> str | None:
        """Return a grant for the KV of a request, valid until a time in seconds since the epoch."""
        seconds = math.ceil(until)
        return None if self._key is None else f"1.{seconds}.{self._signature(self._key, request, digest, seconds)}"

    def valid(self, grant: str | None, request: str, digest: bytes) -> bool:
        if self._key is None:
            return True
        match = _FORM.fullmatch(grant or "")
        if match is None:
            return False
        right = self._signature(self._key, request, digest, int(match[1]))
        return hmac.compare_digest(right, match[2]) and time.time() <= int(match[1])

    @staticmethod
    def _signature(key: bytes, request: str, digest: bytes, seconds: int) -> str:
        return hmac.new(key, b"%s\0%s%d" % (request.encode(), digest, seconds), "sha256").hexdigest()


VERSION = "1"
HEADER_BYTES = 1 << 18
"""Maximum bytes of a safetensors header; a model of 100 layers has 20 KB."""


class Prefilled(NamedTuple):
    """A prefilled prompt: the data with which a decode worker continues without computing the prompt."""

    identity: str
    """Identity of model and dtype; see :class:`PackedModel`."""
    token_ids: NDArray[np.int32]
    """[token] token ids of the prompt."""
    expert_ids: NDArray[np.unsignedinteger]
    """[token, layer, k] expert ids of the prompt."""
    tensors: dict[str, Any]
    """KV by tensor name, as packed by the model's store."""


class SafetensorsCodec(NamedTuple):
    """Converts prefilled requests to bytes and back, for one array library."""

    save: Callable[..., bytes]
    load: Callable[[bytes], dict[str, Any]]
    from_numpy: Callable[[NDArray[Any]], Any]

    def to_bytes(self, prefilled: Prefilled) -> bytes:
        expert_ids: NDArray[Any] = prefilled.expert_ids
        if expert_ids.dtype.kind == "u" and expert_ids.itemsize > 1:  # older torch lacks wider unsigned integers
            expert_ids = expert_ids.astype(np.int32)
        ids = {"token_ids": prefilled.token_ids, "expert_ids": expert_ids}
        arrays = {name: self.from_numpy(np.ascontiguousarray(array)) for name, array in ids.items()}
        return self.save({**prefilled.tensors, **arrays}, {"version": VERSION, "identity": prefilled.identity})

    def from_bytes(self, data: bytes) -> Prefilled:
        """Parse a prefilled request; any malformed input raises InputError."""
        try:
            tensors = self.load(data)
            metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
            token_ids, expert_ids = (np.asarray(tensors.pop(name)) for name in ("token_ids", "expert_ids"))
        except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"is no prefilled request: {error}") from None
        check(
            metadata.get("version") == VERSION,
            f"is a prefilled request of version {metadata.get('version')!r}, expected {VERSION!r}",
            InputError,
        )
        check(
            token_ids.ndim == 1 and expert_ids.ndim == 3 and len(expert_ids) == len(token_ids),
            f"has token_ids {token_ids.shape} and expert_ids {expert_ids.shape}",
            InputError,
        )
        return Prefilled(metadata.get("identity", ""), token_ids, expert_ids, tensors)


def torch_codec() -> SafetensorsCodec:
    import safetensors.torch
    import torch

    return SafetensorsCodec(safetensors.torch.save, safetensors.torch.load, torch.from_numpy)


def numpy_codec() -> SafetensorsCodec:
    return SafetensorsCodec(_save_numpy, safetensors.numpy.load, np.asarray)


def _save_numpy(arrays: dict[str, NDArray[Any]], metadata: dict[str, str]) -> bytes:
    # safetensors writes an array's memory as it is and ignores strides.
    return bytes(
        safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata)
    )


def most_bytes(model: PackedModel, tokens: int) -> int:
    """Return the maximum size in bytes of a serialised prefilled prompt."""
    return (
        tokens * (model.store.token_bytes + 4 + 4 * len(model.capture.layer_ids) * model.capture.top_k) + HEADER_BYTES
    )


def check_prefilled(prefilled: Prefilled, prompt: Sequence[int], model: PackedModel) -> None:
    """Raise ConfigError unless KV from another worker is this prompt's and fits this model."""
    token_ids, expert_ids, capture = prefilled.token_ids, prefilled.expert_ids, model.capture
    check(
        prefilled.identity == model.identity, f"KV is of model {prefilled.identity}; this worker runs {model.identity}"
    )
    check(
        token_ids.dtype.kind in "iu" and expert_ids.dtype.kind in "iu",
        f"token and expert ids are {token_ids.dtype} and {expert_ids.dtype}, not integers",
    )
    check(token_ids.tolist() == list(prompt), f"KV is of another prompt, of {len(token_ids)} tokens")
    check(
        expert_ids.shape == (len(prompt), len(capture.layer_ids), capture.top_k),
        f"expert ids {expert_ids.shape} are not of this model",
    )
    check(
        expert_ids.min() >= 0 and expert_ids.max() < capture.num_experts,
        f"expert ids must be in 0 … {capture.num_experts - 1}",
    )
    model.store.check(prefilled.tensors, len(prompt))


# KV of prefilled requests is kept until another worker fetches it, it expires, or its blocks are needed.


class Staged(NamedTuple):
    """A prefilled request whose KV waits for another worker."""

    prompt: list[int]
    blocks: list[int]
    digest: bytes
    """Digest of prompt and cache salt, which the grant signs."""
    until: float
    """Expiry time, on the monotonic clock."""


class StagedKV:
    """Staged requests by key, oldest first. Every release returns the blocks to the table and counts the reason."""

    def __init__(self, blocks: BlockTable, metrics: WorkerMetrics, ttl_s: float) -> None:
        self._blocks, self._metrics, self._ttl_s = blocks, metrics, ttl_s
        self._staged: dict[str, Staged] = {}

    def __len__(self) -> int:
        return len(self._staged)

    def get(self, key: str) -> Staged | None:
        return self._staged.get(key)

    @property
    def due(self) -> float | None:
        """Monotonic time of the next expiry; None if nothing is staged."""
        return min((staged.until for staged in self._staged.values()), default=None)

    def add(self, key: str, prompt: list[int], blocks: list[int], digest: bytes) -> None:
        self._staged[key] = Staged(prompt, blocks, digest, time.monotonic() + self._ttl_s)
        self._metrics.add("kv_staged_total")

    def release(self, key: str, why: str) -> bool:
        """Release the KV under this key; return whether there was any."""
        staged = self._staged.pop(key, None)
        if staged is None:
            return False
        self._blocks.release(staged.blocks)
        self._metrics.add("kv_released_total", why)
        return True

    def release_expired(self) -> None:
        for key in [key for key, staged in self._staged.items() if staged.until <= time.monotonic()]:
            self.release(key, "expired")

    def evict_oldest(self) -> bool:
        oldest = next(iter(self._staged), None)
        return oldest is not None and self.release(oldest, "evicted")

    def release_all(self) -> None:
        for key in list(self._staged):
            self.release(key, "shutdown")
