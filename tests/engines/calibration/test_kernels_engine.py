"""Triton kernels against torch, row by row. Run where there is a GPU: python -m pytest tests/engines -m torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
if not torch.cuda.is_available():
    pytest.skip("Triton kernels need a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from coterie.engines.calibration.kernels import quantize_rows, silu_mul, silu_mul_quantize  # noqa: E402

LARGEST = 448.0  # of float8_e4m3fn
# Powers of two, one off them, and widths of real experts (gpt-oss 2880, Qwen3-30B-A3B 768, DeepSeek-V3 7168).
WIDTHS = (1, 16, 17, 255, 768, 2_880, 7_168)
ROWS = (1, 3, 257)


def random(rows: int, width: int, dtype: Any = torch.bfloat16, scale: float = 1.0) -> Any:
    """Rows of very different size, so that a row's scale taken from another row would be seen."""
    generator = torch.Generator("cuda").manual_seed(rows * 10_007 + width)
    values = torch.randn(rows, width, device="cuda", generator=generator)
    spread = 10.0 ** torch.linspace(-2.0, 2.0, rows, device="cuda")[:, None] if rows > 1 else 1.0
    return (values * spread * scale).to(dtype)


def gated(gate_up: Any) -> Any:
    """[rows, 2 x inner] → [rows, inner], in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def check_quantized(found: Any, scale: Any, expected: Any) -> None:
    """fp8 times its scale is the value, to within half a step of 3 mantissa bits."""
    assert found.dtype == torch.float8_e4m3fn
    assert found.shape == expected.shape
    assert scale.dtype == torch.float32
    assert scale.shape == expected.shape[:1]
    largest = expected.abs().amax(dim=1)
    torch.testing.assert_close(scale.double(), largest.clamp_min(1e-6) / LARGEST, rtol=1e-4, atol=0.0)
    # Normal numbers round to 1 part in 16; below 2^-6 the step is fixed at 2^-9, half of which is 2^-10.
    off = (found.float().double() * scale.double()[:, None] - expected).abs()
    allowed = torch.maximum(expected.abs() / 16, scale.double()[:, None] * 2.0**-10)
    assert bool((off <= allowed * 1.01 + 1e-12).all()), f"worst {float((off / allowed.clamp_min(1e-12)).max()):.3f}"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", WIDTHS)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11), (torch.float32, 1e-5)], ids=str
)
def test_silu_mul(rows: int, inner: int, dtype: Any, rtol: float) -> None:
    gate_up = random(rows, 2 * inner, dtype, scale=0.1)  # so that no product leaves float16
    found = silu_mul(gate_up)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), gated(gate_up), rtol=1.1 * rtol, atol=1e-7)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", WIDTHS)
def test_silu_mul_quantize(rows: int, inner: int) -> None:
    gate_up = random(rows, 2 * inner)
    check_quantized(*silu_mul_quantize(gate_up), gated(gate_up))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_rows(rows: int, width: int) -> None:
    x = random(rows, width)
    check_quantized(*quantize_rows(x), x.double())


def test_rows_of_zeros_stay_zero_and_finite() -> None:
    zeros = torch.zeros(2, 96, device="cuda")
    for found, scale in (quantize_rows(zeros), silu_mul_quantize(zeros)):
        assert bool((found.float() == 0).all())
        assert bool(torch.isfinite(scale).all())
        assert bool((scale > 0).all())


def test_largest_of_each_row_uses_the_whole_range() -> None:
    found, _ = quantize_rows(random(257, 768))
    assert bool((found.float().abs().amax(dim=1) == LARGEST).all())
