"""Sorting by expert, permuting rows, the top k of logits: the torch form here, the Triton form in its interpreter.

On a GPU the kernels themselves run, compiled, on larger batches too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError
from kernel_cases import cases, check_case, check_top_k, main

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from coterie.engines.kernels.routing import permute_by_expert, sort_by_expert  # noqa: E402
from coterie.engines.kernels.top_k import top_k_into  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_torch_form_sorts_every_case(dtype: object) -> None:
    for case in cases(np.random.default_rng(1), 300):
        check_case(case, "cpu", dtype)


def test_torch_form_takes_the_first_of_equal_logits() -> None:
    check_top_k(top_k_into, "cpu", 40)


def test_no_rows_have_no_experts() -> None:
    ids = torch.empty(0, 4, dtype=torch.uint8)
    top_k_into(torch.empty(0, 32), ids)
    assert ids.shape == (0, 4)


def test_triton_form_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).parents[2] / "support" / "kernel_cases.py"
    # A process of its own: Triton decides when it is imported whether it interprets.
    done = subprocess.run(
        [sys.executable, str(script), "cpu", "24"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_form_on_a_gpu() -> None:
    main("cuda", 3000)


def test_no_tokens() -> None:
    ids = torch.empty(0, 4, dtype=torch.int64)
    rows, routed = permute_by_expert(torch.empty(0, 8), ids, 5)
    assert rows.shape == (0, 8)
    assert routed.counts.tolist() == routed.ends.tolist() == [0] * 5
    assert routed.order.shape == routed.places.shape == (0,)


def test_rows_that_are_views_are_read_by_their_stride() -> None:
    hidden = torch.randn(6, 20)[:, :7]
    ids = torch.tensor([[1, 0], [2, 1], [0, 2], [0, 1], [2, 0], [1, 2]])
    rows, routed = permute_by_expert(hidden, ids, 3)
    assert torch.equal(rows, hidden[routed.order.long() // 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sort_by_expert(torch.tensor([[0, 3]]), 3), "0 … 3; they must be in 0 … 2"),
        (lambda: sort_by_expert(torch.tensor([[-1, 0]]), 3), "must be in 0 … 2"),
        (lambda: sort_by_expert(torch.tensor([0, 1]), 3), r"shape \[2\]"),
        (lambda: sort_by_expert(torch.tensor([[0.0]]), 3), "float32"),
        (lambda: sort_by_expert(torch.tensor([[0]]), 0), "num_experts=0"),
        (lambda: sort_by_expert(torch.tensor([[0]]), 3, backend="cuda"), "backend"),  # type: ignore[arg-type]
        (lambda: permute_by_expert(torch.ones(2, 4), torch.tensor([[0]]), 1), "2 rows; ids has 1"),
        (lambda: permute_by_expert(torch.ones(4, 2).t(), torch.zeros(2, 1, dtype=torch.int64), 1), "contiguous"),
    ],
)
def test_wrong_calls_say_what_is_right(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]
