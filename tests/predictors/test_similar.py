"""The similar prefix against brute force over all earlier requests."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.footprints import footprint
from coterie.predictors import (
    FittablePredictor,
    PredictRequest,
    PrefixIndex,
    RecentPopularity,
    SimilarPrefix,
    predictors,
)
from coterie.traces import ActivationTrace, RequestTrace, TraceMeta
from coterie.types import DECODE, PREFILL

LAYERS, EXPERTS, TOP_K = 2, 6, 2


def some(rng: np.random.Generator, tokens: Any) -> np.ndarray:
    return footprint(np.argsort(rng.random((tokens, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K], EXPERTS)


def common(one: Any, other: Any) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def brute(held: Any, prompt: Any) -> Any:
    """Number and shared tokens of the longest common prefix, the latest of several; `held` is by number."""
    best = max(((common(tokens, prompt), number) for number, tokens in held.items()), default=(0, 0))
    return (best[1], best[0]) if best[0] else None


sequences = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(sequences.map(lambda s: ("add", s)), st.just(("forget", [])), sequences.map(lambda s: ("ask", s))),
        max_size=60,
    )
)
def test_the_index_is_brute_force(steps: list[Any]) -> None:
    index, held = PrefixIndex(), {}
    added = 0
    for what, tokens in steps:
        if what == "add":
            assert index.add(np.array(tokens, np.int32)) == added
            held[added] = tokens
            added += 1
        elif what == "forget" and held:
            oldest = min(held)
            assert index.forget_oldest() == oldest
            del held[oldest]
        found = index.longest(np.array(tokens, np.int64))
        assert found == brute(held, tokens)
        assert len(index) == len(held)
    for tokens in list(held.values()):
        assert index.longest(np.array(tokens)) == brute(held, tokens)
    while held:
        del held[index.forget_oldest()]
        assert index.longest(np.array([0, 1, 2])) == brute(held, [0, 1, 2])
    with pytest.raises(ConfigError, match="there is no sequence to forget"):
        index.forget_oldest()


def test_a_sequence_that_ends_where_others_go_on() -> None:
    """The latest ends after its first token: what goes on below it is another, and stays apart."""
    index = PrefixIndex()
    for tokens in ([0, 1], [0, 2], [0]):
        index.add(np.array(tokens))
    assert index.forget_oldest() == 0
    assert index.longest(np.array([0, 2])) == (1, 2)
    assert index.longest(np.array([0, 1])) == (2, 1)
    assert index.forget_oldest() == 1
    assert index.longest(np.array([0, 2])) == (2, 1)


def test_an_index_that_forgets_does_not_grow() -> None:
    """A shared opening of 400 tokens, ever new endings: memory is that of what is held."""
    rng = np.random.default_rng(0)
    opening = rng.integers(0, 1000, 400)
    index = PrefixIndex()

    def serve(count: int) -> None:
        for _ in range(count):
            cut = int(rng.integers(1, 400))
            index.add(np.concatenate([opening[:cut], rng.integers(0, 1000, 400 - cut)]).astype(np.int32))
            if len(index) > 50:
                index.forget_oldest()

    serve(1000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        serve(3000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 50 * (400 * 4 + 2000), "what is held now was not traced before: its arrays and nodes, no more"


@settings(max_examples=100)
@given(st.data())
def test_it_is_brute_force_over_all_earlier_requests(data: st.DataObject) -> None:
    """Each request is predicted before it is observed: what the latest with the longest prefix did, else popularity."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    alike = data.draw(st.sampled_from([0.3, 0.5, 0.8, 1.0]))
    room = data.draw(st.integers(1, 8))
    size = LAYERS * EXPERTS + 10 * 4
    made, floor = SimilarPrefix(alike, 0.9, max_bytes=room * size), RecentPopularity(0.9)
    prompts: list[np.ndarray] = []
    profiles: list[tuple[np.ndarray, int]] = []
    for step in range(data.draw(st.integers(1, 20))):
        prompt = rng.integers(0, 9, 10)
        if prompts and rng.random() < 0.8:
            kept = int(rng.integers(0, 11))
            prompt[:kept] = prompts[int(rng.integers(len(prompts)))][:kept]
        asked = PredictRequest(prompt, num_tokens=4)
        if step:
            recent = range(max(0, step - room), step)
            best = max(recent, key=lambda r: (common(prompts[r], prompt), r))
            if common(prompts[best], prompt) >= alike * 10:
                counts, tokens = profiles[best]
                np.testing.assert_allclose(made.predict(asked), counts * 4 / tokens)
                similar = made.similar(prompt)
                assert similar is not None
                assert similar.share == common(prompts[best], prompt) / 10
            else:
                np.testing.assert_allclose(made.predict(asked), floor.predict(asked))
                assert made.similar(prompt) is None
        tokens = int(rng.integers(1, 20))
        profiles.append((some(rng, tokens), tokens))
        prompts.append(prompt)
        made.observe(prompt, *profiles[-1])
        floor.observe(*profiles[-1])
    assert made.nbytes_ <= made.max_bytes
    assert made.nbytes_ == size * len(made.profiles_) == size * min(room, len(prompts))


