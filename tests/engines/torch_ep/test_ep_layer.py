"""The expert-parallel layer beside the dense one, on 2, 4 and 8 processes; bytes beside the prediction."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from coterie.engines.ranks import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

WORLDS = (2, 4, 8)
ROUNDING = {"float64": 1e-12, "float32": 2e-5}
"""Largest error ÷ largest output: a hundred times what was seen."""


@cache
def answers(world: int) -> list[dict[str, Any]]:
    """Of every rank; processes are started once for all tests of a world."""
    from ep_cases import run_all

    return run_ranks(run_all, None, world, doing="checking layers", timeout_s=240)


@pytest.mark.parametrize("attention", ["data parallel", "tensor parallel"])
@pytest.mark.parametrize("world", WORLDS)
def test_output_is_the_dense_layers(world: int, attention: str) -> None:
    """Bit-equal where arithmetic is exact, in both dispatch modes; within rounding for floats."""
    exact = rounded = 0
    for rank in answers(world):
        for found in rank[attention]:
            if found.numbers == "exact":
                exact += 1
                assert found.equal, found
            else:
                rounded += 1
                assert found.error <= ROUNDING[found.numbers] * max(found.scale, 1), found
    assert exact >= 10 * world
    assert rounded >= 4 * world


@pytest.mark.parametrize("world", WORLDS)
def test_a_shuffle_does_not_change_a_sum(world: int) -> None:
    assert all(rank["reduce-scatter bits"] for rank in answers(world))


@pytest.mark.parametrize("attention", ["data parallel", "tensor parallel"])
@pytest.mark.parametrize("world", WORLDS)
def test_bytes_are_as_predicted(world: int, attention: str) -> None:
    """Hidden states exactly; counts and routing are counted beside them."""
    ranks = [rank[attention] for rank in answers(world)]
    crossed = 0
    for case in zip(*ranks, strict=True):
        sent = {key: sum(found.sent.get(key, 0) for found in case) for key in ("dispatch", "combine", "routing")}
        assert sent["dispatch"] == sent["combine"]
        if case[0].numbers == "exact":  # else a near tie may be settled otherwise
            assert sent["dispatch"] + sent["combine"] == case[0].predicted, case[0]
        crossed += sent["routing"] > 0
    assert crossed >= 10
    for one, other in zip(ranks[0][::2], ranks[0][1::2], strict=True):
        assert (one.deduplicate, other.deduplicate) == (True, False)
        assert one.predicted <= other.predicted
