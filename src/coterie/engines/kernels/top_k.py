"""The experts of each row by its router's logits: the k largest, largest first; of equal logits the smaller index.

Kernels that route internally choose in this way: the top k of triton_kernels, which vLLM and SGLang run for gpt-oss in
mxfp4 on Hopper. They compare the bits of a number, so that -0.0 is less than 0.0; `torch.topk` takes any of equals.
"""

from __future__ import annotations

from typing import Any

import torch

from coterie.engines.kernels.routing import runs_triton

MAX_EXPERTS = 1 << 16
"""An expert's index takes the low 16 bits of the number that is compared."""


def top_k_into(logits: Any, ids: Any) -> None:
    """Write the experts of logits [row, expert] into ids [row, k]; one launch on a GPU, without a synchronisation."""
    if not runs_triton(logits, "auto"):
        ids.copy_(top_k_by_torch(logits, ids.shape[1]))
    elif len(logits):
        top_k_by_triton(logits, ids)


def top_k_by_torch(logits: Any, k: int) -> Any:
    """Return [row, k] experts."""
    bits = logits.float().view(torch.int32).long()  # exact for 16-bit logits, in the same order
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # order of integers = order of floats
    index = torch.arange(logits.shape[1], device=logits.device)
    return ((ordered << 16) | (MAX_EXPERTS - 1 - index)).topk(k).indices


def top_k_by_triton(logits: Any, ids: Any) -> None:
    """Write the experts of logits [row, expert] into ids [row, k], a program a row."""
    from coterie.engines.kernels._triton import top_k_kernel

    padded = max(32, 1 << (logits.shape[1] - 1).bit_length())
    top_k_kernel[(len(logits),)](
        logits,
        ids,
        logits.shape[1],
        logits.stride(0),
        ids.stride(0),
        K=ids.shape[1],
        PADDED=padded,
        num_warps=1 if padded <= 256 else 4,
    )
