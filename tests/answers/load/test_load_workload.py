"""Workloads: shared prefixes of a set hit rate, lengths and blocks of traces, arrivals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie.answers.load.client import Asking
from coterie.answers.load.workload import (
    LoadRequest,
    SharedPrefixes,
    TraceText,
    arrival_times,
    mixed_prompts,
    shared_prefixes,
    that_fit,
    traced,
)
from coterie.errors import ConfigError
from coterie.prompts import load_prompts
from coterie.traces.requests import RequestTrace

PROMPTS = load_prompts()


def longest_common(texts: list[str], text: str) -> int:
    """Characters of the longest prefix that one of the texts has."""
    most = 0
    for other in texts:
        while most < min(len(text), len(other)) and other[: most + 1] == text[: most + 1]:
            most += 1
    return most


def characters(request: LoadRequest) -> str:
    return "".join(message.content for message in request.messages)


def test_mixed_prompts_are_mixed_and_never_the_same_twice(rng: np.random.Generator) -> None:
    found = mixed_prompts(PROMPTS, 1000, 16, rng)
    assert len({request.text for request in found.requests}) == 1000
    assert {request.domain for request in found.requests[:50]} == {prompt.domain for prompt in PROMPTS}
    assert found.hit_rate() == 0.0


@given(
    st.floats(0.0, 0.9),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 30),
    st.integers(24, 200),
    st.integers(8, 99),
)
def test_the_hit_rate_is_the_one_asked_for(
    wanted: float, turns: int, systems: int, active: int, question: int, answer: int
) -> None:
    past, later = question + answer, turns - 1
    least = (later * question + past * later * (later - 1) / 2) / (turns * question + past * turns * later / 2)
    if wanted < least:
        with pytest.raises(ConfigError, match="fewer turns allow less"):
            SharedPrefixes(wanted, systems, turns, active, question, answer)
        return
    settings = SharedPrefixes(wanted, systems, turns, active, question, answer)
    count = 400 * turns
    found = shared_prefixes(PROMPTS, count, 16, np.random.default_rng(0), settings)
    # Conversations begun and not ended, and the first with each system prompt, leave it a little off.
    slack = 3 * (active + systems) * turns * (settings.system_chars + turns * (question + answer))
    assert found.hit_rate() == pytest.approx(wanted, abs=0.02 + slack / found.sizes.sum())


def test_shared_characters_are_counted_right(rng: np.random.Generator) -> None:
    found = shared_prefixes(PROMPTS, 150, 16, rng, SharedPrefixes(active=5))
    before: list[str] = []
    for request, size, shared in zip(found.requests, found.sizes, found.shared, strict=True):
        text = characters(request)
        assert len(text) == size
        # A question's number may share a digit or two with another's.
        assert 0 <= longest_common(before, text) - shared <= 8
        before.append(text)


def test_turns_of_a_conversation_follow_each_other(rng: np.random.Generator) -> None:
    found = shared_prefixes(PROMPTS, 200, 16, rng, SharedPrefixes(turns=3, hit_rate=0.7))
    last: dict[int, LoadRequest] = {}
    for request in found.requests:
        before = last.get(request.conversation)
        if before is None:
            assert [message.role for message in request.messages] == ["system", "user"]
        else:
            assert request.messages[: len(before.messages)] == before.messages
            assert [message.role for message in request.messages[len(before.messages) :]] == ["assistant", "user"]
        last[request.conversation] = request
    assert max(len(request.messages) for request in found.requests) == 2 * 3


def test_lengths_and_shared_blocks_of_a_trace(rng: np.random.Generator) -> None:
    trace = RequestTrace(
        prompt_tokens=np.array([40, 40, 25, 7]),
        output_tokens=np.array([5, 9, 1, 400]),
        arrival_s=np.array([0.0, 1.0, 2.0, 3.0]),
        prefix_blocks=[np.array(one) for one in ([1, 2, 3], [1, 2, 4], [1, 2], [9])],
        block_tokens=16,
    )
    made = TraceText(dict.fromkeys((prompt.domain for prompt in PROMPTS), 4.0), longest=200)
    found = traced(trace, PROMPTS, 10, rng, made)
    texts = [request.text for request in found.requests]
    assert [len(text) for text in texts] == [160, 160, 100, 28]
    assert [request.max_tokens for request in found.requests] == [5, 9, 1, 100]
    assert texts[0][:128] == texts[1][:128]
    assert texts[0][128:] != texts[1][128:]
    assert texts[2] == texts[0][:100]
    assert list(found.shared) == [0, 128, 64, 0], "the cut block of the third is not one of the first's blocks"
    half = traced(trace, PROMPTS, 10, rng, TraceText(made.chars_per_token, length_scale=0.5, longest=200))
    assert [len(request.text) for request in half.requests] == [80, 80, 48, 16]


def test_prompts_of_a_trace_are_cut_to_the_context(rng: np.random.Generator) -> None:
    trace = RequestTrace(np.array([50_000, 10]), np.array([10, 10]))
    made = TraceText(dict.fromkeys((prompt.domain for prompt in PROMPTS), 3.0), longest=1000)
    found = traced(trace, PROMPTS, 2, rng, made)
    assert len(found.requests[0].text) < 3 * 990
    assert len(found.requests[1].text) == 30
    assert "1 prompts cut" in found.name


def test_poisson_arrivals() -> None:
    times = arrival_times(5000, np.random.default_rng(0), rate=40.0)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 40, rel=0.05)
    assert stats.kstest(gaps, "expon", (0, 1 / 40)).pvalue > 0.01


def test_times_of_a_trace_faster_or_at_a_rate() -> None:
    trace = RequestTrace(np.ones(5, int), np.ones(5, int), np.array([3.0, 4.0, 6.0, 9.0, 11.0]))
    rng = np.random.default_rng(0)
    np.testing.assert_allclose(arrival_times(5, rng, trace=trace), [0, 1, 3, 6, 8])
    np.testing.assert_allclose(arrival_times(5, rng, trace=trace, speed_up=4.0), [0, 0.25, 0.75, 1.5, 2.0])
    np.testing.assert_allclose(arrival_times(5, rng, rate=2.0, trace=trace), [0, 0.25, 0.75, 1.5, 2.0])
    with pytest.raises(ConfigError, match="give one"):
        arrival_times(5, rng, rate=2.0, trace=trace, speed_up=2.0)
    with pytest.raises(ConfigError, match="need a rate"):
        arrival_times(5, rng)


def test_prompts_that_may_not_fit_are_left_out() -> None:
    assert all(len(prompt.prompt.encode()) <= 300 for prompt in that_fit(PROMPTS, 300))
    with pytest.raises(ConfigError, match="no prompt is sure to fit 3 tokens"):
        that_fit(PROMPTS, 3)


def test_markers_keep_shared_prefixes_and_part_contenders(rng: np.random.Generator) -> None:
    found = shared_prefixes(PROMPTS, 60, 16, rng, SharedPrefixes(systems=1))
    asking = Asking("m", chat=False)
    bodies = {marker: [asking.body(one, marker)["prompt"] for one in found.requests] for marker in ("a0", "a1", "")}
    assert all(text.startswith("[a0] ") for text in bodies["a0"])
    assert longest_common(bodies["a0"], bodies["a1"][0]) == 2
    assert bodies["a0"][5] == "[a0] " + bodies[""][5]
    chat = Asking("m").body(found.requests[0], "a0")
    assert chat["messages"][0]["content"].startswith("[a0] ")
    assert not found.requests[0].messages[0].content.startswith("[a0] "), "the workload is not changed"
