"""Gather rows by index, for the shuffles around a collective; index -1 gives a row of zeros.

A shuffle schedule pads each rank's share with -1, so that a reduce-scatter has equal shares. Restoring the order is
the same gather with the inverse index.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from coterie.errors import ConfigError, check_one_of

Backend = Literal["auto", "triton", "torch"]
"""Kernel implementation; `auto` is Triton for tensors on CUDA, torch for all others."""

BLOCK = 1024
"""Maximum number of columns that one program copies."""


def runs_triton(tensor: Any, backend: Backend) -> bool:
    """Return whether to launch Triton kernels for this tensor."""
    check_one_of(("auto", "triton", "torch"), backend=backend)
    return backend == "triton" or (backend == "auto" and bool(tensor.is_cuda))


def column_blocks(width: int, block: int) -> tuple[int, int]:
    """Return the columns per program, a power of two, and the programs per row."""
    block = min(block, 1 << max(0, width - 1).bit_length())
    return block, -(-width // block)


def check_rows(x: Any, name: str) -> None:
    if x.dim() != 2 or not x.shape[1]:
        raise ConfigError(f"{name} has shape {list(x.shape)}; expected [row, width] with a width of at least 1")
    if x.stride(1) != 1:
        raise ConfigError(f"{name} has column stride {x.stride(1)}; its rows must be contiguous")


def gather_rows(
    x: Any, index: Any, *, backend: Backend = "auto", block: int = BLOCK, warps: int = 4, out: Any = None
) -> Any:
    """Return the rows of x [row, width] at `index` [n], as [n, width]; index -1 gives zeros.

    An index out of range raises ConfigError on a CPU. On CUDA a check would synchronise the device: the row is zeros.
    """
    check_rows(x, "x")
    if index.dim() != 1 or index.is_floating_point():
        raise ConfigError(f"index has shape {list(index.shape)} and dtype {index.dtype}; expected integers [n]")
    shape = (index.shape[0], x.shape[1])
    rows = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if rows.shape != shape or rows.dtype != x.dtype or not rows.is_contiguous():
        raise ConfigError(f"out has shape {list(rows.shape)}, dtype {rows.dtype}; expected {list(shape)}, {x.dtype}")
    if not rows.numel():
        return rows
    if runs_triton(x, backend):
        from coterie.engines.kernels._triton import gather_kernel

        block, parts = column_blocks(x.shape[1], block)
        gather_kernel[(shape[0] * parts,)](
            x, index, rows, x.shape[0], shape[1], x.stride(0), parts, BLOCK=block, num_warps=warps
        )
        return rows
    if not x.is_cuda and (int(index.min()) < -1 or int(index.max()) >= len(x)):
        raise ConfigError(f"index is in {int(index.min())} … {int(index.max())}; it must be in -1 … {len(x) - 1}")
    if not len(x):
        return rows.zero_()
    torch.index_select(x, 0, index.clamp(min=0), out=rows)
    return rows.masked_fill_((index < 0)[:, None], 0)
