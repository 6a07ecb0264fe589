"""What the loop computes without workers: prompts of whole blocks, and predicted steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from coterie.costs.presets import step_model
from coterie.engines.routed_loop import REFERENCE_SHAPE, predicted_step_ms, whole_blocks
from coterie.models import get_model

MODEL = step_model(get_model(REFERENCE_SHAPE), "h200")


@given(st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=12), st.integers(1, 8), st.integers(1, 2))
def test_prompts_are_cut_to_whole_blocks(prompts, block_size, over):
    tail = [7, 8]
    prompts = [[*prompt, *tail] for prompt in prompts]
    cut = whole_blocks(prompts, block_size, over)
    assert len({tuple(prompt) for prompt in cut}) == len(cut), "no request twice"
    for prompt in cut:
        assert len(prompt) >= block_size + over
        assert len(prompt) % block_size == over % block_size
        if len(prompts) > 1:
            assert prompt[-2:] == tail, "the template's last words stay"
            assert any(prompt[:-2] == whole[: len(prompt) - 2] for whole in prompts)


def test_whole_blocks_by_hand():
    one, two = [1, 2, 3, 4, 5, 6, 9], [3, 2, 1, 0, 9]
    assert whole_blocks([one, two], 4) == [[1, 2, 3, 4, 9], [3, 2, 1, 0, 9]]
    assert whole_blocks([one, two], 4, 2) == [[1, 2, 3, 4, 5, 9]]
    assert whole_blocks([one, one], 3) == [one]
    assert whole_blocks([], 4) == []


def test_more_experts_and_more_requests_take_longer():
    few, more, most = (predicted_step_ms(distinct, 8, 100, MODEL) for distinct in (10, 10.5, 11))
    assert few < more < most
    assert more == pytest.approx((few + most) / 2)
    assert predicted_step_ms(10, 8, 100, MODEL) < predicted_step_ms(10, 8.5, 100, MODEL)
    assert predicted_step_ms(4, 1, 100, MODEL) < predicted_step_ms(10, 8, 100, MODEL)