def test_the_share_is_of_the_request_asked() -> None:
    """8 of 10 tokens are enough, 7 are not; a longer earlier one does not count against it."""
    rng = np.random.default_rng(0)
    made = SimilarPrefix()
    counts = some(rng, 3)
    made.observe(np.arange(100), counts, 3)
    made.observe(np.full(5, 77), some(rng, 4), 4)
    for shared, hit in ((10, True), (8, True), (7, False), (0, False)):
        asked = np.arange(10)
        asked[shared:] += 500
        assert (made.similar(asked) is not None) == hit
    np.testing.assert_allclose(made.predict(PredictRequest(np.arange(20))), counts * 20 / 3)
    assert made.similar(np.arange(126)) is None
    found = made.similar(np.arange(125))
    assert found is not None
    assert found.share == 0.8
    assert made.similar(None) is None
    assert made.similar(np.empty(0, np.int32)) is None


def make_trace(token_ids: bool = True, arrival_s: Any = None) -> ActivationTrace:
    """Conversations 0 and 1 with a second turn each, 2 and 3: prompt and answer of the first, then one token more."""
    rng = np.random.default_rng(3)
    first = [rng.integers(0, 99, 12), rng.integers(100, 199, 12)]
    ids = [*first, *(np.concatenate([f, [500], rng.integers(0, 99, 5)]) for f in first)]
    cuts = [6, 6, 13, 13]
    phase = [np.repeat([PREFILL, DECODE], [n, len(i) - n]) for n, i in zip(cuts, ids, strict=True)]
    total = sum(map(len, ids))
    experts = np.argsort(rng.random((total, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    table = RequestTrace(np.array(cuts), np.array([len(i) for i in ids]) - np.array(cuts), arrival_s=arrival_s)
    return ActivationTrace.from_arrays(
        TraceMeta("model", EXPERTS, LAYERS, TOP_K),
        experts,
        np.cumsum([0, *map(len, ids)]),
        table,
        np.concatenate(phase).astype(np.uint8),
        np.concatenate(ids).astype(np.int32) if token_ids else None,
    )


def test_fit_remembers_prompt_and_answer() -> None:
    trace = make_trace()
    made = SimilarPrefix().fit(trace, np.array([0, 1]), DECODE)
    for turn in (0, 1):
        tokens = trace.request(turn + 2)
        assert tokens.token_ids is not None
        prompt = tokens.token_ids[tokens.phase == PREFILL]
        own = footprint(trace.request(turn).only(DECODE), EXPERTS)
        np.testing.assert_allclose(made.predict(PredictRequest(prompt, num_tokens=6)), own)
        found = made.similar(prompt)
    assert found is not None
    assert found.share == 12 / 13
    floor = RecentPopularity().fit(trace, np.array([0, 1]), DECODE)
    for asked in (PredictRequest(np.array([7000, 1])), PredictRequest(), PredictRequest(num_tokens=3)):
        np.testing.assert_array_equal(made.predict(asked), floor.predict(asked))


def test_of_equal_ones_the_one_that_arrived_last() -> None:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((12, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
    for arrival_s, last in ((None, 2), (np.array([1.0, 9.0, 5.0]), 1)):
        trace = ActivationTrace.from_arrays(
            TraceMeta("model", EXPERTS, LAYERS, TOP_K),
            experts,
            np.array([0, 4, 8, 12]),
            RequestTrace(np.full(3, 4), np.zeros(3, np.int64), arrival_s=arrival_s),
            np.full(12, PREFILL, np.uint8),
            np.tile([1, 2, 3, 4], 3).astype(np.int32),
        )
        found = SimilarPrefix().fit(trace).predict(PredictRequest(np.array([1, 2, 3, 4])))
        np.testing.assert_allclose(found, footprint(trace.request(last).expert_ids, EXPERTS))


def test_answers_without_their_prompt_are_no_prefix() -> None:
    whole = make_trace()
    tokens, offsets = whole.arrays()
    answers = ActivationTrace.from_arrays(whole.meta, tokens.expert_ids, offsets, token_ids=tokens.token_ids)
    made = SimilarPrefix().fit(answers)
    asked = PredictRequest(whole.request(0).token_ids)
    assert made.similar(asked.token_ids) is None
    np.testing.assert_array_equal(made.predict(asked), RecentPopularity().fit(answers).predict(asked))


def test_a_request_too_large_to_keep_counts_for_popularity() -> None:
    rng = np.random.default_rng(0)
    made = SimilarPrefix(max_bytes=200)
    small, large = some(rng, 3), some(rng, 5)
    made.observe(np.arange(10), small, 3)
    made.observe(np.arange(1000), large, 5)
    assert len(made.profiles_) == 1, "nor does it push others out"
    np.testing.assert_allclose(made.predict(PredictRequest(np.arange(10), num_tokens=3)), small)
    floor = RecentPopularity()
    floor.observe(small, 3)
    floor.observe(large, 5)
    np.testing.assert_array_equal(made.predict(PredictRequest()), floor.predict(PredictRequest()))


def test_what_is_observed_is_copied() -> None:
    rng = np.random.default_rng(0)
    for counts in (some(rng, 3), some(rng, 300), some(rng, 3) / 3):
        made = SimilarPrefix()
        tokens, given, ids = counts.sum() / LAYERS / TOP_K, counts.copy(), np.arange(10)
        made.observe(ids, given, tokens)
        given[:], ids[:] = 0, 0
        np.testing.assert_allclose(made.predict(PredictRequest(np.arange(10), num_tokens=1)), counts / tokens)


def test_contract() -> None:
    assert predictors["similar_prefix"] is SimilarPrefix
    made = SimilarPrefix()
    for use in (lambda: made.predict(PredictRequest()), lambda: made.num_layers, lambda: made.num_experts):
        with pytest.raises(ConfigError, match="predictor 'similar_prefix' is not fitted: call fit"):
            use()
    trace = make_trace()
    for bad, message in ((np.array([0, 4]), "request 4 must be in 0 … 3"), (np.empty(0, np.int64), "no token to fit")):
        with pytest.raises(ConfigError, match=message):
            made.fit(trace, bad)
    with pytest.raises(ConfigError, match="'model' has no token_ids: prefixes are compared by them"):
        made.fit(make_trace(token_ids=False))
    assert made.fit(trace) is made
    assert isinstance(made, FittablePredictor)
    assert (made.num_layers, made.num_experts) == (LAYERS, EXPERTS)
    known = trace.request(1)
    assert known.token_ids is not None
    for request, tokens in (
        (PredictRequest(), 1),
        (PredictRequest(known.token_ids), 12),
        (PredictRequest(known.token_ids, num_tokens=0), 0),
        (PredictRequest(known.token_ids[:6], num_tokens=5), 5),
        (PredictRequest(np.array([9999] * 3)), 3),
    ):
        found = made.predict(request)
        np.testing.assert_allclose(found.sum(axis=1), tokens * TOP_K)
        found[:] = -1  # a new array each time
        np.testing.assert_allclose(made.predict(request).sum(axis=1), tokens * TOP_K)
    with pytest.raises(ConfigError, match=r"request 'q': footprint has shape \(1, 6\)"):
        made.predict(PredictRequest(known.token_ids, footprint=np.ones((1, 6)), id="q"))
    again = SimilarPrefix().fit(trace)
    again.fit(trace, np.array([0]))
    assert again.similar(known.token_ids) is None, "fitted anew, it has forgotten"


def test_bad_settings_are_refused() -> None:
    for alike in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=f"similarity={alike} must be above 0 and at most 1"):
            SimilarPrefix(alike)
    with pytest.raises(ConfigError, match="max_bytes=0 must be at least 1"):
        SimilarPrefix(max_bytes=0)
    with pytest.raises(ConfigError, match="decay=2 must be"):
        SimilarPrefix(decay=2)
    with pytest.raises(ConfigError, match=r"token_ids has shape \(2, 2\); expected \[token\]"):
        SimilarPrefix().observe(np.ones((2, 2), int), np.ones((2, 4)), 2)
    made = SimilarPrefix()
    for bad in (np.array([1, 1 << 31]), np.array([1 << 32])):
        with pytest.raises(ConfigError, match=r"token_ids holds \d+; it must be in -2147483648 … 2147483647"):
            made.observe(bad, np.ones((2, 4)), 2)
    assert made.recent_ is None, "a request that is refused counts for nothing"
