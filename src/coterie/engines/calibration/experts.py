"""Experts of one MoE layer, for calibration; needs only torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.engines.optional import torch
from coterie.types import ModelSpec, WeightDtype


class Experts:
    """Copies of one MoE layer's weights, and its forward pass for given tokens per expert."""

    def __init__(self, spec: ModelSpec, dtype: WeightDtype, device: Any, copies: int) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        hidden, inner, count = spec.hidden_size, spec.expert_intermediate_size, spec.num_experts
        # [expert, out, in], viewed as [expert, in, out]: the layout that both grouped GEMMs need.
        shapes = (count, 2 * inner, hidden), (count, hidden, inner)
        self.layers = [tuple(self._weights(*shape).transpose(1, 2) for shape in shapes) for _ in range(copies)]
        if dtype == "fp8":
            self.up_scale = torch.full((count, 2 * inner), 0.02, device=device)
            self.down_scale = torch.full((count, hidden), 0.02, device=device)

    @property
    def kernel(self) -> str:
        if self.device.type != "cuda":
            return "torch.mm per expert"
        return "torch._scaled_grouped_mm, row-wise scales" if self.dtype == "fp8" else "torch._grouped_mm"

    def _weights(self, *shape: int) -> Any:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
        out = torch.empty(shape, dtype=kind[self.dtype], device=self.device)
        for expert in out:  # one at a time: a whole layer in float32 may not fit beside the copies
            expert.copy_(torch.randn(expert.shape, device=self.device, dtype=torch.float32).mul_(0.02))
        return out

    def forward(self, layer: int, x: Any, ends: Any, counts: Sequence[int]) -> Any:
        """Run one copy of the layer on x [row, hidden], sorted by expert.

        `ends` [expert] is the row after each expert's last row; `counts` [expert] is the number of its rows.
        """
        up, down = self.layers[layer]
        if self.device.type != "cuda":
            return self._loop(up, down, x, counts)
        from coterie.engines.calibration.kernels import quantize_rows, silu_mul, silu_mul_quantize

        if self.dtype == "fp8":
            gate_up = self._fp8(*quantize_rows(x), up, self.up_scale, ends)
            return self._fp8(*silu_mul_quantize(gate_up), down, self.down_scale, ends)
        return torch._grouped_mm(silu_mul(torch._grouped_mm(x, up, offs=ends)), down, offs=ends)

    @staticmethod
    def _fp8(x: Any, scale: Any, weight: Any, weight_scale: Any, ends: Any) -> Any:
        return torch._scaled_grouped_mm(
            x, weight, scale, weight_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def _loop(self, up: Any, down: Any, x: Any, counts: Sequence[int]) -> Any:
        out, start = torch.empty_like(x), 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                gate, inner = torch.mm(x[rows], up[expert]).chunk(2, dim=-1)
                torch.mm(torch.nn.functional.silu(gate) * inner, down[expert], out=out[rows])
                start += count
        return out
