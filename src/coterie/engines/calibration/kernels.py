"""Triton kernels for the fused elementwise steps between the grouped GEMMs of a MoE layer.

``silu_mul`` turns a [rows, 2 x inner] product into its gated activation; ``silu_mul_quantize`` also quantises each
row to fp8; ``quantize_rows`` only quantises. Unfused, these take eight launches and as many passes over the
activations: at 2,048 tokens of Qwen3-30B-A3B's shape that was 60% of an fp8 layer on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(x, out, scale, inner, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(x + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if QUANTIZE:
        step = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-6) / 448.0
        tl.store(scale + row, step)
        value = value / step
    tl.store(out + row * inner + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_kernel(x, out, scale, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-6) / 448.0
    tl.store(scale + row, step)
    tl.store(out + row * width + columns, (value / step).to(out.dtype.element_ty), mask=inside)


def _launch(kernel: Any, x: Any, width: int, dtype: Any, **options: Any) -> tuple[Any, Any]:
    """Run a kernel with one program per row; return its output [rows, width] and the scale [rows]."""
    out = torch.empty(len(x), width, dtype=dtype, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    block = int(triton.next_power_of_2(width))
    kernel[(len(x),)](x, out, scale, width, BLOCK=block, num_warps=4 if block <= 2048 else 8, **options)
    return out, scale


def silu_mul(gate_up: Any) -> Any:
    """Compute silu(gate) x up: [rows, 2 x inner] → [rows, inner], same dtype."""
    return _launch(_silu_mul_kernel, gate_up, gate_up.shape[1] // 2, gate_up.dtype, QUANTIZE=False)[0]


def silu_mul_quantize(gate_up: Any) -> tuple[Any, Any]:
    """Compute silu(gate) x up as fp8: [rows, 2 x inner] → fp8 [rows, inner] and its scale [rows]."""
    return _launch(_silu_mul_kernel, gate_up, gate_up.shape[1] // 2, torch.float8_e4m3fn, QUANTIZE=True)


def quantize_rows(x: Any) -> tuple[Any, Any]:
    """Quantise each row: [rows, width] → fp8 [rows, width] and its scale [rows]."""
    return _launch(_quantize_kernel, x, x.shape[1], torch.float8_e4m3fn)
