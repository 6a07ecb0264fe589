from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.footprints.counting import footprint
from coterie.sim.fleet.requests import draw_requests, order_apart, phase_recordings, split_recordings
from coterie.traces.activations import ActivationTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.requests import RequestTrace
from coterie.traces.synthetic import SyntheticSettings, generate

LENGTHS = LognormalLengths(prompt_mean=12, output_mean=20)


@pytest.fixture(scope="module")
def trace() -> ActivationTrace:
    return generate(SyntheticSettings(num_layers=3, lengths=LENGTHS), np.random.default_rng(0), requests=30)


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 1000))
def test_uses_of_a_recording_lie_apart(recordings: int, requests: int, seed: int) -> None:
    order = order_apart(recordings, requests, np.random.default_rng(seed))
    assert len(order) == requests
    apart = max(1, recordings // 2)
    for start in range(requests - apart + 1):
        assert len(set(order[start : start + apart].tolist())) == apart
    every = order_apart(recordings, 3 * recordings, np.random.default_rng(seed), apart=recordings)
    assert sorted(every[:recordings].tolist()) == list(range(recordings))


def test_apart_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"apart=9 must be in 1 … recordings=4"):
        order_apart(4, 10, np.random.default_rng(0), apart=9)
    with pytest.raises(ConfigError, match="recordings=0 must be at least 1"):
        order_apart(0, 10, np.random.default_rng(0))


def test_a_split_recording_shows_its_first_part_and_decodes_the_rest(trace: ActivationTrace) -> None:
    rows = np.array([7, 3, 11])
    made = split_recordings(trace, rows, share=0.25, least_tokens=2)
    assert len(made) == 3
    for at, number in enumerate(rows):
        tokens = np.asarray(trace.request(int(number)).expert_ids)
        cut = max(1, len(tokens) // 4)
        first, last = made.prompt_row[at], made.decode_row[at] + made.decode_rows[at]
        np.testing.assert_array_equal(made.expert_ids[first:last], tokens)
        assert (made.prompt_rows[at], made.decode_rows[at]) == (cut, len(tokens) - cut)
        assert made.footprint is not None
        np.testing.assert_array_equal(made.footprint[at], footprint(tokens[:cut], trace.meta.num_experts))
    with pytest.raises(ConfigError, match="none of 3 requests has a prompt and decoded tokens, 100000 in all"):
        split_recordings(trace, rows, least_tokens=100_000)
    with pytest.raises(ConfigError, match=r"share=1.0 must be between 0 and 1"):
        split_recordings(trace, share=1.0)


def test_phases_are_as_they_were_recorded(trace: ActivationTrace) -> None:
    made = phase_recordings(trace)
    requests = trace.requests
    np.testing.assert_array_equal(made.prompt_rows, requests.prompt_tokens)
    np.testing.assert_array_equal(made.decode_rows, requests.output_tokens)
    assert made.domains == list(requests.domains or ())


def arrivals() -> RequestTrace:
    blocks = [np.array([5, 6, 7]), np.array([5, 6]), np.array([9])]
    return RequestTrace(
        np.array([40, 32, 3]), np.array([4, 0, 7]), np.array([0.0, 1.0, 5.0]), prefix_blocks=blocks, block_tokens=16
    )


def test_arrivals_lengths_and_prefixes_come_from_the_other_trace(trace: ActivationTrace) -> None:
    made = phase_recordings(trace)
    drawn = draw_requests(made, 3, np.random.default_rng(0), arrivals(), rate=2.0)
    assert drawn.prompt_tokens.tolist() == [40, 32, 3]
    assert drawn.output_tokens.tolist() == [4, 1, 7], "at least one token"
    assert drawn.arrival_s is not None
    np.testing.assert_allclose(drawn.arrival_s, [0.0, 0.2, 1.0])
    assert drawn.block_offsets is not None
    assert drawn.blocks is not None
    assert drawn.block_offsets.tolist() == [0, 3, 5, 6]
    assert drawn.blocks.tolist() == [0, 1, 2, 0, 1, 3]
    cut = draw_requests(made, 3, np.random.default_rng(0), arrivals(), longest_prompt=20)
    assert cut.prompt_tokens.tolist() == [20, 20, 3]
    assert cut.block_offsets is not None
    assert cut.block_offsets.tolist() == [0, 1, 2, 3], "a block that is cut is no longer the one that was hashed"


def test_without_arrivals_lengths_are_the_recordings_own(trace: ActivationTrace) -> None:
    made = phase_recordings(trace)
    drawn = draw_requests(made, 50, np.random.default_rng(0))
    assert drawn.arrival_s is None
    np.testing.assert_array_equal(drawn.prompt_tokens, made.prompt_rows[drawn.recorded])
    np.testing.assert_array_equal(drawn.output_tokens, made.decode_rows[drawn.recorded])
    again = draw_requests(made, 50, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn.recorded, again.recorded)
