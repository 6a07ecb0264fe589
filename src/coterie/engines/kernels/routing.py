"""Sort a batch's activations by expert, stably, and copy hidden rows into that order.

    ids [token, k] → order, places [token x k], counts, ends [expert] → rows [token x k, hidden]

A grouped GEMM takes `rows` and `ends`. Plain torch needs a sort, a search for the boundaries and a gather that reads
every row k times. A counting sort needs one or two launches, and the copy reads each row once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from coterie.errors import ConfigError, check, check_one_of

Backend = Literal["auto", "triton", "torch"]
"""Kernel implementation; `auto` is Triton for tensors on CUDA, torch for all others."""
MAX_PAIRS = 16384
"""Maximum number of entries for the one-launch sort: a program holds all of them in registers."""
MAX_EXPERTS = 1024


class SortedBatch(NamedTuple):
    """A batch sorted by expert; an entry is one expert of one token, ``token x k + slot``. All int32."""

    order: Any
    """[place] entry at each place; its token is ``order // k``."""
    places: Any
    """[entry] place of each entry: the inverse of `order`."""
    counts: Any
    """[expert] number of entries."""
    ends: Any
    """[expert] place after the expert's last entry."""


class Permuted(NamedTuple):
    """Hidden rows in the order by expert."""

    rows: Any
    """[token x k, hidden]"""
    routed: SortedBatch


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of the kernels; results do not depend on them. :func:`launch_for` chooses."""

    pairs: bool
    """True: one launch that compares all pairs of entries. False: chunk tables, then places, then the copy."""
    chunk: int = 512
    """Entries per chunk (tables)."""
    split: int = 1
    """Programs that share the places of a chunk (tables)."""
    block: int = 1024
    """Maximum number of columns that a program copies."""
    warps: int = 4
    """Warps per program that copies rows."""


def launch_for(entries: int, *, copies: bool = True) -> Launch:
    """Return the launch that was fastest on an H200 for this number of entries, with or without the copy of rows."""
    if entries <= (8192 if copies else 4096):
        # Few rows: split each row over programs so that all multiprocessors write.
        return Launch(pairs=True, block=2048, warps=4) if entries <= 512 else Launch(pairs=True, block=8192, warps=8)
    if entries <= 8192:
        return Launch(pairs=False, chunk=256, split=2)
    return Launch(pairs=False, split=4 if entries <= 16384 else 2 if entries <= 32768 else 1, block=2048)


def sort_by_expert(
    ids: Any, num_experts: int, *, backend: Backend = "auto", launch: Launch | None = None
) -> SortedBatch:
    """Sort the entries of ids [token, k] by expert, stably.

    An id out of range raises ConfigError on a CPU. On CUDA a check would synchronise the device, so the id is clamped.
    """
    _check_ids(ids, num_experts)
    if not runs_triton(ids, backend):
        return _sorted_by_torch(ids, num_experts)
    return _sorted_by_triton(ids, num_experts, None, None, launch or launch_for(ids.numel(), copies=False))


def permute_by_expert(
    hidden: Any, ids: Any, num_experts: int, *, backend: Backend = "auto", launch: Launch | None = None
) -> Permuted:
    """Copy the rows of hidden [token, width] into the order by expert, k copies of each; ids [token, k]."""
    _check_ids(ids, num_experts)
    check_rows(hidden, "hidden")
    check(len(hidden) == len(ids), f"hidden has {len(hidden)} rows; ids has {len(ids)}: they must be equal")
    if not runs_triton(hidden, backend):
        routed = _sorted_by_torch(ids, num_experts)
        return Permuted(hidden[routed.order.long() // ids.shape[1]], routed)
    rows = torch.empty(ids.numel(), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    return Permuted(rows, _sorted_by_triton(ids, num_experts, hidden, rows, launch or launch_for(ids.numel())))


def _sorted_by_triton(ids: Any, num_experts: int, hidden: Any, rows: Any, launch: Launch) -> SortedBatch:
    """Sort the entries; unless `hidden` is None, copy its rows into `rows` in that order."""
    routed, ids = _empty(ids, num_experts), ids.contiguous()
    if ids.numel() and launch.pairs:
        _launch_pairs(ids, hidden, rows, routed, launch)
    elif ids.numel():
        _launch_tables(ids, hidden, rows, routed, launch)
    return routed


def _check_ids(ids: Any, num_experts: int) -> None:
    if ids.dim() != 2 or not ids.shape[1] or ids.is_floating_point():
        raise ConfigError(f"ids has shape {list(ids.shape)} and dtype {ids.dtype}; expected integers [token, k]")
    check(1 <= num_experts <= MAX_EXPERTS, f"num_experts={num_experts} must be in 1 … {MAX_EXPERTS}")


def _empty(ids: Any, num_experts: int) -> SortedBatch:
    """Allocate the result as one block, so that small batches pay for one allocation."""
    entries = ids.numel()
    fill = torch.zeros if not entries else torch.empty
    block = fill(2 * entries + 2 * num_experts, dtype=torch.int32, device=ids.device)
    return SortedBatch(*block.split([entries, entries, num_experts, num_experts]))


def _sorted_by_torch(ids: Any, num_experts: int) -> SortedBatch:
    flat = ids.reshape(-1).long()
    if not ids.is_cuda and len(flat) and (int(flat.min()) < 0 or int(flat.max()) >= num_experts):
        raise ConfigError(f"ids are in {int(flat.min())} … {int(flat.max())}; they must be in 0 … {num_experts - 1}")
    order = torch.sort(flat, stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return SortedBatch(*(column.to(torch.int32) for column in (order, places, counts, counts.cumsum(0))))


def _launch_pairs(ids: Any, hidden: Any, rows: Any, routed: SortedBatch, launch: Launch) -> None:
    from coterie.engines.kernels._triton import pairs_kernel

    tokens, k = ids.shape
    if ids.numel() > MAX_PAIRS:
        raise ConfigError(f"{ids.numel()} entries are too many for pairs; at most {MAX_PAIRS}")
    experts, per_program = len(routed.counts), 8
    width = 0 if hidden is None else hidden.shape[1]
    block, parts = column_blocks(width, launch.block) if width else (0, 1)
    programs = tokens + -(-experts // per_program)
    pairs_kernel[(programs * parts,)](
        ids,
        ids if hidden is None else hidden,
        ids if rows is None else rows,
        *routed,
        tokens,
        experts,
        width,
        0 if hidden is None else hidden.stride(0),
        parts,
        K=k,
        EXPERTS=per_program,
        PADDED=max(32, 1 << (ids.numel() - 1).bit_length()),
        BLOCK=block,
        num_warps=launch.warps,
    )


def _launch_tables(ids: Any, hidden: Any, rows: Any, routed: SortedBatch, launch: Launch) -> None:
    from coterie.engines.kernels._triton import copy_kernel, histogram_kernel, places_kernel

    entries, experts = ids.numel(), len(routed.counts)
    chunks, bins = -(-entries // launch.chunk), max(32, 1 << (experts - 1).bit_length())
    table = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    histogram_kernel[(chunks,)](ids, table, entries, experts, CHUNK=launch.chunk, BINS=bins, num_warps=4)
    places_kernel[(chunks, launch.split)](
        ids,
        table,
        *routed,
        entries,
        experts,
        chunks,
        CHUNK=launch.chunk,
        SPLIT=launch.split,
        BINS=bins,
        ROWS=max(1, 4096 // bins),
        SUB=min(32, launch.chunk // launch.split),
        num_warps=8,
    )
    if hidden is not None:
        k, width = ids.shape[1], hidden.shape[1]
        block, parts = column_blocks(width, launch.block)
        copy_kernel[(len(ids) * parts,)](
            hidden, routed.places, rows, width, hidden.stride(0), parts, K=k, BLOCK=block, num_warps=launch.warps
        )


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
