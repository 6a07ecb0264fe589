"""A prefilled request as bytes: its KV, its tokens and their experts, in one safetensors file."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
