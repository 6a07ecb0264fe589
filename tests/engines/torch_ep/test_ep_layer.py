"""The expert-parallel layer beside the dense one, on 2, 4 and 8 processes; bytes beside the prediction.

One test for each world: processes are started once, and answer for all cases.
"""

from __future__ import annotations

from typing import Any

import pytest

from coterie.engines.ranks import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROUNDING = {"float64": 7e-14, "float32": 2.5e-5}
"""Largest error ÷ largest output: a hundred times what was seen."""


@pytest.mark.parametrize("world", [2, 4, 8])
def test_equal_to_the_dense_layer_with_the_bytes_predicted(world: int) -> None:
    from ep_cases import run_all

    ranks = run_ranks(run_all, None, world, doing="checking layers", timeout_s=240)
    for attention in ("data parallel", "tensor parallel"):
        cases = [rank[attention] for rank in ranks]
        check_outputs(cases)
        check_bytes(cases)
    assert all(rank["reduce-scatter bits"] for rank in ranks), "a shuffle does not change a sum"
    assert all(rank["reopened"] for rank in ranks)


def check_outputs(ranks: list[list[Any]]) -> None:
    """Bit-equal where arithmetic is exact, in both dispatch modes; within rounding for floats."""
    exact = rounded = 0
    for found in (found for rank in ranks for found in rank):
        if found.numbers == "exact":
            exact += 1
            assert found.equal, found
        else:
            rounded += 1
            assert found.error <= ROUNDING[found.numbers] * max(found.scale, 1), found
    assert exact >= 10 * len(ranks)
    assert rounded >= 4 * len(ranks)


def check_bytes(ranks: list[list[Any]]) -> None:
    """Hidden states to the byte; slots and weights are counted beside them."""
    crossed = 0
    for case in zip(*ranks, strict=True):
        sent = {key: sum(found.sent.get(key, 0) for found in case) for key in ("dispatch", "combine", "routing")}
        assert sent["dispatch"] == sent["combine"]
        if case[0].numbers == "exact":  # else a near tie may be settled otherwise
            assert sent["dispatch"] + sent["combine"] == case[0].predicted, case[0]
        crossed += sent["routing"] > 0
        for found in case:
            for collective in ("reduce-scatter", "gather"):
                assert found.sent.get(collective, 0) == found.predicted_block
    assert crossed >= 10
    for one, other in zip(ranks[0][::2], ranks[0][1::2], strict=True):
        assert (one.deduplicate, other.deduplicate) == (True, False)
        assert one.predicted <= other.predicted
