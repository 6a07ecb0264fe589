"""Requests of a what-if run: what runs, what is predicted of it, and when it arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.answers.batches.requests import Arrived, arrive, recorded
from coterie.traces import ActivationTrace, RequestTrace
from coterie.types import DECODE, PREFILL
from simulate_traces import EXPERTS, TOP_K, make_trace, rng


def count(ids: Any) -> np.ndarray:
    out = np.zeros((ids.shape[1], EXPERTS), int)
    for token in ids:
        for layer, chosen in enumerate(token):
            for expert in chosen:
                out[layer, expert] += 1
    return out


# ------------------------------------------------------------------------------------------------- what runs


@pytest.mark.parametrize(("execution", "phase"), [("prefill", PREFILL), ("spread", PREFILL), ("decode", DECODE)])
def test_the_part_that_runs_is_counted_exactly(execution: str, phase: int) -> None:
    trace = make_trace()
    found = recorded(trace, "made", execution, "recorded", rng())
    for row in range(trace.num_requests):
        request = trace.request(row)
        ids = request.only(phase)
        np.testing.assert_array_equal(found.counts[row], count(ids))
        assert found.first is not None
        assert found.expert_ids is not None
        assert found.context is not None
        first = found.first[row]
        np.testing.assert_array_equal(found.expert_ids[first : first + found.tokens[row]], ids)
        assert found.context[row] == (0 if phase == PREFILL else (request.phase == PREFILL).sum())
    steps = found.tokens[:, None, None] if execution == "decode" else 1
    np.testing.assert_allclose(found.predicted, found.counts / steps)
    assert found.cosine == pytest.approx(1.0)
    assert found.calibration == 0


def test_of_one_phase_its_tokens_stand_for_the_other() -> None:
    only_answers, only_prompts = make_trace(prompt=0), make_trace(output=0)
    for trace, execution, said in ((only_answers, "prefill", "answers only"), (only_prompts, "decode", "prompts only")):
        found = recorded(trace, "made", execution, "recorded", rng())
        np.testing.assert_array_equal(found.tokens, trace.lengths)
        assert said in found.notes[0]
    assert found.context is not None
    assert not found.context.any()


def test_a_prompt_that_was_not_recorded_is_context_all_the_same() -> None:
    trace = make_trace(prompt=0)
    table = RequestTrace(np.full(trace.num_requests, 77), trace.requests.output_tokens)
    tokens, offsets = trace.arrays()
    trace = ActivationTrace.from_arrays(trace.meta, tokens.expert_ids, offsets, table, tokens.phase)
    context = recorded(trace, "made", "decode", "recorded", rng()).context
    assert context is not None
    assert (context == 77).all()
    context = recorded(trace, "made", "decode", "prefix", rng()).context
    assert context is not None
    assert context.min() >= 77


def test_prefix_sees_the_first_half_and_the_second_runs() -> None:
    trace = make_trace(prompt=0, output=9, token_ids=False)
    found = recorded(trace, "made", "decode", "prefix", rng())
    halves = [count(trace.request(r).expert_ids[trace.lengths[r] // 2 :]) for r in range(trace.num_requests)]
    assert found.calibration + len(found.counts) == trace.num_requests
    assert all(any((half == one).all() for half in halves) for one in found.counts)
    np.testing.assert_allclose(found.predicted.sum(axis=2), TOP_K)  # of a step
    assert found.predicted.max() <= 1.0


def test_a_long_recording_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.answers.batches.requests.MAX_RECORDED", 60)
    found = recorded(make_trace(requests=65, prompt=2, output=0), "made", "prefill", "recorded", rng())
    assert len(found.counts) == 60
    assert "60 of 65" in found.notes[0]


# ------------------------------------------------------------------------------------------------- what is predicted


@pytest.mark.parametrize("predictor", ["popularity", "domain", "prefix", "token_table", "similar_prefix"])
@pytest.mark.parametrize("execution", ["prefill", "decode"])
def test_no_prediction_knows_the_experts_it_predicts(execution: str, predictor: str) -> None:
    """Other experts for the tokens that run, in the requests that run, leave every prediction as it was."""
    trace = make_trace(requests=40)
    before = recorded(trace, "made", execution, predictor, rng(5))
    tokens, offsets = trace.arrays()
    ids = tokens.expert_ids.copy()
    run = [r for r in range(trace.num_requests) if any(_holds(before, trace, r, execution, predictor))]
    assert len(run) >= len(before.counts)
    changed = 0
    for row in range(trace.num_requests):
        if row not in run:
            continue
        span = slice(offsets[row], offsets[row + 1])
        runs = np.flatnonzero(tokens.phase[span] == (DECODE if execution == "decode" else PREFILL))
        if predictor == "prefix" and execution == "prefill":
            runs = runs[len(runs) // 2 :]
        ids[offsets[row] + runs] = (ids[offsets[row] + runs] + 5) % EXPERTS
        changed += len(runs)
    assert changed
    other = ActivationTrace.from_arrays(trace.meta, ids, offsets, trace.requests, tokens.phase, tokens.token_ids)
    after = recorded(other, "made", execution, predictor, rng(5))
    np.testing.assert_array_equal(after.predicted, before.predicted)
    assert not np.array_equal(after.counts, before.counts)
    assert before.calibration + len(before.counts) == trace.num_requests


def _holds(found: Any, trace: ActivationTrace, row: Any, execution: Any, predictor: Any) -> list[Any]:
    """Whether a request's part that runs is among those that do."""
    ids = trace.request(row).only(DECODE if execution == "decode" else PREFILL)
    if predictor == "prefix" and execution == "prefill":
        ids = ids[len(ids) // 2 :]
    mine = count(ids)
    return [(mine == one).all() for one in found.counts]


def test_better_informed_is_nearer() -> None:
    trace = make_trace(requests=200, prompt=40, output=30)
    names = ("popularity", "domain", "token_table")
    by = {name: recorded(trace, "made", "prefill", name, rng(1)).cosine for name in names}
    assert by["popularity"] < by["domain"] < 1.0
    assert by["popularity"] < by["token_table"] < 1.0


@pytest.mark.parametrize("execution", ["prefill", "decode"])
def test_prompts_that_begin_alike_are_found_whatever_runs(execution: str) -> None:
    """Each request again with a last prompt token of its own: not the same prompt, but all the rest of it is."""
    trace = make_trace(requests=12, prompt=10, output=6)
    tokens, offsets = trace.arrays()
    lengths = np.diff(offsets)
    prompts = np.asarray(trace.requests.prompt_tokens)
    ids = np.concatenate([tokens.token_ids] * 8)
    for copy in range(8):
        ids[copy * offsets[-1] + offsets[:-1] + prompts - 1] = 1000 + 12 * copy + np.arange(12)
    ends = np.concatenate([[0], np.cumsum(np.tile(lengths, 8))])
    table = RequestTrace(np.tile(prompts, 8), np.tile(np.asarray(trace.requests.output_tokens), 8))
    alike = ActivationTrace.from_arrays(
        trace.meta, np.concatenate([tokens.expert_ids] * 8), ends, table, np.concatenate([tokens.phase] * 8), ids
    )
    names = ("recent_popularity", "similar_prefix")
    usual, similar = (recorded(alike, "made", execution, name, rng()).cosine for name in names)
    assert similar > usual + 0.05


def test_requests_with_one_prompt_stay_on_one_side() -> None:
    """Each prompt twice: were they apart, a table of tokens would have seen what it predicts."""
    trace = make_trace(requests=12, output=0)
    tokens, offsets = trace.arrays()
    twice = ActivationTrace.from_arrays(
        trace.meta,
        np.concatenate([tokens.expert_ids] * 2),
        np.concatenate([offsets, offsets[-1] + offsets[1:]]),
        None,
        np.concatenate([tokens.phase] * 2),
        np.concatenate([tokens.token_ids] * 2),
    )
    found = recorded(twice, "made", "prefill", "token_table", rng())
    same = (found.counts[:, None] == found.counts[None]).all(axis=(2, 3)).sum(axis=1)
    assert (same >= 2).all()


# ------------------------------------------------------------------------------------------------- arrivals


def test_recorded_times_keep_their_requests_and_go_on_in_laps() -> None:
    trace = make_trace(requests=5, times=True)
    found = recorded(trace, "made", "prefill", "recorded", rng())
    drawn = arrive(found, None, 12, rng())
    assert trace.requests.arrival_s is not None
    by_time = np.argsort(trace.requests.arrival_s, kind="stable")
    assert drawn.row.tolist() == [int(by_time[i % 5]) for i in range(12)]
    np.testing.assert_allclose(np.diff(drawn.arrival_s[:5]), np.diff(trace.requests.arrival_s[by_time]))
    assert (np.diff(drawn.arrival_s) >= 0).all()


def test_bursts_are_of_one_domain() -> None:
    found = recorded(make_trace(requests=90), "made", "prefill", "recorded", rng())
    names = np.array(found.domains)

    def repeats(arrivals: Any) -> Any:
        of = names[arrive(found, arrivals, 2000, rng()).row]
        return (of[1:] == of[:-1]).mean()

    assert repeats("bursty") > repeats("poisson") + 0.1


@given(st.floats(0.01, 1e4), st.integers(2, 50), st.integers(0, 99))
@settings(max_examples=30)
def test_a_rate_is_that_of_the_gaps(rate: float, requests: int, seed: int) -> None:
    times = np.sort(rng(seed).random(requests))
    scaled = Arrived(times, np.arange(requests)).at(rate)
    assert (requests - 1) / (scaled[-1] - scaled[0]) == pytest.approx(rate)
    np.testing.assert_allclose(np.diff(scaled) * np.ptp(times), np.diff(times) * np.ptp(scaled))
