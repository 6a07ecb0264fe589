"""Prompts of whole blocks for fleets of vLLM."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routed_loop import whole_blocks


@given(st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=12), st.integers(1, 8), st.integers(1, 2))
def test_prompts_are_cut_to_whole_blocks(prompts: list[list[int]], block_size: int, over: int) -> None:
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


def test_whole_blocks_by_hand() -> None:
    one, two = [1, 2, 3, 4, 5, 6, 9], [3, 2, 1, 0, 9]
    assert whole_blocks([one, two], 4) == [[1, 2, 3, 4, 9], [3, 2, 1, 0, 9]]
    assert whole_blocks([one, two], 4, 2) == [[1, 2, 3, 4, 5, 9]]
    assert whole_blocks([one, one], 3) == [one]
    assert whole_blocks([], 4) == []
